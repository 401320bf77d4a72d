//! Prefill with all weights in memory.

use std::time::Instant;

use container::{LayerKind, tensors};
use numerics::Activations;
use runtime::{Engine, Want};

use super::decode::weight_bytes_of;
use super::{Multiply, Rates, ReadLoop, multiply_rate, tokens};
use crate::error::LabError;

/// Figures of a prefill bench.
#[derive(Clone, Debug)]
pub struct PrefillFigures {
    /// Prompt tokens per second.
    pub tok_per_s: Rates,
    /// Weight bytes that the prompt must read, per token.
    pub bytes_per_token: u64,
    /// Weight products per token.
    pub products_per_token: u64,
    /// Median of the read-bandwidth loop, in 10^9 bytes per second.
    pub read_gb_per_s: f64,
    /// Median of the multiply loop, in 10^9 products per second.
    pub multiply_gmac_per_s: f64,
}

impl PrefillFigures {
    /// Tokens per second at which reading the weights once per chunk, or multiplying them, would
    /// alone take all the time.
    pub fn limit_tok_per_s(&self) -> f64 {
        let read_s = self.bytes_per_token as f64 / (self.read_gb_per_s * 1e9);
        let multiply_s = self.products_per_token as f64 / (self.multiply_gmac_per_s * 1e9);
        1.0 / read_s.max(multiply_s)
    }

    /// Share of the limit reached.
    pub fn limit_ratio(&self) -> f64 {
        self.tok_per_s.median / self.limit_tok_per_s()
    }
}

/// Prefills a prompt of `count` tokens, `repetitions` times (at least once), the limits measured
/// between them.
pub fn prefill(
    engine: &Engine,
    count: usize,
    repetitions: usize,
) -> Result<PrefillFigures, LabError> {
    let compute = engine.compute();
    let read_loop = ReadLoop::default();
    let prompt = tokens(count, engine.config().vocab_size, 0);
    let (mut rates, mut reads, mut multiplies) = (Vec::new(), Vec::new(), Vec::new());
    let mut touched = 0;
    for repetition in 0..=repetitions.max(1) {
        let read = read_loop.measure(&compute.team);
        let what = match compute.activations {
            Activations::Int8 => Multiply::Int8Tiles,
            Activations::F32 => Multiply::F32,
        };
        let multiply = multiply_rate(&compute.team, compute.isa, what);
        let mut session = engine.session().map_err(runtime::OpenError::from)?;
        let before = engine.expert_stats();
        let started = Instant::now();
        let mut last = Vec::new();
        let mut keep = |hidden: &[f32]| {
            last = hidden.to_vec();
            Ok(())
        };
        engine.prefill(&mut session, &prompt, Want::Last, &mut keep, &mut |_| true)?;
        engine.logits(&last)?;
        let seconds = started.elapsed().as_secs_f64();
        let after = engine.expert_stats();
        // The first repetition fills caches.
        if repetition > 0 {
            rates.push(count as f64 / seconds);
            reads.push(read);
            multiplies.push(multiply);
            touched = after.hits + after.misses - before.hits - before.misses;
        }
    }
    let bytes = weight_bytes_of(engine.model())?;
    let chunks = count.div_ceil(engine.prefill_chunk()) as u64;
    let read = bytes.layers * chunks + bytes.head + (touched as f64 * bytes.expert) as u64;
    Ok(PrefillFigures {
        tok_per_s: Rates::of(rates),
        bytes_per_token: read / count as u64,
        products_per_token: products_per_token(engine),
        read_gb_per_s: Rates::of(reads).median,
        multiply_gmac_per_s: Rates::of(multiplies).median,
    })
}

/// Products of weights with one token's activations, the head left out: it meets one token only.
fn products_per_token(engine: &Engine) -> u64 {
    let config = engine.config();
    let mut products = 0;
    for layer in 0..config.layers {
        let specs = tensors::layer_specs(config, layer);
        let matrices = specs.iter().filter(|spec| !spec.role.is_vector());
        products += matrices.map(|spec| spec.rows * spec.cols).sum::<usize>();
        if config.layer_kind(layer) == Some(LayerKind::Sparse) {
            let expert = 3 * config.hidden_size * config.moe.expert_intermediate;
            products += expert * config.moe.top_k;
        }
    }
    products as u64
}
