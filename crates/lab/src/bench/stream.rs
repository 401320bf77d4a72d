//! Decoding a model whose experts do not fit in memory, beside what its drive allows.

use experts::ExpertStats;
use runtime::Engine;

use super::decode::Run;
use super::io::{Device, drop_cached};
use super::{Rates, decode};
use crate::error::LabError;

/// Figures of decoding from a drive, medians of the repetitions. Times are of one token.
#[derive(Clone, Debug)]
pub struct StreamFigures {
    /// Tokens per second.
    pub tok_per_s: Rates,
    /// Bytes of experts read per token, guesses included.
    pub bytes_per_token: f64,
    /// Share of chosen experts that were in memory, guesses not counted.
    pub hit_rate: f64,
    /// Share of chosen experts that were in memory because they had been guessed.
    pub guessed_rate: f64,
    /// Milliseconds in which a read was known that somebody waited for.
    pub demand_ms: f64,
    /// Milliseconds in which no read was known, not even a guessed one.
    pub idle_ms: f64,
    /// Milliseconds that computation waited for a read.
    pub wait_ms: f64,
    /// 10^9 bytes per second of plain direct reads, measured between the repetitions.
    pub device_gb_per_s: Rates,
    /// 10^9 bytes per second read while reads were known, over that of the plain reads.
    pub device_ratio: Rates,
    /// Time of a token over what it must take: bytes read at the plain reads' rate, and the time in
    /// which no read was known.
    pub time_ratio: Rates,
    /// Fingerprint of the logits, the same in every repetition.
    pub fingerprint: String,
}

impl StreamFigures {
    /// Milliseconds that the bytes of a token take at the plain reads' rate.
    pub fn read_ms(&self) -> f64 {
        self.bytes_per_token / self.device_gb_per_s.median / 1e6
    }

    /// Tokens per second at which bytes and time without reads would be all.
    pub fn limit_tok_per_s(&self) -> f64 {
        1e3 / (self.read_ms() + self.idle_ms)
    }
}

/// Decodes `tokens` tokens `repetitions` times (at least once), after one repetition that fills
/// the cache, plain reads between them. Fails when the logits of a repetition differ.
pub fn stream(
    engine: &Engine,
    tokens: usize,
    repetitions: usize,
) -> Result<StreamFigures, LabError> {
    let device = Device::of(&engine.model().shards)?.limited(engine.read_limit());
    let mut runs = Vec::new();
    for repetition in 0..=repetitions.max(1) {
        drop_cached(engine.model())?;
        // Before and after: the drive may be shared.
        let first = device.measure(2 * repetition)?;
        let run = decode::run(engine, 0..1, tokens)?;
        runs.push((run, (first + device.measure(2 * repetition + 1)?) / 2.0));
    }
    if runs.iter().any(|(run, _)| run.fingerprints != runs[0].0.fingerprints) {
        return Err(LabError::Check("two repetitions gave different logits".to_owned()));
    }
    // The first one filled the cache.
    let counted = &runs[1..];
    let each = |figure: &dyn Fn(&Run, f64) -> f64| {
        Rates::of(counted.iter().map(|(run, device)| figure(run, *device)).collect())
    };
    let bytes = |run: &Run| (run.stats[1].bytes_read - run.stats[0].bytes_read) as f64;
    let known_s = |run: &Run| run.stats[1].known_s - run.stats[0].known_s;
    let idle_s = |run: &Run| (run.seconds - known_s(run)).max(0.0);
    let since = |run: &Run, of: fn(&ExpertStats) -> f64| of(&run.stats[1]) - of(&run.stats[0]);
    let of_chosen =
        |run: &Run, of: fn(&ExpertStats) -> f64| since(run, of) / run.chosen().max(1) as f64;
    let ms = |seconds: f64| seconds * 1e3 / tokens as f64;
    Ok(StreamFigures {
        tok_per_s: each(&|run, _| tokens as f64 / run.seconds),
        bytes_per_token: each(&|run, _| bytes(run) / tokens as f64).median,
        hit_rate: each(&|run, _| of_chosen(run, |stats| stats.hits as f64)).median,
        guessed_rate: each(&|run, _| of_chosen(run, |stats| stats.guessed_hits as f64)).median,
        demand_ms: each(&|run, _| ms(since(run, |stats| stats.busy_s))).median,
        idle_ms: each(&|run, _| ms(idle_s(run))).median,
        wait_ms: each(&|run, _| ms(since(run, |stats| stats.wait_s))).median,
        device_gb_per_s: each(&|_, device| device),
        device_ratio: each(&|run, device| bytes(run) / known_s(run).max(1e-9) / 1e9 / device),
        time_ratio: each(&|run, device| run.seconds / (bytes(run) / device / 1e9 + idle_s(run))),
        fingerprint: runs[0].0.fingerprints.concat(),
    })
}
