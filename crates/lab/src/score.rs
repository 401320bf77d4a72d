//! Negative log-likelihood and perplexity of texts.

use runtime::{Engine, StepError, Want};

use crate::error::LabError;

/// The likelihood of some tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    /// Sum of negative natural log-likelihoods.
    pub nll: f64,
    /// Tokens scored.
    pub tokens: u64,
}

impl Score {
    /// e to the mean negative log-likelihood.
    pub fn perplexity(&self) -> f64 {
        (self.nll / self.tokens.max(1) as f64).exp()
    }

    /// Adds another score.
    pub fn add(&mut self, other: Score) {
        self.nll += other.nll;
        self.tokens += other.tokens;
    }
}

/// Negative log-likelihood of `token` under raw logits, in f64.
fn nll(logits: &[f32], token: u32) -> f64 {
    let max = logits.iter().fold(f64::NEG_INFINITY, |m, &l| m.max(f64::from(l)));
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) - max).exp()).sum();
    max + sum.ln() - f64::from(logits[token as usize])
}

/// The family prefix of `ids`: what must be put before them so that it stands there exactly once.
pub fn missing_prefix(prefix: &[u32], ids: &[u32]) -> Vec<u32> {
    if ids.starts_with(prefix) { Vec::new() } else { prefix.to_vec() }
}

/// Scores tokens `from..` of `ids`, each given all before it; the first token is never scored.
pub fn score_ids(engine: &Engine, ids: &[u32], from: usize) -> Result<Score, LabError> {
    let from = from.max(1);
    let mut score = Score::default();
    if ids.len() <= from {
        return Ok(score);
    }
    let vocab = engine.config().vocab_size;
    if let Some(token) = ids.iter().find(|id| **id as usize >= vocab) {
        let error = models::ModelError::Token { token: *token, vocab };
        return Err(StepError::from(error).into());
    }
    let mut session = engine.session().map_err(runtime::OpenError::from)?;
    let width = engine.config().hidden_size;
    // The state after a token predicts the next one.
    let mut next = 1;
    let mut each = |hidden: &[f32]| -> Result<(), StepError> {
        let skipped = from.saturating_sub(next).min(hidden.len() / width);
        next += skipped;
        engine.each_logits(&hidden[skipped * width..], |logits| {
            score.nll += nll(logits, ids[next]);
            score.tokens += 1;
            next += 1;
        })
    };
    engine.prefill(&mut session, &ids[..ids.len() - 1], Want::All, &mut each, &mut |_| true)?;
    Ok(score)
}

/// Scores a long text by windows that do not overlap, each after the prefix. `progress` is told
/// tokens done and in all.
pub fn score_text(
    engine: &Engine,
    prefix: &[u32],
    ids: &[u32],
    window: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Score, LabError> {
    let window = window.min(engine.context()).saturating_sub(prefix.len()).max(1);
    let mut score = Score::default();
    for (at, part) in ids.chunks(window).enumerate() {
        let mut tokens = if at == 0 { missing_prefix(prefix, part) } else { prefix.to_vec() };
        tokens.extend_from_slice(part);
        // The prefix is never scored, also where the text brings its own.
        score.add(score_ids(engine, &tokens, prefix.len())?);
        progress((at * window + part.len()).min(ids.len()), ids.len());
    }
    Ok(score)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefix_stands_once() {
        assert_eq!(missing_prefix(&[1, 2], &[5, 6]), [1, 2]);
        assert!(missing_prefix(&[1, 2], &[1, 2, 5]).is_empty());
        assert!(missing_prefix(&[], &[5]).is_empty());
    }

    #[test]
    fn likelihoods_are_those_of_the_softmax() {
        let logits = [0.0, 2f32.ln(), 1f32.ln()];
        assert!((nll(&logits, 1) - 2f64.ln()).abs() < 1e-6);
        assert!((nll(&[1000.0, 0.0], 1) - 1000.0).abs() < 1e-6);
    }
}
