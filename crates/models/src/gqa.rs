//! Multi-head and grouped-query attention with normalised queries and keys.

use container::{Attention, Config, Role};
use formats::{Input, QTensor};
use numerics::NumericError;
use numerics::rope::RopeLayout;

use crate::attend::{HeadState, Selection, attend};
use crate::block::{FirstError, linear, rms_rows};
use crate::error::ModelError;
use crate::family::Step;
use crate::kv::{KvKind, KvStore};
use crate::weights::DenseLoad;

/// Sizes of the attention.
#[derive(Clone, Copy, Debug)]
pub struct GqaShape {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    eps: f32,
}

impl GqaShape {
    /// The sizes of a configuration with grouped-query attention.
    pub fn new(config: &Config) -> Option<GqaShape> {
        match config.attention {
            Attention::Gqa { kv_heads, head_dim, .. } => Some(GqaShape {
                heads: config.heads,
                kv_heads,
                dim: head_dim,
                eps: config.rms_norm_eps,
            }),
            Attention::Mla { .. } => None,
        }
    }

    /// Numbers per head, all of them rotary.
    pub fn rope_dim(&self) -> usize {
        self.dim
    }
}

/// Grouped-query attention of one layer.
pub struct Gqa {
    shape: GqaShape,
    query: QTensor,
    key: QTensor,
    value: QTensor,
    output: QTensor,
    /// Norms over the whole projection, queries then keys.
    norms: Option<[Vec<f32>; 2]>,
}

impl Gqa {
    /// Loads the attention of a layer.
    pub fn load(
        load: &mut DenseLoad<'_>,
        shape: GqaShape,
        qk_norm: bool,
        layer: usize,
    ) -> Result<Gqa, ModelError> {
        let at = Some(layer);
        Ok(Gqa {
            shape,
            query: load.matrix(Role::Q, at)?,
            key: load.matrix(Role::K, at)?,
            value: load.matrix(Role::V, at)?,
            output: load.matrix(Role::O, at)?,
            norms: if qk_norm {
                Some([load.vector(Role::QNorm, at)?, load.vector(Role::KNorm, at)?])
            } else {
                None
            },
        })
    }

    /// Writes keys and values of the rows and returns the attention output, `[rows, hidden]`.
    pub fn forward(
        &self,
        step: &Step<'_>,
        x: &Input<'_>,
        kv: &mut dyn KvStore,
    ) -> Result<Vec<f32>, NumericError> {
        let Step { compute, layer, rope, rows } = *step;
        let GqaShape { heads, kv_heads, dim, eps } = self.shape;
        let mut queries = linear(compute, &self.query, x)?;
        let mut keys = linear(compute, &self.key, x)?;
        let values = linear(compute, &self.value, x)?;
        if let Some([query_norm, key_norm]) = &self.norms {
            queries = rms_rows(compute, &queries, query_norm, eps);
            keys = rms_rows(compute, &keys, key_norm, eps);
        }
        let kv_width = kv_heads * dim;
        for (at, row) in rows.iter().enumerate() {
            for head in queries[at * heads * dim..][..heads * dim].chunks_exact_mut(dim) {
                rope.rotate(RopeLayout::HalfSplit, row.position, head);
            }
            let key = &mut keys[at * kv_width..][..kv_width];
            for head in key.chunks_exact_mut(dim) {
                rope.rotate(RopeLayout::HalfSplit, row.position, head);
            }
            kv.write(row.sequence, layer, KvKind::Key, row.position, key);
            let value = &values[at * kv_width..][..kv_width];
            kv.write(row.sequence, layer, KvKind::Value, row.position, value);
        }
        let kv: &dyn KvStore = kv;
        let scale = (1.0 / (dim as f64).sqrt()) as f32;
        let mut out = vec![0.0; rows.len() * heads * dim];
        let errors = FirstError::default();
        compute.team.columns(&mut out, heads * dim, dim, |columns| {
            let head = columns.range().start / dim;
            let first = head / (heads / kv_heads) * dim;
            let mut head_out = vec![0.0; dim];
            for (at, row) in rows.iter().enumerate() {
                let state = HeadState {
                    kv,
                    sequence: row.sequence,
                    layer,
                    key: (KvKind::Key, kv_width, first),
                    value: (KvKind::Value, kv_width, first),
                };
                let query = &queries[(at * heads + head) * dim..][..dim];
                let selection = Selection::First(row.position + 1);
                let attended =
                    attend(compute.isa, &state, query, scale, at, selection, &mut head_out);
                errors.keep(head, attended);
                columns.put(at, head * dim, &head_out);
            }
        });
        errors.result()?;
        let input = Input::new("attention output", out, heads * dim);
        linear(compute, &self.output, &input)
    }
}
