//! The seam between a layer and whoever computes its routed experts.

use std::sync::Arc;

use formats::Input;
use numerics::{Buf, Compute, NumericError, Scratch};

use crate::load::LoadError;

/// Experts that need no allocation: as many as one token is routed to.
pub const FEW_EXPERTS: usize = 16;

/// One choice of the router: an expert and the weight of its output.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Route {
    /// Index of the expert in its layer.
    pub expert: u32,
    /// Weight of its output.
    pub weight: f32,
}

/// The rows of a layer and the experts that serve them: all that the router chose, or a part.
pub struct RoutedBatch<'a> {
    /// The layer's input.
    pub input: &'a Input<'a>,
    /// Each expert once, ascending.
    experts: Buf<u32>,
    /// Where the rows of each expert end.
    ends: Buf<u32>,
    /// Rows of the batch, expert by expert, ascending.
    rows: Buf<u32>,
    /// Weight of the expert's output for each of them.
    weights: Buf<f32>,
}

/// The rows that one expert serves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertRows<'a> {
    /// The expert.
    pub expert: u32,
    /// Rows of the batch, ascending.
    pub rows: &'a [u32],
    /// Weight of the expert's output for each of them.
    pub weights: &'a [f32],
}

impl<'a> RoutedBatch<'a> {
    /// The batch of a router's choices, `top_k` per row, of `experts` experts.
    pub fn new(
        scratch: &Scratch,
        input: &'a Input<'a>,
        routes: &[Route],
        top_k: usize,
        experts: usize,
    ) -> RoutedBatch<'a> {
        // Where the rows of each expert begin, had it all of them.
        let mut next = scratch.zeroed::<u32>(experts);
        for route in routes {
            next[route.expert as usize] += 1;
        }
        let used = next.iter().filter(|count| **count > 0).count();
        let (mut list, mut ends) = (scratch.zeroed(used), scratch.zeroed(used));
        let (mut at, mut end) = (0, 0);
        for (expert, count) in next.iter_mut().enumerate() {
            let start = end;
            end += *count;
            if *count > 0 {
                (list[at], ends[at]) = (expert as u32, end);
                at += 1;
            }
            *count = start;
        }
        let mut rows = scratch.zeroed::<u32>(routes.len());
        let mut weights = scratch.zeroed::<f32>(routes.len());
        for (at, route) in routes.iter().enumerate() {
            let slot = &mut next[route.expert as usize];
            rows[*slot as usize] = (at / top_k) as u32;
            weights[*slot as usize] = route.weight;
            *slot += 1;
        }
        RoutedBatch { input, experts: list, ends, rows, weights }
    }

    /// The batch of experts that each say which rows they get, both ascending; outputs for which
    /// there is no weight count once.
    pub fn of<'r>(
        scratch: &Scratch,
        input: &'a Input<'a>,
        items: impl Iterator<Item = (u32, &'r [u16], &'r [f32])> + Clone,
    ) -> RoutedBatch<'a> {
        let total = items.clone().map(|(_, rows, _)| rows.len()).sum();
        let count = items.clone().count();
        let (mut experts, mut ends) = (scratch.zeroed(count), scratch.zeroed(count));
        let (mut rows, mut weights) = (scratch.zeroed(total), scratch.zeroed(total));
        let mut end = 0;
        for (at, (expert, rows_of, weights_of)) in items.enumerate() {
            for (row, number) in rows_of.iter().enumerate() {
                rows[end] = u32::from(*number);
                weights[end] = weights_of.get(row).copied().unwrap_or(1.0);
                end += 1;
            }
            (experts[at], ends[at]) = (expert, end as u32);
        }
        RoutedBatch { input, experts, ends, rows, weights }
    }

    /// The same rows with some of the experts only: those of which `keep` says so, asked in order.
    pub fn part(&self, scratch: &Scratch, mut keep: impl FnMut(u32) -> bool) -> RoutedBatch<'a> {
        let mut kept = scratch.zeroed::<u32>(self.experts.len());
        let (mut count, mut total) = (0, 0);
        for (at, expert) in self.experts.iter().enumerate() {
            if keep(*expert) {
                kept[count] = at as u32;
                count += 1;
                total += self.rows_of(at).rows.len();
            }
        }
        let (mut experts, mut ends) = (scratch.zeroed(count), scratch.zeroed(count));
        let (mut rows, mut weights) = (scratch.zeroed(total), scratch.zeroed(total));
        let mut end = 0;
        for (to, at) in kept[..count].iter().enumerate() {
            let of_expert = self.rows_of(*at as usize);
            let range = end..end + of_expert.rows.len();
            rows[range.clone()].copy_from_slice(of_expert.rows);
            weights[range.clone()].copy_from_slice(of_expert.weights);
            end = range.end;
            (experts[to], ends[to]) = (of_expert.expert, end as u32);
        }
        RoutedBatch { input: self.input, experts, ends, rows, weights }
    }

    /// The experts, ascending.
    pub fn experts(&self) -> &[u32] {
        &self.experts
    }

    /// The rows of expert `at` of [`RoutedBatch::experts`].
    pub fn rows_of(&self, at: usize) -> ExpertRows<'_> {
        let start = if at == 0 { 0 } else { self.ends[at - 1] as usize };
        let range = start..self.ends[at] as usize;
        let expert = self.experts[at];
        ExpertRows { expert, rows: &self.rows[range.clone()], weights: &self.weights[range] }
    }

    /// Every expert with its rows.
    pub fn iter(&self) -> impl Iterator<Item = ExpertRows<'_>> {
        (0..self.experts.len()).map(|at| self.rows_of(at))
    }
}

/// Why a layer's experts could not be computed. The request fails; the process lives.
#[derive(Debug, thiserror::Error)]
pub enum ExpertError {
    /// An expert's bytes could not be had.
    #[error("layer {layer}, expert {expert}: {source}")]
    Load {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: u32,
        /// What happened.
        #[source]
        source: Arc<LoadError>,
    },
    /// This machine does not hold the expert.
    #[error("layer {layer}, expert {expert}: it is not held here")]
    NotHeld {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: u32,
    },
    /// A value went out of range.
    #[error("layer {layer}, expert {expert}: {source}")]
    Numeric {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: u32,
        /// What happened.
        #[source]
        source: NumericError,
    },
}

/// What a backend did, for figures.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpertStats {
    /// Experts found in memory, per MoE call and distinct expert; those that were there because
    /// they had been guessed not counted.
    pub hits: u64,
    /// Experts found in memory because they had been guessed.
    pub guessed_hits: u64,
    /// Experts that had to be read.
    pub misses: u64,
    /// Bytes read from files.
    pub bytes_read: u64,
    /// Bytes of experts in memory.
    pub cached_bytes: u64,
    /// Seconds that computation waited for reads.
    pub wait_s: f64,
    /// Seconds that computation waited for other machines.
    pub remote_s: f64,
    /// Seconds in which a read was queued or under way that somebody waited for.
    pub busy_s: f64,
    /// Seconds in which any read was queued or under way, guessed ones included.
    pub known_s: f64,
}

/// Computes routed experts.
pub trait ExpertBackend: Send + Sync {
    /// Adds the weighted outputs of the batch's experts to `sum`, `[rows, hidden]` on the integer
    /// grid of the combine. After an error the sum is of no use. `meanwhile` is called once, when
    /// everything has been asked for and before anything is waited for.
    fn compute(
        &self,
        compute: &Compute,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sum: &mut [i64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExpertError>;

    /// Whether it is worth telling which experts may be needed soon.
    fn wants_guesses(&self) -> bool {
        false
    }

    /// Tells which experts of a layer may be needed soon, the most likely first. Never changes what
    /// is computed.
    fn guess(&self, _layer: usize, _experts: &[u32]) {}

    /// What was done so far.
    fn stats(&self) -> ExpertStats;
}

impl<B: ExpertBackend> ExpertBackend for Arc<B> {
    fn compute(
        &self,
        compute: &Compute,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sum: &mut [i64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExpertError> {
        (**self).compute(compute, layer, batch, sum, meanwhile)
    }

    fn wants_guesses(&self) -> bool {
        (**self).wants_guesses()
    }

    fn guess(&self, layer: usize, experts: &[u32]) {
        (**self).guess(layer, experts);
    }

    fn stats(&self) -> ExpertStats {
        (**self).stats()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_union_lists_each_expert_once_with_its_rows_ascending() {
        let x = [0.0; 6];
        let input = Input::new("x", &x[..], 2);
        let route = |expert, weight| Route { expert, weight };
        let routes = [
            route(7, 0.1),
            route(2, 0.2),
            route(2, 0.3),
            route(7, 0.4),
            route(5, 0.5),
            route(2, 0.6),
        ];
        let batch = RoutedBatch::new(&Scratch::default(), &input, &routes, 2, 9);
        let got: Vec<_> =
            batch.iter().map(|e| (e.expert, e.rows.to_vec(), e.weights.to_vec())).collect();
        assert_eq!(
            got,
            [
                (2, vec![0, 1, 2], vec![0.2, 0.3, 0.6]),
                (5, vec![2], vec![0.5]),
                (7, vec![0, 1], vec![0.1, 0.4])
            ]
        );
        assert_eq!(batch.experts(), [2, 5, 7]);
        let part = batch.part(&Scratch::default(), |expert| expert != 5);
        let got: Vec<_> = part.iter().map(|e| (e.expert, e.rows, e.weights)).collect();
        let want = [(2, &[0, 1, 2][..], &[0.2, 0.3, 0.6][..]), (7, &[0, 1], &[0.1, 0.4])];
        assert_eq!(got, want);
        assert_eq!(batch.part(&Scratch::default(), |_| false).experts(), [0; 0]);
    }
}
