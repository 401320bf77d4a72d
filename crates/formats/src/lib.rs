//! Weight formats: one module per format with its layout, encoder, exact decoder and kernel
//! codes; matrices over them; and the one expert FFN of the program.
//!
//! It does not know files, models or budgets.

mod buffer;
pub mod e8;
mod e8_grid;
mod encode;
mod error;
pub mod ffn;
pub mod format;
pub mod fp8;
mod input;
pub mod int2;
pub mod int3;
pub mod int4;
pub mod int8;
mod matmul;
mod matrix;
pub mod mxfp4;
pub mod plain;
pub mod rans;
mod search;
pub mod tile;

pub use buffer::Buffer;
pub use encode::Encoder;
pub use error::{CodedFault, FormatError};
pub use ffn::{
    EXPERTS_MAX, ExpertDesc, ExpertRef, ExpertWork, FfnError, expert_ffn, expert_ffns,
    expert_of_row,
};
pub use format::{Format, Fp8Scale, ScaleType};
pub use input::Input;
#[doc(hidden)]
pub use matmul::matmul_in_emulated_tiles;
pub use matmul::{FEW_ROWS_MAX, matmul, matmul_each};
pub use matrix::{Arrangement, MatrixDesc, MatrixRef, QTensor, decode_row};
