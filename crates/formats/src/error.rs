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
    /// A coded stream that is not one of the stated matrix.
    #[error("coded {format} [{rows}, {cols}]: {fault}")]
    Coded {
        /// Format of the matrix.
        format: Format,
        /// Output rows.
        rows: usize,
        /// Inputs.
        cols: usize,
        /// What is wrong.
        fault: CodedFault,
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

/// What can be wrong with a coded stream; see [`rans`](crate::rans).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CodedFault {
    /// Only int4 in tiles is ever coded.
    #[error("matrices of this format and arrangement are not coded")]
    NotCoded,
    /// The stream ends before the matrix does.
    #[error("the stream ends too early")]
    Truncated,
    /// The matrix ends before the stream does.
    #[error("bytes follow the end of the matrix")]
    Trailing,
    /// An unknown mode of codes.
    #[error("unknown mode {0} of codes")]
    Mode(u8),
    /// A number of plain bits of a scale that no stream has.
    #[error("{0} plain bits of each scale")]
    ScaleBits(u8),
    /// Values of scales that do not ascend or do not fit, or shares that do not sum to the whole.
    #[error("the table of scales is damaged")]
    ScaleTable,
    /// Shares of codes that do not sum to the whole.
    #[error("the shares of codes do not sum to the whole")]
    CodeTable,
    /// A state that no coder leaves.
    #[error("a state of the coder is below its least")]
    State,
    /// The coder does not end as it began.
    #[error("the coder does not end in its initial state")]
    FinalState,
}
