//! Format 0: f32, bf16 and f16, widened exactly.

pub use numerics::simd::f16_to_f32 as from_f16;

/// Least magnitude that rounds to an infinite half.
pub const F16_LIMIT: f32 = 65_520.0;
/// Least magnitude that rounds to an infinite bfloat16.
pub const BF16_LIMIT: f32 = f32::from_bits(0x7f7f_8000);

/// Rounds to bfloat16, ties to even. Values must be finite.
pub fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Rounds to IEEE half, ties to even; magnitudes beyond its range become infinite.
pub fn to_f16(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16 & 0x8000) as u16;
    let magnitude = value.abs();
    // Below 2^-14 the spacing is 2^-24 throughout.
    if magnitude < f32::from_bits(113 << 23) {
        return sign | (magnitude * 16_777_216.0).round_ties_even() as u16;
    }
    let bits = magnitude.to_bits();
    let rounded = bits + 0xfff + (bits >> 13 & 1);
    let half = (rounded >> 13).saturating_sub((127 - 15) << 10);
    sign | half.min(0x7c00) as u16
}

/// Widens a bfloat16.
pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
