//! Given tokens fed one by one, for comparing one way to compute experts with another.

use std::time::Instant;

use experts::ExpertStats;
use runtime::{Engine, Fingerprint, Want};

use super::tokens;
use crate::error::LabError;

/// What feeding tokens took and gave.
#[derive(Clone, Debug)]
pub struct FedFigures {
    /// Tokens that count.
    pub tokens: usize,
    /// Seconds for them.
    pub seconds: f64,
    /// What the experts' backend did for them.
    pub experts: ExpertStats,
    /// Hash of all logits, those of the tokens before included.
    pub fingerprint: String,
}

/// Feeds `warm` tokens, which fill caches, and then `count` more that are measured.
pub fn feed(engine: &Engine, warm: usize, count: usize) -> Result<FedFigures, LabError> {
    let mut session = engine.session().map_err(runtime::OpenError::from)?;
    let mut fingerprint = Fingerprint::default();
    let fed = tokens(warm + count, engine.config().vocab_size, 1);
    let mut feed = |tokens: &[u32]| -> Result<(), LabError> {
        for token in tokens.chunks(1) {
            let mut each = |hidden: &[f32]| engine.each_logits(hidden, |row| fingerprint.add(row));
            engine.prefill(&mut session, token, Want::All, &mut each, &mut |_| true)?;
        }
        Ok(())
    };
    let (first, rest) = fed.split_at(warm);
    feed(first)?;
    let (before, started) = (engine.expert_stats(), Instant::now());
    feed(rest)?;
    let seconds = started.elapsed().as_secs_f64();
    let experts = since(&before, &engine.expert_stats());
    Ok(FedFigures { tokens: count, seconds, experts, fingerprint: fingerprint.hex() })
}

/// What was done between two moments.
fn since(before: &ExpertStats, now: &ExpertStats) -> ExpertStats {
    ExpertStats {
        hits: now.hits - before.hits,
        guessed_hits: now.guessed_hits - before.guessed_hits,
        misses: now.misses - before.misses,
        bytes_read: now.bytes_read - before.bytes_read,
        cached_bytes: now.cached_bytes,
        wait_s: now.wait_s - before.wait_s,
        remote_s: now.remote_s - before.remote_s,
        busy_s: now.busy_s - before.busy_s,
        known_s: now.known_s - before.known_s,
    }
}
