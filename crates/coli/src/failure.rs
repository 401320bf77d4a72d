//! Exit codes: 1 for a thing that failed or a check that did not hold, 2 for wrong usage or
//! unusable input.

use std::fmt;
use std::io::{self, ErrorKind};

use container::ContainerError;
use experts::durable::WriteError;
use experts::local::StartError;
use experts::{ExpertError, LedgerError, SidecarError};
use lab::LabError;
use models::ModelError;
use runtime::{OpenError, StepError, TraceError};

/// Why a command did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// Exit 1.
    Failed(anyhow::Error),
    /// Exit 2.
    Unusable(anyhow::Error),
    /// A check that did not hold, already reported; the exit code.
    Reported(u8),
}

impl Failure {
    /// Wrong usage.
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure::Unusable(anyhow::anyhow!(message.into()))
    }

    /// The exit code.
    pub fn code(&self) -> u8 {
        match self {
            Failure::Failed(_) => 1,
            Failure::Unusable(_) => 2,
            Failure::Reported(code) => *code,
        }
    }

    /// Prints the cause on stderr.
    pub fn print(&self) {
        match self {
            Failure::Failed(_) | Failure::Unusable(_) => note!("error: {self}"),
            Failure::Reported(_) => {}
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Failed(error) | Failure::Unusable(error) => write!(f, "{error}"),
            Failure::Reported(_) => write!(f, "a check did not hold"),
        }
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Threads(_) | OpenError::Experts(StartError::Threads(_)) => {
                Failure::Failed(error.into())
            }
            other => Failure::Unusable(other.into()),
        }
    }
}

impl From<LedgerError> for Failure {
    fn from(error: LedgerError) -> Self {
        Failure::Unusable(error.into())
    }
}

impl From<ContainerError> for Failure {
    fn from(error: ContainerError) -> Self {
        Failure::Unusable(error.into())
    }
}

impl From<SidecarError> for Failure {
    fn from(error: SidecarError) -> Self {
        Failure::Unusable(error.into())
    }
}

impl From<TraceError> for Failure {
    fn from(error: TraceError) -> Self {
        Failure::Failed(error.into())
    }
}

impl From<WriteError> for Failure {
    fn from(error: WriteError) -> Self {
        Failure::Failed(error.into())
    }
}

impl From<StepError> for Failure {
    fn from(error: StepError) -> Self {
        let numeric = matches!(
            &error,
            StepError::Model(
                ModelError::Numeric { .. } | ModelError::Expert(ExpertError::Numeric { .. })
            )
        );
        if numeric { Failure::Failed(error.into()) } else { Failure::Unusable(error.into()) }
    }
}

impl From<LabError> for Failure {
    fn from(error: LabError) -> Self {
        match error {
            LabError::Open(error) => (*error).into(),
            LabError::Step(error) => (*error).into(),
            LabError::Write { .. } | LabError::Check(_) => Failure::Failed(error.into()),
            other => Failure::Unusable(other.into()),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        // Whoever reads the output has gone; there is nobody to tell.
        if error.kind() == ErrorKind::BrokenPipe {
            return Failure::Reported(1);
        }
        Failure::Failed(error.into())
    }
}
