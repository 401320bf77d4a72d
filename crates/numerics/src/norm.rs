//! Normalisations; their sums follow rule 2.

use crate::lanes;
use crate::multiversion;
use crate::simd::Simd;

#[inline(always)]
fn rms_kernel<S: Simd>(simd: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mean = lanes::dot_in(simd, x, x) / x.len() as f32;
    let inverse = 1.0 / (mean + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = (x * inverse) * weight;
    }
}

#[inline(always)]
fn layer_kernel<S: Simd>(
    simd: S,
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let len = x.len() as f32;
    let mean = lanes::sum_in(simd, x) / len;
    for (out, x) in out.iter_mut().zip(x) {
        *out = x - mean;
    }
    let variance = lanes::dot_in(simd, out, out) / len;
    let inverse = 1.0 / (variance + eps).sqrt();
    for ((out, weight), bias) in out.iter_mut().zip(weight).zip(bias) {
        *out = (*out * inverse).mul_add(*weight, *bias);
    }
}

multiversion! {
    /// Root-mean-square norm of one row: `x / sqrt(mean(x²) + eps) · weight`.
    pub fn rms_norm(isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) => rms_kernel;
    /// Layer norm of one row, with mean, variance (both over all elements), weight and bias.
    pub fn layer_norm(
        isa, x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32],
    ) => layer_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    #[test]
    fn norms_give_the_textbook_result_and_the_same_bits_at_every_level() {
        for len in [1, 7, 64, 129] {
            let x: Vec<f32> = (0..len).map(|i| (i as f32 * 0.7).sin() + 0.3).collect();
            let w: Vec<f32> = (0..len).map(|i| 1.0 + i as f32 * 0.01).collect();
            let b: Vec<f32> = (0..len).map(|i| i as f32 * 0.02 - 0.5).collect();
            let (mut rms0, mut layer0) = (vec![0.0; len], vec![0.0; len]);
            rms_norm(Isa::SCALAR, &x, &w, 1e-6, &mut rms0);
            layer_norm(Isa::SCALAR, &x, &w, &b, 1e-6, &mut layer0);
            let n = len as f64;
            let square = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
            let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
            let var = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
            for i in 0..len {
                let (x, w, b) = (f64::from(x[i]), f64::from(w[i]), f64::from(b[i]));
                let rms = x / (square + 1e-6).sqrt() * w;
                let layer = (x - mean) / (var + 1e-6).sqrt() * w + b;
                assert!((f64::from(rms0[i]) - rms).abs() < 1e-5);
                assert!((f64::from(layer0[i]) - layer).abs() < 1e-4);
            }
            for isa in Isa::available() {
                let (mut rms, mut layer) = (vec![0.0; len], vec![0.0; len]);
                rms_norm(isa, &x, &w, 1e-6, &mut rms);
                layer_norm(isa, &x, &w, &b, 1e-6, &mut layer);
                assert_eq!(rms, rms0, "{isa:?}");
                assert_eq!(layer, layer0, "{isa:?}");
            }
        }
    }
}
