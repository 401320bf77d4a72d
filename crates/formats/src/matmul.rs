//! Matrix products: rows of activations with a stored matrix, at every level.
//!
//! Tiles give 16 outputs at once, one lane each. With int8 activations a block of products is an
//! exact integer, then one fused multiply-add per block, ascending (rule 3). With f32 activations
//! one accumulator per output takes the inputs in ascending order, one fused multiply-add each.
//! Formats without tiles use the 32 lanes of rule 2. A row's result never depends on the others:
//! rows are only grouped to decode weights once for several of them.

use std::array;
use std::ops::Range;

use numerics::int8::{Int8Row, Int8Rows};
use numerics::lanes::{self, LANES, Lanes};
use numerics::multiversion;
use numerics::simd::Simd;
use numerics::team::Columns;
use numerics::{Compute, NumericError};

use crate::format::FP8_BLOCK;
use crate::input::{Input, Operand};
use crate::int2::Int2;
use crate::int3::Int3;
use crate::int4::Int4;
use crate::int8::Int8;
use crate::matrix::fp8_scale;
use crate::mxfp4::Mxfp4;
use crate::tile::{Codes, ROWS, Scaling, TileShape};
use crate::{Format, MatrixRef, e8};

/// Output rows per unit of parallel work.
const GRAIN: usize = 64;
/// Output rows of row-by-row formats that one pass over the activations serves.
const ROW_PASS: usize = 16;

/// `out[i, o]` = activations row `rows[i]` (or row `i` where `rows` is `None`) times matrix row
/// `o`. `out` is `[rows, desc.rows()]`.
pub fn matmul(
    compute: &Compute,
    matrix: MatrixRef<'_>,
    input: &Input<'_>,
    rows: Option<&[u32]>,
    out: &mut [f32],
) -> Result<(), NumericError> {
    let count = rows.map_or(input.rows(), <[u32]>::len);
    let outputs = matrix.desc.rows();
    assert_eq!(out.len(), count * outputs);
    let operand = input.operand(compute, &matrix.desc)?;
    let job = Job { matrix, operand, rows: Rows { selected: rows, count } };
    let step = compute.team.step(outputs, GRAIN);
    compute.team.columns(out, outputs, step, |out| run(compute.isa, &job, out));
    Ok(())
}

/// Which activation rows take part.
#[derive(Clone, Copy)]
struct Rows<'a> {
    selected: Option<&'a [u32]>,
    count: usize,
}

impl Rows<'_> {
    #[inline(always)]
    fn get(&self, index: usize) -> usize {
        self.selected.map_or(index, |rows| rows[index] as usize)
    }
}

struct Job<'a> {
    matrix: MatrixRef<'a>,
    operand: Operand<'a>,
    rows: Rows<'a>,
}

multiversion! {
    /// Computes the columns of `out` (from a multiple of 16 on) for all rows.
    fn run(isa, job: &Job<'_>, out: &mut Columns<'_>) => run_kernel;
}

#[inline(always)]
fn run_kernel<S: Simd>(simd: S, job: &Job<'_>, out: &mut Columns<'_>) {
    match job.matrix.desc.format() {
        Format::F32 => plain_rows::<S, F32>(simd, job, out),
        Format::Bf16 => plain_rows::<S, Bf16>(simd, job, out),
        Format::F16 => plain_rows::<S, F16>(simd, job, out),
        Format::Fp8B128(_) => plain_rows::<S, E4m3>(simd, job, out),
        Format::Int8Row => tiles::<S, Int8>(simd, job, out),
        Format::Int4Row => tiles::<S, Int4<false>>(simd, job, out),
        Format::Int2Row => tiles::<S, Int2>(simd, job, out),
        Format::Int4Grouped(_) => tiles::<S, Int4<true>>(simd, job, out),
        Format::Int3G64 => tiles::<S, Int3>(simd, job, out),
        Format::E8Iq3 => tiles::<S, e8::E8>(simd, job, out),
        Format::Mxfp4 => tiles::<S, Mxfp4>(simd, job, out),
    }
}

#[inline(always)]
fn tiles<S: Simd, C: Codes>(simd: S, job: &Job<'_>, out: &mut Columns<'_>) {
    let Some((shape, tile_bytes)) = job.matrix.desc.tile() else {
        // A matrix of these formats kept row by row is only ever decoded.
        panic!("a {} matrix stored by rows cannot be multiplied", job.matrix.desc.format());
    };
    for column in out.range().step_by(ROWS) {
        let tile = &job.matrix.data[column / ROWS * tile_bytes..][..tile_bytes];
        let columns = ROWS.min(out.range().end - column);
        let mut row = 0;
        while job.rows.count - row >= 4 {
            tile_rows::<S, C, 4>(simd, job, &shape, tile, row, column..column + columns, out);
            row += 4;
        }
        if job.rows.count - row >= 2 {
            tile_rows::<S, C, 2>(simd, job, &shape, tile, row, column..column + columns, out);
            row += 2;
        }
        if job.rows.count > row {
            tile_rows::<S, C, 1>(simd, job, &shape, tile, row, column..column + columns, out);
        }
    }
}

#[inline(always)]
fn tile_rows<S: Simd, C: Codes, const R: usize>(
    simd: S,
    job: &Job<'_>,
    shape: &TileShape,
    tile: &[u8],
    row: usize,
    columns: Range<usize>,
    out: &mut Columns<'_>,
) {
    let sums: [S::F; R] = match job.operand {
        Operand::Int8(x) => int8_tile::<S, C, R>(simd, shape, tile, x, &job.rows, row),
        Operand::F32 { rows, stride } => {
            let x = array::from_fn(|r| &rows[job.rows.get(row + r) * stride..][..stride]);
            f32_tile::<S, C, R>(simd, shape, tile, x)
        }
    };
    for (r, sum) in sums.into_iter().enumerate() {
        let mut values = [0.0; ROWS];
        simd.store_f32(sum, &mut values);
        out.put(row + r, columns.start, &values[..columns.len()]);
    }
}

/// The 16 f32 at the start of `bytes`.
#[inline(always)]
fn load_f32<S: Simd>(simd: S, bytes: &[u8]) -> S::F {
    simd.load_f32_le(&bytes.as_chunks::<64>().0[0])
}

/// Scales of a block for 16 rows: `header` is its group's, `chunk` its first chunk.
#[inline(always)]
fn block_scales<S: Simd, C: Codes>(simd: S, header: &[u8], chunk: &[u8]) -> S::F {
    match C::SCALING {
        Scaling::Row => simd.splat_f32(1.0),
        Scaling::Group => load_f32(simd, header),
        Scaling::Ue8m0Half => {
            let scales = simd.load_ue8m0(&header.as_chunks::<16>().0[0]);
            simd.mul_f32(scales, simd.splat_f32(0.5))
        }
        Scaling::E8 => {
            let d = simd.load_f16(&header.as_chunks::<32>().0[0]);
            let words = crate::tile::load(simd, &chunk[C::CHUNK_BYTES - 4 * ROWS..]);
            let code = simd.to_f32(simd.shr(words, 28));
            let code = simd.add_f32(code, simd.splat_f32(0.5));
            // Both products are exact: 11 bits of d, 5 of the code, a power of two.
            simd.mul_f32(d, simd.mul_f32(code, simd.splat_f32(0.25)))
        }
    }
}

#[inline(always)]
fn int8_tile<S: Simd, C: Codes, const R: usize>(
    simd: S,
    shape: &TileShape,
    tile: &[u8],
    x: &Int8Rows,
    rows: &Rows<'_>,
    row: usize,
) -> [S::F; R] {
    let x: [Int8Row<'_>; R] = array::from_fn(|r| x.row(rows.get(row + r)));
    let steps = C::CHUNK_INPUTS / 4;
    let bias = if C::SIGNED { S::S8_BIAS } else { C::BIAS as i32 };
    let mut acc = [simd.splat_f32(0.0); R];
    let mut rest = &tile[shape.header_bytes..];
    let (mut group_start, mut block) = (0, 0);
    while group_start < shape.cols {
        let group_inputs = shape.group.min(shape.cols - group_start);
        let (group, after) = rest.split_at(shape.group_bytes(group_inputs));
        let (header, mut codes) = group.split_at(shape.group_header_bytes);
        rest = after;
        let mut start = 0;
        while start < group_inputs {
            let inputs = shape.block.min(group_inputs - start);
            let (chunks, later) = codes.split_at(shape.code_bytes(inputs));
            codes = later;
            let words = chunks.len() / C::CHUNK_BYTES * steps;
            let first_word = (group_start + start) / 4;
            let xs: [&[[i8; 4]]; R] =
                array::from_fn(|r| &x[r].codes.as_chunks::<4>().0[first_word..][..words]);
            let mut sums = [simd.splat(0); R];
            for (at, chunk) in chunks.chunks_exact(C::CHUNK_BYTES).enumerate() {
                for step in 0..steps {
                    let w = C::codes(simd, chunk, step);
                    for r in 0..R {
                        let four = xs[r][at * steps + step].map(|code| code as u8);
                        let x = simd.splat(u32::from_le_bytes(four));
                        sums[r] = if C::SIGNED {
                            simd.dot_s8(sums[r], w, x)
                        } else {
                            simd.dot_u8(sums[r], w, x)
                        };
                    }
                }
            }
            let scales = block_scales::<S, C>(simd, header, chunks);
            for r in 0..R {
                let correction = simd.splat((bias * x[r].sums[block]) as u32);
                let sum = simd.to_f32(simd.sub(sums[r], correction));
                let x_scale = simd.splat_f32(x[r].scales[block]);
                let scale = match C::SCALING {
                    Scaling::Row => x_scale,
                    Scaling::Group | Scaling::Ue8m0Half | Scaling::E8 => {
                        simd.mul_f32(scales, x_scale)
                    }
                };
                acc[r] = simd.fma(sum, scale, acc[r]);
            }
            start += inputs;
            block += 1;
        }
        group_start += group_inputs;
    }
    if C::SCALING == Scaling::Row {
        let scales = load_f32(simd, tile);
        acc = acc.map(|acc| simd.mul_f32(acc, scales));
    }
    acc
}

#[inline(always)]
fn f32_tile<S: Simd, C: Codes, const R: usize>(
    simd: S,
    shape: &TileShape,
    tile: &[u8],
    x: [&[f32]; R],
) -> [S::F; R] {
    let steps = C::CHUNK_INPUTS / 4;
    let bias = simd.splat(C::BIAS);
    let byte_mask = simd.splat(0xff);
    let row_scales = match C::SCALING {
        Scaling::Row => load_f32(simd, tile),
        Scaling::Group | Scaling::Ue8m0Half | Scaling::E8 => simd.splat_f32(1.0),
    };
    let mut acc = [simd.splat_f32(0.0); R];
    let mut rest = &tile[shape.header_bytes..];
    let mut group_start = 0;
    while group_start < shape.cols {
        let group_inputs = shape.group.min(shape.cols - group_start);
        let (group, after) = rest.split_at(shape.group_bytes(group_inputs));
        let (header, codes) = group.split_at(shape.group_header_bytes);
        rest = after;
        let stored = shape.code_bytes(group_inputs) / C::CHUNK_BYTES;
        let group_scales = match C::SCALING {
            Scaling::Row => row_scales,
            Scaling::Group | Scaling::Ue8m0Half => block_scales::<S, C>(simd, header, codes),
            Scaling::E8 => row_scales,
        };
        for (at, chunk) in codes.chunks_exact(C::CHUNK_BYTES).take(stored).enumerate() {
            let scales = match C::SCALING {
                Scaling::E8 => block_scales::<S, C>(simd, header, chunk),
                Scaling::Row | Scaling::Group | Scaling::Ue8m0Half => group_scales,
            };
            let first = group_start + at * C::CHUNK_INPUTS;
            let xs: [&[f32]; R] = array::from_fn(|r| &x[r][first..][..C::CHUNK_INPUTS]);
            for step in 0..steps {
                let codes = C::unsigned(simd, C::codes(simd, chunk, step));
                for byte in 0..4 {
                    let code = simd.and(simd.shr(codes, 8 * byte as u32), byte_mask);
                    let value = simd.to_f32(simd.sub(code, bias));
                    let weight = simd.mul_f32(value, scales);
                    for r in 0..R {
                        let x = simd.splat_f32(xs[r][step * 4 + byte]);
                        acc[r] = simd.fma(weight, x, acc[r]);
                    }
                }
            }
        }
        group_start += group_inputs;
    }
    acc
}

/// How 32 weights of a format without tiles become f32.
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

#[inline(always)]
fn plain_rows<S: Simd, P: PlainRow>(simd: S, job: &Job<'_>, out: &mut Columns<'_>) {
    let Operand::F32 { rows, stride } = job.operand else {
        panic!("{} weights take f32 activations", job.matrix.desc.format());
    };
    let select = |row: usize| &rows[job.rows.get(row) * stride..][..stride];
    for pass in out.range().step_by(ROW_PASS) {
        let columns = pass..(pass + ROW_PASS).min(out.range().end);
        let mut row = 0;
        while job.rows.count - row >= 4 {
            let x = array::from_fn(|r| select(row + r));
            plain_dots::<S, P, 4>(simd, job, columns.clone(), row, x, out);
            row += 4;
        }
        while job.rows.count > row {
            plain_dots::<S, P, 1>(simd, job, columns.clone(), row, [select(row)], out);
            row += 1;
        }
    }
}

#[inline(always)]
fn plain_dots<S: Simd, P: PlainRow, const R: usize>(
    simd: S,
    job: &Job<'_>,
    columns: Range<usize>,
    row: usize,
    x: [&[f32]; R],
    out: &mut Columns<'_>,
) {
    let cols = job.matrix.desc.cols();
    for column in columns {
        let weights = &job.matrix.data[column * cols * P::SIZE..][..cols * P::SIZE];
        let mut acc = [lanes::zero(simd); R];
        match job.matrix.desc.format() {
            Format::Fp8B128(kind) => {
                let row_scales = job.matrix.desc.scale_range(
                    column / FP8_BLOCK * FP8_BLOCK..column / FP8_BLOCK * FP8_BLOCK + 1,
                );
                let scales = &job.matrix.scales()[row_scales];
                for (block, weights) in weights.chunks(FP8_BLOCK * P::SIZE).enumerate() {
                    let scale = simd.splat_f32(fp8_scale(kind, scales, block));
                    dot_run::<S, P, R>(simd, weights, &x, block * FP8_BLOCK, Some(scale), &mut acc);
                }
            }
            _ => dot_run::<S, P, R>(simd, weights, &x, 0, None, &mut acc),
        }
        for (r, acc) in acc.into_iter().enumerate() {
            out.put(row + r, column, &[lanes::fold(simd, acc)]);
        }
    }
}

/// Adds the products of a run of weights with inputs `start ..` to the lanes; a run that is not
/// the row's last has a multiple of 32 weights.
#[inline(always)]
fn dot_run<S: Simd, P: PlainRow, const R: usize>(
    simd: S,
    weights: &[u8],
    x: &[&[f32]; R],
    start: usize,
    scale: Option<S::F>,
    acc: &mut [Lanes<S>; R],
) {
    let count = weights.len() / P::SIZE;
    let x: [&[f32]; R] = array::from_fn(|r| &x[r][start..][..count]);
    let scaled = |w: Lanes<S>| match scale {
        Some(scale) => [simd.mul_f32(w[0], scale), simd.mul_f32(w[1], scale)],
        None => w,
    };
    let full: [&[[f32; LANES]]; R] =
        array::from_fn(|r| &x[r].as_chunks::<LANES>().0[..count / LANES]);
    let runs = weights.chunks_exact(LANES * P::SIZE);
    let tail = runs.remainder();
    for (at, weights) in runs.enumerate() {
        let w = scaled(P::load(simd, weights));
        for r in 0..R {
            acc[r] = lanes::fma(simd, w, lanes::load(simd, &full[r][at]), acc[r]);
        }
    }
    if !tail.is_empty() {
        let mut padded = [0; LANES * 4];
        padded[..tail.len()].copy_from_slice(tail);
        let w = scaled(P::load(simd, &padded));
        for r in 0..R {
            let x = lanes::padded(&x[r][count / LANES * LANES..]);
            acc[r] = lanes::fma(simd, w, lanes::load(simd, &x), acc[r]);
        }
    }
}
