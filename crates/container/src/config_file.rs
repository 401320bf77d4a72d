//! From the text of `config.json` to a checked [`Config`].
//!
//! Absent fields take the defaults of the family's `transformers` configuration class; a field
//! that changes the mathematics in a way that is not implemented is refused by name. Nothing
//! else is guessed.

use std::path::{Path, PathBuf};

use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::config::*;
use crate::error::ContainerError;
use crate::family::{Family, Rope};
use crate::json::read_optional_text;

/// Largest configuration file read; real ones have a few kilobytes.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Base of the rotary frequencies when no field states one.
const DEFAULT_ROPE_THETA: f64 = 10_000.0;
/// Edge of the fp8 scale blocks this program reads.
const FP8_BLOCK: u64 = formats::format::FP8_BLOCK as u64;

/// Every field that is looked at, as written. Unknown fields are ignored.
#[derive(serde::Deserialize)]
struct Raw {
    model_type: Option<String>,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    moe_intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    n_routed_experts: Option<usize>,
    num_experts: Option<usize>,
    num_local_experts: Option<usize>,
    n_shared_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    norm_topk_prob: Option<bool>,
    routed_scaling_factor: Option<f64>,
    scoring_func: Option<String>,
    topk_method: Option<String>,
    moe_layer_freq: Option<Value>,
    first_k_dense_replace: Option<usize>,
    mlp_layer_types: Option<Vec<String>>,
    layer_types: Option<Vec<String>>,
    #[serde(default, deserialize_with = "present")]
    q_lora_rank: Option<Option<usize>>,
    kv_lora_rank: Option<usize>,
    qk_nope_head_dim: Option<usize>,
    qk_rope_head_dim: Option<usize>,
    qk_head_dim: Option<usize>,
    v_head_dim: Option<usize>,
    index_topk: Option<usize>,
    index_head_dim: Option<usize>,
    index_n_heads: Option<usize>,
    indexer_types: Option<Vec<String>>,
    index_topk_pattern: Option<Value>,
    index_topk_freq: Option<i64>,
    index_skip_topk_offset: Option<i64>,
    rope_interleave: Option<bool>,
    indexer_rope_interleave: Option<bool>,
    rms_norm_eps: Option<f64>,
    max_position_embeddings: Option<usize>,
    rope_parameters: Option<Map<String, Value>>,
    rope_scaling: Option<Map<String, Value>>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    clip_qkv: Option<f64>,
    sliding_window: Option<Value>,
    tie_word_embeddings: Option<bool>,
    num_nextn_predict_layers: Option<usize>,
    #[serde(default, deserialize_with = "present")]
    eos_token_id: Option<Option<Ids>>,
    bos_token_id: Option<i64>,
    pad_token_id: Option<i64>,
    quantization_config: Option<Map<String, Value>>,
}

#[derive(serde::Deserialize)]
struct RawGeneration {
    eos_token_id: Option<Ids>,
}

/// Tells an absent field (`None`) from `null` (`Some(None)`).
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::<T>::deserialize(deserializer).map(Some)
}

/// One id or a list of ids.
struct Ids(Vec<i64>);

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Ids, D::Error> {
        struct IdsVisitor;
        impl<'de> Visitor<'de> for IdsVisitor {
            type Value = Ids;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a token id or a list of token ids")
            }
            fn visit_i64<E>(self, id: i64) -> Result<Ids, E> {
                Ok(Ids(vec![id]))
            }
            fn visit_u64<E>(self, id: u64) -> Result<Ids, E> {
                Ok(Ids(i64::try_from(id).into_iter().collect()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Ids, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = seq.next_element()? {
                    ids.push(id);
                }
                Ok(Ids(ids))
            }
        }
        deserializer.deserialize_any(IdsVisitor)
    }
}

/// See [`Config::load`].
pub(crate) fn load(dir: &Path) -> Result<Config, ContainerError> {
    let path = dir.join("config.json");
    let Some(text) = read_optional_text(&path, MAX_CONFIG_BYTES, "configuration")? else {
        return Err(ContainerError::MissingFile {
            dir: dir.to_owned(),
            file: "config.json",
            remedy: "a model directory has one; fetch it from the model's repository",
        });
    };
    let generation_path = dir.join("generation_config.json");
    let generation =
        read_optional_text(&generation_path, MAX_CONFIG_BYTES, "generation configuration")?;
    parse(&text, &path, generation.as_deref(), &generation_path)
}

/// See [`Config::from_json`]; the paths are for messages.
pub(crate) fn parse(
    text: &str,
    path: &Path,
    generation: Option<&str>,
    generation_path: &Path,
) -> Result<Config, ContainerError> {
    let raw: Raw = from_str(text, path, "configuration")?;
    let generation: Option<RawGeneration> = match generation {
        Some(text) => Some(from_str(text, generation_path, "generation configuration")?),
        None => None,
    };
    let reader = Reader { path: path.to_owned(), raw };
    let family = reader.family()?;
    reader.refuse_unimplemented(family)?;
    let mut config = match family {
        Family::GlmMoeDsa => reader.glm_moe_dsa()?,
        Family::Olmoe => reader.olmoe()?,
    };
    reader.stop_ids(&mut config, generation);
    reader.check_products(&config)?;
    Ok(config)
}

fn from_str<'de, T: Deserialize<'de>>(
    text: &'de str,
    path: &Path,
    what: &'static str,
) -> Result<T, ContainerError> {
    serde_json::from_str(text).map_err(|e| ContainerError::Json {
        path: path.to_owned(),
        what,
        message: e.to_string(),
    })
}

struct Reader {
    path: PathBuf,
    raw: Raw,
}

impl Reader {
    fn error(&self, field: &str, problem: impl Into<String>) -> ContainerError {
        ContainerError::Config {
            source_name: self.path.display().to_string(),
            field: field.to_owned(),
            problem: problem.into(),
        }
    }

    fn unimplemented(
        &self,
        field: &str,
        found: impl std::fmt::Display,
        only: &str,
    ) -> ContainerError {
        self.error(
            field,
            format!("{found} changes the mathematics and is not implemented (implemented: {only})"),
        )
    }

    fn size(
        &self,
        field: &str,
        value: Option<usize>,
        default: usize,
        limit: usize,
    ) -> Result<usize, ContainerError> {
        let value = value.unwrap_or(default);
        if value == 0 || value > limit {
            return Err(
                self.error(field, format!("{value} is out of range, 1 to {limit} expected"))
            );
        }
        Ok(value)
    }

    fn family(&self) -> Result<Family, ContainerError> {
        let known =
            || Family::ALL.iter().flat_map(|f| f.row().model_types).copied().collect::<Vec<_>>();
        let Some(model_type) = &self.raw.model_type else {
            return Err(self.error("model_type", format!("absent; one of {:?} expected", known())));
        };
        Family::from_model_type(model_type).ok_or_else(|| {
            self.error(
                "model_type",
                format!("{model_type:?} is not implemented; one of {:?} expected", known()),
            )
        })
    }

    /// Fields that would change the mathematics.
    fn refuse_unimplemented(&self, family: Family) -> Result<(), ContainerError> {
        let raw = &self.raw;
        if raw.attention_bias == Some(true) {
            return Err(self.unimplemented("attention_bias", true, "false"));
        }
        if raw.mlp_bias == Some(true) {
            return Err(self.unimplemented("mlp_bias", true, "false"));
        }
        if let Some(act) = raw.hidden_act.as_deref().filter(|act| *act != "silu") {
            return Err(self.unimplemented("hidden_act", format!("{act:?}"), "\"silu\""));
        }
        if let Some(clip) = raw.clip_qkv {
            return Err(self.unimplemented("clip_qkv", clip, "null"));
        }
        if let Some(window) = &raw.sliding_window {
            return Err(self.unimplemented("sliding_window", window, "null"));
        }
        if let Some(factor) = raw.partial_rotary_factor.filter(|factor| *factor != 1.0) {
            return Err(self.unimplemented("partial_rotary_factor", factor, "1"));
        }
        for kind in raw.layer_types.iter().flatten() {
            if kind != "indexed_attention" && kind != "full_attention" {
                let only = "\"indexed_attention\", \"full_attention\"";
                return Err(self.unimplemented("layer_types", format!("{kind:?}"), only));
            }
        }
        let (scoring, method, interleave) = match family {
            Family::GlmMoeDsa => ("sigmoid", "noaux_tc", family.row().rope == Rope::Interleaved),
            Family::Olmoe => ("softmax", "greedy", family.row().rope == Rope::Interleaved),
        };
        if let Some(found) = raw.scoring_func.as_deref().filter(|s| *s != scoring) {
            return Err(self.unimplemented("scoring_func", format!("{found:?}"), scoring));
        }
        if let Some(found) = raw.topk_method.as_deref().filter(|s| *s != method) {
            return Err(self.unimplemented("topk_method", format!("{found:?}"), method));
        }
        let interleaves = [
            ("rope_interleave", raw.rope_interleave),
            ("indexer_rope_interleave", raw.indexer_rope_interleave),
        ];
        for (field, value) in interleaves {
            if value.is_some_and(|value| value != interleave) {
                return Err(self.unimplemented(
                    field,
                    !interleave,
                    if interleave { "true" } else { "false" },
                ));
            }
        }
        if let Some(freq) = raw.moe_layer_freq.as_ref().filter(|f| f.as_u64() != Some(1))
            && raw.mlp_layer_types.is_none()
        {
            return Err(self.unimplemented("moe_layer_freq", freq, "1, or mlp_layer_types"));
        }
        if let Some(block) =
            raw.quantization_config.as_ref().and_then(|q| q.get("weight_block_size"))
        {
            let edges: Vec<Option<u64>> =
                block.as_array().into_iter().flatten().map(Value::as_u64).collect();
            if !block.is_null() && edges != [Some(FP8_BLOCK), Some(FP8_BLOCK)] {
                let field = "quantization_config.weight_block_size";
                return Err(self.unimplemented(field, block, "[128, 128]"));
            }
        }
        Ok(())
    }

    /// The rotary base; anything but the default kind of rotary embedding is refused.
    fn rope_theta(&self) -> Result<f64, ContainerError> {
        // As transformers does: a non-empty `rope_scaling` takes the place of `rope_parameters`.
        let scaling = self.raw.rope_scaling.as_ref().filter(|map| !map.is_empty());
        let (field, map) = match (scaling, &self.raw.rope_parameters) {
            (Some(map), _) => ("rope_scaling", Some(map)),
            (None, map) => ("rope_parameters", map.as_ref()),
        };
        let mut theta = self.raw.rope_theta;
        if let Some(map) = map {
            if let Some((name, _)) = map.iter().find(|(_, value)| value.is_object()) {
                return Err(self.unimplemented(
                    field,
                    format!("separate values for {name:?}"),
                    "one set for all layers",
                ));
            }
            if let Some(kind) = map.get("rope_type").or_else(|| map.get("type"))
                && kind.as_str() != Some("default")
            {
                return Err(self.unimplemented(&format!("{field}.rope_type"), kind, "\"default\""));
            }
            if let Some(factor) = map.get("partial_rotary_factor")
                && !factor.is_null()
                && factor.as_f64() != Some(1.0)
            {
                return Err(self.unimplemented(
                    &format!("{field}.partial_rotary_factor"),
                    factor,
                    "1",
                ));
            }
            if let Some(value) = map.get("rope_theta") {
                theta = Some(value.as_f64().ok_or_else(|| {
                    self.error(&format!("{field}.rope_theta"), format!("{value} is not a number"))
                })?);
            }
        }
        let theta = theta.unwrap_or(DEFAULT_ROPE_THETA);
        if !(theta.is_finite() && theta > 0.0) {
            return Err(self.error("rope_theta", format!("{theta} is not a positive number")));
        }
        Ok(theta)
    }

    fn rms_norm_eps(&self) -> Result<f32, ContainerError> {
        // Both families default to 1e-5.
        let eps = self.raw.rms_norm_eps.unwrap_or(1e-5);
        let eps32 = eps as f32;
        if !(eps32.is_finite() && eps32 > 0.0) {
            return Err(self.error("rms_norm_eps", format!("{eps} is not a positive f32 number")));
        }
        Ok(eps32)
    }

    fn even(&self, field: &str, value: usize) -> Result<usize, ContainerError> {
        if !value.is_multiple_of(2) {
            return Err(
                self.error(field, format!("{value} is odd, rotary pairs need an even number"))
            );
        }
        Ok(value)
    }

    /// Number of routed experts; all spellings that are present must agree.
    fn experts(&self, default: usize) -> Result<usize, ContainerError> {
        let stated = [
            ("n_routed_experts", self.raw.n_routed_experts),
            ("num_experts", self.raw.num_experts),
            ("num_local_experts", self.raw.num_local_experts),
        ];
        let mut found: Option<(&str, usize)> = None;
        for (field, value) in stated {
            let Some(value) = value else { continue };
            if let Some((first, other)) = found
                && other != value
            {
                return Err(self.error(field, format!("{value}, but {first} is {other}")));
            }
            found.get_or_insert((field, value));
        }
        let (field, value) = found.unwrap_or(("num_experts", default));
        self.size(field, Some(value), default, MAX_EXPERTS)
    }

    fn top_k(&self, default: usize, experts: usize) -> Result<usize, ContainerError> {
        let top_k =
            self.size("num_experts_per_tok", self.raw.num_experts_per_tok, default, MAX_TOP_K)?;
        if top_k > experts {
            return Err(self.error(
                "num_experts_per_tok",
                format!("{top_k}, but there are {experts} experts"),
            ));
        }
        Ok(top_k)
    }

    fn layers(&self, default: usize) -> Result<usize, ContainerError> {
        self.size("num_hidden_layers", self.raw.num_hidden_layers, default, MAX_LAYERS)
    }

    fn glm_moe_dsa(&self) -> Result<Config, ContainerError> {
        let raw = &self.raw;
        let layers = self.layers(78)?;
        let heads = self.size("num_attention_heads", raw.num_attention_heads, 64, MAX_HEADS)?;
        if let Some(kv_heads) = raw.num_key_value_heads.filter(|kv| *kv != heads) {
            return Err(self.error(
                "num_key_value_heads",
                format!("{kv_heads}, but latent attention has as many as query heads ({heads})"),
            ));
        }
        let mtp_layers = raw.num_nextn_predict_layers.unwrap_or(0);
        if mtp_layers > MAX_MTP_LAYERS {
            return Err(self.error(
                "num_nextn_predict_layers",
                format!("{mtp_layers}, at most {MAX_MTP_LAYERS} expected"),
            ));
        }
        let nope = self.size("qk_nope_head_dim", raw.qk_nope_head_dim, 192, MAX_WIDTH)?;
        let rope = self.size("qk_rope_head_dim", raw.qk_rope_head_dim, 64, MAX_WIDTH)?;
        self.even("qk_rope_head_dim", rope)?;
        if let Some(joint) = raw.qk_head_dim.filter(|joint| *joint != nope + rope) {
            return Err(
                self.error("qk_head_dim", format!("{joint}, but nope + rope is {nope} + {rope}"))
            );
        }
        let q_lora = match raw.q_lora_rank {
            Some(None) => return Err(self.unimplemented("q_lora_rank", "null", "a positive rank")),
            Some(rank) => self.size("q_lora_rank", rank, 2048, MAX_WIDTH)?,
            None => 2048,
        };
        let indexer = self.indexer(layers, mtp_layers, rope)?;
        let experts = self.experts(256)?;
        let top_k = self.top_k(8, experts)?;
        let (n_group, topk_group) = self.groups(experts, top_k)?;
        let routed_scaling = raw.routed_scaling_factor.unwrap_or(2.5) as f32;
        if !routed_scaling.is_finite() {
            return Err(self.error("routed_scaling_factor", "not a finite f32 number"));
        }
        let shared_experts = raw.n_shared_experts.unwrap_or(1);
        if shared_experts > MAX_SHARED_EXPERTS {
            return Err(self.error(
                "n_shared_experts",
                format!("{shared_experts}, at most {MAX_SHARED_EXPERTS} expected"),
            ));
        }
        Ok(Config {
            family: Family::GlmMoeDsa,
            vocab_size: self.size("vocab_size", raw.vocab_size, 154_880, MAX_VOCAB)?,
            hidden_size: self.size("hidden_size", raw.hidden_size, 6144, MAX_WIDTH)?,
            layers,
            heads,
            max_position: self.max_position(202_752)?,
            rms_norm_eps: self.rms_norm_eps()?,
            rope_theta: self.rope_theta()?,
            tie_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            attention: Attention::Mla {
                q_lora,
                kv_lora: self.size("kv_lora_rank", raw.kv_lora_rank, 512, MAX_WIDTH)?,
                nope,
                rope,
                v_dim: self.size("v_head_dim", raw.v_head_dim, 256, MAX_WIDTH)?,
                indexer: Some(indexer),
            },
            dense_intermediate: self.size(
                "intermediate_size",
                raw.intermediate_size,
                12_288,
                MAX_WIDTH,
            )?,
            mlp_layer_types: self.mlp_layer_types(layers, mtp_layers)?,
            moe: MoeConfig {
                experts,
                top_k,
                expert_intermediate: self.size(
                    "moe_intermediate_size",
                    raw.moe_intermediate_size,
                    2048,
                    MAX_WIDTH,
                )?,
                shared_experts,
                n_group,
                topk_group,
                norm_topk_prob: raw.norm_topk_prob.unwrap_or(true),
                routed_scaling,
                scoring: Scoring::Sigmoid,
            },
            mtp_layers,
            // Default of the configuration class; `stop_ids` replaces it.
            stop_ids: vec![1],
            bos: None,
            pad: None,
        })
    }

    fn olmoe(&self) -> Result<Config, ContainerError> {
        let raw = &self.raw;
        let layers = self.layers(16)?;
        let hidden_size = self.size("hidden_size", raw.hidden_size, 2048, MAX_WIDTH)?;
        let heads = self.size("num_attention_heads", raw.num_attention_heads, 16, MAX_HEADS)?;
        let kv_heads =
            self.size("num_key_value_heads", raw.num_key_value_heads, heads, MAX_HEADS)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(self.error(
                "num_key_value_heads",
                format!("{kv_heads} does not divide num_attention_heads {heads}"),
            ));
        }
        let head_dim = self.size("head_dim", raw.head_dim, hidden_size / heads, MAX_WIDTH)?;
        // The query norm covers `hidden_size` numbers, so the projection must have as many.
        if head_dim.checked_mul(heads) != Some(hidden_size) {
            return Err(self.error(
                "head_dim",
                format!("{head_dim} times {heads} heads is not hidden_size {hidden_size}"),
            ));
        }
        self.even("head_dim", head_dim)?;
        let experts = self.experts(64)?;
        let intermediate =
            self.size("intermediate_size", raw.intermediate_size, 2048, MAX_WIDTH)?;
        for (field, value) in [("n_group", raw.n_group), ("topk_group", raw.topk_group)] {
            if let Some(value) = value.filter(|value| *value != 1) {
                return Err(self.unimplemented(field, value, "1 in this family"));
            }
        }
        for (field, value) in [
            ("n_shared_experts", raw.n_shared_experts),
            ("num_nextn_predict_layers", raw.num_nextn_predict_layers),
        ] {
            if let Some(value) = value.filter(|value| *value != 0) {
                return Err(self.unimplemented(field, value, "none in this family"));
            }
        }
        if raw.mlp_layer_types.iter().flatten().any(|kind| kind != "sparse") {
            return Err(self.unimplemented(
                "mlp_layer_types",
                "a dense layer",
                "\"sparse\" in this family",
            ));
        }
        Ok(Config {
            family: Family::Olmoe,
            vocab_size: self.size("vocab_size", raw.vocab_size, 50_304, MAX_VOCAB)?,
            hidden_size,
            layers,
            heads,
            max_position: self.max_position(4096)?,
            rms_norm_eps: self.rms_norm_eps()?,
            rope_theta: self.rope_theta()?,
            tie_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            attention: Attention::Gqa { kv_heads, head_dim, qk_norm: true },
            dense_intermediate: intermediate,
            mlp_layer_types: vec![LayerKind::Sparse; layers],
            moe: MoeConfig {
                experts,
                top_k: self.top_k(8, experts)?,
                expert_intermediate: intermediate,
                shared_experts: 0,
                n_group: 1,
                topk_group: 1,
                norm_topk_prob: raw.norm_topk_prob.unwrap_or(false),
                routed_scaling: 1.0,
                scoring: Scoring::Softmax,
            },
            mtp_layers: 0,
            stop_ids: vec![50_279],
            bos: None,
            pad: None,
        })
    }

    fn max_position(&self, default: usize) -> Result<usize, ContainerError> {
        self.size(
            "max_position_embeddings",
            self.raw.max_position_embeddings,
            default,
            MAX_POSITIONS,
        )
    }

    fn groups(&self, experts: usize, top_k: usize) -> Result<(usize, usize), ContainerError> {
        let n_group = self.size("n_group", self.raw.n_group, 1, MAX_EXPERTS)?;
        let topk_group = self.size("topk_group", self.raw.topk_group, 1, MAX_EXPERTS)?;
        if !experts.is_multiple_of(n_group) {
            return Err(
                self.error("n_group", format!("{n_group} does not divide {experts} experts"))
            );
        }
        if topk_group > n_group {
            return Err(self.error("topk_group", format!("{topk_group}, but n_group is {n_group}")));
        }
        let per_group = experts / n_group;
        if n_group > 1 && per_group < 2 {
            return Err(self.error(
                "n_group",
                format!("{n_group} leaves one expert per group, a group is judged by its best two"),
            ));
        }
        if top_k > topk_group * per_group {
            return Err(self.error(
                "num_experts_per_tok",
                format!("{top_k}, but {topk_group} groups of {per_group} experts leave fewer"),
            ));
        }
        Ok((n_group, topk_group))
    }

    fn mlp_layer_types(
        &self,
        layers: usize,
        mtp_layers: usize,
    ) -> Result<Vec<LayerKind>, ContainerError> {
        let Some(types) = &self.raw.mlp_layer_types else {
            let dense = self.raw.first_k_dense_replace.unwrap_or(3).min(layers);
            let mut kinds = vec![LayerKind::Dense; dense];
            kinds.resize(layers, LayerKind::Sparse);
            return Ok(kinds);
        };
        self.check_list("mlp_layer_types", types.len(), layers, mtp_layers)?;
        types
            .iter()
            .take(layers)
            .map(|kind| match kind.as_str() {
                "dense" => Ok(LayerKind::Dense),
                "sparse" => Ok(LayerKind::Sparse),
                other => Err(self.unimplemented(
                    "mlp_layer_types",
                    format!("{other:?}"),
                    "\"dense\", \"sparse\"",
                )),
            })
            .collect()
    }

    /// A per-layer list has one entry per decoder layer, or one more per MTP layer.
    fn check_list(
        &self,
        field: &str,
        found: usize,
        layers: usize,
        mtp_layers: usize,
    ) -> Result<(), ContainerError> {
        if found != layers && found != layers + mtp_layers {
            return Err(
                self.error(field, format!("{found} entries, but num_hidden_layers is {layers}"))
            );
        }
        Ok(())
    }

    fn indexer(
        &self,
        layers: usize,
        mtp_layers: usize,
        rope: usize,
    ) -> Result<IndexerConfig, ContainerError> {
        let raw = &self.raw;
        let head_dim = self.size("index_head_dim", raw.index_head_dim, 128, MAX_WIDTH)?;
        if head_dim < rope {
            return Err(self.error(
                "index_head_dim",
                format!("{head_dim}, but its first qk_rope_head_dim = {rope} numbers rotate"),
            ));
        }
        let (field, mut types) = self.indexer_types(layers)?;
        self.check_list(field, types.len(), layers, mtp_layers)?;
        types.truncate(layers);
        if types.first() == Some(&IndexerKind::Shared) {
            return Err(self.error(field, "the first layer is shared, but there is none before it"));
        }
        Ok(IndexerConfig {
            heads: self.size("index_n_heads", raw.index_n_heads, 32, MAX_HEADS)?,
            head_dim,
            topk: self.size("index_topk", raw.index_topk, 2048, MAX_POSITIONS)?,
            types,
        })
    }

    /// As transformers derives them: the list, else the pattern, else frequency and offset.
    fn indexer_types(
        &self,
        layers: usize,
    ) -> Result<(&'static str, Vec<IndexerKind>), ContainerError> {
        let kind = |field: &'static str, name: &str| match name {
            "full" => Ok(IndexerKind::Full),
            "shared" => Ok(IndexerKind::Shared),
            other => Err(self.unimplemented(field, format!("{other:?}"), "\"full\", \"shared\"")),
        };
        let raw = &self.raw;
        if let Some(list) = &raw.indexer_types {
            let field = "indexer_types";
            let types = list.iter().map(|name| kind(field, name)).collect::<Result<_, _>>()?;
            return Ok((field, types));
        }
        let field = "index_topk_pattern";
        let types = match &raw.index_topk_pattern {
            Some(Value::String(pattern)) => pattern
                .chars()
                .map(|c| match c {
                    'F' => Ok(IndexerKind::Full),
                    'S' => Ok(IndexerKind::Shared),
                    other => Err(self.unimplemented(field, format!("{other:?}"), "'F', 'S'")),
                })
                .collect::<Result<_, _>>()?,
            Some(Value::Array(list)) => list
                .iter()
                .map(|value| kind(field, value.as_str().unwrap_or("a value that is no text")))
                .collect::<Result<_, _>>()?,
            Some(other) => return Err(self.unimplemented(field, other, "a text or a list")),
            None => {
                let freq = i128::from(raw.index_topk_freq.unwrap_or(1).max(1));
                let offset = i128::from(raw.index_skip_topk_offset.unwrap_or(2));
                let full = |layer: usize| (layer as i128 - offset + 1).max(0) % freq == 0;
                let types = (0..layers)
                    .map(|layer| if full(layer) { IndexerKind::Full } else { IndexerKind::Shared })
                    .collect();
                return Ok(("index_skip_topk_offset", types));
            }
        };
        Ok((field, types))
    }

    fn stop_ids(&self, config: &mut Config, generation: Option<RawGeneration>) {
        let stated = |id: i64| u32::try_from(id).ok();
        let from_config = self.raw.eos_token_id.as_ref();
        let from_generation = generation.and_then(|g| g.eos_token_id);
        if from_config.is_some() || from_generation.is_some() {
            let ids = from_config.into_iter().flatten().chain(&from_generation);
            config.stop_ids = ids.flat_map(|ids| &ids.0).copied().filter_map(stated).collect();
        }
        config.stop_ids.retain(|&id| (id as usize) < config.vocab_size);
        config.stop_ids.sort_unstable();
        config.stop_ids.dedup();
        config.bos = self.raw.bos_token_id.and_then(stated);
        config.pad = self.raw.pad_token_id.and_then(stated);
    }

    /// Products that shapes, caches and tables are made of.
    fn check_products(&self, config: &Config) -> Result<(), ContainerError> {
        let product = |what: &str, factors: &[usize], limit: usize| {
            let value = factors.iter().try_fold(1usize, |value, &f| value.checked_mul(f));
            match value.filter(|value| *value <= limit) {
                Some(value) => Ok(value),
                None => Err(self.error(what, format!("{factors:?} multiplied exceeds {limit}"))),
            }
        };
        let hidden = config.hidden_size;
        product("vocab_size x hidden_size", &[config.vocab_size, hidden], MAX_ELEMENTS)?;
        product(
            "intermediate_size x hidden_size",
            &[config.dense_intermediate, hidden],
            MAX_ELEMENTS,
        )?;
        let moe = &config.moe;
        product("layers x experts", &[config.all_layers(), moe.experts], MAX_ROUTED_EXPERTS)?;
        // Fused tensors hold gate and up of all experts of a layer.
        let fused = [moe.experts, 2, moe.expert_intermediate, hidden];
        product("experts x moe_intermediate_size x hidden_size", &fused, MAX_ELEMENTS)?;
        let shared = [moe.shared_experts, moe.expert_intermediate];
        let shared = product("n_shared_experts x moe_intermediate_size", &shared, MAX_WIDTH)?;
        product("shared experts x hidden_size", &[shared, hidden], MAX_ELEMENTS)?;
        match &config.attention {
            Attention::Mla { q_lora, kv_lora, nope, rope, v_dim, indexer } => {
                let q = product("heads x qk_head_dim", &[config.heads, nope + rope], MAX_WIDTH)?;
                product("q_lora_rank x heads x qk_head_dim", &[*q_lora, q], MAX_ELEMENTS)?;
                let kv = product("heads x (nope + v)", &[config.heads, nope + v_dim], MAX_WIDTH)?;
                product("kv_lora_rank x heads x (nope + v)", &[*kv_lora, kv], MAX_ELEMENTS)?;
                let out = product("heads x v_head_dim", &[config.heads, *v_dim], MAX_WIDTH)?;
                product("heads x v_head_dim x hidden_size", &[out, hidden], MAX_ELEMENTS)?;
                if let Some(indexer) = indexer {
                    let heads = [indexer.heads, indexer.head_dim];
                    let width = product("index heads x index_head_dim", &heads, MAX_WIDTH)?;
                    product("q_lora_rank x index width", &[*q_lora, width], MAX_ELEMENTS)?;
                }
            }
            Attention::Gqa { .. } => {
                product("hidden_size x hidden_size", &[hidden, hidden], MAX_ELEMENTS)?;
            }
        }
        Ok(())
    }
}
