//! Rule 3: activations as blocks of int8 with one f32 scale each.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::multiversion;
use crate::scratch::Buf;
use crate::simd::Simd;
use crate::team::rows_mut;
use crate::{Compute, NumericError};

/// Largest block; also the multiple that quantised rows are padded to.
pub const BLOCK_MAX: usize = 64;
/// Numbers that one task of the thread team quantises, at least.
const GRAIN_NUMBERS: usize = 8192;
/// A block whose largest magnitude is below 2^-100 counts as all zero.
const ABSMAX_MIN: f32 = f32::from_bits(27 << 23);

/// Inputs per activation block where weights have one scale per `group` inputs: the largest
/// divisor of the group that is at most 64. Without groups it is 64.
pub const fn block_len(group: Option<usize>) -> usize {
    match group {
        None => BLOCK_MAX,
        Some(group) => {
            let mut block = if group < BLOCK_MAX { group } else { BLOCK_MAX };
            while !group.is_multiple_of(block) {
                block -= 1;
            }
            block
        }
    }
}

/// Codes kept per row.
const fn stride(cols: usize) -> usize {
    cols.next_multiple_of(BLOCK_MAX) + BLOCK_MAX
}

/// Rows of activations in int8 blocks.
#[derive(Debug)]
pub struct Int8Rows {
    rows: usize,
    cols: usize,
    block: usize,
    codes: Buf<i8>,
    scales: Buf<f32>,
    sums: Buf<i32>,
}

/// One row of [`Int8Rows`].
#[derive(Clone, Copy)]
pub struct Int8Row<'a> {
    /// Codes, padded with zeros: from every block's start there are at least [`BLOCK_MAX`].
    pub codes: &'a [i8],
    /// Scale of each block.
    pub scales: &'a [f32],
    /// Sum of the codes of each block.
    pub sums: &'a [i32],
}

impl Int8Rows {
    /// Quantises rows of `cols` numbers into blocks of `block` inputs. `what` names the quantity
    /// in errors.
    pub fn quantise(
        compute: &Compute,
        what: &'static str,
        x: &[f32],
        cols: usize,
        block: usize,
    ) -> Result<Int8Rows, NumericError> {
        assert!(cols > 0 && block > 0 && block <= BLOCK_MAX && x.len().is_multiple_of(cols));
        let rows = x.len() / cols;
        let (stride, blocks) = (stride(cols), cols.div_ceil(block));
        let mut out = Int8Rows {
            rows,
            cols,
            block,
            codes: compute.scratch.zeroed(rows * stride),
            scales: compute.scratch.zeroed(rows * blocks),
            sums: compute.scratch.zeroed(rows * blocks),
        };
        let finite = AtomicBool::new(true);
        let parts = (
            rows_mut(&mut out.codes, stride),
            rows_mut(&mut out.scales, blocks),
            rows_mut(&mut out.sums, blocks),
        );
        let grain = (GRAIN_NUMBERS / cols).max(1);
        compute.team.rows(rows, grain, parts, |range, (codes, scales, sums)| {
            let codes = codes.chunks_exact_mut(stride);
            let scales = scales.chunks_exact_mut(blocks).zip(sums.chunks_exact_mut(blocks));
            for ((row, codes), (scales, sums)) in range.zip(codes).zip(scales) {
                let x = &x[row * cols..][..cols];
                if !quantise_row(compute.isa, x, block, &mut codes[..cols], scales, sums) {
                    finite.store(false, Ordering::Relaxed);
                }
            }
        });
        if !finite.into_inner() {
            let at = x.iter().position(|value| !value.is_finite()).unwrap_or(0);
            return Err(NumericError::NonFinite { what, row: at / cols, element: at % cols });
        }
        Ok(out)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Inputs per block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Row `row`.
    #[inline]
    pub fn row(&self, row: usize) -> Int8Row<'_> {
        let (stride, blocks) = (stride(self.cols), self.cols.div_ceil(self.block));
        Int8Row {
            codes: &self.codes[row * stride..][..stride],
            scales: &self.scales[row * blocks..][..blocks],
            sums: &self.sums[row * blocks..][..blocks],
        }
    }
}

#[inline(always)]
fn quantise_kernel<S: Simd>(
    simd: S,
    x: &[f32],
    block: usize,
    codes: &mut [i8],
    scales: &mut [f32],
    sums: &mut [i32],
) -> bool {
    let mut finite = true;
    let blocks = x.chunks(block).zip(codes.chunks_mut(block));
    for ((x, codes), (scale, sum)) in blocks.zip(scales.iter_mut().zip(sums)) {
        // Blocks are multiples of 16; only a row's last one may be shorter, zeros fill it up.
        let mut padded = [[0.0; 16]; BLOCK_MAX / 16];
        let (full, tail) = x.as_chunks::<16>();
        padded[..full.len()].copy_from_slice(full);
        let vectors = full.len() + usize::from(!tail.is_empty());
        if !tail.is_empty() {
            padded[full.len()][..tail.len()].copy_from_slice(tail);
        }
        // Magnitudes of floats order as their bits do, and non-finite ones come last.
        let magnitude = simd.splat(0x7fff_ffff);
        let mut most = simd.splat(0);
        for values in &padded[..vectors] {
            most = simd.max_u32(most, simd.and(simd.bits(simd.load_f32(values)), magnitude));
        }
        let max_bits = simd.fold_max_u32(most);
        finite &= max_bits < 0x7f80_0000;
        let absmax = f32::from_bits(max_bits);
        if absmax < ABSMAX_MIN {
            codes.fill(0);
            (*scale, *sum) = (0.0, 0);
            continue;
        }
        *scale = absmax / 127.0;
        // The largest magnitude times it exceeds 127 by less than a half, so rounding clamps.
        let inverse = simd.splat_f32(127.0 / absmax);
        let mut total = simd.splat(0);
        let mut bytes = [[0; 16]; BLOCK_MAX / 16];
        for (values, bytes) in padded[..vectors].iter().zip(&mut bytes) {
            let rounded = simd.to_i32(simd.mul_f32(simd.load_f32(values), inverse));
            total = simd.add(total, rounded);
            simd.store_i8(rounded, bytes);
        }
        for (to, from) in codes.chunks_mut(16).zip(&bytes) {
            match to.first_chunk_mut::<16>() {
                Some(to) => *to = *from,
                None => to.copy_from_slice(&from[..to.len()]),
            }
        }
        *sum = simd.fold_add(total) as i32;
    }
    finite
}

multiversion! {
    /// Quantises one row; false when a value is not finite.
    fn quantise_row(
        isa, x: &[f32], block: usize, codes: &mut [i8], scales: &mut [f32], sums: &mut [i32],
    ) -> bool => quantise_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activations, Isa, Team};

    fn compute(isa: Isa) -> Compute {
        Compute::new(isa, std::sync::Arc::new(Team::new(2).unwrap()), Activations::Int8)
    }

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    #[test]
    fn blocks_never_straddle_two_weight_scales() {
        let want = [(16, 16), (32, 32), (48, 48), (64, 64), (96, 48), (128, 64), (192, 64)];
        for (group, block) in want {
            assert_eq!(block_len(Some(group)), block, "group {group}");
        }
        assert_eq!(block_len(Some(256)), 64);
        assert_eq!(block_len(None), 64);
    }

    #[test]
    fn codes_follow_the_rule_at_every_level() {
        for cols in [1, 15, 64, 72, 200] {
            let rows = 21;
            let mut x = noise(cols * rows, cols as u32);
            x[0] = 2.5e-31; // below 2^-100
            for isa in Isa::available() {
                let quantised = Int8Rows::quantise(&compute(isa), "x", &x, cols, 64).unwrap();
                for r in 0..rows {
                    let row = quantised.row(r);
                    for (b, block) in x[r * cols..][..cols].chunks(64).enumerate() {
                        let absmax = block.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                        let zero = absmax < 2f32.powi(-100);
                        let scale = if zero { 0.0 } else { absmax / 127.0 };
                        assert_eq!(row.scales[b].to_bits(), scale.to_bits());
                        let mut sum = 0;
                        for (i, v) in block.iter().enumerate() {
                            let q = (v * (127.0 / absmax)).round_ties_even().clamp(-127.0, 127.0);
                            let want = if zero { 0 } else { q as i8 };
                            assert_eq!(row.codes[b * 64 + i], want, "{isa:?} cols {cols}");
                            sum += i32::from(want);
                        }
                        assert_eq!(row.sums[b], sum);
                    }
                    assert!(row.codes[cols..].iter().all(|&c| c == 0));
                }
            }
        }
    }

    #[test]
    fn a_non_finite_activation_is_a_typed_error() {
        let mut x = noise(128, 9);
        x[70] = f32::NAN;
        let got = Int8Rows::quantise(&compute(Isa::detect()), "gate input", &x, 64, 64);
        let want = NumericError::NonFinite { what: "gate input", row: 1, element: 6 };
        assert_eq!(got.unwrap_err(), want);
    }
}
