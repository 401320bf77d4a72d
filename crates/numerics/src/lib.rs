//! The exactness contract in code: what makes every logit the same on every machine.
//!
//! Here live instruction-set levels and their dispatch, the 32 virtual lanes of sums and dot
//! products, the elementary functions, int8 activation blocks, norms, rotary tables, the blocked
//! softmax, top-k, the integer expert combine, the Hadamard rotation and the thread team.
//! `docs/numerics.md` states the contract operator by operator.
//!
//! It knows nothing of weight formats, files or models.

pub mod attention;
pub mod combine;
pub mod fp_env;
pub mod function;
pub mod hadamard;
pub mod int8;
pub mod isa;
pub mod lanes;
pub mod norm;
pub mod peak;
pub mod products;
pub mod rope;
pub mod scratch;
pub mod simd;
pub mod team;
pub mod topk;

use std::sync::{Arc, Mutex, PoisonError};

pub use isa::{Isa, Level};
pub use scratch::{Buf, Scratch};
pub use team::Team;

/// Version of the contract. Any change that can move a bit of a logit raises it.
pub const NUMERICS_VERSION: u32 = 1;

impl NumericError {
    /// The same error with its row counted in another batch.
    pub fn in_row(self, at: usize) -> NumericError {
        match self {
            NumericError::NonFinite { what, element, .. } => {
                NumericError::NonFinite { what, row: at, element }
            }
            NumericError::CombineRange { value, element, .. } => {
                NumericError::CombineRange { value, row: at, element }
            }
        }
    }

    /// The same error with its element counted from `start` elements earlier.
    pub fn after(mut self, start: usize) -> NumericError {
        match &mut self {
            NumericError::NonFinite { element, .. }
            | NumericError::CombineRange { element, .. } => *element += start,
        }
        self
    }

    /// Element within the row that the error names.
    pub fn element(&self) -> usize {
        match self {
            NumericError::NonFinite { element, .. }
            | NumericError::CombineRange { element, .. } => *element,
        }
    }

    /// Row of the batch that the error names.
    pub fn row(&self) -> usize {
        match self {
            NumericError::NonFinite { row, .. } | NumericError::CombineRange { row, .. } => *row,
        }
    }
}

/// How activations meet quantised weights.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Activations {
    /// Rule 4: weights are decoded to f32, products are f32.
    F32,
    /// Rule 3: activations are cut in blocks of int8, products are exact integers.
    Int8,
}

impl std::fmt::Display for Activations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Activations::F32 => "f32",
            Activations::Int8 => "int8",
        })
    }
}

/// What a computation needs to know of the machine and of the mode it runs in.
#[derive(Clone)]
pub struct Compute {
    /// Instruction-set level of every kernel.
    pub isa: Isa,
    /// Threads that share the work; results never depend on their number.
    pub team: Arc<Team>,
    /// Activation mode of quantised weights.
    pub activations: Activations,
    /// Working memory that steps take and give back.
    pub scratch: Scratch,
}

impl Compute {
    /// A computation's surroundings with its own working memory.
    pub fn new(isa: Isa, team: Arc<Team>, activations: Activations) -> Compute {
        Compute { isa, team, activations, scratch: Scratch::default() }
    }
}

/// The first error, by row and element, of tasks that run in parallel: whichever task comes upon
/// one first, the same is reported.
#[derive(Default)]
pub struct FirstError {
    found: Mutex<Option<NumericError>>,
}

impl FirstError {
    /// Keeps the error of a task.
    pub fn keep(&self, result: Result<(), NumericError>) {
        let Err(error) = result else { return };
        let place = |error: &NumericError| (error.row(), error.element());
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if found.as_ref().is_none_or(|first| place(&error) < place(first)) {
            *found = Some(error);
        }
    }

    /// The error kept.
    pub fn result(self) -> Result<(), NumericError> {
        let found = self.found.into_inner().unwrap_or_else(PoisonError::into_inner);
        found.map_or(Ok(()), Err)
    }
}

/// A value that cannot be computed with, and where it was met.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NumericError {
    /// An activation is infinite or not a number.
    #[error("non-finite value in {what}, row {row}, element {element}")]
    NonFinite {
        /// Name of the quantity.
        what: &'static str,
        /// Row of the batch.
        row: usize,
        /// Element within the row.
        element: usize,
    },
    /// A routed contribution does not fit the integer grid of the combine.
    #[error("expert contribution {value} in row {row}, element {element} is outside +-2^24")]
    CombineRange {
        /// The contribution.
        value: f32,
        /// Row of the batch.
        row: usize,
        /// Element within the row.
        element: usize,
    },
}
