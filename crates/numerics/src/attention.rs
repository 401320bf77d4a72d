//! Rule 6: the softmax-weighted sum over blocks of 512 keys, merged in ascending order, so that
//! prefill chunks and KV pages never move a block border.

use crate::Isa;
use crate::function::{self, exp};
use crate::lanes;
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
        let max = scores.iter().fold(f32::NEG_INFINITY, |m, &s| if s > m { s } else { m });
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

/// Columns of the output kept in registers while the keys pass.
const COLUMNS: usize = 64;

#[inline(always)]
fn scores_kernel<S: Simd>(simd: S, query: &[f32], keys: &[&[f32]], scale: f32, out: &mut [f32]) {
    for (out, key) in out.iter_mut().zip(keys) {
        *out = lanes::dot_in(simd, query, key) * scale;
    }
}

#[inline(always)]
fn weighted_sum_kernel<S: Simd>(simd: S, weights: &[f32], values: &[&[f32]], out: &mut [f32]) {
    let full = out.len() / COLUMNS * COLUMNS;
    for start in (0..full).step_by(COLUMNS) {
        let mut acc = [simd.splat_f32(0.0); COLUMNS / 16];
        for (weight, value) in weights.iter().zip(values) {
            let weight = simd.splat_f32(*weight);
            let columns = value[start..start + COLUMNS].as_chunks::<16>().0;
            for (acc, column) in acc.iter_mut().zip(columns) {
                *acc = simd.fma(weight, simd.load_f32(column), *acc);
            }
        }
        let columns = out[start..start + COLUMNS].as_chunks_mut::<16>().0;
        for (acc, column) in acc.into_iter().zip(columns) {
            simd.store_f32(acc, column);
        }
    }
    for (column, out) in out.iter_mut().enumerate().skip(full) {
        let mut acc = 0.0;
        for (weight, value) in weights.iter().zip(values) {
            acc = f32::mul_add(*weight, value[column], acc);
        }
        *out = acc;
    }
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
    /// `out[k]` = the rule-2 dot of the query with key `k`, times the scale once.
    pub fn scores(isa, query: &[f32], keys: &[&[f32]], scale: f32, out: &mut [f32])
        => scores_kernel;
    /// `out[c]` = sum over keys, ascending, of `weights[k] · values[k][c]`, one fused
    /// multiply-add each. Values may be longer than `out`.
    pub fn weighted_sum(isa, weights: &[f32], values: &[&[f32]], out: &mut [f32])
        => weighted_sum_kernel;
    fn merge_rows(isa, block_out: &[f32], take: f32, keep: f32, out: &mut [f32]) => merge_kernel;
    fn divide(isa, out: &mut [f32], by: f32) => divide_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;

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
                weighted_sum(isa, &weights, &rows, &mut part);
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
    fn weighted_sums_take_keys_in_ascending_order_at_every_level() {
        let weights: Vec<f32> = (0..37).map(|i| (i as f32 * 0.7).cos()).collect();
        for width in [1, 15, 64, 100, 576] {
            let rows: Vec<Vec<f32>> = (0..37)
                .map(|k| (0..width + 3).map(|c| ((k * 31 + c) as f32).sin()).collect())
                .collect();
            let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            let want: Vec<f32> = (0..width)
                .map(|c| {
                    weights.iter().zip(&rows).fold(0.0, |acc, (w, r)| f32::mul_add(*w, r[c], acc))
                })
                .collect();
            for isa in Isa::available() {
                let mut out = vec![9.0; width];
                weighted_sum(isa, &weights, &rows, &mut out);
                assert_eq!(out, want, "{isa:?} width {width}");
            }
        }
    }

    #[test]
    fn one_score_that_overflowed_is_an_error_not_a_masked_key() {
        for bad in [f32::NEG_INFINITY, f32::INFINITY, f32::NAN] {
            let mut scores = [0.5, -1.0, bad, 2.0];
            assert_eq!(Running::weigh(Isa::detect(), &mut scores), Err(2));
        }
    }
}
