//! What a person waits for: a short chat turn and a question about a long document.

use runtime::{Engine, Generation, GenerationOptions, SamplerOptions};

use super::Rates;
use crate::error::LabError;

/// A prompt with a name.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// What it stands for.
    pub name: &'static str,
    /// Its token ids.
    pub prompt: Vec<u32>,
    /// Tokens to generate.
    pub tokens: usize,
}

/// Figures of one scenario.
#[derive(Clone, Debug)]
pub struct UxFigures {
    /// The scenario.
    pub name: &'static str,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Seconds to the first token.
    pub ttft_s: Rates,
    /// Tokens per second after it.
    pub tok_per_s: Rates,
    /// Fingerprint of its logits, the same in every repetition.
    pub fingerprint: String,
}

/// Runs each scenario `repetitions` times in turns, each time in a new session, greedily and
/// without stopping early. Fails when a fingerprint drifts.
pub fn ux(
    engine: &Engine,
    scenarios: &[Scenario],
    repetitions: usize,
) -> Result<Vec<UxFigures>, LabError> {
    let mut runs: Vec<Vec<runtime::Generated>> = scenarios.iter().map(|_| Vec::new()).collect();
    for _ in 0..repetitions.max(1) {
        for (scenario, runs) in scenarios.iter().zip(&mut runs) {
            let options = GenerationOptions {
                max_tokens: scenario.tokens,
                sampler: SamplerOptions::default(),
                stop_ids: Vec::new(),
                fingerprint: true,
                profile: false,
            };
            let mut session = engine.session().map_err(runtime::OpenError::from)?;
            let generation = Generation::new(engine, options);
            let run = generation.run(&mut session, &scenario.prompt, &mut |_| true)?;
            if run.ttft_s.is_none() {
                return Err(LabError::Check(format!("{}: no token came", scenario.name)));
            }
            if runs.first().is_some_and(|first| first.fingerprint != run.fingerprint) {
                let name = scenario.name;
                return Err(LabError::Check(format!("{name}: the fingerprint drifted")));
            }
            runs.push(run);
        }
    }
    let figures = scenarios.iter().zip(runs).map(|(scenario, runs)| UxFigures {
        name: scenario.name,
        prompt_tokens: scenario.prompt.len(),
        ttft_s: Rates::of(runs.iter().filter_map(|run| run.ttft_s).collect()),
        tok_per_s: Rates::of(runs.iter().map(runtime::Generated::tokens_per_s).collect()),
        fingerprint: runs[0].fingerprint.clone().unwrap_or_default(),
    });
    Ok(figures.collect())
}
