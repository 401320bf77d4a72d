//! Weight formats: one module per format with its layout, encoder, exact decoder and dot
//! kernels; the tensor type over them; and the one expert FFN of the program.
//!
//! It does not know files, models or budgets.

pub mod format;

pub use format::{Format, Fp8Scale, ScaleType};
