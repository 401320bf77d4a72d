//! What a model directory holds: safetensors files and their stamps, the configuration, the
//! registry rows of the model families, the tokenizer and the chat template.
//!
//! It reads headers and small files, never tensor data, and computes nothing. Files come from
//! anywhere, so nothing in them may panic, hang or allocate without bound: every limit is a named
//! constant and every error names the file and what to do.

pub mod config;
mod config_file;
pub mod error;
pub mod family;
pub mod header;
mod held;
pub mod hex;
pub mod index;
mod json;
pub mod numbering;
mod python;
mod rank_bpe;
pub mod recognise;
pub mod record;
pub mod report;
pub mod source;
pub mod stamp;
pub mod template;
pub mod tensors;
pub mod tokenizer;
mod tokenizer_config;
mod tokenizer_file;

pub use config::{Attention, Config, IndexerConfig, IndexerKind, LayerKind, MoeConfig, Scoring};
pub use error::{ContainerError, TensorError};
pub use family::{Family, FamilyRow, Role, Rope, TensorClass};
pub use header::Dtype;
pub use held::HeldExperts;
pub use index::{FileId, ShardFile, Shards, TensorEntry};
pub use record::{Record, Records};
pub use report::{Presence, Report};
pub use source::{ByteRange, Layout, Model, QSource};
pub use stamp::{Stamp, StampFormat};
pub use template::{ChatInput, ChatTemplate};
pub use tensors::{TensorSpec, expert_specs, layer_specs, model_specs, spec, tensor_specs};
pub use tokenizer::Tokenizer;
