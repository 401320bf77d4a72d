//! A sparse feed-forward layer: router, routed experts through the backend, shared experts.

use std::time::Duration;

use container::{Config, MoeConfig, Role, Scoring};
use experts::{FEW_EXPERTS, Route, RoutedBatch};
use formats::{Input, QTensor};
use numerics::team::rows_mut;
use numerics::{Buf, Compute, NumericError, combine, function, lanes, topk};
use smallvec::SmallVec;

use crate::block::{add_rows, check_finite, linear, rms_rows};
use crate::error::ModelError;
use crate::family::Step;
use crate::mlp;
use crate::profile::Activity;
use crate::weights::{DenseLoad, Ffn};

/// Added to the sum of sigmoid weights before they are divided by it, as the reference does.
const SIGMOID_SUM_EPS: f32 = 1e-20;

/// Rows that one task of the thread team routes, at least.
const ROUTE_GRAIN: usize = 8;

/// Rows for which the next layer's experts are guessed: with more, nearly all are needed anyway.
const GUESS_ROWS_MAX: usize = 8;

type Routes = SmallVec<[Route; FEW_EXPERTS]>;

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

    /// What the router chooses for every row, `top_k` each, best first.
    fn routes(&self, compute: &Compute, x: &Input<'_>) -> Result<Routes, NumericError> {
        let (count, top_k) = (self.config.experts, self.config.top_k);
        let mut logits = linear(compute, &self.router, x)?;
        check_finite(compute, "router logits", &logits, count)?;
        let mut routes = Routes::from_elem(Route::default(), x.rows() * top_k);
        let parts = (rows_mut(&mut logits, count), rows_mut(&mut routes, top_k));
        compute.team.rows(x.rows(), ROUTE_GRAIN, parts, |_, (logits, routes)| {
            for (logits, routes) in
                logits.chunks_exact_mut(count).zip(routes.chunks_exact_mut(top_k))
            {
                self.route(compute, logits, routes);
            }
        });
        Ok(routes)
    }

    /// The layer's output for every row, `[rows, hidden]`. `x` is the normed residual stream.
    pub fn forward(
        &self,
        step: &Step<'_>,
        x: &Input<'_>,
        residual: &[f32],
    ) -> Result<Buf<f32>, ModelError> {
        let Step { compute, layer, profile, experts, .. } = *step;
        profile.enter(Activity::Router);
        let numeric = ModelError::at(layer);
        let (count, top_k) = (self.config.experts, self.config.top_k);
        let routes = self.routes(compute, x).map_err(&numeric)?;
        if let Some(observer) = step.routes {
            observer.routed(layer, &routes, top_k);
        }
        let batch = RoutedBatch::new(&compute.scratch, x, &routes, top_k, count);
        let mut sum = compute.scratch.filled_later(x.rows() * x.cols());
        let parts = rows_mut(&mut sum, x.cols());
        compute.team.rows(x.rows(), ROUTE_GRAIN, parts, |_, sum| sum.fill(0));
        profile.enter(Activity::ExpertsLocal);
        let waited_s = || match profile.is_running() {
            true => [experts.stats().wait_s, experts.stats().remote_s],
            false => [0.0; 2],
        };
        let before_s = waited_s();
        let mut shared = Ok(None);
        let mut meanwhile = || {
            guess_next(step, residual);
            if let Some(ffn) = &self.shared {
                shared = mlp::forward(compute, ffn, x).map(Some);
            }
        };
        experts.compute(compute, layer, &batch, &mut sum, &mut meanwhile)?;
        let waits = [Activity::DiskWait, Activity::ExpertsRemote];
        for (what, (after_s, before_s)) in
            waits.into_iter().zip(waited_s().into_iter().zip(before_s))
        {
            let waited = Duration::from_secs_f64((after_s - before_s).max(0.0));
            profile.shift(Activity::ExpertsLocal, what, waited);
        }
        let mut out = compute.scratch.filled_later(sum.len());
        let parts = rows_mut(&mut out, x.cols());
        compute.team.rows(x.rows(), ROUTE_GRAIN, parts, |rows, out| {
            combine::finish(compute.isa, &sum[rows.start * x.cols()..rows.end * x.cols()], out);
        });
        if let Some(shared) = shared.map_err(&numeric)? {
            add_rows(compute, &mut out, &shared, x.cols());
        }
        profile.enter(Activity::Other);
        Ok(out)
    }

    /// Chooses the experts of one row, best first. `logits` become scores.
    fn route(&self, compute: &Compute, logits: &mut [f32], routes: &mut [Route]) {
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
        let mut chosen = [0; combine::TOP_K_MAX];
        let chosen = &mut chosen[..config.top_k];
        match &self.bias {
            None => {
                topk::best_of(scores, 0..scores.len() as u32, chosen);
            }
            Some(bias) => {
                let mut choice = compute.scratch.copy(scores);
                function::add(compute.isa, &mut choice, bias);
                choose(&choice, config.n_group, config.topk_group, chosen);
            }
        }
        let mut weights = [0.0; combine::TOP_K_MAX];
        let weights = &mut weights[..config.top_k];
        for (weight, expert) in weights.iter_mut().zip(&*chosen) {
            *weight = scores[*expert as usize];
        }
        if config.norm_topk_prob {
            let mut sum = lanes::sum(compute.isa, weights);
            if config.scoring == Scoring::Sigmoid {
                sum += SIGMOID_SUM_EPS;
            }
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        if config.scoring == Scoring::Sigmoid {
            weights.iter_mut().for_each(|weight| *weight *= config.routed_scaling);
        }
        for (route, (expert, weight)) in routes.iter_mut().zip(chosen.iter().zip(&*weights)) {
            *route = Route { expert: *expert, weight: *weight };
        }
    }
}

/// Tells the backend which experts the next layer would choose if this one changed nothing.
fn guess_next(step: &Step<'_>, residual: &[f32]) {
    let Step { compute, experts, .. } = *step;
    let Some(next) = step.next.filter(|_| experts.wants_guesses()) else { return };
    if step.rows.len() > GUESS_ROWS_MAX {
        return;
    }
    let normed = rms_rows(compute, residual, next.norm, next.eps);
    let input = Input::new("guessed input", normed, next.norm.len());
    // What cannot be guessed is found out when it is computed.
    let Ok(routes) = next.moe.routes(compute, &input) else { return };
    let mut guesses: SmallVec<[u32; FEW_EXPERTS]> = SmallVec::new();
    for rank in 0..next.moe.config.top_k {
        for row in routes.chunks_exact(next.moe.config.top_k) {
            if !guesses.contains(&row[rank].expert) {
                guesses.push(row[rank].expert);
            }
        }
    }
    experts.guess(next.layer, &guesses);
}

/// The best experts of the best `keep` of `groups` groups; a group counts by the sum of its two
/// best.
fn choose(choice: &[f32], groups: usize, keep: usize, chosen: &mut [u32]) {
    if groups == 1 || keep >= groups {
        topk::best_of(choice, 0..choice.len() as u32, chosen);
        return;
    }
    let size = choice.len() / groups;
    let best_two = |group: &[f32]| {
        let mut best = [0; 2];
        let found = topk::best_of(group, 0..group.len() as u32, &mut best);
        best[..found].iter().map(|at| group[*at as usize]).sum::<f32>()
    };
    let scores: SmallVec<[f32; FEW_EXPERTS]> = choice.chunks_exact(size).map(best_two).collect();
    let mut kept: SmallVec<[u32; FEW_EXPERTS]> = SmallVec::from_elem(0, keep);
    let found = topk::best_of(&scores, 0..groups as u32, &mut kept);
    kept.truncate(found);
    kept.sort_unstable();
    let size = size as u32;
    let candidates = kept.into_iter().flat_map(|group| group * size..(group + 1) * size);
    topk::best_of(choice, candidates, chosen);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_experts_of_the_best_groups_are_chosen() {
        let choice = [0.9, 0.0, 0.5, 0.5, 0.6, 0.2, 0.1, 0.1];
        let best = |groups, keep, k| {
            let mut chosen = vec![0; k];
            choose(&choice, groups, keep, &mut chosen);
            chosen
        };
        assert_eq!(best(4, 2, 3), [0, 2, 3]);
        assert_eq!(best(4, 1, 2), [2, 3]);
        assert_eq!(best(1, 1, 3), [0, 4, 2]);
    }
}
