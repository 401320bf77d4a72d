//! Random-weight models of true shapes, for benches and tests of memory and streaming.

use std::fs;
use std::path::Path;

use container::{Config, Layout, Role, TensorClass, TensorSpec};
use formats::{Encoder, Format, Fp8Scale};
use numerics::Isa;
use serde_json::{Value, json};

use crate::error::LabError;
use crate::manifest::{Manifest, SourceIdentity};
use crate::plan::{full_name, synthetic_targets};
use crate::shard::{ShardSet, ShardWriter, TakePiece, Target, Unit, canonical, split, units};

/// Shapes to start from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Like {
    /// GLM-5.2.
    Glm,
    /// OLMoE-1B-7B.
    Olmoe,
}

/// Numbers that replace those of the shape; `None` keeps them.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct Overrides {
    pub layers: Option<usize>,
    pub dense_layers: Option<usize>,
    pub experts: Option<usize>,
    pub top_k: Option<usize>,
    pub hidden: Option<usize>,
    pub intermediate: Option<usize>,
    pub expert_intermediate: Option<usize>,
    pub heads: Option<usize>,
    pub vocab: Option<usize>,
    pub context: Option<usize>,
}

/// What to make.
#[derive(Clone, Debug)]
pub struct SynthOptions {
    /// Shape to start from.
    pub like: Like,
    /// Changes to it.
    pub overrides: Overrides,
    /// Format of routed experts.
    pub experts: Format,
    /// Format of dense matrices.
    pub dense: Format,
    /// Seed of the weights.
    pub seed: u64,
    /// Shard size.
    pub shard_bytes: u64,
    /// Layout of routed experts.
    pub layout: Layout,
}

/// The configuration file of a shape.
pub fn config_json(like: Like, over: &Overrides) -> Result<Value, LabError> {
    check_overrides(like, over)?;
    let or = |value: Option<usize>, default: usize| value.unwrap_or(default);
    Ok(match like {
        Like::Glm => {
            let layers = or(over.layers, 78);
            let dense = or(over.dense_layers, 3.min(layers.saturating_sub(1)));
            json!({
                "architectures": ["GlmMoeDsaForCausalLM"],
                "model_type": "glm_moe_dsa",
                "vocab_size": or(over.vocab, 154_880),
                "hidden_size": or(over.hidden, 6144),
                "intermediate_size": or(over.intermediate, 12_288),
                "moe_intermediate_size": or(over.expert_intermediate, 2048),
                "num_hidden_layers": layers,
                "first_k_dense_replace": dense,
                "num_attention_heads": or(over.heads, 64),
                "num_key_value_heads": or(over.heads, 64),
                "n_routed_experts": or(over.experts, 256),
                "num_experts_per_tok": or(over.top_k, 8),
                "n_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": true,
                "routed_scaling_factor": 2.5,
                "q_lora_rank": 2048,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 192,
                "qk_rope_head_dim": 64,
                "v_head_dim": 256,
                "index_topk": 2048,
                "index_head_dim": 128,
                "index_n_heads": 32,
                "indexer_types": vec!["full"; layers],
                "hidden_act": "silu",
                "attention_bias": false,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": or(over.context, 202_752),
                "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "tie_word_embeddings": false,
                "num_nextn_predict_layers": 0,
                "bos_token_id": null,
                "eos_token_id": [],
                "pad_token_id": null,
            })
        }
        Like::Olmoe => json!({
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "vocab_size": or(over.vocab, 50_304),
            "hidden_size": or(over.hidden, 2048),
            "intermediate_size": or(over.expert_intermediate, 1024),
            "num_hidden_layers": or(over.layers, 16),
            "num_attention_heads": or(over.heads, 16),
            "num_key_value_heads": or(over.heads, 16),
            "num_experts": or(over.experts, 64),
            "num_experts_per_tok": or(over.top_k, 8),
            "norm_topk_prob": false,
            "hidden_act": "silu",
            "attention_bias": false,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": or(over.context, 4096),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "tie_word_embeddings": false,
            "bos_token_id": null,
            "eos_token_id": [],
            "pad_token_id": null,
        }),
    })
}

/// Refuses numbers that the shape has no place for, before anything is built from them.
fn check_overrides(like: Like, over: &Overrides) -> Result<(), LabError> {
    let refuse = |what: String| Err(LabError::Request(what));
    let max = container::config::MAX_LAYERS;
    if over.layers.is_some_and(|layers| layers > max) {
        return refuse(format!("--layers: at most {max}"));
    }
    match like {
        Like::Olmoe if over.dense_layers.is_some() => {
            refuse("--dense-layers: every layer of this shape has experts".to_owned())
        }
        Like::Olmoe if over.intermediate.is_some() => refuse(
            "--intermediate: this shape has no dense layers; give --expert-intermediate".to_owned(),
        ),
        Like::Glm if over.dense_layers.is_some_and(|d| d >= over.layers.unwrap_or(78)) => {
            refuse("--dense-layers must be below --layers".to_owned())
        }
        Like::Glm | Like::Olmoe => Ok(()),
    }
}

/// A tensor to be made.
type Made = (TensorSpec, Target);

fn target_of(made: &Made) -> &Target {
    &made.1
}

fn made_matrix<'a>(config: &Config, seed: u64, (spec, target): &'a Made) -> Matrix<'a> {
    Matrix::new(target, seed, gain(config, spec))
}

/// Writes a model. `progress` is told bytes done and in all.
pub fn write(
    dir: &Path,
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Manifest, LabError> {
    // What an earlier run left unfinished is written again.
    let unfinished = Manifest::load(dir)?.is_some_and(|manifest| !manifest.complete);
    if !unfinished && fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(LabError::Request(format!(
            "{} is not empty; choose another destination",
            dir.display()
        )));
    }
    if options.dense.is_rotated() {
        return Err(LabError::Request(format!(
            "--dense-format {}: embedding and kv_b are read row by row and cannot be rotated",
            options.dense
        )));
    }
    let json = config_json(options.like, &options.overrides)?;
    let text = serde_json::to_string_pretty(&json)
        .map_err(|error| LabError::Request(format!("config.json: {error}")))?;
    let config = Config::from_json(&text, None)?;
    let targets = synthetic_targets(&config, |spec| match spec.role.class() {
        TensorClass::Experts => Some(options.experts),
        TensorClass::Router => Some(Format::F32),
        TensorClass::Mtp => None,
        _ => Some(options.dense),
    });
    for (spec, target) in &targets {
        if let Format::Int4Grouped(group) = target.format
            && usize::from(group) > target.cols
        {
            let (name, format) = (&spec.name, target.format);
            return Err(LabError::Request(format!(
                "{name} has rows of {}, shorter than the group of {format}",
                target.cols
            )));
        }
    }
    fs::create_dir_all(dir).map_err(LabError::write(dir, "create"))?;
    let path = dir.join("config.json");
    fs::write(&path, &text).map_err(LabError::write(&path, "write"))?;

    let parameters = [
        ("experts".to_owned(), full_name(options.experts)),
        ("dense".to_owned(), full_name(options.dense)),
        ("seed".to_owned(), options.seed.to_string()),
        ("shard-bytes".to_owned(), options.shard_bytes.to_string()),
        ("layout".to_owned(), options.layout.name().to_owned()),
    ];
    let source = SourceIdentity {
        name: "synthetic".to_owned(),
        blake3: blake3::hash(text.as_bytes()).to_hex().to_string(),
    };
    let mut manifest = Manifest::new(source, parameters.into_iter().collect());
    let units = units(targets, options.layout, |(spec, _)| spec.layer.zip(spec.expert));
    let shards = split(units, options.shard_bytes.max(1), target_of);
    let mut write = |unit: &Unit<Made>, shard: &mut ShardWriter| match unit {
        Unit::Tensor(made) => {
            let place = shard.place(&made.1);
            let matrix = made_matrix(&config, options.seed, made);
            shard.write_pieces(place, |take| matrix.each_piece(take))
        }
        Unit::Expert { layer, expert, parts } => {
            let made =
                |made| canonical(|take| made_matrix(&config, options.seed, made).each_piece(take));
            let [gate, up, down] = parts.each_ref().map(made);
            let targets = parts.each_ref().map(target_of);
            shard.write_expert((*layer, *expert), targets, &[gate?, up?, down?])
        }
    };
    let layout = options.layout;
    let set = ShardSet { dir, layout, shards: &shards, done: 0, target_of };
    set.write(&mut manifest, &mut write, progress)?;
    manifest.complete = true;
    manifest.store(dir)?;
    Ok(manifest)
}

/// Standard deviation of a matrix's outputs for unit inputs: branches that feed the residual
/// stream shrink with depth, so that it stays bounded.
fn gain(config: &Config, spec: &TensorSpec) -> f32 {
    match spec.role {
        Role::O | Role::DenseDown | Role::SharedDown | Role::ExpertDown => {
            1.0 / (2.0 * config.layers as f32).sqrt()
        }
        _ => 1.0,
    }
}

/// A small fast generator; weights need no better.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }

    /// Roughly normal with unit variance: a sum of four uniform numbers.
    fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u32 = (0..4).map(|i| (bits >> (16 * i) & 0xffff) as u32).sum();
        (sum as f32 / 65_536.0 - 2.0) * 1.732
    }
}

/// Rows generated at once; a multiple of the fp8 block.
const ROWS: usize = 128;

/// A matrix to be made: the same numbers whatever is made before it.
struct Matrix<'a> {
    target: &'a Target,
    gain: f32,
    noise: Noise,
}

impl Matrix<'_> {
    fn new(target: &Target, seed: u64, gain: f32) -> Matrix<'_> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes()).update(target.name.as_bytes());
        let hash = hasher.finalize();
        let mut state = [0; 8];
        state.copy_from_slice(&hash.as_bytes()[..8]);
        Matrix { target, gain, noise: Noise(u64::from_le_bytes(state) | 1) }
    }

    /// Hands canonical bytes to `take`, block by block: weights and their scales.
    fn each_piece(mut self, take: &mut TakePiece<'_>) -> Result<(), LabError> {
        let target = self.target;
        for start in (0..target.rows).step_by(ROWS) {
            let rows = ROWS.min(target.rows - start);
            let (mut weights, mut scales) = (Vec::new(), Vec::new());
            generate(target, rows, self.gain, &mut self.noise, &mut weights, &mut scales)?;
            take(&weights, &scales)?;
        }
        let mut tail = Vec::new();
        Encoder::new(target.format, target.cols).finish(&mut tail);
        take(&[], &tail)
    }
}

/// Replaces the lowest code, which has no counterpart of the other sign, by that of zero: weights
/// whose mean is not zero would make every token's hidden state, and so its experts, the same.
fn centre(format: Format, weights: &mut [u8]) {
    let zero_if_lowest = |byte: &mut u8, shift: u32, mask: u8, zero: u8| {
        if *byte >> shift & mask == 0 {
            *byte |= zero << shift;
        }
    };
    match format {
        Format::Int4Row | Format::Int4Grouped(_) => {
            for byte in weights {
                [0, 4].into_iter().for_each(|shift| zero_if_lowest(byte, shift, 15, 8));
            }
        }
        Format::Int2Row => {
            for byte in weights {
                [0, 2, 4, 6].into_iter().for_each(|shift| zero_if_lowest(byte, shift, 3, 2));
            }
        }
        Format::Int3G64 => {
            // Two low bits of each input first, then the high bits.
            for group in weights.chunks_exact_mut(24) {
                let (low, high) = group.split_at_mut(16);
                for input in 0..64 {
                    if low[input / 4] >> (2 * (input % 4)) & 3 == 0 {
                        high[input / 8] |= 1 << (input % 8);
                    }
                }
            }
        }
        Format::Int8Row
        | Format::Mxfp4
        | Format::E8Iq3
        | Format::F32
        | Format::Bf16
        | Format::F16
        | Format::Fp8B128(_) => {}
    }
}

fn generate(
    target: &Target,
    rows: usize,
    gain: f32,
    noise: &mut Noise,
    weights: &mut Vec<u8>,
    scales: &mut Vec<u8>,
) -> Result<(), LabError> {
    let (format, cols) = (target.format, target.cols);
    if target.vector {
        // Norm weights are one, biases small.
        let bias = target.name.ends_with("bias");
        for _ in 0..cols {
            let value = if bias { noise.normal() * 0.01 } else { 1.0 };
            weights.extend_from_slice(&value.to_le_bytes());
        }
        return Ok(());
    }
    let deviation = gain / (cols as f32).sqrt();
    // Standard deviation of uniformly random codes.
    let code_deviation = match format {
        Format::Int8Row => 73.9,
        Format::Int4Row | Format::Int4Grouped(_) => 4.18,
        Format::Int2Row => 0.71,
        Format::Int3G64 => 1.87,
        Format::Mxfp4 => 2.9,
        Format::E8Iq3 => 57.0,
        Format::F32
        | Format::Bf16
        | Format::F16
        | Format::Fp8B128(Fp8Scale::F32 | Fp8Scale::Ue8m0) => {
            let values: Vec<f32> = (0..rows * cols).map(|_| noise.normal() * deviation).collect();
            return Encoder::new(format, cols)
                .encode(Isa::detect(), &values, weights, scales)
                .map_err(|source| LabError::Encode { tensor: target.name.clone(), source });
        }
    };
    let row_bytes = format.row_bytes(cols).unwrap_or(0);
    weights.resize(rows * row_bytes, 0);
    noise.fill(weights);
    centre(format, weights);
    let scale = deviation / code_deviation;
    match format {
        Format::E8Iq3 => {
            let half = formats::plain::to_f16(scale).to_le_bytes();
            for block in weights.chunks_exact_mut(formats::format::E8_BLOCK_BYTES) {
                let at = block.len() - 2;
                block[at..].copy_from_slice(&half);
            }
        }
        Format::Mxfp4 => {
            let count = format.scale_count(rows, cols).unwrap_or(0);
            let exponent = (scale.to_bits() >> 23) as u8;
            scales.resize(count, exponent);
        }
        _ => {
            let count = format.scale_count(rows, cols).unwrap_or(0);
            for _ in 0..count {
                // Within 12 % of each other, so that a wrong scale shows.
                let jitter = 1.0 + (noise.next() >> 60) as f32 * 0.008;
                scales.extend_from_slice(&(scale * jitter).to_le_bytes());
            }
        }
    }
    Ok(())
}
