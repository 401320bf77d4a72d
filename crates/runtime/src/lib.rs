//! Running models: what the machine has, the engine with its memory plan, sessions and their
//! key/value state, sampling, generation, fingerprints and text that never cuts a character.
//!
//! Commands and servers sit above; families and experts below.

pub mod engine;
pub mod fingerprint;
pub mod generate;
mod kv;
pub mod machine;
pub mod plan;
pub mod routing;
pub mod sample;
pub mod session;
pub mod text;

pub use engine::{Engine, EngineOptions, OpenError};
pub use fingerprint::Fingerprint;
pub use generate::{FinishReason, Generated, Generation, GenerationOptions, Phase};
pub use plan::MemoryPlan;
pub use routing::{RouteLog, TraceError};
pub use sample::{Sampler, SamplerOptions};
pub use session::{Session, StepError, Want, Work};
