//! Multi-head and grouped-query attention with normalised queries and keys.

use container::{Attention, Config, Role};
use formats::{Input, QTensor};
use numerics::rope::RopeLayout;
use numerics::team::Columns;
use numerics::{Buf, FirstError, NumericError};

use crate::attend::{BlockRows, HeadState, Part, QUERIES_MAX, Query, Selection, attend};
use crate::block::{linear, linear_each, rms_rows, rotate_heads};
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
    ) -> Result<Buf<f32>, NumericError> {
        let Step { compute, layer, rows, .. } = *step;
        let GqaShape { heads, kv_heads, dim, eps } = self.shape;
        let projections = [&self.query, &self.key, &self.value];
        let [mut queries, mut keys, values] = linear_each(compute, projections, x)?;
        if let Some([query_norm, key_norm]) = &self.norms {
            queries = rms_rows(compute, &queries, query_norm, eps);
            keys = rms_rows(compute, &keys, key_norm, eps);
        }
        rotate_heads(step, RopeLayout::HalfSplit, &mut queries, dim, 0);
        rotate_heads(step, RopeLayout::HalfSplit, &mut keys, dim, 0);
        let kv_width = kv_heads * dim;
        let written = keys.chunks_exact(kv_width).zip(values.chunks_exact(kv_width));
        for (row, (key, value)) in rows.iter().zip(written) {
            kv.write(row.sequence, layer, KvKind::Key, row.position, key);
            kv.write(row.sequence, layer, KvKind::Value, row.position, value);
        }
        let kv: &dyn KvStore = kv;
        let mut out = compute.scratch.filled_later(rows.len() * heads * dim);
        let errors = FirstError::default();
        // The heads that share keys go together.
        let step_width = heads / kv_heads * dim;
        compute.team.columns(&mut out, heads * dim, step_width, |columns| {
            let attended = self.attend_heads(step, &queries, kv, columns);
            errors.keep(attended);
        });
        errors.result()?;
        let input = Input::new("attention output", out, heads * dim);
        linear(compute, &self.output, &input)
    }

    /// Attends with the heads of one group of keys, whose columns `out` holds.
    fn attend_heads(
        &self,
        step: &Step<'_>,
        queries: &[f32],
        kv: &dyn KvStore,
        out: &mut Columns<'_>,
    ) -> Result<(), NumericError> {
        let Step { compute, layer, rows, .. } = *step;
        let GqaShape { heads, kv_heads, dim, .. } = self.shape;
        let (width, columns, kv_width) = (heads * dim, out.range(), kv_heads * dim);
        let per_group = columns.len() / dim;
        let scale = (1.0 / (dim as f64).sqrt()) as f32;
        let first = columns.start / columns.len() * dim;
        // Every head of every row, rows ascending, so that neighbours see nearly the same keys.
        let total = rows.len() * per_group;
        let mut group_out = compute.scratch.filled_later(QUERIES_MAX.min(total) * dim);
        let mut block = BlockRows::default();
        let mut start = 0;
        while start < total {
            let sequence = rows[start / per_group].sequence;
            let same = rows[start / per_group..].iter().take_while(|row| row.sequence == sequence);
            let end = (start + QUERIES_MAX).min((start / per_group + same.count()) * per_group);
            let mut group = [Query::default(); QUERIES_MAX];
            for (query, at) in group.iter_mut().zip(start..end) {
                let row = at / per_group;
                let column = columns.start + at % per_group * dim;
                *query = Query {
                    values: &queries[row * width + column..][..dim],
                    count: rows[row].position + 1,
                    row,
                };
            }
            let state = HeadState {
                kv,
                sequence,
                layer,
                key: Part { kind: KvKind::Key, width: kv_width, first },
                value: Part { kind: KvKind::Value, width: kv_width, first },
                selection: Selection::First,
                scale,
            };
            let (group, outs) = (&group[..end - start], &mut group_out[..(end - start) * dim]);
            attend(compute, &state, &mut block, group, dim, outs)?;
            for (at, values) in (start..end).zip(outs.chunks_exact(dim)) {
                out.put(at / per_group, columns.start + at % per_group * dim, values);
            }
            start = end;
        }
        Ok(())
    }
}
