//! Small pieces that every block uses.

use formats::{Input, QTensor, matmul};
use numerics::{Compute, NumericError, function, norm};

use crate::error::ModelError;
use crate::family::Row;

/// Rows of `x` times a matrix: `[rows, outputs]`.
pub fn linear(
    compute: &Compute,
    matrix: &QTensor,
    input: &Input<'_>,
) -> Result<Vec<f32>, NumericError> {
    let mut out = vec![0.0; input.rows() * matrix.desc().rows()];
    matmul(compute, matrix.view(), input, None, &mut out)?;
    Ok(out)
}

/// The RMS norm of each row.
pub fn rms_rows(compute: &Compute, x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
        norm::rms_norm(compute.isa, x, weight, eps, out);
    }
    out
}

/// Refuses a value that is not finite, naming its row.
pub fn check_finite(
    compute: &Compute,
    what: &'static str,
    values: &[f32],
    width: usize,
) -> Result<(), NumericError> {
    match function::first_non_finite(compute.isa, values) {
        None => Ok(()),
        Some(at) => Err(NumericError::NonFinite { what, row: at / width, element: at % width }),
    }
}

/// Embeddings of the rows' tokens, `[rows, hidden]`.
pub fn embed(embedding: &QTensor, rows: &[Row]) -> Result<Vec<f32>, ModelError> {
    let (vocab, hidden) = (embedding.desc().rows(), embedding.desc().cols());
    let mut x = vec![0.0; rows.len() * hidden];
    for (row, x) in rows.iter().zip(x.chunks_exact_mut(hidden)) {
        if row.token as usize >= vocab {
            return Err(ModelError::Token { token: row.token, vocab });
        }
        embedding.view().decode_row(row.token as usize, x);
    }
    Ok(x)
}
