//! One account for every byte the process holds, with a hard ceiling.
//!
//! Memory is reserved here before it is allocated. A refused reservation is an error with both
//! numbers; nothing is ever traded for precision, experts or context behind the user's back.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What bytes are held for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ByteClass {
    /// Code, tokenizer and tables that were there before the model was loaded.
    Process,
    /// Weights that stay in memory.
    Dense,
    /// Key/value state of sessions.
    Kv,
    /// Activations of a step.
    Scratch,
    /// Routed experts in memory.
    ExpertCache,
    /// Buffers of reads under way.
    InFlight,
    /// Pages of mapped files, which the system keeps or drops as it likes: noted, never counted
    /// against the ceiling.
    FilePages,
}

impl ByteClass {
    /// Every class.
    pub const ALL: [ByteClass; 7] = [
        ByteClass::Process,
        ByteClass::Dense,
        ByteClass::Kv,
        ByteClass::Scratch,
        ByteClass::ExpertCache,
        ByteClass::InFlight,
        ByteClass::FilePages,
    ];

    /// Name for people and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            ByteClass::Process => "process",
            ByteClass::Dense => "dense",
            ByteClass::Kv => "kv",
            ByteClass::Scratch => "scratch",
            ByteClass::ExpertCache => "expert_cache",
            ByteClass::InFlight => "in_flight",
            ByteClass::FilePages => "file_pages",
        }
    }
}

impl fmt::Display for ByteClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A reservation that the ceiling does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{class} needs {wanted} bytes, but {used} of {limit} bytes are in use; \
     raise --ram or lower --ctx"
)]
pub struct LedgerError {
    /// Class of the refused bytes.
    pub class: ByteClass,
    /// Bytes asked for.
    pub wanted: u64,
    /// Bytes reserved already.
    pub used: u64,
    /// The ceiling.
    pub limit: u64,
}

/// The account.
#[derive(Debug)]
pub struct Ledger {
    limit: u64,
    used: AtomicU64,
    classes: [AtomicU64; ByteClass::ALL.len()],
}

impl Ledger {
    /// An account with a ceiling in bytes.
    pub fn new(limit_bytes: u64) -> Arc<Ledger> {
        Arc::new(Ledger {
            limit: limit_bytes,
            used: AtomicU64::new(0),
            classes: std::array::from_fn(|_| AtomicU64::new(0)),
        })
    }

    /// The ceiling in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes reserved.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes that may still be reserved.
    pub fn free(&self) -> u64 {
        self.limit.saturating_sub(self.used())
    }

    /// Bytes reserved for a class.
    pub fn class(&self, class: ByteClass) -> u64 {
        self.classes[class as usize].load(Ordering::Relaxed)
    }

    /// Notes bytes of mapped files.
    pub fn note_file_pages(&self, bytes: u64) {
        self.classes[ByteClass::FilePages as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Reserves bytes until the reservation is dropped.
    pub fn reserve(
        self: &Arc<Self>,
        class: ByteClass,
        bytes: u64,
    ) -> Result<Reservation, LedgerError> {
        let grown = |used: u64| used.checked_add(bytes).filter(|total| *total <= self.limit);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown)
            .map_err(|used| LedgerError { class, wanted: bytes, used, limit: self.limit })?;
        self.classes[class as usize].fetch_add(bytes, Ordering::Relaxed);
        Ok(Reservation { ledger: self.clone(), class, bytes })
    }
}

/// Reserved bytes; dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    ledger: Arc<Ledger>,
    class: ByteClass,
    bytes: u64,
}

impl Reservation {
    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.ledger.classes[self.class as usize].fetch_sub(self.bytes, Ordering::Relaxed);
        self.ledger.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_holds_and_dropped_bytes_come_back() {
        let ledger = Ledger::new(100);
        let first = ledger.reserve(ByteClass::Dense, 60).unwrap();
        let refused = ledger.reserve(ByteClass::Kv, 41).unwrap_err();
        assert_eq!(refused, LedgerError { class: ByteClass::Kv, wanted: 41, used: 60, limit: 100 });
        let second = ledger.reserve(ByteClass::Kv, 40).unwrap();
        assert_eq!((ledger.free(), ledger.class(ByteClass::Kv)), (0, 40));
        drop(first);
        assert_eq!((ledger.used(), ledger.class(ByteClass::Dense)), (40, 0));
        drop(second);
        assert_eq!(ledger.free(), 100);
        assert!(ledger.reserve(ByteClass::Kv, u64::MAX).is_err());
    }
}
