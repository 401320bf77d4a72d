//! Formats 2 and 4, `int4-row` and `int4-gN`: two codes per byte, even input in the low nibble,
//! value = code - 8, one f32 scale per row or per row and group.

use numerics::simd::Simd;

use crate::search;
use crate::tile::{Codes, Packing, Scaling, four_bytes};

/// Code of the value zero.
pub const ZERO: u8 = 8;

/// The nibble of input `input`.
#[inline]
pub fn nibble(row: &[u8], input: usize) -> u8 {
    row.get(input / 2).copied().unwrap_or(ZERO | ZERO << 4) >> (4 * (input % 2)) & 15
}

/// Writes the nibble of input `input` over zero bits.
#[inline]
pub fn put_nibble(row: &mut [u8], input: usize, code: u8) {
    row[input / 2] |= code << (4 * (input % 2));
}

/// Decodes the inputs from `start` on that share one scale.
#[inline(always)]
pub fn decode_group(weights: &[u8], start: usize, scale: f32, out: &mut [f32]) {
    let value = |code: u8| (f32::from(code) - f32::from(ZERO)) * scale;
    // Groups are even, so they begin with a byte: two values each.
    debug_assert!(start.is_multiple_of(2));
    let bytes = &weights[start / 2..];
    let (pairs, rest) = out.as_chunks_mut::<2>();
    for (pair, byte) in pairs.iter_mut().zip(bytes) {
        *pair = [value(byte & 15), value(byte >> 4)];
    }
    if let (Some(last), Some(byte)) = (rest.first_mut(), bytes.get(pairs.len())) {
        *last = value(byte & 15);
    }
}

/// Encodes the inputs from `start` on that share one scale, over zero bits; returns the scale.
pub fn encode_group(values: &[f32], weights: &mut [u8], start: usize) -> f32 {
    let mut codes = vec![0; values.len()];
    let scale = search::symmetric(values, i32::from(ZERO), &mut codes);
    for (i, code) in codes.into_iter().enumerate() {
        put_nibble(weights, start + i, code);
    }
    scale
}

/// Chunk of 8 inputs: lane = row, byte `j` holds input `j` low and input `j + 4` high.
pub struct Int4<const GROUPED: bool>;

impl<const GROUPED: bool> Codes for Int4<GROUPED> {
    const SCALING: Scaling = if GROUPED { Scaling::Group } else { Scaling::Row };
    const CHUNK_INPUTS: usize = 8;
    const CHUNK_BYTES: usize = 64;
    const BLOCK: Option<usize> = if GROUPED { None } else { Some(64) };
    const SIGNED: bool = false;
    // Pair bound: 2·15·127 = 3,810.
    const BIAS: u32 = ZERO as u32;

    #[inline(always)]
    fn codes<S: Simd>(simd: S, chunk: &[u8], step: usize) -> S::I {
        nibble_codes(simd, chunk, step)
    }
}

impl<const GROUPED: bool> Packing for Int4<GROUPED> {
    fn pack(row: &[u8], start: usize, lane: usize, chunk: &mut [u8]) {
        pack_nibbles(row, start, lane, chunk);
    }

    fn get(chunk: &[u8], row: usize, input: usize) -> u8 {
        chunk_nibble(chunk, row, input)
    }

    fn store(row: &mut [u8], input: usize, code: u8) {
        put_nibble(row, input, code);
    }
}

/// The four inputs of `step` from a chunk of nibbles.
#[inline(always)]
pub fn nibble_codes<S: Simd>(simd: S, chunk: &[u8], step: usize) -> S::I {
    let bytes = crate::tile::load(simd, chunk);
    let bytes = if step == 0 { bytes } else { simd.shr(bytes, 4) };
    simd.and(bytes, simd.splat(0x0f0f_0f0f))
}

/// Moves the 8 nibbles of one row from input `start` on into its lane of a chunk.
pub fn pack_nibbles(row: &[u8], start: usize, lane: usize, chunk: &mut [u8]) {
    let four = u32::from_le_bytes(four_bytes(row, start / 2));
    let word = spread_nibbles(four & 0xffff) | spread_nibbles(four >> 16) << 4;
    chunk[lane * 4..][..4].copy_from_slice(&word.to_le_bytes());
}

/// The four nibbles of 16 bits, one per byte.
fn spread_nibbles(bits: u32) -> u32 {
    let pairs = (bits | bits << 8) & 0x00ff_00ff;
    (pairs | pairs << 4) & 0x0f0f_0f0f
}

/// Reads a nibble of a chunk.
pub fn chunk_nibble(chunk: &[u8], row: usize, input: usize) -> u8 {
    chunk[row * 4 + input % 4] >> (4 * (input / 4)) & 15
}
