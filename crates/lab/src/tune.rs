//! The search for settings that are fastest on this machine: they change speed, never a result.
//!
//! One setting after another is varied, the best so far kept. The values of a setting are measured
//! in one order and then in the other, so that a machine that speeds up or slows down meanwhile
//! favours none; what is far behind after the first measurement is not measured again. Each
//! measurement is to be a process of its own: what one engine leaves to the allocator would count
//! against the next one's ceiling.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::time::Instant;

use container::Model;
use experts::{IoMode, ReadAhead};
use runtime::machine::Machine;
use runtime::{Engine, EngineOptions, MemoryPlan, Want};
use serde::{Deserialize, Serialize};

use crate::bench::{self, Rates};
use crate::error::LabError;

/// A value replaces the one in force only when it is faster by this factor, and each time.
const GAIN_MIN: f64 = 1.03;
/// Share of the best rate below which a value is not measured a second time.
const BEHIND_SHARE: f64 = 0.8;
/// Share of the best rate below which a value is not measured once its caches are filled.
const HOPELESS_SHARE: f64 = 0.3;
/// Prefill chunks that are tried, as long as the prompt.
const CHUNKS: [usize; 4] = [128, 256, 512, 1024];
/// Bytes of a file that are read at once into the page cache.
const WARM_BYTES: usize = 4 << 20;

/// Settings that change nothing but speed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Compute threads.
    pub threads: usize,
    /// Tokens per prefill step.
    pub prefill_chunk: usize,
    /// How experts are read; `None` where all of them are read once.
    #[serde(with = "io_name")]
    pub io: Option<IoMode>,
    /// Whether experts are read ahead by the next layer's router; `None` likewise.
    pub prefetch: Option<bool>,
}

mod io_name {
    //! Readers by their names.

    use experts::IoMode;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(mode: &Option<IoMode>, to: S) -> Result<S::Ok, S::Error> {
        mode.map(IoMode::name).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<IoMode>, D::Error> {
        let name = Option::<String>::deserialize(from)?;
        let known = |name: String| {
            IoMode::from_name(&name).ok_or_else(|| D::Error::custom(format!("io {name:?}")))
        };
        name.map(known).transpose()
    }
}

impl Settings {
    /// `options` with these settings.
    pub fn apply(&self, options: &EngineOptions) -> EngineOptions {
        let read_ahead = match self.prefetch {
            None => options.read_ahead.clone(),
            Some(true) => ReadAhead::Router,
            Some(false) => ReadAhead::Off,
        };
        EngineOptions {
            threads: Some(self.threads),
            prefill_chunk: self.prefill_chunk,
            io: self.io.or(options.io),
            read_ahead,
            ..options.clone()
        }
    }
}

impl fmt::Display for Settings {
    /// As flags.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--threads {} --prefill-chunk {}", self.threads, self.prefill_chunk)?;
        if let Some(io) = self.io {
            write!(f, " --io {}", io.name())?;
        }
        match self.prefetch {
            None => Ok(()),
            Some(on) => write!(f, " --prefetch {}", if on { "router" } else { "off" }),
        }
    }
}

/// What is varied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Knob {
    /// Compute threads, by generated tokens per second.
    Threads,
    /// Readers, by generated tokens per second.
    Io,
    /// Reading ahead, by generated tokens per second.
    Prefetch,
    /// Prefill steps, by prompt tokens per second.
    PrefillChunk,
}

impl Knob {
    /// Name, as the flag has it.
    pub const fn name(self) -> &'static str {
        match self {
            Knob::Threads => "threads",
            Knob::Io => "io",
            Knob::Prefetch => "prefetch",
            Knob::PrefillChunk => "prefill-chunk",
        }
    }

    /// The value that settings have.
    fn value(self, settings: &Settings) -> String {
        match self {
            Knob::Threads => settings.threads.to_string(),
            Knob::PrefillChunk => settings.prefill_chunk.to_string(),
            Knob::Io => settings.io.map_or("-", IoMode::name).to_owned(),
            Knob::Prefetch => {
                settings.prefetch.map_or("-", |on| if on { "router" } else { "off" }).to_owned()
            }
        }
    }
}

/// A value of a knob and what it gave.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The knob.
    pub knob: Knob,
    /// The value.
    pub value: String,
    /// Tokens per second, or why there are none.
    pub tok_per_s: Result<Rates, String>,
    /// Whether it was kept.
    pub kept: bool,
}

/// How long to measure.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct TuneOptions {
    /// Generated tokens per measurement.
    pub tokens: usize,
    /// Prompt tokens per measurement.
    pub prompt: usize,
}

/// The settings found, and everything that was measured.
#[derive(Clone, Debug)]
pub struct Tuned {
    /// The settings.
    pub settings: Settings,
    /// The ceiling under which all of it was measured, in bytes.
    pub ram_bytes: u64,
    /// The measurements, knob by knob.
    pub trials: Vec<Trial>,
}

/// One measurement, as it is given to the process that makes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// What is to be measured.
    pub knob: Knob,
    /// With which settings.
    pub settings: Settings,
    /// How long.
    pub lengths: TuneOptions,
    /// The ceiling, in bytes.
    pub ram_bytes: u64,
    /// The best rate so far, tokens per second; 0 for none.
    pub best: f64,
}

/// Makes a measurement: tokens per second, or why there are none.
pub type Measure<'a> = &'a mut dyn FnMut(&Measurement) -> Result<f64, String>;

/// Finds settings for a model on this machine, all under the ceiling of `options`. `told` gets each
/// trial of a knob once the knob is done.
pub fn tune(
    options: &EngineOptions,
    lengths: TuneOptions,
    measure: Measure<'_>,
    told: &mut dyn FnMut(&Trial),
) -> Result<Tuned, LabError> {
    let (plan, model, _) = Engine::plan(options)?;
    let needed = lengths.tokens.saturating_add(bench::DECODE_PROMPT);
    if needed > plan.context {
        let (tokens, context) = (lengths.tokens, plan.context);
        return Err(LabError::Request(format!(
            "--tokens {tokens} needs a context of {needed} tokens, {context} is what there is; \
             lower --tokens or raise --ctx"
        )));
    }
    let cores = Machine::default().compute_threads();
    let streams = plan.io == IoMode::Mmap || plan.cache() < plan.experts;
    let settings = Settings {
        threads: options.threads.unwrap_or(cores),
        prefill_chunk: plan.prefill_chunk,
        io: streams.then_some(plan.io),
        prefetch: streams.then_some(!matches!(options.read_ahead, ReadAhead::Off)),
    };
    let mut search = Search { model, plan, lengths, measure, settings, trials: Vec::new() };
    if streams {
        let others = search.readers();
        search.vary(Knob::Io, others, told)?;
        if search.settings.io != Some(IoMode::Mmap) {
            let other = search.settings.prefetch.map(|on| !on);
            search.vary(
                Knob::Prefetch,
                vec![Settings { prefetch: other, ..search.now() }],
                told,
            )?;
        }
    }
    let all = std::thread::available_parallelism().map_or(cores, usize::from);
    let mut counts = vec![cores.div_ceil(2), cores, all];
    counts.retain(|count| *count != search.settings.threads);
    counts.dedup();
    let counts = counts.into_iter().map(|threads| Settings { threads, ..search.now() }).collect();
    search.vary(Knob::Threads, counts, told)?;
    // Chunks as long as the prompt are all the same.
    let longest = lengths.prompt.min(search.plan.context);
    let now = search.settings.prefill_chunk.min(longest);
    let chunks = CHUNKS.into_iter().filter(|chunk| *chunk != now && *chunk <= longest);
    let chunks = chunks.map(|chunk| Settings { prefill_chunk: chunk, ..search.now() }).collect();
    search.vary(Knob::PrefillChunk, chunks, told)?;
    if search.settings.io == Some(IoMode::Mmap) {
        search.settings.prefetch = None;
    }
    Ok(Tuned { settings: search.settings, ram_bytes: search.plan.limit, trials: search.trials })
}

struct Search<'a> {
    model: Model,
    plan: MemoryPlan,
    lengths: TuneOptions,
    measure: Measure<'a>,
    settings: Settings,
    trials: Vec<Trial>,
}

impl Search<'_> {
    fn now(&self) -> Settings {
        self.settings.clone()
    }

    /// Settings with the other readers that may be worth a trial. What goes through the page cache
    /// is one only where all experts would stay there.
    fn readers(&self) -> Vec<Settings> {
        let bytes: u64 = self.model.shards.files().iter().map(|shard| shard.len).sum();
        let free = Machine::default().memory_available().map_or(0, |bound| bound.bytes);
        let stays = bytes.saturating_add(self.plan.limit) < free;
        let modes = IoMode::ALL.into_iter().filter(|mode| {
            Some(*mode) != self.settings.io && (stays || !through_page_cache(*mode))
        });
        modes.map(|io| Settings { io: Some(io), ..self.now() }).collect()
    }

    /// Measures the settings in force and others that differ in one knob, and keeps the best.
    fn vary(
        &mut self,
        knob: Knob,
        others: Vec<Settings>,
        told: &mut dyn FnMut(&Trial),
    ) -> Result<(), LabError> {
        if others.is_empty() {
            return Ok(());
        }
        let candidates: Vec<Settings> = std::iter::once(self.now()).chain(others).collect();
        let mut rates: Vec<Result<Vec<f64>, String>> = Vec::new();
        let mut best = 0.0;
        for (at, settings) in candidates.iter().enumerate() {
            let rate = self.rate(knob, settings, best);
            // What is in force must work; another value may not fit.
            if let (0, Err(why)) = (at, &rate) {
                return Err(LabError::Check(why.clone()));
            }
            best = rate.as_ref().copied().unwrap_or(0.0).max(best);
            rates.push(rate.map(|rate| vec![rate]));
        }
        for (settings, rates) in candidates.iter().zip(&mut rates).rev() {
            if let Ok(known) = rates
                && known[0] >= BEHIND_SHARE * best
            {
                match self.rate(knob, settings, best) {
                    Ok(rate) => known.push(rate),
                    Err(why) => *rates = Err(why),
                }
            }
        }
        let rates: Vec<_> = rates.into_iter().map(|rates| rates.map(Rates::of)).collect();
        let kept = best_of(&rates);
        self.settings = candidates[kept].clone();
        for (at, (settings, tok_per_s)) in candidates.iter().zip(rates).enumerate() {
            let value = knob.value(settings);
            self.trials.push(Trial { knob, value, tok_per_s, kept: at == kept });
        }
        let first = self.trials.len() - candidates.len();
        self.trials[first..].iter().for_each(told);
        Ok(())
    }

    fn rate(&mut self, knob: Knob, settings: &Settings, best: f64) -> Result<f64, String> {
        let (lengths, ram_bytes) = (self.lengths, self.plan.limit);
        (self.measure)(&Measurement { knob, settings: settings.clone(), lengths, ram_bytes, best })
    }
}

/// Makes a measurement in this process: tokens per second, generated or of the prompt.
pub fn measure(options: &EngineOptions, what: &Measurement) -> Result<f64, LabError> {
    let settings = &what.settings;
    if settings.threads == 0 || settings.prefill_chunk == 0 || what.lengths.tokens == 0 {
        return Err(LabError::Request("a measurement of nothing".to_owned()));
    }
    let options = settings.apply(options);
    let options = EngineOptions { ram_bytes: Some(what.ram_bytes), ..options };
    let engine = Engine::open(&options, &mut |_, _| {})?;
    if let Some(asked) = settings.io {
        if engine.io() != asked {
            return Err(LabError::Check(format!("{} reads are refused here", asked.name())));
        }
        if through_page_cache(asked) {
            fill_page_cache(engine.model())?;
        }
    }
    let once = || match what.knob {
        Knob::PrefillChunk => prompt_rate(&engine, what.lengths.prompt.min(engine.context())),
        Knob::Threads | Knob::Io | Knob::Prefetch => {
            let tokens = what.lengths.tokens;
            Ok(tokens as f64 / bench::timed_decode(&engine, tokens)?)
        }
    };
    // The first one fills the cache.
    let first = once()?;
    if first < HOPELESS_SHARE * what.best { Ok(first) } else { once() }
}

fn through_page_cache(mode: IoMode) -> bool {
    matches!(mode, IoMode::Buffered | IoMode::Mmap)
}

/// Reads the model's files, so that later reads through the page cache find them there.
fn fill_page_cache(model: &Model) -> Result<(), LabError> {
    let mut buffer = vec![0; WARM_BYTES];
    for shard in model.shards.files() {
        let failed = |error| LabError::write(&shard.path, "read")(error);
        let mut file = File::open(&shard.path).map_err(failed)?;
        while file.read(&mut buffer).map_err(failed)? > 0 {}
    }
    Ok(())
}

/// The place of the best rate; the first, which is in force, unless another is clearly better.
fn best_of(rates: &[Result<Rates, String>]) -> usize {
    let rate = |at: usize| rates[at].as_ref().map_or(0.0, |rates| rates.median);
    let best = (1..rates.len()).max_by(|a, b| rate(*a).total_cmp(&rate(*b)));
    let clearly = |best: &usize| match (&rates[0], &rates[*best]) {
        (Ok(now), Ok(other)) => {
            other.median > GAIN_MIN * now.median && other.spread.0 > now.spread.1
        }
        _ => false,
    };
    best.filter(clearly).unwrap_or(0)
}

/// Prompt tokens per second.
fn prompt_rate(engine: &Engine, count: usize) -> Result<f64, LabError> {
    let prompt = bench::tokens(count, engine.config().vocab_size, 0);
    let mut session = engine.session().map_err(runtime::OpenError::from)?;
    let started = Instant::now();
    engine.prefill(&mut session, &prompt, Want::Last, &mut |_| Ok(()), &mut |_| true)?;
    Ok(count as f64 / started.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_value_is_kept_only_when_it_is_clearly_better() {
        let rates = |values: &[f64]| -> Vec<Result<Rates, String>> {
            values.iter().map(|value| Ok(Rates::of(vec![*value]))).collect()
        };
        assert_eq!(best_of(&rates(&[10.0, 10.2, 9.0])), 0);
        assert_eq!(best_of(&rates(&[10.0, 10.5, 11.0])), 2);
        assert_eq!(best_of(&rates(&[10.0])), 0);
        // Faster once and slower once.
        let mut noisy = rates(&[10.0, 10.0]);
        noisy[1] = Ok(Rates::of(vec![9.5, 14.0]));
        assert_eq!(best_of(&noisy), 0);
        let mut some = rates(&[10.0, 12.0]);
        some[1] = Err("does not fit".to_owned());
        assert_eq!(best_of(&some), 0);
    }
}
