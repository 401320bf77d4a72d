//! The sparse-attention indexer: which keys each query attends to.
//!
//! `score = Σ_h w_h · relu(q_h · k · dim^-0.5)`, `w = weights_proj(x) · heads^-0.5`; the best
//! `topk` causal keys are kept. Source: `glm_moe_dsa` of transformers.

use container::{IndexerConfig, Role};
use formats::{Input, QTensor};
use numerics::rope::RopeLayout;
use numerics::{Isa, NumericError, attention, lanes, norm, topk};

use crate::block::{FirstError, check_finite, linear};
use crate::error::ModelError;
use crate::family::Step;
use crate::kv::{KvKind, KvStore, PAGE};
use crate::weights::DenseLoad;

/// Epsilon of the index keys' layer norm, as the reference builds it.
const K_NORM_EPS: f32 = 1e-6;

/// The indexer of one layer.
pub struct Indexer {
    query: QTensor,
    key: QTensor,
    key_norm: Vec<f32>,
    key_norm_bias: Vec<f32>,
    weights: QTensor,
    heads: usize,
    dim: usize,
    topk: usize,
}

/// Keys selected for each row of a step; `None` for rows that see all of theirs.
pub type Selections = Vec<Option<Vec<u32>>>;

impl Indexer {
    /// Loads the indexer of a layer.
    pub fn load(
        load: &mut DenseLoad<'_>,
        config: &IndexerConfig,
        layer: usize,
    ) -> Result<Indexer, ModelError> {
        let at = Some(layer);
        Ok(Indexer {
            query: load.matrix(Role::IndexerQB, at)?,
            key: load.matrix(Role::IndexerK, at)?,
            key_norm: load.vector(Role::IndexerKNormWeight, at)?,
            key_norm_bias: load.vector(Role::IndexerKNormBias, at)?,
            weights: load.matrix(Role::IndexerWeights, at)?,
            heads: config.heads,
            dim: config.head_dim,
            topk: config.topk,
        })
    }

    /// Writes the rows' index keys and selects keys for every row.
    pub fn select(
        &self,
        step: &Step<'_>,
        x: &Input<'_>,
        query_latent: &Input<'_>,
        kv: &mut dyn KvStore,
    ) -> Result<Selections, NumericError> {
        let Step { compute, layer, rope, rows } = *step;
        let isa = compute.isa;
        let keys = linear(compute, &self.key, x)?;
        let mut key = vec![0.0; self.dim];
        for (row, raw) in rows.iter().zip(keys.chunks_exact(self.dim)) {
            norm::layer_norm(isa, raw, &self.key_norm, &self.key_norm_bias, K_NORM_EPS, &mut key);
            rope.rotate(RopeLayout::Interleaved, row.position, &mut key);
            kv.write(row.sequence, layer, KvKind::Index, row.position, &key);
        }
        if rows.iter().all(|row| row.position < self.topk) {
            return Ok(rows.iter().map(|_| None).collect());
        }
        let mut queries = linear(compute, &self.query, query_latent)?;
        for (row, heads) in rows.iter().zip(queries.chunks_exact_mut(self.heads * self.dim)) {
            for head in heads.chunks_exact_mut(self.dim) {
                rope.rotate(RopeLayout::Interleaved, row.position, head);
            }
        }
        let mut weights = linear(compute, &self.weights, x)?;
        let factor = (1.0 / (self.heads as f64).sqrt()) as f32;
        weights.iter_mut().for_each(|weight| *weight *= factor);

        let kv: &dyn KvStore = kv;
        let errors = FirstError::default();
        let mut selections = Vec::with_capacity(rows.len());
        for (at, row) in rows.iter().enumerate() {
            let count = row.position + 1;
            if count <= self.topk {
                selections.push(None);
                continue;
            }
            let query = &queries[at * self.heads * self.dim..][..self.heads * self.dim];
            let weights = &weights[at * self.heads..][..self.heads];
            let mut scores = vec![0.0; count];
            compute.team.columns(&mut scores, count, PAGE, |scores| {
                let page = scores.range().start / PAGE;
                let keys = kv.page(row.sequence, layer, KvKind::Index, page);
                let of_page = self.page_scores(isa, query, weights, keys, scores.range().len());
                let checked = check_finite(compute, "index scores", &of_page, PAGE);
                errors.keep(page, checked.map_err(|error| error.in_row(at)));
                scores.put(0, page * PAGE, &of_page);
            });
            let mut selected = topk::top_k(&scores, self.topk);
            selected.sort_unstable();
            selections.push(Some(selected));
        }
        errors.result()?;
        Ok(selections)
    }

    /// Scores of the first `count` keys of a page.
    fn page_scores(
        &self,
        isa: Isa,
        query: &[f32],
        weights: &[f32],
        keys: &[f32],
        count: usize,
    ) -> Vec<f32> {
        let scale = (1.0 / (self.dim as f64).sqrt()) as f32;
        let keys: Vec<&[f32]> = keys.chunks_exact(self.dim).take(count).collect();
        let mut by_head = vec![0.0; self.heads * count];
        for (query, out) in query.chunks_exact(self.dim).zip(by_head.chunks_exact_mut(count)) {
            attention::scores(isa, query, &keys, scale, out);
        }
        let mut of_key = vec![0.0; self.heads];
        let score = |key: usize| {
            for (head, of_key) in of_key.iter_mut().enumerate() {
                let raw = by_head[head * count + key];
                // Not a maximum: a NaN must stay one.
                *of_key = if raw > 0.0 { raw } else { raw * 0.0 };
            }
            lanes::dot(isa, weights, &of_key)
        };
        (0..count).map(score).collect()
    }
}
