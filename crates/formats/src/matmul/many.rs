//! Many rows: each block of a pair of tiles is decoded once into a panel, which all rows of a chunk
//! then meet; sums wait in memory between blocks. Per row and output the order of operations is
//! that of the few-rows kernels.

use std::ops::Range;

use numerics::fill;
use numerics::simd::{MatrixTiles, Panel, Simd, TILE_ROWS, TILE_ROWS_MAX, TileSession, WORDS_MAX};
use numerics::team::Columns;

use super::few::weights;
use super::packed::{CHUNK_ROWS, PackedBlock, PackedChunk, PackedRows, Packing};
use super::{Job, add_block, block_scales, load_f32, prefetch, put_tile, x_word};
use crate::input::Operand;
use crate::tile::{Codes, ROWS, Scaling, TileShape};

/// Tiles whose outputs are computed together.
const PAIR: usize = 2;

/// Sums of a pair of tiles, per row of a chunk.
type Sums = [[[f32; ROWS]; PAIR]; CHUNK_ROWS];

/// How int8 rows are packed for format codes, with or without matrix tiles.
#[inline(always)]
pub fn packing<S: Simd, C: Codes>(matrix_tiles: Option<MatrixTiles>) -> Packing {
    if S::MATRIX_TILES && matrix_tiles.is_some() {
        // Matrix tiles multiply signed by signed.
        return Packing { bias: 0, row_unit: TILE_ROWS, matrix_tiles };
    }
    let bias = if C::SIGNED { S::S8_BIAS } else { C::BIAS as i32 };
    Packing { bias, row_unit: S::ROWS, matrix_tiles: None }
}

/// Computes the columns of `out` for all rows.
#[inline(always)]
pub fn tiles<S: Simd, C: Codes>(simd: S, job: &Job<'_>, out: &mut Columns<'_>) {
    match (job.operand, job.packed) {
        (Operand::F32 { rows, stride }, _) => {
            f32_tiles::<S, C>(simd, job, rows, stride, out);
        }
        (Operand::Int8(_), Some(packed)) => int8_tiles::<S, C>(simd, job, packed, out),
        (Operand::Int8(_), None) => panic!("int8 rows that were not packed"),
    }
}

/// The pairs of tiles of a range of columns: first column, columns, tiles. An odd last tile goes
/// with itself.
#[inline(always)]
fn pairs<'a>(
    job: &Job<'a>,
    range: Range<usize>,
) -> impl Iterator<Item = (Range<usize>, [&'a [u8]; PAIR])> {
    range.clone().step_by(PAIR * ROWS).map(move |column| {
        let columns = column..(column + PAIR * ROWS).min(range.end);
        let second = if columns.len() > ROWS { column + ROWS } else { column };
        (columns, [job.tile(column), job.tile(second)])
    })
}

/// [`tiles`] for packed int8 rows.
#[inline(always)]
pub fn int8_tiles<S: Simd, C: Codes>(
    simd: S,
    job: &Job<'_>,
    packed: &PackedRows,
    out: &mut Columns<'_>,
) {
    let Some((shape, _)) = job.matrix.desc.tile() else { return };
    let mut sums: Sums = [[[0.0; ROWS]; PAIR]; CHUNK_ROWS];
    let tiles_in_use = packed
        .matrix_tiles()
        .filter(|_| S::MATRIX_TILES)
        .map(|tiles| TileSession::begin(simd, tiles, shape.block / 4));
    for (columns, tiles) in pairs(job, out.range()) {
        for chunk in packed.chunks() {
            match &tiles_in_use {
                Some(session) if S::MATRIX_TILES => {
                    let session = Some(session);
                    int8_chunk::<S, C, true>(simd, session, &shape, tiles, &chunk, &mut sums);
                }
                _ => int8_chunk::<S, C, false>(simd, None, &shape, tiles, &chunk, &mut sums),
            }
            put(&sums, chunk.first..chunk.first + chunk.rows, columns.clone(), out);
        }
    }
}

/// [`tiles`] for f32 rows.
#[inline(always)]
fn f32_tiles<S: Simd, C: Codes>(
    simd: S,
    job: &Job<'_>,
    rows: &[f32],
    stride: usize,
    out: &mut Columns<'_>,
) {
    let Some((shape, _)) = job.matrix.desc.tile() else { return };
    let mut sums: Sums = [[[0.0; ROWS]; PAIR]; CHUNK_ROWS];
    for (columns, tiles) in pairs(job, out.range()) {
        for first in (0..job.rows.count).step_by(CHUNK_ROWS) {
            let count = CHUNK_ROWS.min(job.rows.count - first);
            // Rows beyond the last are that one again; their sums are dropped.
            let row = |r: usize| job.rows.get(first + r.min(count - 1));
            let x = |r: usize| &rows[row(r) * stride..][..stride];
            f32_chunk::<S, C>(simd, &shape, tiles, x, count, &mut sums);
            put(&sums, first..first + count, columns.clone(), out);
        }
    }
}

#[inline(always)]
fn put(sums: &Sums, rows: Range<usize>, columns: Range<usize>, out: &mut Columns<'_>) {
    for (at, row) in rows.enumerate() {
        put_tile(out, row, columns.clone(), &sums[at][0]);
        if columns.len() > ROWS {
            put_tile(out, row, columns.start + ROWS..columns.end, &sums[at][1]);
        }
    }
}

/// Sums of one chunk of int8 rows with a pair of tiles; `TILES` says whether there is a session of
/// matrix tiles to multiply with.
#[inline(always)]
fn int8_chunk<S: Simd, C: Codes, const TILES: bool>(
    simd: S,
    session: Option<&TileSession<S>>,
    shape: &TileShape,
    tiles: [&[u8]; PAIR],
    x: &PackedChunk<'_>,
    sums: &mut Sums,
) {
    let words = shape.block / 4;
    let mut panels: [Panel; PAIR] = [[[0; 64]; WORDS_MAX]; PAIR];
    let mut products = [[[0; ROWS]; TILE_ROWS_MAX]; PAIR];
    sums[..x.rows].fill([[0.0; ROWS]; PAIR]);
    let [mut low, mut high] = [shape.blocks::<C>(tiles[0]), shape.blocks::<C>(tiles[1])];
    let mut index = 0;
    while let (Some(low), Some(high)) = (low.next(), high.next()) {
        prefetch(simd, low.header);
        prefetch(simd, high.header);
        fill_panel::<S, C, TILES>(simd, low.chunks, &mut panels[0]);
        fill_panel::<S, C, TILES>(simd, high.chunks, &mut panels[1]);
        let scales = [
            block_scales::<S, C>(simd, low.header, low.chunks),
            block_scales::<S, C>(simd, high.header, high.chunks),
        ];
        let x_block = x.block(index);
        index += 1;
        if TILES && let Some(session) = session {
            let units = x_block.codes.chunks(TILE_ROWS_MAX * shape.block);
            for (unit, codes) in units.enumerate() {
                session.products(&panels, codes, &mut products);
                let first = unit * TILE_ROWS_MAX;
                let last = (first + TILE_ROWS_MAX).min(x.rows);
                for (at, products) in products.iter().enumerate() {
                    let rows = sums[first..last].iter_mut().zip(products);
                    for ((sums, product), x_scale) in rows.zip(&x_block.scales[first..last]) {
                        let product = simd.load_i32(product);
                        let acc = simd.load_f32(&sums[at]);
                        let acc = add_block::<S, C>(simd, product, scales[at], *x_scale, acc);
                        simd.store_f32(acc, &mut sums[at]);
                    }
                }
            }
            continue;
        }
        let [low, high] = &panels;
        if S::ROWS == 8 {
            // Registers for both tiles: each activation is loaded once for the pair.
            int8_rows_of::<S, C, 2>(simd, words, [low, high], &x_block, scales, 0, sums);
        } else {
            int8_rows_of::<S, C, 1>(simd, words, [low], &x_block, [scales[0]], 0, sums);
            int8_rows_of::<S, C, 1>(simd, words, [high], &x_block, [scales[1]], 1, sums);
        }
    }
    if C::SCALING == Scaling::Row {
        for (at, tile) in tiles.into_iter().enumerate() {
            let scales = load_f32(simd, tile);
            for sums in &mut sums[..x.rows] {
                simd.store_f32(simd.mul_f32(simd.load_f32(&sums[at]), scales), &mut sums[at]);
            }
        }
    }
}

/// Decodes the codes of a block into a panel, as the level multiplies them. Words beyond the block
/// keep what they had: their inputs are zero.
#[inline(always)]
fn fill_panel<S: Simd, C: Codes, const TILES: bool>(simd: S, chunks: &[u8], panel: &mut Panel) {
    let steps = C::CHUNK_INPUTS / 4;
    for (chunk, words) in chunks.chunks_exact(C::CHUNK_BYTES).zip(panel.chunks_exact_mut(steps)) {
        prefetch(simd, chunk);
        for (step, word) in words.iter_mut().enumerate() {
            let codes = C::codes(simd, chunk, step);
            let codes = match (TILES, C::SIGNED) {
                (true, false) => {
                    let bias = simd.splat(u32::from_le_bytes([C::BIAS as u8; 4]));
                    simd.sub_bytes(codes, bias)
                }
                (false, true) if S::S8_BIAS != 0 => C::unsigned(simd, codes),
                _ => codes,
            };
            simd.store(codes, word);
        }
    }
}

/// Adds the products of a block with `T` tiles, from tile `first` of the pair on, to the sums of
/// all rows.
#[inline(always)]
fn int8_rows_of<S: Simd, C: Codes, const T: usize>(
    simd: S,
    words: usize,
    panels: [&Panel; T],
    x: &PackedBlock<'_>,
    scales: [S::F; T],
    first: usize,
    sums: &mut Sums,
) {
    // Lengths that the compiler knows leave no checks in the loops.
    match (S::ROWS, C::BLOCK.unwrap_or(4 * words)) {
        (8, 64) => int8_groups::<S, C, T, 8, 16>(simd, panels, x, scales, first, sums),
        (8, 48) => int8_groups::<S, C, T, 8, 12>(simd, panels, x, scales, first, sums),
        (8, 32) => int8_groups::<S, C, T, 8, 8>(simd, panels, x, scales, first, sums),
        (8, _) => int8_groups::<S, C, T, 8, 4>(simd, panels, x, scales, first, sums),
        (4, 64) => int8_groups::<S, C, T, 4, 16>(simd, panels, x, scales, first, sums),
        (4, 48) => int8_groups::<S, C, T, 4, 12>(simd, panels, x, scales, first, sums),
        (4, 32) => int8_groups::<S, C, T, 4, 8>(simd, panels, x, scales, first, sums),
        (4, _) => int8_groups::<S, C, T, 4, 4>(simd, panels, x, scales, first, sums),
        (_, 64) => int8_groups::<S, C, T, 2, 16>(simd, panels, x, scales, first, sums),
        (_, 48) => int8_groups::<S, C, T, 2, 12>(simd, panels, x, scales, first, sums),
        (_, 32) => int8_groups::<S, C, T, 2, 8>(simd, panels, x, scales, first, sums),
        (_, _) => int8_groups::<S, C, T, 2, 4>(simd, panels, x, scales, first, sums),
    }
}

/// [`int8_rows_of`] in groups of `R` rows, for blocks of `W` words.
#[inline(always)]
fn int8_groups<S: Simd, C: Codes, const T: usize, const R: usize, const W: usize>(
    simd: S,
    panels: [&Panel; T],
    x: &PackedBlock<'_>,
    scales: [S::F; T],
    first: usize,
    sums: &mut Sums,
) {
    // Whether the panel holds signed codes that the level multiplies as such.
    let signed = C::SIGNED && S::S8_BIAS == 0;
    let groups = x.codes.as_chunks::<4>().0.as_chunks::<W>().0.as_chunks::<R>().0;
    let factors = x.scales.as_chunks::<R>().0.iter().zip(x.corrections.as_chunks::<R>().0);
    for (group, (rows, (x_scales, corrections))) in groups.iter().zip(factors).enumerate() {
        let mut products = [[simd.splat(0); T]; R];
        for r in 0..R {
            products[r] = [simd.splat(corrections[r] as u32); T];
        }
        for word in 0..W {
            let w: [S::I; T] = fill!(simd.splat(0); |t| simd.load(&panels[t][word]));
            for r in 0..R {
                let x = simd.splat(x_word(rows[r][word]));
                for t in 0..T {
                    let sum = products[r][t];
                    products[r][t] =
                        if signed { simd.dot_s8(sum, w[t], x) } else { simd.dot_u8(sum, w[t], x) };
                }
            }
        }
        let Some(sums) = sums.as_chunks_mut::<R>().0.get_mut(group) else {
            panic!("more packed rows than sums");
        };
        for r in 0..R {
            for t in 0..T {
                let sum = &mut sums[r][first + t];
                let acc = simd.load_f32(sum);
                let acc = add_block::<S, C>(simd, products[r][t], scales[t], x_scales[r], acc);
                simd.store_f32(acc, sum);
            }
        }
    }
}

/// Weights of a block in f32: per input, 16 outputs.
type F32Panel = [[f32; ROWS]; 4 * WORDS_MAX];

/// Sums of one chunk of f32 rows with a pair of tiles.
#[inline(always)]
fn f32_chunk<'x, S: Simd, C: Codes>(
    simd: S,
    shape: &TileShape,
    tiles: [&[u8]; PAIR],
    x: impl Fn(usize) -> &'x [f32],
    rows: usize,
    sums: &mut Sums,
) {
    let mut panel: F32Panel = [[0.0; ROWS]; 4 * WORDS_MAX];
    sums[..rows.next_multiple_of(S::ROWS)].fill([[0.0; ROWS]; PAIR]);
    for (at, tile) in tiles.into_iter().enumerate() {
        let row_scales = match C::SCALING {
            Scaling::Row => load_f32(simd, tile),
            Scaling::Group | Scaling::Ue8m0Half | Scaling::E8 => simd.splat_f32(1.0),
        };
        for block in shape.blocks::<C>(tile) {
            let scales = match C::SCALING {
                Scaling::Row => row_scales,
                Scaling::Group | Scaling::Ue8m0Half | Scaling::E8 => {
                    block_scales::<S, C>(simd, block.header, block.chunks)
                }
            };
            let chunks = block.chunks.chunks_exact(C::CHUNK_BYTES);
            let inputs = chunks.len() * C::CHUNK_INPUTS;
            for (chunk, inputs) in chunks.zip(panel.chunks_exact_mut(C::CHUNK_INPUTS)) {
                for (step, four) in inputs.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let weights = weights::<S, C>(simd, chunk, step, scales);
                    for (input, weight) in four.iter_mut().zip(weights) {
                        simd.store_f32(weight, input);
                    }
                }
            }
            let panel = &panel[..inputs];
            for row in (0..rows).step_by(S::ROWS) {
                match S::ROWS {
                    8 => f32_rows::<S, 8>(simd, panel, &x, block.start, row, at, sums),
                    4 => f32_rows::<S, 4>(simd, panel, &x, block.start, row, at, sums),
                    _ => f32_rows::<S, 2>(simd, panel, &x, block.start, row, at, sums),
                }
            }
        }
    }
}

#[inline(always)]
fn f32_rows<'x, S: Simd, const R: usize>(
    simd: S,
    panel: &[[f32; ROWS]],
    x: impl Fn(usize) -> &'x [f32],
    start: usize,
    row: usize,
    at: usize,
    sums: &mut Sums,
) {
    let sums = &mut sums.as_chunks_mut::<R>().0[row / R];
    let x: [&[f32]; R] = fill!(&[][..]; |r| &x(row + r)[start..][..panel.len()]);
    let mut acc: [S::F; R] = fill!(simd.splat_f32(0.0); |r| simd.load_f32(&sums[r][at]));
    for (at, weight) in panel.iter().enumerate() {
        let weight = simd.load_f32(weight);
        for r in 0..R {
            acc[r] = simd.fma(weight, simd.splat_f32(x[r][at]), acc[r]);
        }
    }
    for r in 0..R {
        simd.store_f32(acc[r], &mut sums[r][at]);
    }
}
