//! Rotary position embedding. Angles are computed in f64 by a pinned pure-Rust libm and rounded
//! once, so the table is the same on every machine.

use crate::Isa;
use crate::multiversion;
use crate::simd::Simd;

/// Cosines and sines of `half` frequencies for positions from 0.
#[derive(Debug, Clone)]
pub struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// Which elements of a head form a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RopeLayout {
    /// Elements 2i and 2i+1.
    Interleaved,
    /// Elements i and i + half.
    HalfSplit,
}

impl RopeTable {
    /// Table for `dim` rotated elements (even), base `theta`, positions `0..positions`.
    pub fn new(dim: usize, theta: f64, positions: usize) -> RopeTable {
        assert!(dim.is_multiple_of(2));
        let half = dim / 2;
        let mut table = RopeTable {
            half,
            cos: Vec::with_capacity(half * positions),
            sin: Vec::with_capacity(half * positions),
        };
        let frequencies: Vec<f64> =
            (0..half).map(|i| libm::pow(theta, -((2 * i) as f64) / dim as f64)).collect();
        for position in 0..positions {
            for frequency in &frequencies {
                let angle = position as f64 * frequency;
                table.cos.push(libm::cos(angle) as f32);
                table.sin.push(libm::sin(angle) as f32);
            }
        }
        table
    }

    /// Bytes that a table for `dim` rotated elements and `positions` holds.
    pub fn bytes_of(dim: usize, positions: usize) -> usize {
        dim.saturating_mul(positions).saturating_mul(size_of::<f32>())
    }

    /// Rotates the first `2·half` elements of `head` for `position`, in place.
    pub fn rotate(&self, isa: Isa, layout: RopeLayout, position: usize, head: &mut [f32]) {
        let cos = &self.cos[position * self.half..][..self.half];
        let sin = &self.sin[position * self.half..][..self.half];
        let head = &mut head[..2 * self.half];
        match layout {
            RopeLayout::Interleaved => rotate_pairs(isa, cos, sin, head),
            RopeLayout::HalfSplit => rotate_halves(isa, cos, sin, head),
        }
    }
}

/// The pair turned by an angle.
#[inline(always)]
fn turn(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (a.mul_add(cos, -(b * sin)), b.mul_add(cos, a * sin))
}

#[inline(always)]
fn pairs_kernel<S: Simd>(_simd: S, cos: &[f32], sin: &[f32], head: &mut [f32]) {
    for ((pair, cos), sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
        (pair[0], pair[1]) = turn(pair[0], pair[1], *cos, *sin);
    }
}

#[inline(always)]
fn halves_kernel<S: Simd>(_simd: S, cos: &[f32], sin: &[f32], head: &mut [f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
        (*a, *b) = turn(*a, *b, *cos, *sin);
    }
}

multiversion! {
    fn rotate_pairs(isa, cos: &[f32], sin: &[f32], head: &mut [f32]) => pairs_kernel;
    fn rotate_halves(isa, cos: &[f32], sin: &[f32], head: &mut [f32]) => halves_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FNV-1a over the table's bits: a changed libm or order of operations shows here.
    fn hash(table: &RopeTable) -> u64 {
        let bits = table.cos.iter().chain(&table.sin).flat_map(|v| v.to_bits().to_le_bytes());
        bits.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
    }

    #[test]
    fn the_table_is_pinned() {
        assert_eq!(hash(&RopeTable::new(64, 1_000_000.0, 512)), PINNED);
    }
    const PINNED: u64 = 16_027_498_205_651_966_899;

    #[test]
    fn rotation_keeps_length_and_position_zero_is_the_identity() {
        let table = RopeTable::new(8, 10_000.0, 16);
        for layout in [RopeLayout::Interleaved, RopeLayout::HalfSplit] {
            let head: Vec<f32> = (0..8).map(|i| i as f32 - 3.0).collect();
            let mut at0 = head.clone();
            table.rotate(Isa::SCALAR, layout, 0, &mut at0);
            assert_eq!(at0, head);
            let mut at9 = head.clone();
            table.rotate(Isa::SCALAR, layout, 9, &mut at9);
            for isa in Isa::available() {
                let mut same = head.clone();
                table.rotate(isa, layout, 9, &mut same);
                assert_eq!(same, at9, "{isa:?}");
            }
            let norm = |v: &[f32]| v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            assert!((norm(&at9) - norm(&head)).abs() < 1e-4);
            assert_ne!(at9, head);
        }
    }
}
