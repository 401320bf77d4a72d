//! Connections as state machines: bytes and wishes go in, events and bytes come out. They have no
//! sockets, no threads and no clocks; whoever drives them has.

pub mod coordinator;
pub mod worker;

use crate::identity::Mismatch;
use crate::wire::WireError;
use crate::wire::secure::ChannelError;
use crate::wire::v2::Kind;

/// Why a connection is of no more use.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SessionError {
    /// Bytes that are no message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Encryption.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The peer has another model or arithmetic.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// The peer has an expert of the same name with other weights.
    #[error(
        "layer {layer}, expert {expert} has other weights at the worker than at the coordinator; \
         both must have the same checkpoint and quantisation"
    )]
    Weights {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
    },
    /// The peer ends the connection and says why.
    #[error("it refuses: {0}")]
    Refused(String),
    /// A request before the last one was answered, in version 1.
    #[error("it sent a request before the last one was answered")]
    Early,
    /// Something that nobody asked for.
    #[error("it answers what was not asked")]
    Unasked,
    /// A failed request in version 1.
    #[error(
        "it could not compute what was asked (status {0}); its own output says why. If it holds a \
         part of the experts only, --place \"layers A-B=WORKER\" must say which"
    )]
    Status(u32),
}

impl SessionError {
    /// Whether both sides will never agree while they are as they are.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            SessionError::Mismatch(_) | SessionError::Weights { .. } | SessionError::Refused(_)
        )
    }
}

/// Text of a peer, as people may see it: nothing in it moves a cursor, ends a line or turns the
/// direction of writing.
pub(crate) fn shown(text: &str, most: usize) -> String {
    let is_shown = |c: &char| {
        let turns = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}');
        !c.is_control() && !turns
    };
    text.chars().filter(is_shown).take(most).collect()
}

/// The reason in a frame that refuses.
fn refusal(body: &[u8]) -> SessionError {
    SessionError::Refused(shown(&String::from_utf8_lossy(body), 500))
}

/// A frame that does not come at this time.
fn out_of_order(kind: Kind) -> SessionError {
    SessionError::Wire(WireError::Order { kind })
}
