//! The sparse-attention indexer: which keys each query attends to.
//!
//! `score = Σ_h w_h · relu(q_h · k · dim^-0.5)`, `w = weights_proj(x) · heads^-0.5`; the best
//! `topk` causal keys are kept. Source: `glm_moe_dsa` of transformers.

use std::sync::Mutex;

use container::{IndexerConfig, Role};
use formats::{Input, QTensor};
use numerics::rope::RopeLayout;
use numerics::{NumericError, attention, lanes, norm, topk};

use crate::block::{check_finite, linear};
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
        let selections: Vec<Mutex<Result<Option<Vec<u32>>, NumericError>>> =
            rows.iter().map(|_| Mutex::new(Ok(None))).collect();
        compute.team.run(rows.len(), |at| {
            let query = &queries[at * self.heads * self.dim..][..self.heads * self.dim];
            let weights = &weights[at * self.heads..][..self.heads];
            let selected = self.select_row(step, at, query, weights, kv);
            if let Ok(mut slot) = selections[at].lock() {
                *slot = selected;
            }
        });
        let taken = selections.into_iter().map(|slot| match slot.into_inner() {
            Ok(selected) => selected,
            Err(poisoned) => poisoned.into_inner(),
        });
        taken.collect()
    }

    fn select_row(
        &self,
        step: &Step<'_>,
        at: usize,
        query: &[f32],
        weights: &[f32],
        kv: &dyn KvStore,
    ) -> Result<Option<Vec<u32>>, NumericError> {
        let Step { compute, layer, rows, .. } = *step;
        let row = &rows[at];
        let count = row.position + 1;
        if count <= self.topk {
            return Ok(None);
        }
        let isa = compute.isa;
        let scale = (1.0 / (self.dim as f64).sqrt()) as f32;
        let mut scores = vec![0.0; count];
        let mut by_head = vec![0.0; self.heads * PAGE];
        let mut of_key = vec![0.0; self.heads];
        for (page_at, scores) in scores.chunks_mut(PAGE).enumerate() {
            let page = kv.page(row.sequence, layer, KvKind::Index, page_at);
            let keys: Vec<&[f32]> = page.chunks_exact(self.dim).take(scores.len()).collect();
            for (query, out) in query.chunks_exact(self.dim).zip(by_head.chunks_exact_mut(PAGE)) {
                attention::scores(isa, query, &keys, scale, &mut out[..keys.len()]);
            }
            for (key, score) in scores.iter_mut().enumerate() {
                for (head, of_key) in of_key.iter_mut().enumerate() {
                    let raw = by_head[head * PAGE + key];
                    *of_key = if raw > 0.0 { raw } else { raw * 0.0 };
                }
                *score = lanes::dot(isa, weights, &of_key);
            }
        }
        check_finite(compute, "index scores", &scores, count).map_err(|error| match error {
            NumericError::NonFinite { what, element, .. } => {
                NumericError::NonFinite { what, row: at, element }
            }
            other => other,
        })?;
        let mut selected = topk::top_k(&scores, self.topk);
        selected.sort_unstable();
        Ok(Some(selected))
    }
}
