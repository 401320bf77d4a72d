//! Small pieces that every block uses.

use std::sync::{Mutex, PoisonError};

use formats::{Input, QTensor, matmul};
use numerics::{Compute, Isa, NumericError, function, norm};

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

/// The first error (of the lowest task) of tasks that run in parallel.
#[derive(Default)]
pub struct FirstError {
    found: Mutex<Option<(usize, NumericError)>>,
}

impl FirstError {
    /// Keeps the error of a task.
    pub fn keep(&self, task: usize, result: Result<(), NumericError>) {
        let Err(error) = result else { return };
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if found.as_ref().is_none_or(|(first, _)| task < *first) {
            *found = Some((task, error));
        }
    }

    /// The error kept.
    pub fn result(self) -> Result<(), NumericError> {
        let found = self.found.into_inner().unwrap_or_else(PoisonError::into_inner);
        found.map_or(Ok(()), |(_, error)| Err(error))
    }
}

/// Embeddings of the rows' tokens, `[rows, hidden]`.
pub fn embed(isa: Isa, embedding: &QTensor, rows: &[Row]) -> Result<Vec<f32>, ModelError> {
    let (vocab, hidden) = (embedding.desc().rows(), embedding.desc().cols());
    let mut x = vec![0.0; rows.len() * hidden];
    for (row, x) in rows.iter().zip(x.chunks_exact_mut(hidden)) {
        if row.token as usize >= vocab {
            return Err(ModelError::Token { token: row.token, vocab });
        }
        embedding.view().decode_row(isa, row.token as usize, x);
    }
    Ok(x)
}
