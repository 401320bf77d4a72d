//! A few rows: every weight is decoded in registers and meets the rows at once; sums stay in
//! registers from the first input to the last. Up to [`ROWS_MAX`] rows come as they are, up to
//! [`PACKED_ROWS`] packed.

use numerics::fill;
use numerics::int8::Int8Row;
use numerics::simd::{Simd, WORDS_MAX};
use numerics::team::Columns;

use super::packed::{PackedChunk, PackedRows};
use super::{Job, add_block, block_scales, load_f32, prefetch, put_tile, x_word};
use crate::input::Operand;
use crate::tile::{Codes, ROWS, Scaling, TileShape};

/// Partial sums of a row.
const PARTS: usize = 2;

/// Chunks that are multiplied as one: at least two steps.
const fn chunks_per_unit<C: Codes>() -> usize {
    if C::CHUNK_INPUTS == 4 { 2 } else { 1 }
}

/// Most rows that come as they are.
pub const ROWS_MAX: usize = 4;
/// Packed rows that come this way where there are registers for them.
pub const PACKED_ROWS: usize = 8;

/// Whether these rows come this way. Packed ones do where there are registers for them; decoding
/// e8 takes registers of its own.
#[inline(always)]
pub fn takes<S: Simd, C: Codes>(job: &Job<'_>) -> bool {
    match job.packed {
        None => job.rows.count <= ROWS_MAX,
        Some(packed) => {
            S::ROWS == 8
                && C::SCALING != Scaling::E8
                && packed.rows() <= PACKED_ROWS
                && packed.matrix_tiles().is_none()
        }
    }
}

/// Computes the columns of `out` for all rows, which [`takes`] must have accepted.
#[inline(always)]
pub fn tiles<S: Simd, C: Codes>(simd: S, job: &Job<'_>, out: &mut Columns<'_>) {
    if let Some(packed) = job.packed {
        return match packed.rows() {
            ..=6 => packed_rows::<S, C, 6>(simd, job, packed, out),
            _ => packed_rows::<S, C, PACKED_ROWS>(simd, job, packed, out),
        };
    }
    // Rows beyond the last are that one again; their sums are dropped.
    for first in (0..job.rows.count).step_by(S::ROWS.min(ROWS_MAX)) {
        match (S::ROWS, job.rows.count - first) {
            (_, 1) => some_rows::<S, C, 1>(simd, job, first, out),
            (..4, _) | (_, 2) => some_rows::<S, C, 2>(simd, job, first, out),
            _ => some_rows::<S, C, 4>(simd, job, first, out),
        }
    }
}

#[inline(always)]
fn some_rows<S: Simd, C: Codes, const R: usize>(
    simd: S,
    job: &Job<'_>,
    first: usize,
    out: &mut Columns<'_>,
) {
    let Some((shape, _)) = job.matrix.desc.tile() else { return };
    let rows: [usize; R] = fill!(0; |r| job.rows.get((first + r).min(job.rows.count - 1)));
    for column in out.range().step_by(ROWS) {
        let tile = job.tile(column);
        let columns = ROWS.min(out.range().end - column);
        let sums: [S::F; R] = match job.operand {
            Operand::Int8(x) => {
                let x = fill!(x.row(rows[0]); |r| x.row(rows[r]));
                int8_tile::<S, C, R>(simd, &shape, tile, x)
            }
            Operand::F32 { rows: x, stride } => {
                let x = fill!(x; |r| &x[rows[r] * stride..][..stride]);
                f32_tile::<S, C, R>(simd, &shape, tile, x)
            }
        };
        for (r, sum) in sums.into_iter().enumerate().take(job.rows.count - first) {
            let mut values = [0.0; ROWS];
            simd.store_f32(sum, &mut values);
            put_tile(out, first + r, column..column + columns, &values);
        }
    }
}

#[inline(always)]
fn int8_tile<S: Simd, C: Codes, const R: usize>(
    simd: S,
    shape: &TileShape,
    tile: &[u8],
    x: [Int8Row<'_>; R],
) -> [S::F; R] {
    let steps = C::CHUNK_INPUTS / 4;
    let bias = if C::SIGNED { S::S8_BIAS } else { C::BIAS as i32 };
    let mut acc = [simd.splat_f32(0.0); R];
    for (index, block) in shape.blocks::<C>(tile).enumerate() {
        prefetch(simd, block.header);
        // A window of the longest block, whatever its length: no checks are left in the loop.
        let xs: [&[[i8; 4]; WORDS_MAX]; R] = fill!(&[[0; 4]; WORDS_MAX]; |r| {
            let words = &x[r].codes.as_chunks::<4>().0[block.start / 4..];
            words.first_chunk().unwrap_or(&[[0; 4]; WORDS_MAX])
        });
        // Integer sums are exact in any order: two of them per row keep the multipliers busy.
        let mut sums = [[simd.splat(0); PARTS]; R];
        let unit_bytes = C::CHUNK_BYTES * chunks_per_unit::<C>();
        for (at, unit) in block.chunks.chunks_exact(unit_bytes).enumerate() {
            prefetch(simd, unit);
            for step in 0..steps * chunks_per_unit::<C>() {
                let chunk = &unit[step / steps * C::CHUNK_BYTES..][..C::CHUNK_BYTES];
                let w = C::codes(simd, chunk, step % steps);
                let part = if S::ROWS == 8 { step % PARTS } else { 0 };
                for r in 0..R {
                    let word = at * steps * chunks_per_unit::<C>() + step;
                    let x = simd.splat(x_word(xs[r][word % WORDS_MAX]));
                    sums[r][part] = if C::SIGNED {
                        simd.dot_s8(sums[r][part], w, x)
                    } else {
                        simd.dot_u8(sums[r][part], w, x)
                    };
                }
            }
        }
        let scales = block_scales::<S, C>(simd, block.header, block.chunks);
        for r in 0..R {
            let correction = simd.splat((bias * x[r].sums[index]) as u32);
            let mut sum = simd.sub(sums[r][0], correction);
            if S::ROWS == 8 {
                sum = simd.add(sum, sums[r][1]);
            }
            acc[r] = add_block::<S, C>(simd, sum, scales, x[r].scales[index], acc[r]);
        }
    }
    times_row_scales::<S, C, R>(simd, tile, acc)
}

/// [`tiles`] for the first `R` packed rows.
#[inline(always)]
fn packed_rows<S: Simd, C: Codes, const R: usize>(
    simd: S,
    job: &Job<'_>,
    packed: &PackedRows,
    out: &mut Columns<'_>,
) {
    let Some((shape, _)) = job.matrix.desc.tile() else { return };
    let Some(x) = packed.chunks().next() else { panic!("no packed rows") };
    for column in out.range().step_by(ROWS) {
        let tile = job.tile(column);
        let columns = column..(column + ROWS).min(out.range().end);
        // Lengths that the compiler knows leave no checks in the loops.
        let sums = match C::BLOCK.unwrap_or(shape.block) {
            64 => packed_tile::<S, C, R, 16>(simd, &shape, tile, &x),
            48 => packed_tile::<S, C, R, 12>(simd, &shape, tile, &x),
            32 => packed_tile::<S, C, R, 8>(simd, &shape, tile, &x),
            16 => packed_tile::<S, C, R, 4>(simd, &shape, tile, &x),
            other => panic!("activation blocks of {other}"),
        };
        for (row, sum) in sums.into_iter().enumerate().take(x.rows) {
            let mut values = [0.0; ROWS];
            simd.store_f32(sum, &mut values);
            put_tile(out, row, columns.clone(), &values);
        }
    }
}

/// Sums of a tile with the first `R` packed rows, in blocks of `W` words.
#[inline(always)]
fn packed_tile<S: Simd, C: Codes, const R: usize, const W: usize>(
    simd: S,
    shape: &TileShape,
    tile: &[u8],
    x: &PackedChunk<'_>,
) -> [S::F; R] {
    // Whether codes are signed and the level multiplies them as such.
    let signed = C::SIGNED && S::S8_BIAS == 0;
    let steps = C::CHUNK_INPUTS / 4;
    let unit = chunks_per_unit::<C>();
    let mut acc = [simd.splat_f32(0.0); R];
    for (index, block) in shape.blocks::<C>(tile).enumerate() {
        prefetch(simd, block.header);
        let x = x.block(index);
        let rows = x.codes.as_chunks::<4>().0.as_chunks::<W>().0.first_chunk::<R>();
        let factors = (x.scales.first_chunk(), x.corrections.first_chunk());
        let (Some(rows), (Some(x_scales), Some(corrections))) = (rows, factors) else {
            panic!("packed rows without padding");
        };
        let corrections: &[i32; R] = corrections;
        let x_scales: &[f32; R] = x_scales;
        let mut sums = [[simd.splat(0); PARTS]; R];
        for r in 0..R {
            sums[r][0] = simd.splat(corrections[r] as u32);
        }
        for (at, chunks) in block.chunks.chunks_exact(C::CHUNK_BYTES * unit).enumerate() {
            prefetch(simd, chunks);
            for step in 0..steps * unit {
                let chunk = &chunks[step / steps * C::CHUNK_BYTES..][..C::CHUNK_BYTES];
                let w = C::codes(simd, chunk, step % steps);
                let w = if C::SIGNED && !signed { C::unsigned(simd, w) } else { w };
                let word = (at * steps * unit + step).min(W - 1);
                for r in 0..R {
                    let x = simd.splat(x_word(rows[r][word]));
                    let sum = &mut sums[r][step % PARTS];
                    *sum = if signed { simd.dot_s8(*sum, w, x) } else { simd.dot_u8(*sum, w, x) };
                }
            }
        }
        let scales = block_scales::<S, C>(simd, block.header, block.chunks);
        for r in 0..R {
            let sum = simd.add(sums[r][0], sums[r][1]);
            acc[r] = add_block::<S, C>(simd, sum, scales, x_scales[r], acc[r]);
        }
    }
    times_row_scales::<S, C, R>(simd, tile, acc)
}

/// Sums times the scales at the head of a tile, where the format has them there.
#[inline(always)]
fn times_row_scales<S: Simd, C: Codes, const R: usize>(
    simd: S,
    tile: &[u8],
    mut sums: [S::F; R],
) -> [S::F; R] {
    if C::SCALING == Scaling::Row {
        let scales = load_f32(simd, tile);
        for sum in &mut sums {
            *sum = simd.mul_f32(*sum, scales);
        }
    }
    sums
}

#[inline(always)]
fn f32_tile<S: Simd, C: Codes, const R: usize>(
    simd: S,
    shape: &TileShape,
    tile: &[u8],
    x: [&[f32]; R],
) -> [S::F; R] {
    let row_scales = match C::SCALING {
        Scaling::Row => load_f32(simd, tile),
        Scaling::Group | Scaling::Ue8m0Half | Scaling::E8 => simd.splat_f32(1.0),
    };
    let mut acc = [simd.splat_f32(0.0); R];
    for block in shape.blocks::<C>(tile) {
        prefetch(simd, block.header);
        let scales = match C::SCALING {
            Scaling::Row => row_scales,
            Scaling::Group | Scaling::Ue8m0Half | Scaling::E8 => {
                block_scales::<S, C>(simd, block.header, block.chunks)
            }
        };
        for (at, chunk) in block.chunks.chunks_exact(C::CHUNK_BYTES).enumerate() {
            prefetch(simd, chunk);
            let first = block.start + at * C::CHUNK_INPUTS;
            let xs: [&[f32]; R] = fill!(&[][..]; |r| &x[r][first..][..C::CHUNK_INPUTS]);
            for step in 0..C::CHUNK_INPUTS / 4 {
                let weights = weights::<S, C>(simd, chunk, step, scales);
                for (byte, weight) in weights.into_iter().enumerate() {
                    for r in 0..R {
                        let x = simd.splat_f32(xs[r][step * 4 + byte]);
                        acc[r] = simd.fma(weight, x, acc[r]);
                    }
                }
            }
        }
    }
    acc
}

/// The f32 weights of the four inputs of a step, one vector of 16 outputs each.
#[inline(always)]
pub fn weights<S: Simd, C: Codes>(simd: S, chunk: &[u8], step: usize, scales: S::F) -> [S::F; 4] {
    let codes = C::unsigned(simd, C::codes(simd, chunk, step));
    fill!(scales; |byte| {
        let code = simd.and(simd.shr(codes, 8 * byte as u32), simd.splat(0xff));
        simd.mul_f32(simd.to_f32(simd.sub(code, simd.splat(C::BIAS))), scales)
    })
}
