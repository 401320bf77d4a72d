//! Benches whose figures stand beside the physical limit measured in the same run.

mod decode;
mod fed;
mod io;
mod kernels;
mod prefill;
mod stream;
mod ux;

use std::time::Instant;

use numerics::{Isa, Team, peak};

pub(crate) use decode::timed_decode;
pub use decode::{
    BatchFigures, DECODE_PROMPT, DecodeFigures, WeightBytes, decode, decode_batch, weight_bytes_of,
};
pub use fed::{FedFigures, feed};
pub use io::{Device, IoFigures, io};
pub use kernels::{KernelFigures, KernelOptions, ROWS_MAX, kernels};
pub use prefill::{PrefillFigures, prefill};
pub use stream::{StreamFigures, stream};
pub use ux::{Scenario, UxFigures, ux};

/// Bytes of the array that the read-bandwidth loop streams: far beyond any cache.
pub const READ_BYTES: usize = 1 << 30;
/// Iterations of the multiply loop per thread and measurement.
const MULTIPLY_ITERATIONS: u64 = 4_000_000;

/// Median, slowest and fastest of repeated measurements.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Middle value.
    pub median: f64,
    /// Least and greatest value.
    pub spread: (f64, f64),
}

impl Rates {
    /// Of at least one value.
    pub fn of(mut values: Vec<f64>) -> Rates {
        values.sort_by(f64::total_cmp);
        let half = values.len() / 2;
        let median = if values.len().is_multiple_of(2) {
            (values[half - 1] + values[half]) / 2.0
        } else {
            values[half]
        };
        Rates { median, spread: (values[0], values[values.len() - 1]) }
    }
}

/// Read bandwidth of all threads together over an array beyond the caches, in 10^9 bytes per
/// second.
pub struct ReadLoop {
    data: Vec<u8>,
}

impl Default for ReadLoop {
    fn default() -> Self {
        ReadLoop { data: vec![1; READ_BYTES] }
    }
}

impl ReadLoop {
    /// One pass on every thread of the team.
    pub fn measure(&self, team: &Team) -> f64 {
        let (isa, pieces) = (Isa::detect(), team.threads());
        let started = Instant::now();
        team.run(pieces, |piece| {
            let len = self.data.len();
            let part = &self.data[len * piece / pieces..len * (piece + 1) / pieces];
            std::hint::black_box(peak::read_loop(isa, part));
        });
        READ_BYTES as f64 / started.elapsed().as_secs_f64() / 1e9
    }
}

/// What a loop multiplies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Multiply {
    /// int8 numbers in vectors.
    Int8,
    /// int8 numbers in matrix tiles where the level has them.
    Int8Tiles,
    /// f32 numbers.
    F32,
}

/// Products per second of all threads together, operands in registers, in 10^9.
pub fn multiply_rate(team: &Team, isa: Isa, what: Multiply) -> f64 {
    let iterations =
        if isa == Isa::SCALAR { MULTIPLY_ITERATIONS / 40 } else { MULTIPLY_ITERATIONS };
    let products = std::sync::atomic::AtomicU64::new(0);
    let started = Instant::now();
    team.run(team.threads(), |_| {
        let made = match what {
            Multiply::Int8 => peak::multiply_loop(isa, false, iterations),
            Multiply::Int8Tiles => peak::multiply_loop(isa, true, iterations),
            Multiply::F32 => peak::multiply_f32_loop(isa, iterations),
        };
        products.fetch_add(made, std::sync::atomic::Ordering::Relaxed);
    });
    products.into_inner() as f64 / started.elapsed().as_secs_f64() / 1e9
}

/// Token ids that look like no text, the same in every run.
pub(crate) fn tokens(count: usize, vocab: usize, seed: usize) -> Vec<u32> {
    (0..count).map(|i| (((i + seed * 31) * 7919 + 13) % vocab) as u32).collect()
}
