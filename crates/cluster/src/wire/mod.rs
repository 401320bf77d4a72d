//! The messages of both protocol versions as bytes. `docs/wire.md` describes them.
//!
//! Readers take bytes as they come, in pieces of any size, and check every field as soon as it is
//! complete, before anything that it announces is stored. What a reader holds grows with the bytes
//! that came, never with what a header claims.

mod incoming;
pub mod secure;
pub mod v1;
pub mod v2;

use container::Config;

pub(crate) use incoming::put_floats_at;

/// First bytes of every message of version 1, and of every connection of version 2.
pub const MAGIC: [u8; 8] = *b"COLIEX01";

/// What every message of a connection must agree with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Numbers per row.
    pub hidden: u32,
    /// Width of an expert.
    pub intermediate: u32,
    /// Layers, one that predicts further tokens included.
    pub layers: u32,
    /// Experts per layer.
    pub experts: u32,
}

impl Shape {
    /// The shape that messages about a model must have.
    pub fn of(config: &Config) -> Shape {
        Shape {
            hidden: config.hidden_size as u32,
            intermediate: config.moe.expert_intermediate as u32,
            layers: config.all_layers() as u32,
            experts: config.moe.experts as u32,
        }
    }
}

/// Bytes that are not a message of this model. The connection ends: where the next message would
/// begin is unknown.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WireError {
    /// The first bytes are something else's.
    #[error("the peer does not speak this protocol: {found:02x?} instead of \"COLIEX01\"")]
    Magic {
        /// What came.
        found: [u8; 8],
    },
    /// A version that this program does not speak.
    #[error("protocol version {found}; this connection takes {wanted}")]
    Version {
        /// What came.
        found: u32,
        /// What was expected.
        wanted: u32,
    },
    /// The peer has a model of another shape.
    #[error("the peer's {field} is {found}, this model's {wanted}; both must have the same model")]
    Shape {
        /// The field.
        field: &'static str,
        /// What came.
        found: u32,
        /// This model's.
        wanted: u32,
    },
    /// A count or index outside its limits.
    #[error("{field} is {found}, allowed are {least} to {most}")]
    Range {
        /// The field.
        field: &'static str,
        /// What came.
        found: u32,
        /// Least allowed.
        least: u32,
        /// Most allowed.
        most: u32,
    },
    /// A message that would be larger than the receiver takes.
    #[error("the message has more than {budget_bytes} bytes of rows, which is all that is taken")]
    Budget {
        /// Most bytes of rows.
        budget_bytes: u64,
    },
    /// A frame that is longer than any of its kind.
    #[error("a frame {kind:?} of {bytes} bytes; at most {most} are taken now")]
    Frame {
        /// Its kind.
        kind: v2::Kind,
        /// Its length.
        bytes: u32,
        /// Most that are taken.
        most: u64,
    },
    /// A frame that contradicts itself.
    #[error("{what}")]
    Malformed {
        /// How.
        what: &'static str,
    },
    /// A frame at the wrong time.
    #[error("a frame {kind:?} is out of order")]
    Order {
        /// Its kind.
        kind: v2::Kind,
    },
    /// A reply to something else.
    #[error("item {item} answers for {field} {found}, asked was {wanted}")]
    Answer {
        /// The item, from 0.
        item: usize,
        /// The field.
        field: &'static str,
        /// What came.
        found: u32,
        /// What was asked.
        wanted: u32,
    },
}

/// Refuses a number outside a range.
fn within(field: &'static str, found: u32, least: u32, most: u32) -> Result<u32, WireError> {
    if (least..=most).contains(&found) {
        return Ok(found);
    }
    Err(WireError::Range { field, found, least, most })
}
