//! Format 3, `int2-row`: four codes per byte from the low bits, value = code - 2, one f32 scale
//! per row.

use numerics::simd::Simd;

use crate::search;
use crate::tile::{Codes, Packing, Scaling, four_bytes};

/// Code of the value zero.
const ZERO: u8 = 2;

fn crumb(row: &[u8], input: usize) -> u8 {
    row.get(input / 4).copied().unwrap_or(0xaa) >> (2 * (input % 4)) & 3
}

/// Decodes one row.
#[inline(always)]
pub fn decode_row(weights: &[u8], scale: f32, out: &mut [f32]) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = (f32::from(crumb(weights, i)) - f32::from(ZERO)) * scale;
    }
}

/// Encodes one row over zero bits; returns its scale.
pub fn encode_row(values: &[f32], weights: &mut [u8]) -> f32 {
    let mut codes = vec![0; values.len()];
    let scale = search::symmetric(values, i32::from(ZERO), &mut codes);
    for (i, code) in codes.into_iter().enumerate() {
        Int2::store(weights, i, code);
    }
    scale
}

/// Exchanges byte and position of the 16 two-bit codes of a word: code `j` of byte `s` goes to
/// position `s` of byte `j`.
pub fn transpose_crumbs(word: u32) -> u32 {
    // Exchange the off-diagonal codes of each 2 x 2 tile, then the off-diagonal tiles.
    let swap = (word ^ word >> 6) & 0x00cc_00cc;
    let word = word ^ swap ^ swap << 6;
    let swap = (word ^ word >> 12) & 0x0000_f0f0;
    word ^ swap ^ swap << 12
}

/// Chunk of 16 inputs: lane = row, bits `2s` of byte `j` hold input `4s + j`.
pub struct Int2;

impl Codes for Int2 {
    const SCALING: Scaling = Scaling::Row;
    const CHUNK_INPUTS: usize = 16;
    const CHUNK_BYTES: usize = 64;
    const BLOCK: Option<usize> = Some(64);
    const SIGNED: bool = false;
    // Pair bound: 2·3·127 = 762.
    const BIAS: u32 = ZERO as u32;

    #[inline(always)]
    fn codes<S: Simd>(simd: S, chunk: &[u8], step: usize) -> S::I {
        let bytes = crate::tile::load(simd, chunk);
        simd.and(simd.shr(bytes, 2 * step as u32), simd.splat(0x0303_0303))
    }
}

impl Packing for Int2 {
    fn pack(row: &[u8], start: usize, lane: usize, chunk: &mut [u8]) {
        let word = transpose_crumbs(u32::from_le_bytes(four_bytes(row, start / 4)));
        chunk[lane * 4..][..4].copy_from_slice(&word.to_le_bytes());
    }

    fn get(chunk: &[u8], row: usize, input: usize) -> u8 {
        chunk[row * 4 + input % 4] >> (2 * (input / 4)) & 3
    }

    fn store(row: &mut [u8], input: usize, code: u8) {
        row[input / 4] |= code << (2 * (input % 4));
    }
}
