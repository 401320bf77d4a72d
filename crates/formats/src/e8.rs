//! Format 6, `e8-iq3`: blocks of 256 rotated inputs in 98 bytes.
//!
//! Bytes 0-63: one grid index per 4 inputs. Bytes 64-95: eight little-endian words, one per 32
//! inputs, with four 7-bit sign fields and a 4-bit scale code in the top bits. Bytes 96-97: an
//! IEEE half `d`. Value = d (0.5 + code) 0.5 · grid/2 · sign; of every eight signs the last makes
//! the number of negatives even.

use std::sync::OnceLock;

use numerics::simd::Simd;

pub use crate::e8_grid::GRID;
use crate::format::{E8_BLOCK, E8_BLOCK_BYTES};
use crate::plain;
use crate::tile::{Codes, ROWS, Scaling};

/// Inputs that share a scale code.
pub const SUB_BLOCK: usize = 32;
const SUB_BLOCKS: usize = E8_BLOCK / SUB_BLOCK;
const WORDS_AT: usize = 64;
const SCALE_AT: usize = 96;
/// Doubled magnitudes per unit of the doubled, halved scale: value = grid · d (0.5 + code) / 4.
const QUARTER: f32 = 0.25;
/// Largest doubled magnitude; added to signed values to make them unsigned.
const BIAS: u8 = 62;
/// Value of the four-byte tag that stands in for scales.
pub const TAG: f32 = 6.0;

/// The sign byte of eight inputs from its seven stored bits: bit set = negative.
#[inline]
fn sign_byte(seven: u32) -> u32 {
    seven | (seven.count_ones() & 1) << 7
}

fn word(block: &[u8], sub: usize) -> u32 {
    let at = WORDS_AT + 4 * sub;
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

fn block_scale(block: &[u8]) -> f32 {
    plain::from_f16(u16::from_le_bytes([block[SCALE_AT], block[SCALE_AT + 1]]))
}

/// Index of the first block whose `d` is not finite.
pub fn first_bad_scale(weights: &[u8]) -> Option<usize> {
    weights.chunks_exact(E8_BLOCK_BYTES).position(|block| !block_scale(block).is_finite())
}

/// Decodes one row of stored (rotated) weights; the padding of the last block is dropped.
#[inline(always)]
pub fn decode_row(weights: &[u8], out: &mut [f32]) {
    for (block, out) in weights.chunks_exact(E8_BLOCK_BYTES).zip(out.chunks_mut(E8_BLOCK)) {
        let d = block_scale(block);
        for (i, out) in out.iter_mut().enumerate() {
            let word = word(block, i / SUB_BLOCK);
            let scale = d * (0.5 + (word >> 28) as f32) * QUARTER;
            let magnitude = GRID[usize::from(block[i / 4])] >> (8 * (i % 4)) & 0xff;
            let signs = sign_byte(word >> (7 * (i % SUB_BLOCK / 8)) & 0x7f);
            let value = magnitude as f32 * scale;
            *out = if signs >> (i % 8) & 1 == 1 { -value } else { value };
        }
    }
}

/// Levels of a doubled magnitude.
const LEVELS: [u8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];

/// Grid entry nearest to each combination of four levels.
fn nearest_table() -> &'static [u8; 4096] {
    static TABLE: OnceLock<[u8; 4096]> = OnceLock::new();
    TABLE.get_or_init(|| {
        std::array::from_fn(|cell| {
            let target: [f32; 4] = std::array::from_fn(|j| f32::from(LEVELS[cell >> (3 * j) & 7]));
            nearest(&target)
        })
    })
}

/// Grid entry nearest to four doubled magnitudes.
fn nearest(target: &[f32; 4]) -> u8 {
    let mut best = (f32::INFINITY, 0);
    for (index, entry) in GRID.iter().enumerate() {
        let distance = (0..4).fold(0.0, |sum, j| {
            let difference = (entry >> (8 * j) & 0xff) as f32 - target[j];
            sum + difference * difference
        });
        if distance < best.0 {
            best = (distance, index as u8);
        }
    }
    best.1
}

/// Index of the level nearest to a doubled magnitude.
fn level(magnitude: f32) -> usize {
    (((magnitude - 4.0) * 0.125).round_ties_even().clamp(0.0, 7.0)) as usize
}

/// Signs and signed magnitudes of 32 inputs: the magnitude whose sign parity forces over is
/// negative, so that the search brings it near zero.
fn split_signs(values: &[f32; SUB_BLOCK]) -> (u32, [f32; SUB_BLOCK]) {
    let mut word = 0;
    let mut magnitudes = [0.0; SUB_BLOCK];
    for eight in 0..SUB_BLOCK / 8 {
        let at = eight * 8;
        let mut signs = 0u32;
        let mut smallest = at;
        for i in at..at + 8 {
            magnitudes[i] = values[i].abs();
            signs |= u32::from(values[i] < 0.0) << (i - at);
            if magnitudes[i] < magnitudes[smallest] {
                smallest = i;
            }
        }
        if signs.count_ones() % 2 == 1 {
            signs ^= 1 << (smallest - at);
            magnitudes[smallest] = -magnitudes[smallest];
        }
        word |= (signs & 0x7f) << (7 * eight);
    }
    (word, magnitudes)
}

/// Squared error and least-squares factors of the grid codes of 32 magnitudes at one scale.
fn fit(magnitudes: &[f32; SUB_BLOCK], scale: f32) -> (f64, f64) {
    let table = nearest_table();
    let inverse = 1.0 / scale;
    let (mut cross, mut square) = (0.0, 0.0);
    for four in magnitudes.as_chunks::<4>().0 {
        let cell = (0..4).fold(0, |cell, j| cell | level(four[j] * inverse) << (3 * j));
        let entry = GRID[usize::from(table[cell])];
        for (j, magnitude) in four.iter().enumerate() {
            let code = f64::from(entry >> (8 * j) & 0xff);
            cross += code * f64::from(*magnitude);
            square += code * code;
        }
    }
    (cross, square)
}

/// The scale (of doubled magnitudes) that fits 32 magnitudes best.
fn best_scale(magnitudes: &[f32; SUB_BLOCK]) -> f32 {
    let max = magnitudes.iter().fold(0.0f32, |m, &v| m.max(v));
    if max < f32::MIN_POSITIVE * 256.0 {
        return 0.0;
    }
    let mut best = (f64::NEG_INFINITY, 0.0);
    for step in 0..16 {
        let scale = max / (28.0 + 2.6 * step as f32);
        let (cross, square) = fit(magnitudes, scale);
        if cross > 0.0 && cross * cross / square > best.0 {
            best = (cross * cross / square, (cross / square) as f32);
        }
    }
    best.1
}

/// Encodes one row that has been rotated already. Values must be finite.
pub fn encode_row(values: &[f32], weights: &mut [u8]) {
    let blocks = weights.chunks_exact_mut(E8_BLOCK_BYTES).zip(values.chunks(E8_BLOCK));
    for (block, values) in blocks {
        let mut padded = [0.0; E8_BLOCK];
        padded[..values.len()].copy_from_slice(values);
        encode_block(&padded, block);
    }
}

fn encode_block(values: &[f32; E8_BLOCK], block: &mut [u8]) {
    let subs = values.as_chunks::<SUB_BLOCK>().0;
    let split: [_; SUB_BLOCKS] = std::array::from_fn(|s| split_signs(&subs[s]));
    let scales: [f32; SUB_BLOCKS] = std::array::from_fn(|s| best_scale(&split[s].1));
    let max = scales.iter().fold(0.0f32, |m, &s| m.max(s));
    // The largest sub-block takes the top code, 15.5 quarters of d.
    let half = plain::to_f16((max / (15.5 * QUARTER)).min(65_504.0));
    block[SCALE_AT..].copy_from_slice(&half.to_le_bytes());
    let d = plain::from_f16(half);
    for (sub, (word, magnitudes)) in split.iter().enumerate() {
        let code = if d > 0.0 {
            (scales[sub] / (d * QUARTER) - 0.5).round_ties_even().clamp(0.0, 15.0)
        } else {
            0.0
        };
        let scale = d * (0.5 + code) * QUARTER;
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        for (group, four) in magnitudes.as_chunks::<4>().0.iter().enumerate() {
            block[sub * 8 + group] = nearest(&four.map(|m| m * inverse));
        }
        let word = word | (code as u32) << 28;
        block[WORDS_AT + 4 * sub..][..4].copy_from_slice(&word.to_le_bytes());
    }
}

/// All eight bits of a nibble's bytes set where its bit is set.
const SPREAD: [u32; 16] = {
    let mut table = [0; 16];
    let mut nibble = 0;
    while nibble < 16 {
        let mut bit = 0;
        while bit < 4 {
            if nibble >> bit & 1 == 1 {
                table[nibble] |= 0xff << (8 * bit);
            }
            bit += 1;
        }
        nibble += 1;
    }
    table
};

/// Chunk of 32 inputs: 8 x 16 grid indices (group of 4 inputs, row), then 16 words, one per row.
pub struct E8;

/// Bytes of grid indices in a chunk.
const CHUNK_WORDS_AT: usize = 8 * ROWS;

impl Codes for E8 {
    const SCALING: Scaling = Scaling::E8;
    const CHUNK_INPUTS: usize = SUB_BLOCK;
    const CHUNK_BYTES: usize = CHUNK_WORDS_AT + 4 * ROWS;
    const BLOCK: Option<usize> = Some(32);
    const SIGNED: bool = false;
    // Pair bound: 2·124·127 = 31,496.
    const BIAS: u32 = BIAS as u32;

    #[inline(always)]
    fn codes<S: Simd>(simd: S, chunk: &[u8], step: usize) -> S::I {
        let indices = &chunk.as_chunks::<ROWS>().0[step];
        let magnitudes = simd.gather(&GRID, indices);
        let words = crate::tile::load(simd, &chunk[CHUNK_WORDS_AT..]);
        let seven = simd.and(simd.shr(words, 7 * (step as u32 / 2)), simd.splat(0x7f));
        let nibble = if step.is_multiple_of(2) {
            simd.and(seven, simd.splat(15))
        } else {
            let folded = simd.xor(seven, simd.shr(seven, 4));
            let folded = simd.xor(folded, simd.shr(folded, 2));
            let parity = simd.and(simd.xor(folded, simd.shr(folded, 1)), simd.splat(1));
            simd.or(simd.shr(seven, 4), simd.shl(parity, 3))
        };
        let mask = simd.lookup_lanes(&SPREAD, nibble);
        let signed = simd.sub_bytes(simd.xor(magnitudes, mask), mask);
        simd.add_bytes(signed, simd.splat(u32::from_le_bytes([BIAS; 4])))
    }
}

/// Moves one row's block into its tile group: `d` in the header, indices and words in the chunks.
pub fn pack_block(block: &[u8], row: usize, group: &mut [u8]) {
    group[2 * row..][..2].copy_from_slice(&block[SCALE_AT..][..2]);
    let chunks = group[2 * ROWS..].chunks_exact_mut(E8::CHUNK_BYTES);
    for (sub, chunk) in chunks.enumerate() {
        for step in 0..8 {
            chunk[step * ROWS + row] = block[sub * 8 + step];
        }
        chunk[CHUNK_WORDS_AT + 4 * row..][..4].copy_from_slice(&block[WORDS_AT + 4 * sub..][..4]);
    }
}

/// The inverse of [`pack_block`].
pub fn unpack_block(group: &[u8], row: usize, block: &mut [u8]) {
    block[SCALE_AT..][..2].copy_from_slice(&group[2 * row..][..2]);
    for (sub, chunk) in group[2 * ROWS..].chunks_exact(E8::CHUNK_BYTES).enumerate() {
        for step in 0..8 {
            block[sub * 8 + step] = chunk[step * ROWS + row];
        }
        block[WORDS_AT + 4 * sub..][..4].copy_from_slice(&chunk[CHUNK_WORDS_AT + 4 * row..][..4]);
    }
}
