//! Multi-head latent attention in its absorbed form, the one form for every row count.
//!
//! Cached per position: the normalised latent, then the rotated shared key. A head's query is
//! brought into latent space through its rows of `kv_b` (`q_lat[c] = Σ_d q[d] W[d, c]`, ascending
//! d), scores are dots over latent and rotary numbers, values are read off the attended latent.

use std::array;
use std::ops::Range;

use container::{Attention, Config, Role};
use formats::{Input, QTensor};
use numerics::rope::RopeLayout;
use numerics::team::Columns;
use numerics::{Buf, Compute, FirstError, NumericError, norm, products};

use crate::attend::{BlockRows, HeadState, Part, QUERIES_MAX, Query, Selection, attend};
use crate::block::{linear, linear_each, rms_rows, rotate_heads};
use crate::dsa::Selections;
use crate::error::ModelError;
use crate::family::Step;
use crate::kv::{KvKind, KvStore};
use crate::weights::DenseLoad;

/// Epsilon of the latent norms, as the reference builds them.
const LATENT_NORM_EPS: f32 = 1e-6;

/// Rows brought into latent space together: enough to share the decoding of `kv_b`, few enough for
/// their latents to stay in cache.
pub const ROW_CHUNK: usize = 64;
/// Rows of `kv_b` that meet queries or latents together.
const ROWS_AT_ONCE: usize = 256;

/// Sizes of the attention.
#[derive(Clone, Copy, Debug)]
pub struct MlaShape {
    heads: usize,
    kv_lora: usize,
    nope: usize,
    rope: usize,
    value: usize,
}

impl MlaShape {
    /// The sizes of a configuration with latent attention.
    pub fn new(config: &Config) -> Option<MlaShape> {
        match config.attention {
            Attention::Mla { kv_lora, nope, rope, v_dim, .. } => {
                Some(MlaShape { heads: config.heads, kv_lora, nope, rope, value: v_dim })
            }
            Attention::Gqa { .. } => None,
        }
    }

    /// Rotary numbers per head.
    pub fn rope_dim(&self) -> usize {
        self.rope
    }
}

/// Latent attention of one layer.
pub struct Mla {
    shape: MlaShape,
    query_a: QTensor,
    query_a_norm: Vec<f32>,
    query_b: QTensor,
    kv_a: QTensor,
    kv_a_norm: Vec<f32>,
    kv_b: QTensor,
    output: QTensor,
}

impl Mla {
    /// Loads the attention of a layer.
    pub fn load(
        load: &mut DenseLoad<'_>,
        shape: MlaShape,
        layer: usize,
    ) -> Result<Mla, ModelError> {
        let at = Some(layer);
        Ok(Mla {
            shape,
            query_a: load.matrix(Role::QA, at)?,
            query_a_norm: load.vector(Role::QANorm, at)?,
            query_b: load.matrix(Role::QB, at)?,
            kv_a: load.matrix(Role::KvA, at)?,
            kv_a_norm: load.vector(Role::KvANorm, at)?,
            kv_b: load.matrix(Role::KvB, at)?,
            output: load.matrix(Role::O, at)?,
        })
    }

    /// Writes the rows' keys to the state; returns the normalised query latents of the rows, which
    /// heads and indexer share.
    pub fn project(
        &self,
        step: &Step<'_>,
        x: &Input<'_>,
        kv: &mut dyn KvStore,
    ) -> Result<Buf<f32>, NumericError> {
        let Step { compute, layer, rope, rows, .. } = *step;
        let MlaShape { kv_lora, rope: rope_dim, .. } = self.shape;
        let [raw_query, mut raw_key] = linear_each(compute, [&self.query_a, &self.kv_a], x)?;
        let mut latent = compute.scratch.filled_later(kv_lora);
        for (row, raw) in rows.iter().zip(raw_key.chunks_exact_mut(kv_lora + rope_dim)) {
            let (raw_latent, raw_rope) = raw.split_at_mut(kv_lora);
            let norm = &self.kv_a_norm;
            norm::rms_norm(compute.isa, raw_latent, norm, LATENT_NORM_EPS, &mut latent);
            raw_latent.copy_from_slice(&latent);
            rope.rotate(compute.isa, RopeLayout::Interleaved, row.position, raw_rope);
            kv.write(row.sequence, layer, KvKind::Key, row.position, raw);
        }
        Ok(rms_rows(compute, &raw_query, &self.query_a_norm, LATENT_NORM_EPS))
    }

    /// The attention output of the rows, `[rows, hidden]`. Keys must have been written.
    pub fn attend(
        &self,
        step: &Step<'_>,
        query_latent: &Input<'_>,
        selections: &Selections,
        kv: &dyn KvStore,
    ) -> Result<Buf<f32>, NumericError> {
        let Step { compute, rows, .. } = *step;
        let MlaShape { heads, nope, rope: rope_dim, value, .. } = self.shape;
        let mut queries = linear(compute, &self.query_b, query_latent)?;
        rotate_heads(step, RopeLayout::Interleaved, &mut queries, nope + rope_dim, nope);
        let mut out = compute.scratch.filled_later(rows.len() * heads * value);
        let errors = FirstError::default();
        let heads_per_task = compute.team.step(heads, 1).min(QUERIES_MAX);
        compute.team.columns(&mut out, heads * value, heads_per_task * value, |columns| {
            let attended = self.attend_heads(step, &queries, selections, kv, columns);
            errors.keep(attended);
        });
        errors.result()?;
        let input = Input::new("attention output", out, heads * value);
        linear(compute, &self.output, &input)
    }

    /// Attends with the heads whose value columns `out` holds: some rows at a time are brought into
    /// latent space, then each row's heads, which share its keys, attend together.
    fn attend_heads(
        &self,
        step: &Step<'_>,
        queries: &[f32],
        selections: &Selections,
        kv: &dyn KvStore,
        out: &mut Columns<'_>,
    ) -> Result<(), NumericError> {
        let Step { compute, layer, rows, .. } = *step;
        let MlaShape { heads, kv_lora, nope, rope: rope_dim, value } = self.shape;
        let (head_width, width) = (nope + rope_dim, kv_lora + rope_dim);
        let task = out.range().start / value..out.range().end / value;
        let scale = (1.0 / (head_width as f64).sqrt()) as f32;
        let scratch = &compute.scratch;
        let chunk = ROW_CHUNK.min(rows.len());
        let mut absorbed = scratch.filled_later(chunk * task.len() * width);
        let mut latents = scratch.filled_later(chunk * task.len() * kv_lora);
        let mut weights = scratch.filled_later(nope.max(value) * kv_lora);
        let mut of_head = scratch.filled_later(chunk * kv_lora.max(value));
        let mut block = BlockRows::default();
        for first in (0..rows.len()).step_by(ROW_CHUNK) {
            let rows = first..(first + ROW_CHUNK).min(rows.len());
            for (slot, head) in task.clone().enumerate() {
                let weights = self.weight_rows(compute, head, 0..nope, &mut weights);
                let query =
                    |row: usize| &queries[(row * heads + head) * head_width..][..head_width];
                let of_head = &mut of_head[..rows.len() * kv_lora];
                of_head.fill(0.0);
                for (group, out) in
                    groups(rows.clone()).zip(of_head.chunks_mut(QUERIES_MAX * kv_lora))
                {
                    let parts: [&[f32]; QUERIES_MAX] =
                        array::from_fn(|at| &query((group.start + at).min(group.end - 1))[..nope]);
                    let parts = &parts[..group.len()];
                    with_rows(weights, kv_lora, |start, weights| {
                        let mut some = [&[][..]; QUERIES_MAX];
                        for (some, part) in some.iter_mut().zip(parts) {
                            *some = &part[start..start + weights.len()];
                        }
                        let some = &some[..parts.len()];
                        products::weighted_sums(compute.isa, some, weights, kv_lora, out);
                    });
                }
                for (at, row) in rows.clone().enumerate() {
                    let to = &mut absorbed[(at * task.len() + slot) * width..][..width];
                    to[..kv_lora].copy_from_slice(&of_head[at * kv_lora..][..kv_lora]);
                    to[kv_lora..].copy_from_slice(&query(row)[nope..]);
                }
            }
            for (at, row) in rows.clone().enumerate() {
                let count =
                    selections[row].as_ref().map_or(step.rows[row].position + 1, |list| list.len());
                let mut group = [Query::default(); QUERIES_MAX];
                for (slot, query) in group[..task.len()].iter_mut().enumerate() {
                    let values = &absorbed[(at * task.len() + slot) * width..][..width];
                    *query = Query { values, count, row };
                }
                let selection = match &selections[row] {
                    None => Selection::First,
                    Some(list) => Selection::Listed(list),
                };
                let sequence = step.rows[row].sequence;
                let part = Part { kind: KvKind::Key, width, first: 0 };
                let state =
                    HeadState { kv, sequence, layer, key: part, value: part, selection, scale };
                let per_row = task.len() * kv_lora;
                let latents = &mut latents[at * per_row..][..per_row];
                let group = &group[..task.len()];
                attend(compute, &state, &mut block, group, kv_lora, latents)?;
            }
            for (slot, head) in task.clone().enumerate() {
                let weights = self.weight_rows(compute, head, nope..nope + value, &mut weights);
                for group in groups(0..rows.len()) {
                    let latent = |at: usize| &latents[(at * task.len() + slot) * kv_lora..];
                    let parts: [&[f32]; QUERIES_MAX] = array::from_fn(|at| {
                        &latent((group.start + at).min(group.end - 1))[..kv_lora]
                    });
                    with_rows(weights, kv_lora, |start, weights| {
                        let outs = &mut of_head[..group.len() * weights.len()];
                        products::dots(compute.isa, &parts[..group.len()], weights, 1.0, outs);
                        for (at, values) in group.clone().zip(outs.chunks_exact(weights.len())) {
                            out.put(rows.start + at, head * value + start, values);
                        }
                    });
                }
            }
        }
        Ok(())
    }

    /// Decodes some rows of a head's part of `kv_b`.
    fn weight_rows<'b>(
        &self,
        compute: &Compute,
        head: usize,
        range: Range<usize>,
        out: &'b mut [f32],
    ) -> &'b [f32] {
        let MlaShape { kv_lora, nope, value, .. } = self.shape;
        let first = head * (nope + value);
        let out = &mut out[..range.len() * kv_lora];
        for (row, out) in range.zip(out.chunks_exact_mut(kv_lora)) {
            self.kv_b.view().decode_row(compute.isa, first + row, out);
        }
        out
    }
}

/// Ranges of up to [`QUERIES_MAX`] rows.
fn groups(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(QUERIES_MAX).map(move |start| start..(start + QUERIES_MAX).min(end))
}

/// Calls `with` with the rows of a matrix, some at a time, and the index of the first of them.
fn with_rows(matrix: &[f32], width: usize, mut with: impl FnMut(usize, &[&[f32]])) {
    for (at, some) in matrix.chunks(ROWS_AT_ONCE * width).enumerate() {
        let mut rows: [&[f32]; ROWS_AT_ONCE] = [&[]; ROWS_AT_ONCE];
        rows.iter_mut().zip(some.chunks_exact(width)).for_each(|(to, row)| *to = row);
        with(at * ROWS_AT_ONCE, &rows[..some.len() / width]);
    }
}
