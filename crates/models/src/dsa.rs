//! The sparse-attention indexer: which keys each query attends to.
//!
//! `score = Σ_h w_h · relu(q_h · k · dim^-0.5)`, `w = weights_proj(x) · heads^-0.5`; the best
//! `topk` causal keys are kept. Source: `glm_moe_dsa` of transformers.

use container::{IndexerConfig, Role};
use formats::{Input, QTensor};
use numerics::rope::RopeLayout;
use numerics::team::rows_mut;
use numerics::{Buf, Compute, FirstError, NumericError, attention, function, norm, products, topk};
use smallvec::SmallVec;

use crate::block::{linear, linear_each, rotate_heads};
use crate::error::ModelError;
use crate::family::Step;
use crate::kv::{KvKind, KvStore, PAGE};
use crate::weights::DenseLoad;

/// Epsilon of the index keys' layer norm, as the reference builds it.
const K_NORM_EPS: f32 = 1e-6;

/// Rows whose scores are held at the same time.
const WAVE_ROWS: usize = 16;
/// Most scores held at the same time, unless one row alone has more.
pub const WAVE_SCORES: usize = 1 << 20;
/// Heads of the indexer that meet a page of keys together.
const HEAD_GROUP: usize = 32;

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
pub type Selections = SmallVec<[Option<Buf<u32>>; FEW_ROWS]>;

/// Rows of a step that need no allocation.
const FEW_ROWS: usize = 4;

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
        let Step { compute, layer, rope, rows, .. } = *step;
        let isa = compute.isa;
        let [keys, mut weights] = linear_each(compute, [&self.key, &self.weights], x)?;
        let mut key = compute.scratch.zeroed(self.dim);
        for (row, raw) in rows.iter().zip(keys.chunks_exact(self.dim)) {
            norm::layer_norm(isa, raw, &self.key_norm, &self.key_norm_bias, K_NORM_EPS, &mut key);
            rope.rotate(isa, RopeLayout::Interleaved, row.position, &mut key);
            kv.write(row.sequence, layer, KvKind::Index, row.position, &key);
        }
        let mut selections: Selections = rows.iter().map(|_| None).collect();
        // Rows beyond the first `topk` positions of their sequences choose among their keys.
        let choosing: SmallVec<[usize; FEW_ROWS]> =
            (0..rows.len()).filter(|at| rows[*at].position >= self.topk).collect();
        if choosing.is_empty() {
            return Ok(selections);
        }
        let mut queries = linear(compute, &self.query, query_latent)?;
        rotate_heads(step, RopeLayout::Interleaved, &mut queries, self.dim, 0);
        let factor = (1.0 / (self.heads as f64).sqrt()) as f32;
        weights.iter_mut().for_each(|weight| *weight *= factor);

        let kv: &dyn KvStore = kv;
        let longest = choosing.iter().map(|at| rows[*at].position + 1).max().unwrap_or(1);
        for wave in choosing.chunks((WAVE_SCORES / longest).clamp(1, WAVE_ROWS)) {
            let longest = wave.iter().map(|at| rows[*at].position + 1).max().unwrap_or(1);
            let mut scores = compute.scratch.zeroed(wave.len() * longest);
            let errors = FirstError::default();
            compute.team.columns(&mut scores, longest, PAGE, |scores| {
                let range = scores.range();
                for (slot, &at) in wave.iter().enumerate() {
                    // A shorter sequence of the wave may have no such page.
                    let count = (rows[at].position + 1).saturating_sub(range.start);
                    if count == 0 {
                        continue;
                    }
                    let out = scores.row(slot);
                    let count = count.min(out.len());
                    let page = range.start / PAGE;
                    let keys = kv.page(rows[at].sequence, layer, KvKind::Index, page);
                    let query = &queries[at * self.heads * self.dim..][..self.heads * self.dim];
                    let weights = &weights[at * self.heads..][..self.heads];
                    self.page_scores(compute, query, weights, keys, &mut out[..count]);
                    let error = match function::first_non_finite(isa, &out[..count]) {
                        None => continue,
                        Some(element) => element + range.start,
                    };
                    let what = "index scores";
                    errors.keep(Err(NumericError::NonFinite { what, row: at, element: error }));
                }
            });
            errors.result()?;
            let mut chosen: SmallVec<[Buf<u32>; FEW_ROWS]> =
                wave.iter().map(|_| Buf::default()).collect();
            compute.team.rows(wave.len(), 1, rows_mut(&mut chosen, 1), |slots, chosen| {
                for (slot, chosen) in slots.zip(chosen) {
                    let count = rows[wave[slot]].position + 1;
                    let scores = &scores[slot * longest..][..count];
                    let mut candidates = compute.scratch.filled_later(count);
                    candidates.iter_mut().zip(0..).for_each(|(to, position)| *to = position);
                    let best = topk::select(scores, &mut candidates, self.topk);
                    best.sort_unstable();
                    *chosen = compute.scratch.copy(best);
                }
            });
            for (at, chosen) in wave.iter().zip(chosen) {
                selections[*at] = Some(chosen);
            }
        }
        Ok(selections)
    }

    /// Scores of the first keys of a page, as many as `out` holds.
    fn page_scores(
        &self,
        compute: &Compute,
        query: &[f32],
        weights: &[f32],
        keys: &[f32],
        out: &mut [f32],
    ) {
        let scale = (1.0 / (self.dim as f64).sqrt()) as f32;
        let count = out.len();
        let mut rows: [&[f32]; PAGE] = [&[]; PAGE];
        rows.iter_mut().zip(keys.chunks_exact(self.dim)).for_each(|(to, key)| *to = key);
        let rows = &rows[..count];
        let mut by_head = compute.scratch.zeroed(self.heads * count);
        let queries = query.chunks(HEAD_GROUP * self.dim);
        for (query, out) in queries.zip(by_head.chunks_mut(HEAD_GROUP * count)) {
            let mut heads: [&[f32]; HEAD_GROUP] = [&[]; HEAD_GROUP];
            heads.iter_mut().zip(query.chunks_exact(self.dim)).for_each(|(to, head)| *to = head);
            products::dots(compute.isa, &heads[..query.len() / self.dim], rows, scale, out);
        }
        attention::index_scores(compute.isa, weights, &by_head, out);
    }
}
