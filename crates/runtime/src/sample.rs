//! Choosing a token, rule 9 of the numerics contract: penalties, temperature, top-k, top-p,
//! min-p, then one draw of a counter-based generator, so that a seed gives the same text in any
//! batch.

use std::collections::HashMap;

use numerics::{Isa, function, topk};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Words of one ChaCha block; each generated token draws from its own.
const BLOCK_WORDS: u128 = 16;

/// How tokens are chosen.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SamplerOptions {
    /// 0 chooses the best token.
    pub temperature: f32,
    /// Candidates kept; 0 keeps all.
    pub top_k: usize,
    /// Mass of the shortest prefix kept; 1 keeps all.
    pub top_p: f32,
    /// Share of the best probability a candidate must have.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or answer.
    pub repetition_penalty: f32,
    /// Subtracted from logits of tokens in the answer.
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the answer.
    pub frequency_penalty: f32,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        SamplerOptions {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

impl SamplerOptions {
    /// Says what is wrong with the options, if anything.
    pub fn check(&self) -> Result<(), String> {
        let range = |name: &str, value: f32, low: f32, high: f32| {
            if value.is_finite() && value >= low && value <= high {
                Ok(())
            } else {
                Err(format!("--{name} {value} is outside {low} to {high}"))
            }
        };
        range("temperature", self.temperature, 0.0, 100.0)?;
        range("top-p", self.top_p, 0.0, 1.0)?;
        range("min-p", self.min_p, 0.0, 1.0)?;
        range("repetition-penalty", self.repetition_penalty, 0.01, 100.0)?;
        range("presence-penalty", self.presence_penalty, -100.0, 100.0)?;
        range("frequency-penalty", self.frequency_penalty, -100.0, 100.0)
    }
}

/// Chooses the tokens of one answer.
pub struct Sampler {
    isa: Isa,
    options: SamplerOptions,
    rng: ChaCha8Rng,
    generated: u64,
    /// Occurrences in prompt and answer, and in the answer alone.
    seen: HashMap<u32, (u32, u32)>,
}

impl Sampler {
    /// A sampler for choice number `choice` of a request, after `prompt`.
    pub fn new(isa: Isa, options: SamplerOptions, choice: u32, prompt: &[u32]) -> Sampler {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&options.seed.to_le_bytes());
        key[8..12].copy_from_slice(&choice.to_le_bytes());
        let mut seen = HashMap::new();
        for token in prompt {
            seen.entry(*token).or_insert((0, 0)).0 += 1;
        }
        Sampler { isa, options, rng: ChaCha8Rng::from_seed(key), generated: 0, seen }
    }

    /// Chooses the next token from raw logits and remembers it.
    pub fn next(&mut self, logits: &[f32]) -> u32 {
        let token = if self.penalises() {
            let mut adjusted = logits.to_vec();
            self.penalise(&mut adjusted);
            self.choose(&adjusted)
        } else {
            self.choose(logits)
        };
        let counts = self.seen.entry(token).or_insert((0, 0));
        *counts = (counts.0 + 1, counts.1 + 1);
        self.generated += 1;
        token
    }

    fn penalises(&self) -> bool {
        let options = &self.options;
        options.repetition_penalty != 1.0
            || options.presence_penalty != 0.0
            || options.frequency_penalty != 0.0
    }

    fn penalise(&self, logits: &mut [f32]) {
        let options = &self.options;
        for (token, (seen, answered)) in &self.seen {
            let Some(logit) = logits.get_mut(*token as usize) else { continue };
            if *seen > 0 {
                let factor = options.repetition_penalty;
                *logit = if *logit > 0.0 { *logit / factor } else { *logit * factor };
            }
            if *answered > 0 {
                *logit -= options.presence_penalty;
                *logit -= options.frequency_penalty * *answered as f32;
            }
        }
    }

    fn choose(&mut self, logits: &[f32]) -> u32 {
        let options = &self.options;
        if options.temperature == 0.0 {
            return topk::argmax(logits);
        }
        let keep = if options.top_k == 0 { logits.len() } else { options.top_k };
        let order = topk::top_k(logits, keep.min(logits.len()));
        // Differences from the best logit are at most 0, so no temperature makes them overflow
        // upwards; what overflows downwards has weight 0.
        let best = order.first().map_or(0.0, |token| logits[*token as usize]);
        let scaled = |token: &u32| (logits[*token as usize] - best) / options.temperature;
        let mut weights: Vec<f32> = order.iter().map(scaled).collect();
        function::exp_minus(self.isa, &mut weights, 0.0);
        let mass = |weights: &[f32]| weights.iter().fold(0.0f64, |sum, w| sum + f64::from(*w));
        if options.top_p < 1.0 {
            let target = f64::from(options.top_p) * mass(&weights);
            let mut sum = 0.0f64;
            let cut = weights.iter().position(|weight| {
                sum += f64::from(*weight);
                sum >= target
            });
            weights.truncate(cut.map_or(weights.len(), |cut| cut + 1));
        }
        // The best weight is 1.
        let cut = weights.iter().position(|weight| *weight < options.min_p);
        weights.truncate(cut.unwrap_or(weights.len()).max(1));

        self.rng.set_word_pos(u128::from(self.generated) * BLOCK_WORDS);
        let uniform = (self.rng.next_u64() >> 11) as f64 * 2f64.powi(-53);
        let target = uniform * mass(&weights);
        let mut sum = 0.0f64;
        let chosen = weights.iter().position(|weight| {
            sum += f64::from(*weight);
            sum > target
        });
        order[chosen.unwrap_or(weights.len() - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(temperature: f32) -> SamplerOptions {
        SamplerOptions { temperature, seed: 7, ..SamplerOptions::default() }
    }

    fn draw(options: SamplerOptions, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(Isa::detect(), options, 0, &[]);
        (0..count).map(|_| sampler.next(logits)).collect()
    }

    #[test]
    fn temperature_zero_is_the_best_token_and_the_lower_of_equals() {
        assert_eq!(draw(options(0.0), &[1.0, 3.0, 3.0], 2), [1, 1]);
    }

    #[test]
    fn draws_depend_on_seed_choice_and_token_index_only() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let first = draw(options(1.0), &logits, 40);
        assert_eq!(first, draw(options(1.0), &logits, 40));
        let other_seed = SamplerOptions { seed: 8, ..options(1.0) };
        assert_ne!(first, draw(other_seed, &logits, 40));
        let mut other_choice = Sampler::new(Isa::detect(), options(1.0), 1, &[]);
        let drawn: Vec<u32> = (0..40).map(|_| other_choice.next(&logits)).collect();
        assert_ne!(first, drawn);
    }

    #[test]
    fn the_least_temperature_takes_the_best_token() {
        for temperature in [f32::from_bits(1), 1e-38, 1e-20] {
            let drawn = draw(options(temperature), &[1.0, 3.0, -2.0, 2.9], 20);
            assert!(drawn.iter().all(|token| *token == 1), "{temperature}: {drawn:?}");
        }
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [0.0, 2f32.ln(), 4f32.ln()];
        let drawn = draw(options(1.0), &logits, 7000);
        for (token, want) in [(0, 1000.0), (1, 2000.0), (2, 4000.0)] {
            let count = drawn.iter().filter(|t| **t == token).count() as f64;
            assert!((count - want).abs() < 150.0, "token {token}: {count}");
        }
    }

    #[test]
    fn truncation_keeps_what_it_says() {
        let logits = [0.0, 1.0, 2.0, 3.0];
        let all = |options| {
            let drawn = draw(options, &logits, 2000);
            let mut kept: Vec<u32> = drawn;
            kept.sort_unstable();
            kept.dedup();
            kept
        };
        assert_eq!(all(options(1.0)), [0, 1, 2, 3]);
        assert_eq!(all(SamplerOptions { top_k: 2, ..options(1.0) }), [2, 3]);
        // Probabilities are 0.032, 0.087, 0.237, 0.644.
        assert_eq!(all(SamplerOptions { top_p: 0.64, ..options(1.0) }), [3]);
        assert_eq!(all(SamplerOptions { top_p: 0.65, ..options(1.0) }), [2, 3]);
        assert_eq!(all(SamplerOptions { min_p: 0.13, ..options(1.0) }), [1, 2, 3]);
        assert_eq!(all(SamplerOptions { top_p: 0.0, ..options(1.0) }), [3]);
    }

    #[test]
    fn penalties_follow_their_definitions() {
        let base = SamplerOptions::default();
        let next = |options, logits: &[f32], prompt: &[u32]| {
            Sampler::new(Isa::detect(), options, 0, prompt).next(logits)
        };
        let repetition = SamplerOptions { repetition_penalty: 2.0, ..base };
        assert_eq!(next(repetition, &[3.0, 2.0], &[0]), 1);
        assert_eq!(next(repetition, &[-1.0, -1.5], &[0]), 1);
        // Presence and frequency look at the answer, not the prompt.
        let presence = SamplerOptions { presence_penalty: 2.0, ..base };
        assert_eq!(next(presence, &[3.0, 2.0], &[0]), 0);
        assert_eq!(draw(presence, &[3.0, 2.0], 3), [0, 1, 0]);
        let frequency = SamplerOptions { frequency_penalty: 0.4, ..base };
        assert_eq!(draw(frequency, &[3.0, 2.0], 6), [0, 0, 0, 1, 0, 1]);
    }

    #[test]
    fn options_out_of_range_are_named() {
        let bad = SamplerOptions { top_p: 1.5, ..SamplerOptions::default() };
        assert!(bad.check().unwrap_err().contains("--top-p 1.5"));
        let nan = SamplerOptions { temperature: f32::NAN, ..SamplerOptions::default() };
        assert!(nan.check().is_err());
        assert!(SamplerOptions::default().check().is_ok());
    }
}
