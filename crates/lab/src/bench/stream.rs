//! Decoding a model whose experts do not fit in memory, beside what its drive allows.

use runtime::Engine;

use super::io::{Device, drop_cached};
use super::{Rates, decode};
use crate::error::LabError;

/// Figures of decoding from a drive. Times are of one token, on average over a repetition.
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
    let device = Device::of(&engine.model().shards)?;
    let mut figures: Option<StreamFigures> = None;
    let (mut rates, mut devices) = (Vec::new(), Vec::new());
    let (mut device_ratios, mut time_ratios) = (Vec::new(), Vec::new());
    for repetition in 0..=repetitions.max(1) {
        drop_cached(engine.model())?;
        // Before and after: the drive may be shared.
        let first = device.measure(2 * repetition)?;
        let run = decode::run(engine, 0..1, tokens)?;
        let ([before, after], wall_s) = (run.stats, run.seconds);
        let device_gb_per_s = (first + device.measure(2 * repetition + 1)?) / 2.0;
        let per_token = |seconds: f64| seconds * 1e3 / tokens as f64;
        let bytes = (after.bytes_read - before.bytes_read) as f64;
        let (demand_s, known_s) = (after.busy_s - before.busy_s, after.known_s - before.known_s);
        let idle_s = (wall_s - known_s).max(0.0);
        let of_chosen = |count: u64| count as f64 / run.chosen().max(1) as f64;
        let fingerprint = run.fingerprints.concat();
        if let Some(earlier) = &figures
            && earlier.fingerprint != fingerprint
        {
            return Err(LabError::Check("two repetitions gave different logits".to_owned()));
        }
        if repetition > 0 {
            rates.push(tokens as f64 / wall_s);
            devices.push(device_gb_per_s);
            device_ratios.push(bytes / known_s.max(1e-9) / 1e9 / device_gb_per_s);
            time_ratios.push(wall_s / (bytes / device_gb_per_s / 1e9 + idle_s));
        }
        let none = Rates { median: 0.0, spread: (0.0, 0.0) };
        figures = Some(StreamFigures {
            tok_per_s: none,
            bytes_per_token: bytes / tokens as f64,
            hit_rate: of_chosen(after.hits - before.hits),
            guessed_rate: of_chosen(after.guessed_hits - before.guessed_hits),
            demand_ms: per_token(demand_s),
            idle_ms: per_token(idle_s),
            wait_ms: per_token(after.wait_s - before.wait_s),
            device_gb_per_s: none,
            device_ratio: none,
            time_ratio: none,
            fingerprint,
        });
    }
    let missing = || LabError::Check("no repetition was run".to_owned());
    Ok(StreamFigures {
        tok_per_s: Rates::of(rates),
        device_gb_per_s: Rates::of(devices),
        device_ratio: Rates::of(device_ratios),
        time_ratio: Rates::of(time_ratios),
        ..figures.ok_or_else(missing)?
    })
}
