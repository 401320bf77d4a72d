//! What the cache did, by cause.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Where a chosen expert was when it was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tier {
    /// In memory, pinned.
    Pinned,
    /// In memory.
    Cached,
    /// In memory because it was guessed.
    Guessed,
    /// Being read because it was guessed.
    Late,
    /// On the drive, or being read for another request.
    Missing,
}

/// What a request was part of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// One row.
    Decode,
    /// Several rows.
    Prefill,
}

impl Phase {
    /// The phase of a request for so many rows.
    pub fn of(rows: usize) -> Phase {
        if rows > 1 { Phase::Prefill } else { Phase::Decode }
    }
}

const TIERS: usize = 5;

/// What the cache did.
#[derive(Debug, Default)]
pub struct CacheCounters {
    selections: [[Counter; TIERS]; 2],
    /// Experts read.
    pub loads: Counter,
    /// Experts dropped to make room.
    pub evictions: Counter,
    /// Experts named as likely to be needed.
    pub guessed: Counter,
    /// Of them, those whose reading was queued.
    pub issued: Counter,
    /// Of the guessed, those that were in memory or under way already.
    pub dropped_resident: Counter,
    /// Of the guessed, those not queued because the drive was busy.
    pub dropped_busy: Counter,
    /// Of the guessed, those not queued because too few came true.
    pub dropped_unlikely: Counter,
    /// Lists of guesses while the drive was idle.
    pub trials: Counter,
    /// Of the issued, those that found no room or were overtaken by better guesses.
    pub dropped_no_room: Counter,
    /// Of the issued, those that were read and evicted before anybody asked.
    pub wasted: Counter,
}

impl CacheCounters {
    /// Counts a chosen expert.
    pub fn count(&self, phase: Phase, tier: Tier) {
        self.selections[phase as usize][tier as usize].add(1);
    }

    /// Chosen experts of a phase by where they were.
    pub fn selections(&self, phase: Phase, tier: Tier) -> u64 {
        self.selections[phase as usize][tier as usize].get()
    }

    /// Chosen experts by where they were.
    pub fn tier(&self, tier: Tier) -> u64 {
        self.selections(Phase::Decode, tier) + self.selections(Phase::Prefill, tier)
    }

    /// Chosen experts that were in memory without a guess.
    pub fn hits(&self) -> u64 {
        self.tier(Tier::Pinned) + self.tier(Tier::Cached)
    }

    /// Chosen experts that had to be waited for.
    pub fn misses(&self) -> u64 {
        self.tier(Tier::Late) + self.tier(Tier::Missing)
    }
}
