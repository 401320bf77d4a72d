//! The threads that load, and the room they load into.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, MutexGuard, PoisonError};

use smallvec::SmallVec;

use super::policy::coldest_layer;
use super::queue::{Job, Kind};
use super::{Account, Entry, GUESSES_NOTED_MAX, Key, Layer, Shared};
use crate::load::{LoadError, LoadMemory, name_of};
use crate::reader::{AtOnce, Pace, PageBuffer};

/// Bytes that a guessed expert's read may take before it looks whether somebody waits for another.
const PIECE_BYTES: usize = 1 << 20;

/// Guessed experts for which there is room while guesses do not pay.
const TRIAL_EXPERTS: u64 = 2;

/// The pace of a guessed expert's read: it waits while somebody waits for another, until somebody
/// waits for it.
struct GiveWay<'a> {
    shared: &'a Shared,
    key: Key,
}

impl Pace for GiveWay<'_> {
    fn piece_bytes(&self) -> usize {
        PIECE_BYTES
    }

    fn between(&mut self) {
        let (layer, expert) = (self.key.0 as usize, self.key.1 as usize);
        self.shared.jobs.wait_until_idle(|| {
            let state = self.shared.layers[layer].lock();
            matches!(state.entries[expert], Entry::Loading { ahead: Some(_), .. })
        });
    }
}

impl Shared {
    pub(super) fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn bytes_of(&self, key: Key) -> i64 {
        self.store.table().expert(key).slot_bytes() as i64
    }

    /// Bytes that experts which were asked for may always take.
    pub(super) fn regular_least(&self) -> i64 {
        (self.options.capacity_bytes - self.options.ahead_bytes) as i64
    }

    /// Bytes that guesses may take: little, for trials, while they do not pay.
    fn ahead_max(&self) -> i64 {
        let all = self.options.ahead_bytes;
        let most = match self.recent.pay.load(Ordering::Relaxed) {
            true => all,
            false => all.min(TRIAL_EXPERTS * self.store.table().slot_bytes_max()),
        };
        most as i64
    }

    /// Bytes that experts which were asked for may take now.
    fn regular_max(&self, account: &Account) -> i64 {
        self.options.capacity_bytes as i64 - account.ahead.max(self.ahead_max())
    }

    /// Wakes loaders that wait for room. Everything that lets an expert go calls it afterwards: the
    /// fence orders that before the look at `starved`, a loader counts itself starved before its
    /// last look for room.
    pub(super) fn room_freed(&self) {
        fence(Ordering::SeqCst);
        if self.starved.load(Ordering::Relaxed) > 0 {
            self.jobs.signal_room();
        }
    }

    /// Takes an expert out of memory and gives its buffer to the spare ones.
    fn evict(&self, account: &mut Account, state: &mut Layer, key: Key) {
        let entry = std::mem::replace(&mut state.entries[key.1 as usize], Entry::Absent);
        state.policy.unlink(key.1);
        state.held -= 1;
        let Entry::Ready { slot, ahead, .. } = entry else {
            panic!("{} is evicted and not in memory", name_of(key));
        };
        let bytes = self.bytes_of(key);
        if ahead.is_some() {
            account.ahead -= bytes;
            self.counters.wasted.add(1);
            self.recent.wasted.fetch_add(1, Ordering::Relaxed);
        } else {
            account.regular -= bytes;
        }
        self.counters.evictions.add(1);
        if let Some(slot) = Arc::into_inner(slot) {
            account.spare.push(slot);
        }
    }

    /// Evicts the expert that is worth least, of one layer or of all; false when everything that
    /// could go is held.
    fn evict_coldest(&self, account: &mut Account, of_layer: Option<usize>) -> bool {
        let mut tried: SmallVec<[usize; 16]> = SmallVec::new();
        loop {
            let open = |layer: &usize| !tried.contains(layer);
            let floor_of = |layer: usize| (layer, self.layers[layer].floor.load(Ordering::Relaxed));
            let coldest = match of_layer {
                Some(layer) => Some(layer).filter(open),
                None => coldest_layer((0..self.layers.len()).filter(open).map(floor_of)),
            };
            let Some(layer) = coldest else { return false };
            let shard = &self.layers[layer];
            let mut guard = shard.lock();
            let state = &mut *guard;
            let entries = &state.entries;
            let victim = state.policy.coldest(|expert| is_free(&entries[expert as usize]));
            if let Some((expert, _)) = victim {
                self.evict(account, state, (layer as u32, expert));
            }
            shard.publish_floor(state);
            if victim.is_some() {
                return true;
            }
            tried.push(layer);
        }
    }

    /// Forgets guesses that were asked for or given up, once there are many: those left are as many
    /// as there is room for.
    fn forget_settled_guesses(&self, account: &mut Account) {
        if account.guesses.len() <= GUESSES_NOTED_MAX {
            return;
        }
        account.guesses.retain(|((layer, expert), guessed_at)| {
            let state = self.layers[*layer as usize].lock();
            state.entries[*expert as usize].guess() == Some(*guessed_at)
        });
    }

    /// Evicts the oldest guess, if its layer has been computed since.
    fn evict_stale_guess(&self, account: &mut Account) -> bool {
        while let Some(&(key, guessed_at)) = account.guesses.front() {
            let mut state = self.layers[key.0 as usize].lock();
            let entry = &state.entries[key.1 as usize];
            if entry.guess() != Some(guessed_at) {
                account.guesses.pop_front();
                continue;
            }
            if state.requests == guessed_at || !is_free(entry) {
                return false;
            }
            account.guesses.pop_front();
            self.evict(account, &mut state, key);
            return true;
        }
        false
    }

    /// Whether a guess comes too late: its layer has been computed since.
    fn is_overtaken(&self, key: Key) -> bool {
        let state = self.layers[key.0 as usize].lock();
        state.entries[key.1 as usize].guess().is_some_and(|at| at != state.requests)
    }

    /// Accounts for an expert's memory, evicting as needed, and returns a buffer for it; `None`
    /// when there is no room now.
    fn take_room(&self, job: &Job) -> Option<PageBuffer> {
        let &Job { key, kind } = job;
        let layer = key.0 as usize;
        let bytes = self.bytes_of(key);
        let mut guard = self.account();
        let account = &mut *guard;
        if let Some(max) = self.options.per_layer_max {
            while self.layers[layer].lock().held >= max {
                if kind != Kind::Demand || !self.evict_coldest(account, Some(layer)) {
                    return None;
                }
            }
        }
        match kind {
            Kind::Demand => {
                while account.regular + bytes > self.regular_max(account) {
                    let too_many_guesses = account.ahead > self.ahead_max();
                    if too_many_guesses && self.evict_stale_guess(account) {
                        continue;
                    }
                    if !self.evict_coldest(account, None) {
                        return None;
                    }
                }
            }
            // Warming fills what is free; whoever is there has been asked for.
            Kind::Warm => {
                if account.regular + bytes > self.regular_max(account) {
                    return None;
                }
            }
            Kind::Ahead => {
                if self.is_overtaken(key) {
                    return None;
                }
                while account.ahead + bytes > self.ahead_max() {
                    if !self.evict_stale_guess(account) {
                        return None;
                    }
                }
                // A guess that was asked for left its room to the regular ones: they give it back.
                while account.regular + account.ahead + bytes > self.options.capacity_bytes as i64 {
                    let fits = account.regular <= self.regular_max(account);
                    if fits || !self.evict_coldest(account, None) {
                        return None;
                    }
                }
            }
        }
        let guess = {
            let mut state = self.layers[layer].lock();
            state.held += 1;
            let entry = &mut state.entries[key.1 as usize];
            if let Entry::Loading { has_room, .. } = entry {
                *has_room = true;
            }
            // None where a guess was asked for while it had no room yet.
            entry.guess()
        };
        match guess {
            None => account.regular += bytes,
            Some(guessed_at) => {
                account.ahead += bytes;
                account.guesses.push_back((key, guessed_at));
                self.forget_settled_guesses(account);
            }
        }
        let fitting = account.spare.iter().position(|buffer| buffer.len() as i64 == bytes);
        Some(match fitting {
            Some(at) => account.spare.swap_remove(at),
            None => {
                // Buffers of other sizes would be held beyond the account.
                account.spare.clear();
                PageBuffer::default()
            }
        })
    }

    /// [`Shared::take_room`] for a load that somebody waits for: waits until there is some, nobody
    /// waits any more, or the cache ends; the last two give `None`.
    fn wait_for_room(&self, job: &Job) -> Option<PageBuffer> {
        self.starved.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let room = loop {
            let seen = self.jobs.room_signals();
            if self.is_unwanted(job.key) {
                break None;
            }
            if let Some(room) = self.take_room(job) {
                break Some(room);
            }
            if !self.jobs.wait_for_room(seen) {
                break None;
            }
        };
        self.starved.fetch_sub(1, Ordering::Relaxed);
        room
    }

    fn is_unwanted(&self, key: Key) -> bool {
        let state = self.layers[key.0 as usize].lock();
        matches!(state.entries[key.1 as usize], Entry::Loading { waiters: 0, .. })
    }

    /// One loader thread: loads what is queued until the cache is dropped.
    pub(super) fn run_loader(&self, ahead: bool) {
        let mut memory = LoadMemory::default();
        while let Some(job) = self.jobs.next(ahead) {
            let room = match (self.take_room(&job), job.kind) {
                (None, Kind::Demand) => self.wait_for_room(&job),
                (room, _) => room,
            };
            match room {
                None => self.give_up(job.key),
                Some(data) => {
                    // A panic is a bug, but it must not leave those who wait waiting.
                    let load = AssertUnwindSafe(|| self.load(&job, data, &mut memory));
                    let loaded = catch_unwind(load)
                        .unwrap_or_else(|_| Err(LoadError::Panicked { tensor: name_of(job.key) }));
                    self.publish(job.key, loaded);
                }
            }
            self.jobs.done(&job);
        }
    }

    /// Forgets a load that has no room, unless somebody has begun to wait for it.
    pub(super) fn give_up(&self, key: Key) {
        let entry = &mut self.layers[key.0 as usize].lock().entries[key.1 as usize];
        match entry {
            Entry::Loading { waiters: 0, has_room: false, ahead } => {
                self.counters.dropped_no_room.add(u64::from(ahead.is_some()));
                *entry = Entry::Absent;
            }
            Entry::Loading { has_room: false, .. } => self.jobs.need(&[key]),
            _ => {}
        }
    }

    fn load(
        &self,
        job: &Job,
        data: PageBuffer,
        memory: &mut LoadMemory,
    ) -> Result<PageBuffer, LoadError> {
        let bytes = self.bytes_of(job.key) as usize;
        let mut slot = if data.len() == bytes { data } else { PageBuffer::zeroed(bytes) };
        let (mut give_way, mut at_once) = (GiveWay { shared: self, key: job.key }, AtOnce);
        let pace: &mut dyn Pace = match job.kind {
            Kind::Ahead => &mut give_way,
            Kind::Demand | Kind::Warm => &mut at_once,
        };
        self.store.load(job.key, memory, &mut slot, pace)?;
        self.counters.loads.add(1);
        Ok(slot)
    }

    fn publish(&self, key: Key, loaded: Result<PageBuffer, LoadError>) {
        let shard = &self.layers[key.0 as usize];
        // Whoever hears of a failure finds its room given back.
        let mut account = loaded.is_err().then(|| self.account());
        {
            let mut guard = shard.lock();
            let state = &mut *guard;
            let entry = &mut state.entries[key.1 as usize];
            let (waiters, ahead) = match entry {
                Entry::Loading { waiters, ahead, .. } => (*waiters, *ahead),
                _ => (0, None),
            };
            match loaded {
                Ok(data) => {
                    *entry = Entry::Ready { slot: Arc::new(data), waiters, ahead };
                    if ahead.is_none() && !state.pinned[key.1 as usize] {
                        state.policy.link(key.1);
                    }
                }
                Err(error) => {
                    state.held -= 1;
                    *entry = match waiters {
                        0 => Entry::Absent,
                        _ => Entry::Failed { error: Arc::new(error), waiters },
                    };
                }
            }
            if let Some(account) = &mut account {
                let of_kind = match ahead {
                    Some(_) => &mut account.ahead,
                    None => &mut account.regular,
                };
                *of_kind -= self.bytes_of(key);
            }
            shard.publish_floor(state);
        }
        drop(account);
        shard.changed.notify_all();
        // An expert that nobody waits for may go at once.
        self.room_freed();
    }

    /// Moves bytes of guesses that were asked for to the regular ones.
    pub(super) fn count_asked_for(&self, bytes: i64) {
        if bytes > 0 {
            let mut account = self.account();
            account.ahead -= bytes;
            account.regular += bytes;
        }
    }
}

/// Whether nobody holds or waits for an expert.
fn is_free(entry: &Entry) -> bool {
    // New holders appear under the layer's lock only, which the caller has.
    matches!(entry, Entry::Ready { slot, waiters: 0, .. } if Arc::strong_count(slot) == 1)
}
