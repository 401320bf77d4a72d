//! Format 7, `mxfp4`: e2m1 nibbles, even input low, one UE8M0 scale per 32 inputs.

pub use numerics::simd::ue8m0_to_f32 as ue8m0;

use numerics::simd::Simd;

use crate::format::MXFP4_GROUP;
use crate::int4;
use crate::tile::{Codes, Packing, Scaling};

/// Twice the magnitude of each e2m1 code; bit 3 of a nibble is the sign.
const DOUBLED: [i8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
/// Added to doubled values to make them unsigned.
const BIAS: i8 = 12;
/// Largest e2m1 magnitude.
const MAX: f32 = 6.0;

/// Doubled value plus bias of each nibble.
const BIASED: [u8; 16] = {
    let mut table = [0; 16];
    let mut code = 0;
    while code < 8 {
        table[code] = (BIAS + DOUBLED[code]) as u8;
        table[code + 8] = (BIAS - DOUBLED[code]) as u8;
        code += 1;
    }
    table
};

/// The value of a nibble.
#[inline(always)]
pub fn e2m1(code: u8) -> f32 {
    let magnitude = f32::from(DOUBLED[usize::from(code & 7)]) * 0.5;
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The nibble nearest to `value`; ties go to the even code.
pub fn to_e2m1(value: f32) -> u8 {
    // Borders between neighbouring magnitudes; a tie goes down from an even code only.
    const BORDERS: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let magnitude = value.abs();
    let mut code = 0;
    for (index, border) in BORDERS.into_iter().enumerate() {
        let up = if index % 2 == 0 { magnitude > border } else { magnitude >= border };
        code += u8::from(up);
    }
    code | u8::from(value.is_sign_negative()) << 3
}

/// Decodes the group that starts at input `start`.
#[inline(always)]
pub fn decode_group(weights: &[u8], start: usize, scale: f32, out: &mut [f32]) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = e2m1(int4::nibble(weights, start + i)) * scale;
    }
}

/// Encodes the group that starts at input `start` over zero bits; returns its UE8M0 scale, the
/// exponent of three candidates with the least squared error.
pub fn encode_group(values: &[f32], weights: &mut [u8], start: usize) -> u8 {
    debug_assert!(values.len() <= MXFP4_GROUP);
    let absmax = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    // floor(log2(absmax / 6)) from the exponent field; subnormal inputs get the lowest scale.
    let exponent = ((absmax / MAX).to_bits() >> 23) as i32;
    let mut best = (f64::INFINITY, 0u8);
    for candidate in exponent - 1..=exponent + 1 {
        let byte = candidate.clamp(0, 254) as u8;
        let scale = ue8m0(byte);
        let error = values.iter().fold(0.0f64, |sum, &value| {
            let decoded = e2m1(to_e2m1(value / scale)) * scale;
            sum + f64::from(value - decoded).powi(2)
        });
        if error < best.0 {
            best = (error, byte);
        }
    }
    let scale = ue8m0(best.1);
    for (i, value) in values.iter().enumerate() {
        int4::put_nibble(weights, start + i, to_e2m1(value / scale));
    }
    best.1
}

/// Chunk of 8 inputs, nibbles as in int4.
pub struct Mxfp4;

impl Codes for Mxfp4 {
    const SCALING: Scaling = Scaling::Ue8m0Half;
    const CHUNK_INPUTS: usize = 8;
    const CHUNK_BYTES: usize = 64;
    const BLOCK: Option<usize> = Some(32);
    const SIGNED: bool = false;
    // Pair bound: 2·24·127 = 6,096.
    const BIAS: u32 = BIAS as u32;

    #[inline(always)]
    fn codes<S: Simd>(simd: S, chunk: &[u8], step: usize) -> S::I {
        simd.lookup_bytes(&BIASED, int4::nibble_codes(simd, chunk, step))
    }
}

impl Packing for Mxfp4 {
    fn pack(row: &[u8], start: usize, lane: usize, chunk: &mut [u8]) {
        int4::pack_nibbles(row, start, lane, chunk);
    }

    fn get(chunk: &[u8], row: usize, input: usize) -> u8 {
        int4::chunk_nibble(chunk, row, input)
    }

    fn store(row: &mut [u8], input: usize, code: u8) {
        int4::put_nibble(row, input, code);
    }
}
