//! Multi-head latent attention in its absorbed form, the one form for every row count.
//!
//! Cached per position: the normalised latent, then the rotated shared key. A head's query is
//! brought into latent space through its rows of `kv_b` (`q_lat[c] = Σ_d q[d] W[d, c]`, ascending
//! d), scores are dots over latent and rotary numbers, values are read off the attended latent.

use container::{Attention, Config, Role};
use formats::{Input, QTensor};
use numerics::rope::RopeLayout;
use numerics::team::Columns;
use numerics::{Compute, NumericError, lanes};

use crate::attend::{HeadState, Selection, attend};
use crate::block::{FirstError, linear, rms_rows};
use crate::dsa::Selections;
use crate::error::ModelError;
use crate::family::Step;
use crate::kv::{KvKind, KvStore};
use crate::weights::DenseLoad;

/// Epsilon of the latent norms, as the reference builds them.
const LATENT_NORM_EPS: f32 = 1e-6;

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

    /// The normalised query latents of the rows, shared by heads and indexer.
    pub fn query_latent(&self, compute: &Compute, x: &Input<'_>) -> Result<Vec<f32>, NumericError> {
        let raw = linear(compute, &self.query_a, x)?;
        Ok(rms_rows(compute, &raw, &self.query_a_norm, LATENT_NORM_EPS))
    }

    /// Writes the rows' keys to the state.
    pub fn write_keys(
        &self,
        step: &Step<'_>,
        x: &Input<'_>,
        kv: &mut dyn KvStore,
    ) -> Result<(), NumericError> {
        let Step { compute, layer, rope, rows } = *step;
        let MlaShape { kv_lora, rope: rope_dim, .. } = self.shape;
        let raw = linear(compute, &self.kv_a, x)?;
        let mut key = vec![0.0; kv_lora + rope_dim];
        for (row, raw) in rows.iter().zip(raw.chunks_exact(kv_lora + rope_dim)) {
            let latent = rms_rows(compute, &raw[..kv_lora], &self.kv_a_norm, LATENT_NORM_EPS);
            key[..kv_lora].copy_from_slice(&latent);
            key[kv_lora..].copy_from_slice(&raw[kv_lora..]);
            rope.rotate(RopeLayout::Interleaved, row.position, &mut key[kv_lora..]);
            kv.write(row.sequence, layer, KvKind::Key, row.position, &key);
        }
        Ok(())
    }

    /// The attention output of the rows, `[rows, hidden]`. Keys must have been written.
    pub fn attend(
        &self,
        step: &Step<'_>,
        query_latent: &Input<'_>,
        selections: &Selections,
        kv: &dyn KvStore,
    ) -> Result<Vec<f32>, NumericError> {
        let Step { compute, rope, rows, .. } = *step;
        let MlaShape { heads, nope, rope: rope_dim, value, .. } = self.shape;
        let head_width = nope + rope_dim;
        let mut queries = linear(compute, &self.query_b, query_latent)?;
        for (row, query) in rows.iter().zip(queries.chunks_exact_mut(heads * head_width)) {
            for head in query.chunks_exact_mut(head_width) {
                rope.rotate(RopeLayout::Interleaved, row.position, &mut head[nope..]);
            }
        }
        let mut out = vec![0.0; rows.len() * heads * value];
        let errors = FirstError::default();
        compute.team.columns(&mut out, heads * value, value, |columns| {
            let attended = self.attend_head(step, &queries, selections, kv, columns);
            errors.keep(columns.range().start, attended);
        });
        errors.result()?;
        let input = Input::new("attention output", out, heads * value);
        linear(compute, &self.output, &input)
    }

    /// Attends with the head whose value columns `out` holds.
    fn attend_head(
        &self,
        step: &Step<'_>,
        queries: &[f32],
        selections: &Selections,
        kv: &dyn KvStore,
        out: &mut Columns<'_>,
    ) -> Result<(), NumericError> {
        let Step { compute, layer, rows, .. } = *step;
        let MlaShape { heads, kv_lora, nope, rope: rope_dim, value } = self.shape;
        let head = out.range().start / value;
        let (isa, head_width) = (compute.isa, nope + rope_dim);
        let first_row = head * (nope + value);
        let query_of = |at: usize| &queries[(at * heads + head) * head_width..][..head_width];
        let width = kv_lora + rope_dim;
        let mut absorbed = vec![0.0; rows.len() * width];
        let mut weights = vec![0.0; kv_lora];
        for d in 0..nope {
            self.kv_b.view().decode_row(isa, first_row + d, &mut weights);
            for (at, absorbed) in absorbed.chunks_exact_mut(width).enumerate() {
                lanes::axpy(isa, query_of(at)[d], &weights, &mut absorbed[..kv_lora]);
            }
        }
        let scale = (1.0 / (head_width as f64).sqrt()) as f32;
        let mut latents = vec![0.0; rows.len() * kv_lora];
        for (at, row) in rows.iter().enumerate() {
            let query = &mut absorbed[at * width..][..width];
            query[kv_lora..].copy_from_slice(&query_of(at)[nope..]);
            let state = HeadState {
                kv,
                sequence: row.sequence,
                layer,
                key: (KvKind::Key, width, 0),
                value: (KvKind::Key, width, 0),
            };
            let selection = match &selections[at] {
                None => Selection::First(row.position + 1),
                Some(list) => Selection::Listed(list),
            };
            let latent = &mut latents[at * kv_lora..][..kv_lora];
            attend(isa, &state, query, scale, at, selection, latent)?;
        }
        for d in 0..value {
            self.kv_b.view().decode_row(isa, first_row + nope + d, &mut weights);
            for (at, latent) in latents.chunks_exact(kv_lora).enumerate() {
                out.put(at, head * value + d, &[lanes::dot(isa, &weights, latent)]);
            }
        }
        Ok(())
    }
}
