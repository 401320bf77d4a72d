//! A sparse feed-forward layer: router, routed experts through the backend, shared experts.

use container::{Config, MoeConfig, Role, Scoring};
use experts::{ExpertBackend, Route, RoutedBatch};
use formats::{Input, QTensor};
use numerics::{Compute, combine, function, lanes, topk};

use crate::block::{check_finite, linear};
use crate::error::ModelError;
use crate::mlp;
use crate::weights::{DenseLoad, Ffn};

/// Added to the sum of sigmoid weights before they are divided by it, as the reference does.
const SIGMOID_SUM_EPS: f32 = 1e-20;

/// Router and shared experts of one layer.
pub struct Moe {
    config: MoeConfig,
    router: QTensor,
    /// Added to sigmoid scores for the choice only.
    bias: Option<Vec<f32>>,
    shared: Option<Ffn>,
}

impl Moe {
    /// Loads the router and shared experts of a layer.
    pub fn load(
        load: &mut DenseLoad<'_>,
        config: &Config,
        layer: usize,
    ) -> Result<Moe, ModelError> {
        let at = Some(layer);
        let router = load.matrix(Role::Router, at)?;
        let bias = match config.moe.scoring {
            Scoring::Sigmoid => Some(load.vector(Role::RouterBias, at)?),
            Scoring::Softmax => None,
        };
        let shared = if config.moe.shared_experts > 0 {
            Some(load.ffn([Role::SharedGate, Role::SharedUp, Role::SharedDown], at)?)
        } else {
            None
        };
        Ok(Moe { config: config.moe.clone(), router, bias, shared })
    }

    /// The layer's output for every row, `[rows, hidden]`.
    pub fn forward(
        &self,
        compute: &Compute,
        layer: usize,
        x: &Input<'_>,
        experts: &dyn ExpertBackend,
    ) -> Result<Vec<f32>, ModelError> {
        let numeric = ModelError::at(layer);
        let count = self.config.experts;
        let mut logits = linear(compute, &self.router, x).map_err(&numeric)?;
        check_finite(compute, "router logits", &logits, count).map_err(&numeric)?;
        let mut routes = Vec::with_capacity(x.rows() * self.config.top_k);
        for logits in logits.chunks_exact_mut(count) {
            self.route(compute, logits, &mut routes);
        }
        let batch = RoutedBatch::new(x, &routes, self.config.top_k);
        let mut sum = vec![0; x.rows() * x.cols()];
        experts.compute(compute, layer, &batch, &mut sum)?;
        let mut out = vec![0.0; sum.len()];
        combine::finish(compute.isa, &sum, &mut out);
        if let Some(shared) = &self.shared {
            let shared = mlp::forward(compute, shared, x).map_err(&numeric)?;
            function::add(compute.isa, &mut out, &shared);
        }
        Ok(out)
    }

    /// Chooses the experts of one row, best first. `logits` become scores.
    fn route(&self, compute: &Compute, logits: &mut [f32], routes: &mut Vec<Route>) {
        let config = &self.config;
        let scores = logits;
        match config.scoring {
            Scoring::Sigmoid => function::sigmoid_all(compute.isa, scores),
            Scoring::Softmax => {
                let max = scores.iter().fold(f32::NEG_INFINITY, |m, &s| if s > m { s } else { m });
                function::exp_minus(compute.isa, scores, max);
                let sum = lanes::sum(compute.isa, scores);
                scores.iter_mut().for_each(|score| *score /= sum);
            }
        }
        let chosen = match &self.bias {
            None => topk::top_k(scores, config.top_k),
            Some(bias) => {
                let choice: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
                let candidates = candidates(&choice, config.n_group, config.topk_group);
                topk::top_k_of(&choice, candidates, config.top_k)
            }
        };
        let mut weights: Vec<f32> = chosen.iter().map(|expert| scores[*expert as usize]).collect();
        if config.norm_topk_prob {
            let mut sum = lanes::sum(compute.isa, &weights);
            if config.scoring == Scoring::Sigmoid {
                sum += SIGMOID_SUM_EPS;
            }
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        if config.scoring == Scoring::Sigmoid {
            weights.iter_mut().for_each(|weight| *weight *= config.routed_scaling);
        }
        let routed = chosen.into_iter().zip(weights);
        routes.extend(routed.map(|(expert, weight)| Route { expert, weight }));
    }
}

/// Experts of the best `keep` of `groups` groups; a group counts by the sum of its two best.
fn candidates(choice: &[f32], groups: usize, keep: usize) -> Vec<u32> {
    let size = choice.len() / groups;
    if groups == 1 || keep >= groups {
        return (0..choice.len() as u32).collect();
    }
    let best_two = |group: &[f32]| {
        let best = topk::top_k(group, 2);
        best.iter().map(|at| group[*at as usize]).sum::<f32>()
    };
    let scores: Vec<f32> = choice.chunks_exact(size).map(best_two).collect();
    let mut kept = topk::top_k(&scores, keep);
    kept.sort_unstable();
    kept.into_iter().flat_map(|group| group * size as u32..(group + 1) * size as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_experts_of_the_best_groups_are_candidates() {
        let choice = [0.9, 0.0, 0.5, 0.5, 0.6, 0.2, 0.1, 0.1];
        assert_eq!(candidates(&choice, 4, 2), [0, 1, 2, 3]);
        assert_eq!(candidates(&choice, 4, 1), [2, 3]);
        assert_eq!(candidates(&choice, 1, 1).len(), 8);
    }
}
