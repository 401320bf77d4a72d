//! Rule 8: routed experts are combined as integers on the grid 2^-32, so partial sums from any
//! worker, in any order, merge to the same bits.

use crate::multiversion;
use crate::simd::Simd;
use crate::{Isa, NumericError};

/// Largest number of experts a token may be routed to; keeps the sum far from i64 overflow.
pub const TOP_K_MAX: usize = 64;
/// Contributions must be below it in magnitude.
const RANGE: f32 = 16_777_216.0;
/// Adding and subtracting 1.5·2^52 rounds an f64 below 2^51 to an integer, ties to even.
const ROUND: f64 = 6_755_399_441_055_744.0;
/// 2^32: grid points per unit.
const GRID: f64 = 4_294_967_296.0;

/// Adds `weight · y` to the sum of row `row`. Errors name the row and element.
pub fn add_weighted(
    isa: Isa,
    row: usize,
    weight: f32,
    y: &[f32],
    sum: &mut [i64],
) -> Result<(), NumericError> {
    debug_assert_eq!(y.len(), sum.len());
    if add_kernel_at(isa, weight, y, sum) {
        return Ok(());
    }
    let outside = |value: &f32| value.abs() >= RANGE || value.is_nan();
    let element = y.iter().position(|y| outside(&(weight * y))).unwrap_or(0);
    Err(NumericError::CombineRange { value: weight * y[element], row, element })
}

/// Converts the sum to f32 in one rounding.
pub fn finish(isa: Isa, sum: &[i64], out: &mut [f32]) {
    finish_at(isa, sum, out);
}

#[inline(always)]
fn add_kernel<S: Simd>(_simd: S, weight: f32, y: &[f32], sum: &mut [i64]) -> bool {
    let mut inside = true;
    for (y, sum) in y.iter().zip(sum) {
        let contribution = weight * y;
        let in_range = contribution.abs() < RANGE;
        inside &= in_range;
        let value = f64::from(if in_range { contribution } else { 0.0 });
        // The nearest whole number, exactly; what is left is at most a half. A whole number is an
        // even multiple of the grid's unit, so rounding the rest rounds the sum.
        let shifted = value + ROUND;
        let rest = (value - (shifted - ROUND)) * GRID + ROUND;
        let whole = shifted.to_bits().wrapping_sub(ROUND.to_bits());
        let rest = rest.to_bits().wrapping_sub(ROUND.to_bits());
        *sum = sum.wrapping_add((whole << 32).wrapping_add(rest) as i64);
    }
    inside
}

#[inline(always)]
fn finish_kernel<S: Simd>(_simd: S, sum: &[i64], out: &mut [f32]) {
    for (sum, out) in sum.iter().zip(out) {
        *out = *sum as f32 * (1.0 / 4_294_967_296.0);
    }
}

multiversion! {
    fn add_kernel_at(isa, weight: f32, y: &[f32], sum: &mut [i64]) -> bool => add_kernel;
    fn finish_at(isa, sum: &[i64], out: &mut [f32]) => finish_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contributions_round_to_the_grid_with_ties_to_even() {
        let unit = 2f32.powi(-32);
        let y = [unit, unit * 0.5, unit * 1.5, -unit * 0.5, -unit * 2.5, 1.0, 600_000.5, -16e6];
        let want = [1, 0, 2, 0, -2, 1 << 32, (600_000 << 32) + (1 << 31), -68_719_476_736_000_000];
        for isa in Isa::available() {
            let mut sum = [0i64; 8];
            add_weighted(isa, 0, 1.0, &y, &mut sum).unwrap();
            assert_eq!(sum, want, "{isa:?}");
        }
    }

    #[test]
    fn the_order_of_experts_does_not_matter() {
        let parts: Vec<Vec<f32>> =
            (0..8).map(|e| (0..40).map(|i| ((e * 41 + i) as f32).sin() * 3.0).collect()).collect();
        let total = |order: &[usize]| {
            let mut sum = vec![0; 40];
            for &e in order {
                add_weighted(Isa::detect(), 0, 0.3 + e as f32 * 0.07, &parts[e], &mut sum).unwrap();
            }
            sum
        };
        assert_eq!(total(&[0, 1, 2, 3, 4, 5, 6, 7]), total(&[7, 2, 5, 0, 6, 1, 4, 3]));
    }

    #[test]
    fn the_sum_is_rounded_once() {
        // Through f64 this would round twice: 2^61 + 2^37 + 1 lies just above a tie.
        let sum = [(1i64 << 61) + (1 << 37) + 1, -(1i64 << 61) - (1 << 37) - 1, 3 << 31];
        for isa in Isa::available() {
            let mut out = [0.0; 3];
            finish(isa, &sum, &mut out);
            let want = 2f32.powi(29) * (1.0 + f32::EPSILON);
            assert_eq!(out, [want, -want, 1.5], "{isa:?}");
        }
    }

    #[test]
    fn a_contribution_outside_the_grid_is_a_typed_error() {
        for bad in [16_777_216.0, f32::NAN, f32::NEG_INFINITY] {
            for isa in Isa::available() {
                let got = add_weighted(isa, 3, 1.0, &[0.0, bad], &mut [0, 0]).unwrap_err();
                assert!(matches!(got, NumericError::CombineRange { row: 3, element: 1, .. }));
            }
        }
    }
}
