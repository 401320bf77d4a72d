//! Model families over shared blocks: one file per family, one per block.
//!
//! A family turns rows (token, sequence, position) into hidden states and logits. It keeps its
//! dense weights; routed experts are asked from an [`experts::ExpertBackend`], key/value state
//! from a [`KvStore`]. Sessions, sampling and files are other crates' business.

mod attend;
mod block;
mod decoder;
mod dsa;
mod error;
mod family;
mod glm;
mod gqa;
mod kv;
mod mla;
mod mlp;
mod moe;
mod olmoe;
mod profile;
mod weights;

pub use attend::attention_scratch;
pub use dsa::WAVE_SCORES;
pub use error::ModelError;
pub use family::{Family, RouteObserver, Row, StepContext, open_family};
pub use kv::{KvKind, KvShape, KvStore, PAGE};
pub use profile::{Activity, Profile, Running, Spent, Stage};
pub use weights::{DenseLoad, Int8Classes, planned_dense_bytes};
