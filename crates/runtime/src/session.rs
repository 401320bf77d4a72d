//! Sessions: the tokens a sequence was fed and its state.

use experts::Reservation;
use models::ModelError;

use crate::kv::SequenceKv;

/// One sequence. Its state is exactly that of the tokens in [`Session::tokens`].
pub struct Session {
    pub(crate) kv: SequenceKv,
    pub(crate) tokens: Vec<u32>,
    pub(crate) context: usize,
    pub(crate) _memory: Reservation,
}

impl Session {
    /// Tokens fed so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Most tokens it can hold.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Tokens it can still take.
    pub fn room(&self) -> usize {
        self.context - self.tokens.len()
    }

    /// Forgets tokens from `len` on; the state of the others stays.
    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
    }
}

/// Which hidden states of a work item are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Want {
    /// None of them.
    Nothing,
    /// The last one.
    Last,
    /// All of them.
    All,
}

/// Tokens to feed to a session in a step.
pub struct Work<'a> {
    /// The session.
    pub session: &'a mut Session,
    /// Tokens to append.
    pub tokens: &'a [u32],
    /// Hidden states wanted.
    pub want: Want,
}

/// A step that failed. Sessions are as they were before it.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The tokens do not fit the context.
    #[error(
        "{used} tokens in the context and {wanted} more exceed its {context}; \
         shorten the prompt or raise --ctx (or --ram, which bounds it where --ctx is not given)"
    )]
    Context {
        /// Tokens already in the session.
        used: usize,
        /// Tokens to be fed.
        wanted: usize,
        /// Length of the context.
        context: usize,
    },
    /// More rows in one step than memory was planned for.
    #[error(
        "a step of {rows} tokens, memory is planned for {planned}; \
         feed fewer at once or raise --prefill-chunk"
    )]
    Rows {
        /// Tokens of the step.
        rows: usize,
        /// Most that were planned for.
        planned: usize,
    },
    /// The model could not compute it.
    #[error(transparent)]
    Model(#[from] ModelError),
}
