//! What can be wrong with the bytes of a matrix.

use crate::Format;

/// Bytes that are not a matrix of the stated format. Callers add the tensor, file and offset.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum FormatError {
    /// A length that disagrees with the shape.
    #[error("{format} [{rows}, {cols}] needs {want} bytes of {what}, found {got}")]
    Length {
        /// Format of the matrix.
        format: Format,
        /// Output rows.
        rows: usize,
        /// Inputs.
        cols: usize,
        /// `weights` or `scales`.
        what: &'static str,
        /// Bytes that the shape asks for.
        want: usize,
        /// Bytes given.
        got: usize,
    },
    /// A scale that is infinite, NaN, or the invalid UE8M0 code 255.
    #[error("scale {index} of a {format} matrix is not a finite number")]
    Scale {
        /// Format of the matrix.
        format: Format,
        /// Index of the scale, counted from the first row given.
        index: usize,
    },
    /// A plain weight that is infinite or NaN.
    #[error("weight {index} of a {format} matrix is not a finite number")]
    NonFiniteWeight {
        /// Format of the matrix.
        format: Format,
        /// Index of the weight, counted from the first row given.
        index: usize,
    },
    /// An fp8 weight with the NaN code.
    #[error("weight {index} of a {format} matrix is the NaN code")]
    NanCode {
        /// Format of the matrix.
        format: Format,
        /// Index of the weight, counted from the first row given.
        index: usize,
    },
    /// A value that the encoder cannot represent.
    #[error("row {row}, input {col} is not finite and cannot be encoded as {format}")]
    NonFinite {
        /// Target format.
        format: Format,
        /// Row, counted from the first row given.
        row: usize,
        /// Input.
        col: usize,
    },
    /// A value beyond the range of the format.
    #[error(
        "row {row}, input {col}: {value} is beyond the range of {format}; choose another format"
    )]
    Range {
        /// Target format.
        format: Format,
        /// Row, counted from the first row given.
        row: usize,
        /// Input.
        col: usize,
        /// The value.
        value: f32,
    },
    /// A shape whose byte counts overflow.
    #[error("{format} [{rows}, {cols}] is too large to address")]
    TooLarge {
        /// Format of the matrix.
        format: Format,
        /// Output rows.
        rows: usize,
        /// Inputs.
        cols: usize,
    },
}
