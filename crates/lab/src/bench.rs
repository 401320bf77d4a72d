//! Benches whose figures stand beside the physical limit measured in the same run.

use std::time::Instant;

use container::{ContainerError, LayerKind, Role, TensorSpec, tensors};
use numerics::Team;
use runtime::{Engine, Want, Work};

use crate::error::LabError;

/// Bytes of the array that the read-bandwidth loop streams: far beyond any cache.
pub const READ_BYTES: usize = 1 << 30;

/// Figures of a decode bench.
#[derive(Clone, Debug)]
pub struct DecodeFigures {
    /// Median tokens per second.
    pub tok_per_s: f64,
    /// Slowest and fastest repetition.
    pub spread: (f64, f64),
    /// Weight bytes that every token must read.
    pub bytes_per_token: u64,
    /// Median of the read-bandwidth loop, in 10^9 bytes per second.
    pub read_gb_per_s: f64,
}

impl DecodeFigures {
    /// Tokens per second at which reading the weights alone would take all the time.
    pub fn limit_tok_per_s(&self) -> f64 {
        self.read_gb_per_s * 1e9 / self.bytes_per_token.max(1) as f64
    }

    /// Share of the limit reached.
    pub fn limit_ratio(&self) -> f64 {
        self.tok_per_s / self.limit_tok_per_s()
    }
}

/// Read bandwidth of all threads together over an array beyond the caches, in 10^9 bytes per
/// second.
pub struct ReadLoop {
    data: Vec<u64>,
}

impl Default for ReadLoop {
    fn default() -> Self {
        ReadLoop { data: (0..READ_BYTES as u64 / 8).collect() }
    }
}

impl ReadLoop {
    /// One pass on every thread of the team.
    pub fn measure(&self, team: &Team) -> f64 {
        let pieces = team.threads();
        let started = Instant::now();
        team.run(pieces, |piece| {
            let len = self.data.len();
            let part = &self.data[len * piece / pieces..len * (piece + 1) / pieces];
            // Independent accumulators, so that loads and not additions set the pace.
            let mut sums = [0u64; 32];
            for chunk in part.as_chunks::<32>().0 {
                for (sum, value) in sums.iter_mut().zip(chunk) {
                    *sum = sum.wrapping_add(*value);
                }
            }
            std::hint::black_box(sums);
        });
        READ_BYTES as f64 / started.elapsed().as_secs_f64() / 1e9
    }
}

/// Decodes `tokens` tokens after a short prompt, `repetitions` times (at least once), the read
/// loop between them. Its array of [`READ_BYTES`] is
/// part of the memory that the engine must have been told is held.
pub fn decode(
    engine: &Engine,
    tokens: usize,
    repetitions: usize,
) -> Result<DecodeFigures, LabError> {
    let team = &engine.compute().team;
    let read_loop = ReadLoop::default();
    let vocab = engine.config().vocab_size as u32;
    let mut rates = Vec::new();
    let mut reads = Vec::new();
    for repetition in 0..=repetitions.max(1) {
        let read = read_loop.measure(team);
        let mut session = engine.session().map_err(runtime::OpenError::from)?;
        let prompt: Vec<u32> = (0..8).map(|i| (i * 7919 + 13) % vocab).collect();
        let work = Work { session: &mut session, tokens: &prompt, want: Want::Last };
        let mut hidden = engine.step(&mut [work])?.swap_remove(0);
        let started = Instant::now();
        for _ in 0..tokens {
            let logits = engine.logits(&hidden)?;
            let token = numerics::topk::argmax(&logits);
            let work = Work { session: &mut session, tokens: &[token], want: Want::Last };
            hidden = engine.step(&mut [work])?.swap_remove(0);
        }
        let rate = tokens as f64 / started.elapsed().as_secs_f64();
        // The first repetition fills caches.
        if repetition > 0 {
            rates.push(rate);
            reads.push(read);
        }
    }
    let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
    let fastest = rates.iter().copied().fold(0.0, f64::max);
    Ok(DecodeFigures {
        tok_per_s: median(rates),
        spread: (slowest, fastest),
        bytes_per_token: bytes_per_token(engine)?,
        read_gb_per_s: median(reads),
    })
}

/// Weight bytes that one decoded token reads: the dense weights of the decoder layers and the
/// head, and `top_k` experts of every sparse layer.
pub fn bytes_per_token(engine: &Engine) -> Result<u64, LabError> {
    let (config, model) = (engine.config(), engine.model());
    let stored = |spec: &TensorSpec| -> Result<u64, ContainerError> {
        Ok(model.find(spec)?.map_or(0, |source| source.bytes()))
    };
    let mut bytes = 0;
    for spec in tensors::model_specs(config) {
        if spec.role != Role::Embedding || config.tie_embeddings {
            bytes += stored(&spec)?;
        }
    }
    for layer in 0..config.layers {
        for spec in tensors::layer_specs(config, layer) {
            bytes += stored(&spec)?;
        }
        if config.layer_kind(layer) == Some(LayerKind::Sparse) {
            let mut experts = 0;
            for expert in 0..config.moe.experts {
                for spec in tensors::expert_specs(config, layer, expert).into_iter().flatten() {
                    experts += stored(&spec)?;
                }
            }
            bytes += experts * config.moe.top_k as u64 / config.moe.experts as u64;
        }
    }
    Ok(bytes)
}

/// The middle value, or the mean of the two middle ones. The values must not be empty.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    if values.len().is_multiple_of(2) {
        (values[half - 1] + values[half]) / 2.0
    } else {
        values[half]
    }
}
