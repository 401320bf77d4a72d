//! Products of several f32 rows with several others, in the orders of rules 2 and 6. Rows are
//! grouped only to load numbers once for several of them; a result never depends on the group.

use std::ops::Range;

use crate::fill;
use crate::lanes::{self, LANES, Lanes};
use crate::multiversion;
use crate::simd::Simd;

/// Keys or values that all rows meet before the next ones: they stay in the nearest cache where
/// they are short, in the next one where they are long.
const AT_ONCE: usize = 64;

/// Dots of `Q` queries with the `16 / Q` keys from `first` on, `PASS` keys at a time, times
/// `scale` once. Lane `q · 16/Q + k` is query `q` with key `first + k`; keys beyond the last give
/// its result again.
#[inline(always)]
fn dots_group<S: Simd, const Q: usize, const PASS: usize>(
    simd: S,
    queries: [&[f32]; Q],
    keys: &[&[f32]],
    first: usize,
    scale: f32,
) -> [f32; 16] {
    let per_query = 16 / Q;
    let mut sums = [simd.splat_f32(0.0); 16];
    for pass in (0..per_query).step_by(PASS) {
        let keys: [&[f32]; PASS] = fill!(&[][..]; |k| keys[(first + pass + k).min(keys.len() - 1)]);
        let len = queries[0].len();
        let queries: [&[f32]; Q] = fill!(&[][..]; |q| &queries[q][..len]);
        let keys: [&[f32]; PASS] = fill!(&[][..]; |k| &keys[k][..len]);
        let q_full: [&[[f32; LANES]]; Q] =
            fill!(&[][..]; |q| &queries[q].as_chunks::<LANES>().0[..len / LANES]);
        let k_full: [&[[f32; LANES]]; PASS] =
            fill!(&[][..]; |k| &keys[k].as_chunks::<LANES>().0[..len / LANES]);
        let mut acc: [[Lanes<S>; PASS]; Q] = [[lanes::zero(simd); PASS]; Q];
        for at in 0..len / LANES {
            let k: [Lanes<S>; PASS] =
                fill!(lanes::zero(simd); |k| lanes::load(simd, &k_full[k][at]));
            for (q, acc) in acc.iter_mut().enumerate() {
                let query = lanes::load(simd, &q_full[q][at]);
                for (acc, key) in acc.iter_mut().zip(k) {
                    *acc = lanes::fma(simd, query, key, *acc);
                }
            }
        }
        if !len.is_multiple_of(LANES) {
            let tail = len / LANES * LANES..;
            for (q, acc) in acc.iter_mut().enumerate() {
                let query = lanes::load(simd, &lanes::padded(&queries[q][tail.clone()]));
                for (acc, key) in acc.iter_mut().zip(keys) {
                    let key = lanes::load(simd, &lanes::padded(&key[tail.clone()]));
                    *acc = lanes::fma(simd, query, key, *acc);
                }
            }
        }
        for (q, acc) in acc.into_iter().enumerate() {
            for (k, [low, high]) in acc.into_iter().enumerate() {
                sums[q * per_query + pass + k] = simd.add_f32(low, high);
            }
        }
    }
    let mut out = [0.0; 16];
    let scaled = simd.mul_f32(simd.fold16(&sums), simd.splat_f32(scale));
    simd.store_f32(scaled, &mut out);
    out
}

/// Dots of the first `Q` queries with some of the keys; returns `Q`.
#[inline(always)]
fn dots_of<S: Simd, const Q: usize, const PASS: usize>(
    simd: S,
    queries: &[&[f32]],
    keys: &[&[f32]],
    some: Range<usize>,
    scale: f32,
    out: &mut [f32],
) -> usize {
    let per_query = 16 / Q;
    let group: [&[f32]; Q] = fill!(&[][..]; |q| queries[q]);
    for first in some.clone().step_by(per_query) {
        let count = per_query.min(some.end - first);
        let sums = dots_group::<S, Q, PASS>(simd, group, keys, first, scale);
        for q in 0..Q {
            let out = &mut out[q * keys.len() + first..][..count];
            out.copy_from_slice(&sums[q * per_query..][..count]);
        }
    }
    Q
}

#[inline(always)]
fn dots_kernel<S: Simd>(simd: S, queries: &[&[f32]], keys: &[&[f32]], scale: f32, out: &mut [f32]) {
    for start in (0..keys.len()).step_by(AT_ONCE) {
        let some = start..(start + AT_ONCE).min(keys.len());
        let mut at = 0;
        while at < queries.len() {
            let (queries, out) = (&queries[at..], &mut out[at * keys.len()..]);
            let some = some.clone();
            // Registers hold 16 sums of 32 lanes where vectors are wide, else 2.
            at += match (S::ROWS, queries.len()) {
                (8.., 4..) => dots_of::<S, 4, 2>(simd, queries, keys, some, scale, out),
                (8.., 2..) => dots_of::<S, 2, 4>(simd, queries, keys, some, scale, out),
                (8.., _) => dots_of::<S, 1, 8>(simd, queries, keys, some, scale, out),
                (_, 2..) => dots_of::<S, 2, 1>(simd, queries, keys, some, scale, out),
                _ => dots_of::<S, 1, 2>(simd, queries, keys, some, scale, out),
            };
        }
    }
}

/// Adds the weighted values to `V` vectors of columns from `column` on of `Q` rows of `out`.
#[inline(always)]
fn sum_columns<S: Simd, const Q: usize, const V: usize>(
    simd: S,
    weights: [&[f32]; Q],
    values: &[&[f32]],
    column: usize,
    width: usize,
    out: &mut [f32],
) {
    let zero = simd.splat_f32(0.0);
    let mut acc: [[S::F; V]; Q] = [[zero; V]; Q];
    for (q, acc) in acc.iter_mut().enumerate() {
        let from = out[q * width + column..][..V * 16].as_chunks::<16>().0;
        *acc = fill!(zero; |v| simd.load_f32(&from[v]));
    }
    let weights: [&[f32]; Q] = fill!(&[][..]; |q| &weights[q][..values.len()]);
    for (at, value) in values.iter().enumerate() {
        let from = value[column..column + V * 16].as_chunks::<16>().0;
        let value: [S::F; V] = fill!(zero; |v| simd.load_f32(&from[v]));
        for q in 0..Q {
            let weight = simd.splat_f32(weights[q][at]);
            for v in 0..V {
                acc[q][v] = simd.fma(weight, value[v], acc[q][v]);
            }
        }
    }
    for (q, acc) in acc.into_iter().enumerate() {
        let to = out[q * width + column..][..V * 16].as_chunks_mut::<16>().0;
        for (to, acc) in to.iter_mut().zip(acc) {
            simd.store_f32(acc, to);
        }
    }
}

#[inline(always)]
fn sums_of<S: Simd, const Q: usize, const V: usize>(
    simd: S,
    weights: [&[f32]; Q],
    values: &[&[f32]],
    width: usize,
    out: &mut [f32],
) {
    let mut column = 0;
    while width - column >= 16 * V {
        sum_columns::<S, Q, V>(simd, weights, values, column, width, out);
        column += 16 * V;
    }
    while width - column >= 16 {
        sum_columns::<S, Q, 1>(simd, weights, values, column, width, out);
        column += 16;
    }
    for column in column..width {
        for q in 0..Q {
            let acc = &mut out[q * width + column];
            for (weight, value) in weights[q].iter().zip(values) {
                *acc = weight.mul_add(value[column], *acc);
            }
        }
    }
}

#[inline(always)]
fn weighted_sums_kernel<S: Simd>(
    simd: S,
    weights: &[&[f32]],
    values: &[&[f32]],
    width: usize,
    out: &mut [f32],
) {
    assert!(weights.iter().all(|row| row.len() <= values.len()), "more weights than values");
    // Some values at a time, ascending: the order of each sum is the same.
    for start in (0..values.len()).step_by(AT_ONCE) {
        let some = start..(start + AT_ONCE).min(values.len());
        let mut at = 0;
        while at < weights.len() {
            let left = &weights[at..];
            let out = &mut out[at * width..];
            let some = some.clone();
            at += match (S::ROWS, left.len()) {
                (8.., 4..) => group_sums::<S, 4, 4>(simd, left, values, some, width, out),
                (8.., 2..) => group_sums::<S, 2, 4>(simd, left, values, some, width, out),
                (_, 2..) => group_sums::<S, 2, 2>(simd, left, values, some, width, out),
                _ => group_sums::<S, 1, 4>(simd, left, values, some, width, out),
            };
        }
    }
}

/// Sums of `Q` rows over some values: those that all of the rows take together, then those of each
/// alone.
#[inline(always)]
fn group_sums<S: Simd, const Q: usize, const V: usize>(
    simd: S,
    weights: &[&[f32]],
    values: &[&[f32]],
    some: Range<usize>,
    width: usize,
    out: &mut [f32],
) -> usize {
    let values = &values[some.clone()];
    let group: [&[f32]; Q] = fill!(&[][..]; |q| {
        let row = weights[q];
        &row[some.start.min(row.len())..some.end.min(row.len())]
    });
    let shared = group.iter().map(|row| row.len()).min().unwrap_or(0);
    sums_of::<S, Q, V>(simd, group, &values[..shared], width, out);
    for (row, out) in group.iter().zip(out.chunks_exact_mut(width)) {
        if row.len() > shared {
            let rest = &values[shared..row.len()];
            sums_of::<S, 1, V>(simd, [&row[shared..]], rest, width, out);
        }
    }
    Q
}

multiversion! {
    /// `out[q, k]` = the rule-2 dot of query `q` with key `k`, times the scale once. Keys may be
    /// longer than queries, which are of one length; the rest of them is not read.
    pub fn dots(isa, queries: &[&[f32]], keys: &[&[f32]], scale: f32, out: &mut [f32])
        => dots_kernel;
    /// Adds to `out[q, c]` (rows of `width`) the products `weights[q][k] · values[k][c]`, k
    /// ascending, one fused multiply-add each. A row of weights takes the first values, as many
    /// as it has weights; values may be longer than `width`.
    pub fn weighted_sums(
        isa, weights: &[&[f32]], values: &[&[f32]], width: usize, out: &mut [f32],
    ) => weighted_sums_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    fn rows(count: usize, len: usize, seed: usize) -> Vec<Vec<f32>> {
        let value = |row: usize, i: usize| ((row * 131 + i * 31 + seed) as f32).sin() * 2.0;
        (0..count).map(|row| (0..len).map(|i| value(row, i)).collect()).collect()
    }

    fn slices(rows: &[Vec<f32>]) -> Vec<&[f32]> {
        rows.iter().map(Vec::as_slice).collect()
    }

    #[test]
    fn dots_of_any_group_are_the_single_dots_at_every_level() {
        for (queries, keys, len) in [
            (1, 1, 5),
            (1, 17, 64),
            (2, 9, 33),
            (2, 64, 16),
            (3, 16, 128),
            (4, 5, 576),
            (5, 131, 33),
            (7, 37, 100),
            (9, 3, 1),
        ] {
            let (q, k) = (rows(queries, len, 1), rows(keys, len + 3, 2));
            for isa in Isa::available() {
                let mut out = vec![9.0; queries * keys];
                dots(isa, &slices(&q), &slices(&k), 0.37, &mut out);
                for (at, got) in out.iter().enumerate() {
                    let (query, key) = (&q[at / keys], &k[at % keys]);
                    let want = lanes::dot(Isa::SCALAR, query, &key[..len]) * 0.37;
                    assert_eq!(got.to_bits(), want.to_bits(), "{isa:?} {queries}x{keys}x{len}");
                }
            }
        }
    }

    #[test]
    fn weighted_sums_take_keys_in_ascending_order_at_every_level() {
        for (counts, width) in [
            (vec![37], 1),
            (vec![37, 36], 15),
            (vec![1, 2, 3, 4, 37], 64),
            (vec![37; 9], 100),
            (vec![5, 0, 9, 9, 2, 1], 576),
            (vec![130, 64, 65, 3, 0], 40),
            (vec![131; 9], 64),
        ] {
            let values = rows(131, width + 3, 3);
            let weights: Vec<Vec<f32>> =
                counts.iter().enumerate().map(|(q, n)| rows(1, *n, q).remove(0)).collect();
            let start = 0.25;
            for isa in Isa::available() {
                let mut out = vec![start; counts.len() * width];
                weighted_sums(isa, &slices(&weights), &slices(&values), width, &mut out);
                for (at, got) in out.iter().enumerate() {
                    let (row, column) = (&weights[at / width], at % width);
                    let want = row.iter().zip(&values).fold(start, |acc, (weight, value)| {
                        f32::mul_add(*weight, value[column], acc)
                    });
                    assert_eq!(got.to_bits(), want.to_bits(), "{isa:?} {counts:?} width {width}");
                }
            }
        }
    }

    #[test]
    fn no_keys_give_no_dots() {
        dots(Isa::detect(), &[&[1.0, 2.0]], &[], 1.0, &mut []);
    }
}
