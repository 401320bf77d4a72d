//! Rule 2: sums and dot products over 32 virtual lanes. Lane `j` takes the elements `i` with
//! `i mod 32 == j`, ascending, one fused multiply-add each; the tail is padded with zeros; lanes
//! fold 32 -> 16 -> 8 -> 4 -> 2 -> 1, lane `j` plus lane `j + half`.

use crate::multiversion;
use crate::simd::Simd;

/// Number of virtual lanes.
pub const LANES: usize = 32;

/// The 32 lanes, as two vectors of 16.
pub type Lanes<S> = [<S as Simd>::F; 2];

/// Empty lanes.
#[inline(always)]
pub fn zero<S: Simd>(simd: S) -> Lanes<S> {
    [simd.splat_f32(0.0); 2]
}

/// Loads 32 numbers of a slice that has them.
#[inline(always)]
pub fn load<S: Simd>(simd: S, from: &[f32; LANES]) -> Lanes<S> {
    let (low, high) = from.split_at(16);
    // The split is in two arrays of 16, so neither default is reached.
    [
        simd.load_f32(low.first_chunk().unwrap_or(&[0.0; 16])),
        simd.load_f32(high.first_chunk().unwrap_or(&[0.0; 16])),
    ]
}

/// One fused multiply-add in each lane.
#[inline(always)]
pub fn fma<S: Simd>(simd: S, a: Lanes<S>, b: Lanes<S>, acc: Lanes<S>) -> Lanes<S> {
    [simd.fma(a[0], b[0], acc[0]), simd.fma(a[1], b[1], acc[1])]
}

/// Folds the lanes to their sum.
#[inline(always)]
pub fn fold<S: Simd>(simd: S, acc: Lanes<S>) -> f32 {
    let mut lanes = [0.0; 16];
    simd.store_f32(simd.add_f32(acc[0], acc[1]), &mut lanes);
    let mut half = 8;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Copies a tail of fewer than 32 numbers, padded with zeros.
#[inline(always)]
pub fn padded(tail: &[f32]) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for (to, from) in out.iter_mut().zip(tail) {
        *to = *from;
    }
    out
}

/// The dot product of two slices of equal length, inside a kernel.
#[inline(always)]
pub fn dot_in<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    debug_assert_eq!(a.len(), b.len());
    let (a_full, a_tail) = a.as_chunks::<LANES>();
    let (b_full, b_tail) = b.as_chunks::<LANES>();
    let mut acc = zero(simd);
    for (a, b) in a_full.iter().zip(b_full) {
        acc = fma(simd, load(simd, a), load(simd, b), acc);
    }
    if !a_tail.is_empty() {
        acc = fma(simd, load(simd, &padded(a_tail)), load(simd, &padded(b_tail)), acc);
    }
    fold(simd, acc)
}

/// The sum of a slice, inside a kernel.
#[inline(always)]
pub fn sum_in<S: Simd>(simd: S, a: &[f32]) -> f32 {
    let one = [simd.splat_f32(1.0); 2];
    let (full, tail) = a.as_chunks::<LANES>();
    let mut acc = zero(simd);
    for a in full {
        acc = fma(simd, load(simd, a), one, acc);
    }
    if !tail.is_empty() {
        acc = fma(simd, load(simd, &padded(tail)), one, acc);
    }
    fold(simd, acc)
}

multiversion! {
    /// Dot product of two slices of equal length.
    pub fn dot(isa, a: &[f32], b: &[f32]) -> f32 => dot_in;
    /// Sum of a slice.
    pub fn sum(isa, a: &[f32]) -> f32 => sum_in;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    /// The rule as its words say it.
    fn reference(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0.0f32; 32];
        for i in 0..a.len().next_multiple_of(32) {
            let (a, b) = (a.get(i).unwrap_or(&0.0), b.get(i).unwrap_or(&0.0));
            lanes[i % 32] = a.mul_add(*b, lanes[i % 32]);
        }
        for half in [16, 8, 4, 2, 1] {
            for j in 0..half {
                lanes[j] += lanes[j + half];
            }
        }
        lanes[0]
    }

    #[test]
    fn dots_and_sums_follow_the_rule_at_every_level() {
        for len in [0, 1, 5, 31, 32, 33, 64, 95, 576, 1000] {
            let a: Vec<f32> = (0..len).map(|i| ((i * 37 + 11) as f32).sin() * 3.0).collect();
            let b: Vec<f32> = (0..len).map(|i| ((i * 53 + 7) as f32).cos()).collect();
            for isa in Isa::available() {
                assert_eq!(dot(isa, &a, &b).to_bits(), reference(&a, &b).to_bits(), "{isa:?}");
                let ones = vec![1.0; len];
                assert_eq!(sum(isa, &a).to_bits(), reference(&a, &ones).to_bits(), "{isa:?}");
            }
        }
    }
}
