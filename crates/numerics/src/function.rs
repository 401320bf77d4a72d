//! Rule 5: elementary functions in IEEE operations with one evaluation order, scalar and vector.

use crate::multiversion;
use crate::simd::Simd;

/// Adding and subtracting 1.5·2^23 rounds an f32 below 2^22 to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;
/// Above it e^x is infinite.
const EXP_MAX: f32 = 89.0;
/// At and below it e^x rounds to zero.
const EXP_MIN: f32 = -104.0;
/// ln 2 in two parts; the first has few bits, so its product with an exponent is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// e^x: `x = n·ln 2 + r`, the Taylor polynomial of degree 7 at r (|r| <= 0.35, remainder 6e-9),
/// then 2^n in two exact steps. NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let x = if x > EXP_MAX { EXP_MAX } else { x };
    let x = if x < EXP_MIN { EXP_MIN } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    let mut p = 1.0 / 5040.0;
    p = f32::mul_add(p, r, 1.0 / 720.0);
    p = f32::mul_add(p, r, 1.0 / 120.0);
    p = f32::mul_add(p, r, 1.0 / 24.0);
    p = f32::mul_add(p, r, 1.0 / 6.0);
    p = f32::mul_add(p, r, 0.5);
    p = f32::mul_add(p, r, 1.0);
    p = f32::mul_add(p, r, 1.0);
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let first = n >> 1;
    p * power_of_two(first) * power_of_two(n.wrapping_sub(first))
}

/// 2^n for n in -126..=127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x / (1 + e^-x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[inline(always)]
fn sigmoid_kernel<S: Simd>(_simd: S, values: &mut [f32]) {
    for value in values {
        *value = sigmoid(*value);
    }
}

#[inline(always)]
fn exp_minus_kernel<S: Simd>(_simd: S, values: &mut [f32], minus: f32) {
    for value in values {
        *value = exp(*value - minus);
    }
}

#[inline(always)]
fn silu_mul_kernel<S: Simd>(_simd: S, gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = silu(*gate) * *up;
    }
}

#[inline(always)]
fn add_kernel<S: Simd>(_simd: S, to: &mut [f32], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += *from;
    }
}

#[inline(always)]
fn first_non_finite_kernel<S: Simd>(_simd: S, values: &[f32]) -> Option<usize> {
    let mut all_finite = true;
    for value in values {
        all_finite &= value.to_bits() & 0x7f80_0000 != 0x7f80_0000;
    }
    if all_finite {
        return None;
    }
    values.iter().position(|value| !value.is_finite())
}

multiversion! {
    /// The sigmoid of each element.
    pub fn sigmoid_all(isa, values: &mut [f32]) => sigmoid_kernel;
    /// `e^(value - minus)` of each element.
    pub fn exp_minus(isa, values: &mut [f32], minus: f32) => exp_minus_kernel;
    /// `gate[i] = silu(gate[i]) * up[i]`.
    pub fn silu_mul(isa, gate: &mut [f32], up: &[f32]) => silu_mul_kernel;
    /// `to[i] += from[i]`.
    pub fn add(isa, to: &mut [f32], from: &[f32]) => add_kernel;
    /// Index of the first infinite or NaN element.
    pub fn first_non_finite(isa, values: &[f32]) -> Option<usize> => first_non_finite_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    fn samples() -> Vec<f32> {
        let mut values: Vec<f32> = (-1100..1100).map(|i| i as f32 * 0.1003).collect();
        values.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE, 1e-45]);
        values.extend([88.72, 88.73, -103.97, -103.98, -87.4, 1e30, -1e30]);
        values
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for x in samples() {
            let want = libm::exp(f64::from(x));
            let got = f64::from(exp(x));
            let ulp = f64::from(f32::from_bits((want as f32).to_bits().max(1) & !0x7f_ffff))
                .max(f64::from(f32::from_bits(1)) * 8_388_608.0)
                / 8_388_608.0;
            if want > f64::from(f32::MAX) {
                assert_eq!(got, f64::INFINITY, "exp({x})");
            } else {
                assert!((got - want).abs() <= 2.0 * ulp, "exp({x}) = {got}, want {want}");
            }
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn functions_give_the_same_bits_at_every_level() {
        let values = samples();
        for isa in Isa::available() {
            let (mut s, mut e, mut g) = (values.clone(), values.clone(), values.clone());
            sigmoid_all(isa, &mut s);
            exp_minus(isa, &mut e, 0.25);
            silu_mul(isa, &mut g, &values);
            for (i, &x) in values.iter().enumerate() {
                assert_eq!(s[i].to_bits(), sigmoid(x).to_bits(), "{isa:?} sigmoid({x})");
                assert_eq!(e[i].to_bits(), exp(x - 0.25).to_bits(), "{isa:?} exp({x} - 0.25)");
                let want = silu(x) * x;
                assert!(g[i].to_bits() == want.to_bits() || (g[i].is_nan() && want.is_nan()));
            }
        }
    }

    #[test]
    fn the_first_non_finite_element_is_found() {
        let mut values = vec![1.0; 100];
        for isa in Isa::available() {
            assert_eq!(first_non_finite(isa, &values), None);
        }
        values[63] = f32::NAN;
        values[70] = f32::INFINITY;
        for isa in Isa::available() {
            assert_eq!(first_non_finite(isa, &values), Some(63));
        }
    }
}
