//! Format 5, `int3-g64`: per 64 inputs 16 bytes with the low two bits, then 8 bytes with the high
//! bit; value = code - 4; one f32 scale per group.

use numerics::simd::Simd;

use crate::format::{INT3_GROUP, INT3_GROUP_BYTES};
use crate::int2;
use crate::search;
use crate::tile::{Codes, Packing, Scaling, four_bytes};

/// Code of the value zero.
const ZERO: u8 = 4;
/// Bytes of low bits per group and per chunk of 16 inputs by 16 rows.
const LOW_BYTES: usize = 16;
const CHUNK_LOW_BYTES: usize = 64;

fn code_at(row: &[u8], input: usize) -> u8 {
    let Some(group) = row.get(input / INT3_GROUP * INT3_GROUP_BYTES..) else { return ZERO };
    let k = input % INT3_GROUP;
    match (group.get(k / 4), group.get(LOW_BYTES + k / 8)) {
        (Some(low), Some(high)) => low >> (2 * (k % 4)) & 3 | (high >> (k % 8) & 1) << 2,
        _ => ZERO,
    }
}

/// Decodes the group that starts at input `start`.
#[inline(always)]
pub fn decode_group(weights: &[u8], start: usize, scale: f32, out: &mut [f32]) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = (f32::from(code_at(weights, start + i)) - f32::from(ZERO)) * scale;
    }
}

/// Encodes the group that starts at input `start` over zero bits; returns its scale. Inputs past
/// the row's end get the code of zero.
pub fn encode_group(values: &[f32], weights: &mut [u8], start: usize) -> f32 {
    let mut codes = [ZERO; INT3_GROUP];
    let scale = search::symmetric(values, i32::from(ZERO), &mut codes[..values.len()]);
    for (i, code) in codes.into_iter().enumerate() {
        Int3::store(weights, start + i, code);
    }
    scale
}

/// Chunk of 16 inputs: 64 bytes of low bits as in int2, then 4 x 8 bytes of high bits, bit
/// `4 row + j` of word `s` for input `4s + j`.
pub struct Int3;

impl Codes for Int3 {
    const SCALING: Scaling = Scaling::Group;
    const CHUNK_INPUTS: usize = 16;
    const CHUNK_BYTES: usize = CHUNK_LOW_BYTES + 32;
    const BLOCK: Option<usize> = Some(64);
    const SIGNED: bool = false;
    // Pair bound: 2·7·127 = 1,778.
    const BIAS: u32 = ZERO as u32;

    #[inline(always)]
    fn codes<S: Simd>(simd: S, chunk: &[u8], step: usize) -> S::I {
        let bytes = crate::tile::load(simd, chunk);
        let low = simd.and(simd.shr(bytes, 2 * step as u32), simd.splat(0x0303_0303));
        let word = chunk[CHUNK_LOW_BYTES..].as_chunks::<8>().0[step];
        simd.or(low, simd.expand_bits(u64::from_le_bytes(word), 4))
    }
}

impl Packing for Int3 {
    fn pack(row: &[u8], start: usize, lane: usize, chunk: &mut [u8]) {
        let at = start / INT3_GROUP * INT3_GROUP_BYTES;
        let low = four_bytes(row, at + start % INT3_GROUP / 4);
        let word = int2::transpose_crumbs(u32::from_le_bytes(low));
        chunk[lane * 4..][..4].copy_from_slice(&word.to_le_bytes());
        let high = four_bytes(row, at + LOW_BYTES + start % INT3_GROUP / 8);
        for step in 0..4 {
            let nibble = high[step / 2] >> (4 * (step % 2)) & 15;
            chunk[CHUNK_LOW_BYTES + 8 * step + lane / 2] |= nibble << (4 * (lane % 2));
        }
    }

    fn get(chunk: &[u8], row: usize, input: usize) -> u8 {
        let low = chunk[row * 4 + input % 4] >> (2 * (input / 4)) & 3;
        let bit = 4 * row + input % 4;
        low | (chunk[CHUNK_LOW_BYTES + 8 * (input / 4) + bit / 8] >> (bit % 8) & 1) << 2
    }

    fn store(row: &mut [u8], input: usize, code: u8) {
        let group = &mut row[input / INT3_GROUP * INT3_GROUP_BYTES..][..INT3_GROUP_BYTES];
        let k = input % INT3_GROUP;
        group[k / 4] |= (code & 3) << (2 * (k % 4));
        group[LOW_BYTES + k / 8] |= (code >> 2) << (k % 8);
    }
}
