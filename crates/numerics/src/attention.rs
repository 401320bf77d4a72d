//! Rule 6: the softmax-weighted sum over blocks of 512 keys, merged in ascending order, so that
//! prefill chunks and KV pages never move a block border.

use crate::Isa;
use crate::function::{self, exp};
use crate::lanes::{self, LANES};
use crate::multiversion;
use crate::simd::Simd;

/// Ranks of attended keys per block.
pub const KEY_BLOCK: usize = 512;

/// Running maximum and sum of one head's softmax over ascending blocks.
#[derive(Clone, Copy, Debug)]
pub struct Running {
    max: f32,
    sum: f32,
}

impl Default for Running {
    fn default() -> Self {
        Running { max: f32::NEG_INFINITY, sum: 0.0 }
    }
}

impl Running {
    /// Turns a block's scores into unnormalised weights in place; returns the block's maximum and
    /// the sum of its weights. A score that is not finite is an error with its rank in the block.
    pub fn weigh(isa: Isa, scores: &mut [f32]) -> Result<(f32, f32), usize> {
        if let Some(rank) = function::first_non_finite(isa, scores) {
            return Err(rank);
        }
        let max = maximum(isa, scores);
        function::exp_minus(isa, scores, max);
        Ok((max, lanes::sum(isa, scores)))
    }

    /// Merges a block (maximum, sum, unnormalised output) into the running output.
    pub fn merge(&mut self, isa: Isa, block: (f32, f32), block_out: &[f32], out: &mut [f32]) {
        let (block_max, block_sum) = block;
        let max = if block_max > self.max { block_max } else { self.max };
        let keep = exp(self.max - max);
        let take = exp(block_max - max);
        self.sum = block_sum.mul_add(take, self.sum * keep);
        self.max = max;
        merge_rows(isa, block_out, take, keep, out);
    }

    /// Divides the running output by the sum.
    pub fn finish(self, isa: Isa, out: &mut [f32]) {
        divide(isa, out, self.sum);
    }
}

/// Keys of [`index_scores`] that pass together.
const INDEX_KEYS: usize = 16;

#[inline(always)]
fn index_scores_kernel<S: Simd>(_simd: S, weights: &[f32], by_head: &[f32], out: &mut [f32]) {
    let keys = out.len();
    let mut first = 0;
    while first < keys {
        let count = INDEX_KEYS.min(keys - first);
        // Lane `h mod 32` of each key, as rule 2 sums over heads.
        let mut acc = [[0.0f32; INDEX_KEYS]; LANES];
        for (head, weight) in weights.iter().enumerate() {
            let scores = &by_head[head * keys + first..][..count];
            let mut kept = [0.0; INDEX_KEYS];
            for (kept, raw) in kept.iter_mut().zip(scores) {
                // Not a maximum: a NaN must stay one.
                *kept = if *raw > 0.0 { *raw } else { *raw * 0.0 };
            }
            for (acc, kept) in acc[head % LANES].iter_mut().zip(kept) {
                *acc = weight.mul_add(kept, *acc);
            }
        }
        for half in [16, 8, 4, 2, 1] {
            for lane in 0..half {
                let (low, high) = acc.split_at_mut(half);
                for (low, high) in low[lane].iter_mut().zip(high[lane]) {
                    *low += high;
                }
            }
        }
        out[first..first + count].copy_from_slice(&acc[0][..count]);
        first += count;
    }
}

#[inline(always)]
fn maximum_kernel<S: Simd>(_simd: S, scores: &[f32]) -> f32 {
    let mut most = [f32::NEG_INFINITY; 16];
    let (full, tail) = scores.as_chunks::<16>();
    for scores in full {
        for (most, score) in most.iter_mut().zip(scores) {
            *most = if *score > *most { *score } else { *most };
        }
    }
    let mut max = f32::NEG_INFINITY;
    for score in most.iter().chain(tail) {
        max = if *score > max { *score } else { max };
    }
    max
}

#[inline(always)]
fn merge_kernel<S: Simd>(_simd: S, block_out: &[f32], take: f32, keep: f32, out: &mut [f32]) {
    for (out, block) in out.iter_mut().zip(block_out) {
        *out = block.mul_add(take, *out * keep);
    }
}

#[inline(always)]
fn divide_kernel<S: Simd>(_simd: S, out: &mut [f32], by: f32) {
    for out in out {
        *out /= by;
    }
}

multiversion! {
    /// Scores of an index: `out[k]` = the rule-2 dot over heads of `weights` with
    /// `max(by_head[h, k], 0)`; a score that is not a number stays one.
    pub fn index_scores(isa, weights: &[f32], by_head: &[f32], out: &mut [f32])
        => index_scores_kernel;
    /// The largest of finite scores; of zeros either, which changes no weight.
    fn maximum(isa, scores: &[f32]) -> f32 => maximum_kernel;
    fn merge_rows(isa, block_out: &[f32], take: f32, keep: f32, out: &mut [f32]) => merge_kernel;
    fn divide(isa, out: &mut [f32], by: f32) => divide_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::products;

    #[test]
    fn blocks_merge_to_the_softmax_average() {
        let n = 3 * KEY_BLOCK + 17;
        let scores: Vec<f32> = (0..n).map(|i| ((i * 7919) % 1000) as f32 * 0.02 - 10.0).collect();
        let values: Vec<f32> = (0..n).map(|i| (i as f32 * 0.11).sin()).collect();
        let mut bits = None;
        for isa in Isa::available() {
            let (mut running, mut out) = (Running::default(), [0.0]);
            for (scores, values) in scores.chunks(KEY_BLOCK).zip(values.chunks(KEY_BLOCK)) {
                let mut weights = scores.to_vec();
                let block = Running::weigh(isa, &mut weights).unwrap();
                let mut part = [0.0];
                let rows: Vec<&[f32]> = values.chunks(1).collect();
                products::weighted_sums(isa, &[&weights], &rows, 1, &mut part);
                running.merge(isa, block, &part, &mut out);
            }
            running.finish(isa, &mut out);
            let weights: Vec<f64> = scores.iter().map(|s| f64::from(*s).exp()).collect();
            let total: f64 = weights.iter().sum();
            let want: f64 =
                weights.iter().zip(&values).map(|(w, v)| w * f64::from(*v)).sum::<f64>() / total;
            assert!((f64::from(out[0]) - want).abs() < 1e-5);
            assert_eq!(*bits.get_or_insert(out[0].to_bits()), out[0].to_bits(), "{isa:?}");
        }
    }

    #[test]
    fn index_scores_are_rule_2_dots_over_heads_at_every_level() {
        for (heads, keys) in [(1, 1), (2, 40), (32, 17), (33, 16), (40, 5)] {
            let weights: Vec<f32> = (0..heads).map(|h| (h as f32 * 0.7).cos()).collect();
            let scores: Vec<f32> = (0..heads * keys).map(|i| (i as f32 * 1.3).sin()).collect();
            for isa in Isa::available() {
                let mut out = vec![9.0; keys];
                index_scores(isa, &weights, &scores, &mut out);
                for (key, got) in out.iter().enumerate() {
                    let kept: Vec<f32> = (0..heads)
                        .map(|h| scores[h * keys + key])
                        .map(|raw| if raw > 0.0 { raw } else { raw * 0.0 })
                        .collect();
                    let want = lanes::dot(Isa::SCALAR, &weights, &kept);
                    assert_eq!(got.to_bits(), want.to_bits(), "{isa:?} {heads}x{keys}");
                }
            }
        }
        let mut out = [0.0; 2];
        index_scores(Isa::detect(), &[0.5], &[f32::NAN, 1.0], &mut out);
        assert!(out[0].is_nan() && out[1] == 0.5);
    }

    #[test]
    fn one_score_that_overflowed_is_an_error_not_a_masked_key() {
        for bad in [f32::NEG_INFINITY, f32::INFINITY, f32::NAN] {
            let mut scores = [0.5, -1.0, bad, 2.0];
            assert_eq!(Running::weigh(Isa::detect(), &mut scores), Err(2));
        }
    }
}
