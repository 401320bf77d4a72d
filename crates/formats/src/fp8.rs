//! Format 8, `fp8-e4m3-b128`: e4m3fn bytes, one scale per 128 x 128 block, f32 or UE8M0.

pub use numerics::simd::e4m3_to_f32 as e4m3;

/// Largest finite e4m3 magnitude.
pub const MAX: f32 = 448.0;

/// Whether a byte is one of the two NaN codes.
pub fn is_nan(byte: u8) -> bool {
    byte & 0x7f == 0x7f
}

/// The byte nearest to a finite value, ties to even, saturating at 448.
pub fn to_e4m3(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs().min(MAX);
    // Below 2^-6 the spacing is 2^-9 throughout; above it three bits of mantissa stay.
    if magnitude < f32::from_bits(121 << 23) {
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    let bits = magnitude.to_bits();
    let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
    sign | (((rounded >> 20) - ((127 - 7) << 3)) as u8).min(0x7e)
}

/// Decodes a run of weights that share a scale.
#[inline(always)]
pub fn decode(weights: &[u8], scale: f32, out: &mut [f32]) {
    for (out, &byte) in out.iter_mut().zip(weights) {
        *out = e4m3(byte) * scale;
    }
}

/// Scale of a block with the given largest magnitude.
pub fn f32_scale(absmax: f32) -> f32 {
    let scale = absmax / MAX;
    if scale < f32::MIN_POSITIVE { 0.0 } else { scale }
}

/// UE8M0 scale of a block with the given largest magnitude: the least power of two that does
/// not saturate.
pub fn ue8m0_scale(absmax: f32) -> u8 {
    let bits = (absmax / MAX).to_bits();
    ((bits >> 23) + u32::from(bits & 0x7f_ffff != 0)).min(254) as u8
}

/// Encodes a run of finite weights that share a scale.
pub fn encode(values: &[f32], scale: f32, weights: &mut [u8]) {
    for (byte, value) in weights.iter_mut().zip(values) {
        *byte = if scale == 0.0 { 0 } else { to_e4m3(value / scale) };
    }
}
