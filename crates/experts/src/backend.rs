//! The seam between a layer and whoever computes its routed experts.

use std::sync::Arc;

use formats::Input;
use numerics::{Compute, NumericError};

use crate::load::LoadError;

/// One choice of the router: an expert and the weight of its output.
#[derive(Clone, Copy, PartialEq, Debug)]
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
    /// Each expert once, ascending, with its rows.
    pub experts: Vec<ExpertRows>,
}

/// The rows that one expert serves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpertRows {
    /// The expert.
    pub expert: u32,
    /// Rows of the batch, ascending.
    pub rows: Vec<u32>,
    /// Weight of the expert's output for each of them.
    pub weights: Vec<f32>,
}

impl<'a> RoutedBatch<'a> {
    /// The batch of a router's choices, `top_k` per row.
    pub fn new(input: &'a Input<'a>, routes: &[Route], top_k: usize) -> RoutedBatch<'a> {
        let mut order: Vec<usize> = (0..routes.len()).collect();
        order.sort_by_key(|&at| (routes[at].expert, at));
        let mut experts: Vec<ExpertRows> = Vec::new();
        for at in order {
            let route = routes[at];
            if experts.last().is_none_or(|last| last.expert != route.expert) {
                experts.push(ExpertRows { expert: route.expert, ..ExpertRows::default() });
            }
            if let Some(last) = experts.last_mut() {
                last.rows.push((at / top_k) as u32);
                last.weights.push(route.weight);
            }
        }
        RoutedBatch { input, experts }
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
    /// Experts found in memory, per MoE call and distinct expert.
    pub hits: u64,
    /// Experts that had to be read.
    pub misses: u64,
    /// Bytes read from files.
    pub bytes_read: u64,
    /// Bytes of experts in memory.
    pub cached_bytes: u64,
    /// Seconds that computation waited for reads.
    pub wait_s: f64,
}

/// Computes routed experts.
pub trait ExpertBackend: Send + Sync {
    /// Adds the weighted outputs of the batch's experts to `sum`, `[rows, hidden]` on the integer
    /// grid of the combine. After an error the sum is of no use.
    fn compute(
        &self,
        compute: &Compute,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sum: &mut [i64],
    ) -> Result<(), ExpertError>;

    /// What was done so far.
    fn stats(&self) -> ExpertStats;
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
        let batch = RoutedBatch::new(&input, &routes, 2);
        let want = |expert, rows: &[u32], weights: &[f32]| ExpertRows {
            expert,
            rows: rows.to_vec(),
            weights: weights.to_vec(),
        };
        assert_eq!(
            batch.experts,
            [
                want(2, &[0, 1, 2], &[0.2, 0.3, 0.6]),
                want(5, &[2], &[0.5]),
                want(7, &[0, 1], &[0.1, 0.4])
            ]
        );
    }
}
