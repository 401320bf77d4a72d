//! Formats without tiles: f32, bf16, f16 and fp8 rows, each output one dot by rule 2.

use numerics::fill;
use numerics::lanes::{self, LANES, Lanes};
use numerics::simd::Simd;
use numerics::team::Columns;

use super::Job;
use crate::Format;
use crate::format::FP8_BLOCK;
use crate::input::Operand;
use crate::matrix::fp8_scale;
use crate::tile::ROWS;

/// How 32 weights become f32.
trait PlainRow {
    /// Bytes per weight.
    const SIZE: usize;
    /// Loads 32 weights from `32 * SIZE` bytes.
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> Lanes<S>;
}

macro_rules! plain_row {
    ($name:ident, $size:literal, $load:ident) => {
        struct $name;
        impl PlainRow for $name {
            const SIZE: usize = $size;
            #[inline(always)]
            fn load<S: Simd>(simd: S, bytes: &[u8]) -> Lanes<S> {
                let halves = bytes.as_chunks::<{ 16 * $size }>().0;
                [simd.$load(&halves[0]), simd.$load(&halves[1])]
            }
        }
    };
}

plain_row!(F32, 4, load_f32_le);
plain_row!(Bf16, 2, load_bf16);
plain_row!(F16, 2, load_f16);
plain_row!(E4m3, 1, load_e4m3);

/// Computes the columns of `out` for all rows.
#[inline(always)]
pub fn rows<S: Simd>(simd: S, job: &Job<'_>, out: &mut Columns<'_>) {
    match job.matrix.desc.format() {
        Format::F32 => rows_of::<S, F32>(simd, job, out),
        Format::Bf16 => rows_of::<S, Bf16>(simd, job, out),
        Format::F16 => rows_of::<S, F16>(simd, job, out),
        Format::Fp8B128(_) => rows_of::<S, E4m3>(simd, job, out),
        format => panic!("{format} weights have tiles"),
    }
}

#[inline(always)]
fn rows_of<S: Simd, P: PlainRow>(simd: S, job: &Job<'_>, out: &mut Columns<'_>) {
    let Operand::F32 { rows, stride } = job.operand else {
        panic!("{} weights take f32 activations", job.matrix.desc.format());
    };
    for column in out.range().step_by(ROWS) {
        let columns = column..(column + ROWS).min(out.range().end);
        let mut row = 0;
        while row < job.rows.count {
            // Registers hold 16 sums of 32 lanes where vectors are wide, else 2.
            row += match (S::ROWS, job.rows.count - row) {
                (8.., 4..) => {
                    group::<S, P, 4, 2>(simd, job, columns.clone(), row, (rows, stride), out)
                }
                (8.., _) => {
                    group::<S, P, 1, 4>(simd, job, columns.clone(), row, (rows, stride), out)
                }
                (_, 2..) => {
                    group::<S, P, 2, 1>(simd, job, columns.clone(), row, (rows, stride), out)
                }
                _ => group::<S, P, 1, 2>(simd, job, columns.clone(), row, (rows, stride), out),
            };
        }
    }
}

/// Dots of `R` rows with up to 16 columns, `PASS` columns at a time.
#[inline(always)]
fn group<S: Simd, P: PlainRow, const R: usize, const PASS: usize>(
    simd: S,
    job: &Job<'_>,
    columns: std::ops::Range<usize>,
    row: usize,
    (x, stride): (&[f32], usize),
    out: &mut Columns<'_>,
) -> usize {
    let per_fold = ROWS / R;
    let x: [&[f32]; R] = fill!(x; |r| &x[job.rows.get(row + r) * stride..][..stride]);
    for first in columns.clone().step_by(per_fold) {
        let mut sums = [simd.splat_f32(0.0); ROWS];
        for pass in (0..per_fold).step_by(PASS) {
            // Columns beyond the last give its result again.
            let group = fill!(0; |k| (first + pass + k).min(columns.end - 1));
            let acc = dots::<S, P, R, PASS>(simd, job, group, &x);
            for r in 0..R {
                for k in 0..PASS {
                    sums[r * per_fold + pass + k] = simd.add_f32(acc[r][k][0], acc[r][k][1]);
                }
            }
        }
        let mut values = [0.0; ROWS];
        simd.store_f32(simd.fold16(&sums), &mut values);
        let count = per_fold.min(columns.end - first);
        for r in 0..R {
            out.put(row + r, first, &values[r * per_fold..][..count]);
        }
    }
    R
}

#[inline(always)]
fn dots<S: Simd, P: PlainRow, const R: usize, const PASS: usize>(
    simd: S,
    job: &Job<'_>,
    columns: [usize; PASS],
    x: &[&[f32]; R],
) -> [[Lanes<S>; PASS]; R] {
    let desc = &job.matrix.desc;
    let row_bytes = desc.cols() * P::SIZE;
    let weights: [&[u8]; PASS] =
        fill!(&[][..]; |k| &job.matrix.data[columns[k] * row_bytes..][..row_bytes]);
    let mut acc = [[lanes::zero(simd); PASS]; R];
    let Format::Fp8B128(kind) = desc.format() else {
        dot_run::<S, P, R, PASS>(simd, weights, x, 0, None, &mut acc);
        return acc;
    };
    // The columns of a group lie in one row of blocks.
    let first = columns[0] / FP8_BLOCK * FP8_BLOCK;
    let scales = &job.matrix.scales()[desc.scale_range(first..first + 1)];
    for (block, start) in (0..desc.cols()).step_by(FP8_BLOCK).enumerate() {
        let end = (start + FP8_BLOCK).min(desc.cols());
        let weights: [&[u8]; PASS] =
            fill!(&[][..]; |k| &weights[k][start * P::SIZE..end * P::SIZE]);
        let scale = simd.splat_f32(fp8_scale(kind, scales, block));
        dot_run::<S, P, R, PASS>(simd, weights, x, start, Some(scale), &mut acc);
    }
    acc
}

/// Adds the products of a run of weights with inputs `start ..` to the lanes; a run that is not
/// the row's last has a multiple of 32 weights.
#[inline(always)]
fn dot_run<S: Simd, P: PlainRow, const R: usize, const PASS: usize>(
    simd: S,
    weights: [&[u8]; PASS],
    x: &[&[f32]; R],
    start: usize,
    scale: Option<S::F>,
    acc: &mut [[Lanes<S>; PASS]; R],
) {
    let count = weights[0].len() / P::SIZE;
    let weights: [&[u8]; PASS] = fill!(&[][..]; |k| &weights[k][..count * P::SIZE]);
    let x: [&[f32]; R] = fill!(&[][..]; |r| &x[r][start..][..count]);
    let full: [&[[f32; LANES]]; R] =
        fill!(&[][..]; |r| &x[r].as_chunks::<LANES>().0[..count / LANES]);
    let run = LANES * P::SIZE;
    let zero = lanes::zero(simd);
    for at in 0..count / LANES {
        let w: [Lanes<S>; PASS] =
            fill!(zero; |k| load::<S, P>(simd, &weights[k][at * run..][..run], scale));
        let x: [Lanes<S>; R] = fill!(zero; |r| lanes::load(simd, &full[r][at]));
        add(simd, &w, &x, acc);
    }
    let done = count / LANES * LANES;
    if done < count {
        let w: [Lanes<S>; PASS] = fill!(zero; |k| {
            let tail = &weights[k][done * P::SIZE..];
            let mut padded = [0; LANES * 4];
            padded[..tail.len()].copy_from_slice(tail);
            load::<S, P>(simd, &padded, scale)
        });
        let x: [Lanes<S>; R] = fill!(zero; |r| lanes::load(simd, &lanes::padded(&x[r][done..])));
        add(simd, &w, &x, acc);
    }
}

/// Loads 32 weights and scales them.
#[inline(always)]
fn load<S: Simd, P: PlainRow>(simd: S, bytes: &[u8], scale: Option<S::F>) -> Lanes<S> {
    let [low, high] = P::load(simd, bytes);
    match scale {
        Some(scale) => [simd.mul_f32(low, scale), simd.mul_f32(high, scale)],
        None => [low, high],
    }
}

#[inline(always)]
fn add<S: Simd, const R: usize, const PASS: usize>(
    simd: S,
    w: &[Lanes<S>; PASS],
    x: &[Lanes<S>; R],
    acc: &mut [[Lanes<S>; PASS]; R],
) {
    for r in 0..R {
        for k in 0..PASS {
            acc[r][k] = lanes::fma(simd, w[k], x[r], acc[r][k]);
        }
    }
}
