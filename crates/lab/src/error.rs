//! What can go wrong in the lab.

use std::path::{Path, PathBuf};

use container::ContainerError;
use experts::durable::WriteError;
use experts::{LoadError, ReadError};
use formats::FormatError;
use runtime::{OpenError, StepError};

/// A conversion, synthesis, scoring or bench that could not be done.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The source container.
    #[error(transparent)]
    Container(#[from] ContainerError),
    /// A source file.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A source tensor.
    #[error(transparent)]
    Load(Box<LoadError>),
    /// A target tensor.
    #[error("tensor {tensor}: {source}")]
    Encode {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        #[source]
        source: FormatError,
    },
    /// A target file.
    #[error("{}: cannot {action}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A check that did not hold.
    #[error("{0}")]
    Check(String),
    /// A request that cannot be honoured.
    #[error("{0}")]
    Request(String),
    /// The engine could not be opened.
    #[error(transparent)]
    Open(Box<OpenError>),
    /// A step failed.
    #[error(transparent)]
    Step(Box<StepError>),
}

impl LabError {
    /// Attaches a path to a failed write.
    pub(crate) fn write(
        path: &Path,
        action: &'static str,
    ) -> impl FnOnce(std::io::Error) -> LabError {
        let path = path.to_owned();
        move |source| LabError::Write { path, action, source }
    }
}

impl From<WriteError> for LabError {
    fn from(error: WriteError) -> Self {
        let WriteError { path, action, source } = error;
        LabError::Write { path, action, source }
    }
}

impl From<LoadError> for LabError {
    fn from(error: LoadError) -> Self {
        LabError::Load(Box::new(error))
    }
}

impl From<OpenError> for LabError {
    fn from(error: OpenError) -> Self {
        LabError::Open(Box::new(error))
    }
}

impl From<StepError> for LabError {
    fn from(error: StepError) -> Self {
        LabError::Step(Box::new(error))
    }
}
