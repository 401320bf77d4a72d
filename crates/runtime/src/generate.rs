//! One answer: prefill, then token by token until a stop id, the limit or the caller ends it.

use std::time::Instant;

use models::{Running, Spent, Stage};

use crate::engine::Engine;
use crate::fingerprint::Fingerprint;
use crate::sample::{Sampler, SamplerOptions};
use crate::session::{Session, StepError, Want, Work};

/// Why an answer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// A stop id was chosen.
    Stop,
    /// The limit of tokens or the end of the context was reached.
    Length,
    /// The caller stopped it.
    Cancelled,
}

impl FinishReason {
    /// Name for JSON.
    pub const fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        }
    }
}

/// How an answer is made.
#[derive(Clone, Debug)]
pub struct GenerationOptions {
    /// Most tokens; the room in the context bounds it too.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Ids that end the answer; they are not part of it.
    pub stop_ids: Vec<u32>,
    /// Whether raw logits are fingerprinted.
    pub fingerprint: bool,
    /// Whether the engine's clock runs.
    pub profile: bool,
}

/// Where an answer is.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Phase {
    /// Share of the prompt that is done, from 0 to 1.
    Prefill(f64),
    /// A token of the answer.
    Token(u32),
}

/// A finished answer.
#[derive(Clone, Debug)]
pub struct Generated {
    /// Its tokens, without the stop id.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Hex of the raw logits, when asked for.
    pub fingerprint: Option<String>,
    /// Seconds from the start to the first token; `None` where there was none.
    pub ttft_s: Option<f64>,
    /// Seconds of the prefill.
    pub prefill_s: f64,
    /// Seconds from the first token to the end.
    pub decode_s: f64,
    /// Steps taken in them; one more than tokens follow the first where a stop id ended the answer.
    pub decode_steps: usize,
    /// Prompt tokens fed.
    pub prompt_tokens: usize,
    /// Where the time went, when asked for.
    pub spent: Option<Spent>,
}

impl Generated {
    /// Tokens per second after the first.
    pub fn tokens_per_s(&self) -> f64 {
        let steps = self.decode_steps as f64;
        if self.decode_s > 0.0 { steps / self.decode_s } else { 0.0 }
    }
}

/// An answer being made.
pub struct Generation<'a> {
    engine: &'a Engine,
    options: GenerationOptions,
}

impl<'a> Generation<'a> {
    /// An answer by `engine`.
    pub fn new(engine: &'a Engine, options: GenerationOptions) -> Generation<'a> {
        Generation { engine, options }
    }

    /// Feeds `prompt` to the session and answers. `on` is told every phase and returns whether to
    /// go on; what was generated until then is kept. The session ends up holding the prompt and
    /// every token of the answer that was fed back.
    pub fn run(
        &self,
        session: &mut Session,
        prompt: &[u32],
        on: &mut dyn FnMut(Phase) -> bool,
    ) -> Result<Generated, StepError> {
        let started = Instant::now();
        let engine = self.engine;
        let clock = self.options.profile.then(|| engine.profile().start());
        let mut hidden = Vec::new();
        let mut going = true;
        let fed = engine.prefill(
            session,
            prompt,
            Want::Last,
            &mut |rows| {
                hidden = rows.to_vec();
                Ok(())
            },
            &mut |share| {
                going = on(Phase::Prefill(share));
                going
            },
        )?;
        let prefill_s = started.elapsed().as_secs_f64();
        let mut sampler =
            Sampler::new(engine.compute().isa, self.options.sampler, 0, session.tokens());
        let mut fingerprint = Fingerprint::default();
        let mut out = Generated {
            ids: Vec::new(),
            finish: FinishReason::Length,
            fingerprint: None,
            ttft_s: None,
            prefill_s,
            decode_s: 0.0,
            decode_steps: 0,
            prompt_tokens: fed,
            spent: None,
        };
        if let Some(clock) = &clock {
            clock.stage(Stage::Decode);
        }
        let mut first_token = None;
        if fed < prompt.len() || !going || hidden.is_empty() {
            out.finish = FinishReason::Cancelled;
        } else {
            while out.ids.len() < self.options.max_tokens {
                let logits = engine.logits(&hidden)?;
                if self.options.fingerprint {
                    fingerprint.add(&logits);
                }
                let token = sampler.next(&logits);
                if first_token.is_none() {
                    first_token = Some(Instant::now());
                    out.ttft_s = Some(started.elapsed().as_secs_f64());
                }
                if self.options.stop_ids.contains(&token) {
                    out.finish = FinishReason::Stop;
                    break;
                }
                out.ids.push(token);
                if !on(Phase::Token(token)) {
                    out.finish = FinishReason::Cancelled;
                    break;
                }
                if out.ids.len() == self.options.max_tokens || session.room() == 0 {
                    break;
                }
                let work = Work { session: &mut *session, tokens: &[token], want: Want::Last };
                hidden = engine.step(&mut [work])?.swap_remove(0);
                out.decode_steps += 1;
            }
        }
        out.decode_s = first_token.map_or(0.0, |first: Instant| first.elapsed().as_secs_f64());
        out.fingerprint = self.options.fingerprint.then(|| fingerprint.hex());
        out.spent = clock.map(Running::stop);
        Ok(out)
    }
}
