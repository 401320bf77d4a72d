//! Format 1, `int8-row`: signed bytes, one f32 scale per row.

use numerics::simd::Simd;

use crate::tile::{Codes, Packing, Scaling, four_bytes};

/// Decodes one row.
#[inline(always)]
pub fn decode_row(weights: &[u8], scale: f32, out: &mut [f32]) {
    for (out, &byte) in out.iter_mut().zip(weights) {
        *out = f32::from(byte as i8) * scale;
    }
}

/// Encodes one row of finite numbers; returns its scale.
pub fn encode_row(values: &[f32], weights: &mut [u8]) -> f32 {
    let absmax = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let scale = absmax / 127.0;
    let inverse = if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 };
    for (byte, value) in weights.iter_mut().zip(values) {
        *byte = (value * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
    }
    if inverse == 0.0 { 0.0 } else { scale }
}

/// Bytes in order: chunk of 4 inputs, lane = row, byte = input.
pub struct Int8;

impl Codes for Int8 {
    const SCALING: Scaling = Scaling::Row;
    const CHUNK_INPUTS: usize = 4;
    const CHUNK_BYTES: usize = 64;
    const BLOCK: Option<usize> = Some(64);
    const SIGNED: bool = true;
    const BIAS: u32 = 128;

    #[inline(always)]
    fn codes<S: Simd>(simd: S, chunk: &[u8], _step: usize) -> S::I {
        crate::tile::load(simd, chunk)
    }

    #[inline(always)]
    fn unsigned<S: Simd>(simd: S, codes: S::I) -> S::I {
        simd.xor(codes, simd.splat(0x8080_8080))
    }
}

impl Packing for Int8 {
    fn pack(row: &[u8], start: usize, lane: usize, chunk: &mut [u8]) {
        chunk[lane * 4..][..4].copy_from_slice(&four_bytes(row, start));
    }

    fn get(chunk: &[u8], row: usize, input: usize) -> u8 {
        chunk[row * 4 + input]
    }

    fn store(row: &mut [u8], input: usize, code: u8) {
        row[input] = code;
    }
}
