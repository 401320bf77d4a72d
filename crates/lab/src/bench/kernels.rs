//! Each kernel alone: every weight format and row count, at one or all levels of the CPU.

use std::sync::Arc;
use std::time::{Duration, Instant};

use formats::{Encoder, Format, Fp8Scale, Input, MatrixDesc, QTensor, matmul};
use numerics::{Activations, Compute, Isa, Team};

use super::{Multiply, Rates, ReadLoop, multiply_rate};
use crate::error::LabError;

/// Outputs of the matrix multiplied.
const OUTPUTS: usize = 1024;
/// Its inputs.
const INPUTS: usize = 2048;
/// Bytes of different matrices that a small row count goes through, so that weights come from
/// memory: far beyond any cache.
const STREAMED_BYTES: usize = 256 << 20;
/// Rows up to which no level uses its matrix tiles.
const FEW_ROWS: usize = formats::FEW_ROWS_MAX;
/// Most rows measured: activations and results stay below some hundred megabytes.
pub const ROWS_MAX: usize = 8192;
/// Least time of one measurement.
const LEAST: Duration = Duration::from_millis(60);

/// What to measure.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// Levels.
    pub levels: Vec<Isa>,
    /// Weight formats; empty for all of them.
    pub formats: Vec<Format>,
    /// Row counts.
    pub rows: Vec<usize>,
    /// Activation modes.
    pub activations: Vec<Activations>,
    /// Measurements of each.
    pub repetitions: usize,
}

/// Figures of one kernel.
#[derive(Clone, Debug)]
pub struct KernelFigures {
    /// Format, activation mode and rows.
    pub name: String,
    /// Level.
    pub level: &'static str,
    /// 10^9 bytes of weights per second.
    pub gb_per_s: f64,
    /// 10^9 products per second.
    pub gmac_per_s: f64,
    /// Share of what the binding limit, reading or multiplying, allows.
    pub limit_ratio: f64,
}

/// The formats measured unless others are asked for.
const FORMATS: [Format; 12] = [
    Format::F32,
    Format::Bf16,
    Format::F16,
    Format::Int8Row,
    Format::Int4Row,
    Format::Int4Grouped(32),
    Format::Int4Grouped(64),
    Format::Int3G64,
    Format::Int2Row,
    Format::E8Iq3,
    Format::Mxfp4,
    Format::Fp8B128(Fp8Scale::F32),
];

/// Measures kernels on the threads of `team` and hands each figure to `each` as it is known. The
/// array of the read loop and the matrices take about 1.6 GB.
pub fn kernels(
    team: &Arc<Team>,
    options: &KernelOptions,
    each: &mut dyn FnMut(&KernelFigures),
) -> Result<(), LabError> {
    let read_loop = ReadLoop::default();
    let formats = if options.formats.is_empty() { &FORMATS[..] } else { &options.formats };
    for &format in formats {
        let tensor = matrix(format)?;
        // The same matrix many times over, each copy with its own bytes.
        let copies = STREAMED_BYTES.div_ceil(tensor.desc().bytes());
        let copies: Vec<QTensor> = (0..copies).map(|_| tensor.clone()).collect();
        for &isa in &options.levels {
            let read = read_loop.measure(team);
            let rates = [Multiply::Int8, Multiply::Int8Tiles, Multiply::F32]
                .map(|what| multiply_rate(team, isa, what));
            for &activations in &options.activations {
                let exact = activations == Activations::F32 || !format.takes_int8_activations();
                if exact && activations == Activations::Int8 {
                    continue;
                }
                let compute = Compute::new(isa, team.clone(), activations);
                for &rows in &options.rows {
                    let seconds = time(&compute, &copies, rows, options.repetitions)?;
                    let bytes = tensor.desc().bytes() as f64;
                    let products = (OUTPUTS * INPUTS * rows) as f64;
                    let multiply = match (exact, rows <= FEW_ROWS) {
                        (true, _) => rates[2],
                        (false, true) => rates[0],
                        (false, false) => rates[1],
                    };
                    let least = (bytes / (read * 1e9)).max(products / (multiply * 1e9));
                    each(&KernelFigures {
                        name: format!("{} {activations} x{rows}", name(format)),
                        level: isa.level().name(),
                        gb_per_s: bytes / seconds / 1e9,
                        gmac_per_s: products / seconds / 1e9,
                        limit_ratio: least / seconds,
                    });
                }
            }
        }
    }
    Ok(())
}

/// The name by which a format is asked for.
fn name(format: Format) -> String {
    match format {
        Format::Fp8B128(Fp8Scale::Ue8m0) => format!("{format}-ue8m0"),
        _ => format.to_string(),
    }
}

/// A matrix of the bench's shape with numbers of no meaning.
fn matrix(format: Format) -> Result<QTensor, LabError> {
    let at = |source| LabError::Encode { tensor: format.to_string(), source };
    // One tile's worth of rows, encoded once and repeated.
    let rows = 128;
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let values: Vec<f32> = (0..rows * INPUTS)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 40) as f32 / (1 << 24) as f32 - 0.5) * 0.1
        })
        .collect();
    let (mut weights, mut scales) = (Vec::new(), Vec::new());
    let encoder = Encoder::new(format, INPUTS);
    encoder.encode(Isa::detect(), &values, &mut weights, &mut scales).map_err(at)?;
    let desc = MatrixDesc::for_matmul(format, OUTPUTS, INPUTS, true).map_err(at)?;
    let mut tensor = QTensor::zeroed(desc);
    for first in (0..OUTPUTS).step_by(rows) {
        tensor.store(first..first + rows, &weights, &scales).map_err(at)?;
    }
    Ok(tensor)
}

/// Median seconds of one product of `rows` rows with one matrix.
fn time(
    compute: &Compute,
    copies: &[QTensor],
    rows: usize,
    repetitions: usize,
) -> Result<f64, LabError> {
    let x: Vec<f32> =
        (0..rows * INPUTS).map(|i| ((i * 7919 % 211) as f32 - 105.0) * 0.01).collect();
    let mut out = vec![0.0; rows * OUTPUTS];
    let input = Input::new("bench", &x[..], INPUTS);
    let mut next = copies.iter().cycle();
    let mut times = Vec::new();
    for repetition in 0..=repetitions.max(1) {
        let (started, mut count) = (Instant::now(), 0);
        while started.elapsed() < LEAST {
            let Some(tensor) = next.next() else { break };
            matmul(compute, tensor.view(), &input, None, &mut out)
                .map_err(|error| LabError::Request(error.to_string()))?;
            count += 1;
        }
        if repetition > 0 {
            times.push(started.elapsed().as_secs_f64() / f64::from(count));
        }
    }
    Ok(Rates::of(times).median)
}
