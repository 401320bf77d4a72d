//! Small pieces that every block uses.

use std::sync::atomic::{AtomicUsize, Ordering};

use formats::{Input, QTensor, matmul_each};
use numerics::rope::RopeLayout;
use numerics::team::rows_mut;
use numerics::{Buf, Compute, NumericError, function, norm};

use crate::error::ModelError;
use crate::family::{Row, Step};

/// Rows that one task of the thread team takes in element-wise work, at least.
const GRAIN: usize = 8;
/// Numbers that one task checks, at least.
const CHECKED: usize = 1 << 15;

/// Rows of `x` times a matrix: `[rows, outputs]`.
pub fn linear(
    compute: &Compute,
    matrix: &QTensor,
    input: &Input<'_>,
) -> Result<Buf<f32>, NumericError> {
    linear_each(compute, [matrix], input).map(|[out]| out)
}

/// Rows of `x` times several matrices, as one piece of parallel work.
pub fn linear_each<const N: usize>(
    compute: &Compute,
    matrices: [&QTensor; N],
    input: &Input<'_>,
) -> Result<[Buf<f32>; N], NumericError> {
    let mut outs =
        matrices.map(|matrix| compute.scratch.filled_later(input.rows() * matrix.desc().rows()));
    let slices = outs.each_mut().map(|out| &mut **out);
    matmul_each(compute, matrices.map(QTensor::view), input, None, slices)?;
    Ok(outs)
}

/// The RMS norm of each row.
pub fn rms_rows(compute: &Compute, x: &[f32], weight: &[f32], eps: f32) -> Buf<f32> {
    let (width, mut out) = (weight.len(), compute.scratch.filled_later(x.len()));
    let parts = rows_mut(&mut out, width);
    compute.team.rows(x.len() / width, GRAIN, parts, |rows, out| {
        let x = &x[rows.start * width..rows.end * width];
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            norm::rms_norm(compute.isa, x, weight, eps, out);
        }
    });
    out
}

/// Adds rows of `width` numbers to others.
pub fn add_rows(compute: &Compute, to: &mut [f32], from: &[f32], width: usize) {
    let rows = to.len() / width;
    compute.team.rows(rows, GRAIN, rows_mut(to, width), |rows, to| {
        function::add(compute.isa, to, &from[rows.start * width..rows.end * width]);
    });
}

/// Rotates the numbers from `skip` on of every head, of `head_width` numbers, of the rows.
pub fn rotate_heads(
    step: &Step<'_>,
    layout: RopeLayout,
    heads: &mut [f32],
    head_width: usize,
    skip: usize,
) {
    let Step { compute, rope, rows, .. } = *step;
    let width = heads.len() / rows.len();
    compute.team.rows(rows.len(), GRAIN, rows_mut(heads, width), |range, heads| {
        for (row, heads) in rows[range].iter().zip(heads.chunks_exact_mut(width)) {
            for head in heads.chunks_exact_mut(head_width) {
                rope.rotate(compute.isa, layout, row.position, &mut head[skip..]);
            }
        }
    });
}

/// Refuses a value that is not finite, naming its row.
pub fn check_finite(
    compute: &Compute,
    what: &'static str,
    values: &[f32],
    width: usize,
) -> Result<(), NumericError> {
    let first = AtomicUsize::new(usize::MAX);
    let pieces = values.len().div_ceil(CHECKED);
    compute.team.run(pieces, |piece| {
        let start = piece * CHECKED;
        let values = &values[start..(start + CHECKED).min(values.len())];
        if let Some(at) = function::first_non_finite(compute.isa, values) {
            first.fetch_min(start + at, Ordering::Relaxed);
        }
    });
    match first.into_inner() {
        usize::MAX => Ok(()),
        at => Err(NumericError::NonFinite { what, row: at / width, element: at % width }),
    }
}

/// Embeddings of the rows' tokens, `[rows, hidden]`.
pub fn embed(compute: &Compute, embedding: &QTensor, rows: &[Row]) -> Result<Buf<f32>, ModelError> {
    let (vocab, hidden) = (embedding.desc().rows(), embedding.desc().cols());
    let mut x = compute.scratch.zeroed(rows.len() * hidden);
    for (row, x) in rows.iter().zip(x.chunks_exact_mut(hidden)) {
        if row.token as usize >= vocab {
            return Err(ModelError::Token { token: row.token, vocab });
        }
        embedding.view().decode_row(compute.isa, row.token as usize, x);
    }
    Ok(x)
}
