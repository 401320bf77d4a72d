//! What can go wrong in a step.

use container::ContainerError;
use experts::{ExpertError, LedgerError, LoadError};
use formats::FormatError;
use numerics::NumericError;

/// A step, or the loading of a model, that failed.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The container does not hold what the model needs.
    #[error(transparent)]
    Container(#[from] ContainerError),
    /// A dense tensor could not be loaded.
    #[error(transparent)]
    Load(Box<LoadError>),
    /// A matrix shape that no memory could hold.
    #[error("tensor {tensor}: {source}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        #[source]
        source: FormatError,
    },
    /// A format that a tensor of this use cannot have.
    #[error("tensor {tensor} is stored as {format}, whose rows are rotated; {remedy}")]
    RotatedRows {
        /// The tensor.
        tensor: String,
        /// Its format.
        format: formats::Format,
        /// What to do.
        remedy: &'static str,
    },
    /// The memory ceiling does not allow the model.
    #[error(transparent)]
    Memory(#[from] LedgerError),
    /// Half of an MTP projection is zero: its quantisation lost it.
    #[error(
        "tensor {tensor}: the {half} half of its inputs is all zero; it was quantised too coarsely \
         (per-row int4 does this), convert it again from the original checkpoint"
    )]
    ZeroHalf {
        /// The tensor.
        tensor: String,
        /// `first` (embedding) or `second` (hidden state).
        half: &'static str,
    },
    /// A value is not finite or out of range.
    #[error("layer {layer}: {source}")]
    Numeric {
        /// The layer; `layers` for the head.
        layer: usize,
        /// What happened.
        #[source]
        source: NumericError,
    },
    /// Routed experts could not be computed.
    #[error(transparent)]
    Expert(#[from] ExpertError),
    /// The context is longer than dense attention may reach and the indexer is not stored.
    #[error(
        "layer {layer}: position {position} needs sparse attention over {topk} keys, but this \
         container has no indexer tensors; keep the context within {topk} tokens or convert with \
         the indexer"
    )]
    NoIndexer {
        /// The layer.
        layer: usize,
        /// First position out of reach.
        position: usize,
        /// Keys that dense attention may reach.
        topk: usize,
    },
    /// The caller ended the step.
    #[error("stopped after layer {layer}")]
    Cancelled {
        /// Last layer computed.
        layer: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {token} is outside the vocabulary of {vocab}")]
    Token {
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
}

impl From<LoadError> for ModelError {
    fn from(error: LoadError) -> Self {
        ModelError::Load(Box::new(error))
    }
}

/// A configuration that does not have what its family always has.
pub(crate) fn family_error(what: &str) -> ModelError {
    ModelError::Container(ContainerError::Config {
        source_name: "config.json".to_owned(),
        field: "attention".to_owned(),
        problem: format!("this family has {what}"),
    })
}

impl ModelError {
    /// Attaches a layer to a numeric error.
    pub(crate) fn at(layer: usize) -> impl Fn(NumericError) -> ModelError {
        move |source| ModelError::Numeric { layer, source }
    }
}
