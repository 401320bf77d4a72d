//! Where expert bytes live: the byte ledger of the process, robust reads, the cache of experts
//! with leases, the backend that computes a layer's routed experts, and the files that say which
//! experts were chosen before.
//!
//! It knows files and budgets, not what an attention layer or a session is.

pub mod backend;
pub mod cache;
pub mod durable;
pub mod ledger;
pub mod load;
pub mod local;
mod mapped;
pub mod pairs;
pub mod pins;
pub mod reader;
pub mod sidecar;
pub mod simulate;
pub mod store;
pub mod trace;
pub mod usage;

pub use backend::{
    ExpertBackend, ExpertError, ExpertRows, ExpertStats, FEW_EXPERTS, Route, RoutedBatch,
};
pub use ledger::{ByteClass, Ledger, LedgerError, Reservation};
pub use load::LoadError;
pub use local::{LocalExperts, LocalOptions, ReadAhead};
pub use pairs::Pairs;
pub use reader::{FileSet, IoMode, RawFiles, ReadError, Reader};
pub use sidecar::{RouteShape, SidecarError};
pub use store::{ExpertStore, Mirror, MirrorError, Notice};
pub use trace::{Trace, TraceWriter};
pub use usage::{Usage, UsageError, UsageShape};
