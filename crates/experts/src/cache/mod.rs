//! The experts in memory: which are there, who holds them, and who waits for one.
//!
//! A lease keeps its expert's bytes where they are: a handed-out expert is never evicted or
//! overwritten. Loads run on their own threads; those who wait for one get it before it can be
//! evicted. Once those who wait for a failed load have heard, the next request tries again.
//!
//! Each layer has a lock of its own, held for a few operations and never during a read. Reads that
//! somebody waits for come first; experts to warm the cache with follow; what is only guessed is
//! read when nothing else is, into room of its own, and gives way between pieces.
//!
//! Locks are taken in the order account, layer, queue of loads.

pub mod counters;
mod loading;
pub mod policy;
mod queue;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use formats::ExpertRef;
use smallvec::SmallVec;

use self::counters::{CacheCounters, Phase, Tier};
use self::policy::{LayerPolicy, NOTHING};
use self::queue::Jobs;
use crate::backend::FEW_EXPERTS;
use crate::load::{ExpertSource, LoadError};
use crate::reader::PageBuffer;
use crate::store::ExpertStore;

/// Share of the time without a read that somebody waits for, below which guesses are not read.
const IDLE_SHARE_MIN: f64 = 0.02;

/// Least share of the guesses read that must have come true for more to be read.
const COME_TRUE_SHARE_MIN: f64 = 0.6;
/// Guesses whose end is known before they are judged.
const GUESSES_JUDGED: u64 = 64;
/// Guesses whose end is known after which all so far count half.
const GUESSES_RECENT: u64 = 256;
/// Lists of guesses of which one is read although guesses do not pay.
const TRIAL_EVERY: u64 = 32;

/// Guesses noted before those that are settled are looked for.
const GUESSES_NOTED_MAX: usize = 128;

/// Limits of the cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheOptions {
    /// Most bytes of experts in memory; at least the largest expert.
    pub capacity_bytes: u64,
    /// Of them, bytes for experts that are only guessed to be needed; 0 reads none.
    pub ahead_bytes: u64,
    /// Most experts in memory per layer, for tests; excludes guesses.
    pub per_layer_max: Option<usize>,
    /// Threads that read what somebody waits for.
    pub loaders: usize,
    /// Least share of idle time for guesses to be read; [`CacheOptions::new`] has the default.
    pub idle_share_min: f64,
}

impl CacheOptions {
    /// A cache of so many bytes without guesses.
    pub fn new(capacity_bytes: u64, loaders: usize) -> CacheOptions {
        CacheOptions {
            capacity_bytes,
            ahead_bytes: 0,
            per_layer_max: None,
            loaders,
            idle_share_min: IDLE_SHARE_MIN,
        }
    }
}

/// A place in the model: layer and expert.
pub type Key = (u32, u32);

/// Of an expert that was guessed and that nobody has asked for: the requests that its layer had
/// had.
type Guess = Option<u64>;

#[derive(Debug)]
enum Entry {
    /// Not in memory.
    Absent,
    /// Queued or being read. `has_room`: its memory is accounted for.
    Loading { waiters: u32, ahead: Guess, has_room: bool },
    /// In memory.
    Ready { slot: Arc<PageBuffer>, waiters: u32, ahead: Guess },
    /// Its load failed; kept until everyone who waits has heard.
    Failed { error: Arc<LoadError>, waiters: u32 },
}

impl Entry {
    fn guess(&self) -> Guess {
        match self {
            Entry::Loading { ahead, .. } | Entry::Ready { ahead, .. } => *ahead,
            Entry::Absent | Entry::Failed { .. } => None,
        }
    }
}

#[derive(Debug)]
struct Layer {
    entries: Vec<Entry>,
    policy: LayerPolicy,
    pinned: Vec<bool>,
    /// Experts with memory.
    held: usize,
    /// Requests so far.
    requests: u64,
}

/// One layer, its lock, and those who wait for its experts.
#[derive(Debug)]
struct Shard {
    state: Mutex<Layer>,
    changed: Condvar,
    /// How cold the coldest expert is that may go; a hint, true when it was written.
    floor: AtomicI64,
}

impl Shard {
    fn lock(&self) -> MutexGuard<'_, Layer> {
        // A panic while the lock was held is a bug elsewhere; the state is updated in steps that
        // leave it consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the others how cold this layer is. Called before the lock is given back.
    fn publish_floor(&self, layer: &mut Layer) {
        self.floor.store(layer.policy.floor(), Ordering::Relaxed);
    }
}

/// Bytes in memory, and memory to be used again.
#[derive(Debug, Default)]
struct Account {
    /// Bytes of experts that were asked for, reads under way included. A request that asks for a
    /// guess moves its bytes a moment later, so both may be off by some for as long.
    regular: i64,
    /// Bytes of experts that nobody has asked for.
    ahead: i64,
    /// Bytes of experts that are kept once they are there.
    pinned: i64,
    spare: Vec<PageBuffer>,
    /// Guessed experts that were given room, oldest first, each with its [`Guess`].
    guesses: VecDeque<(Key, u64)>,
}

/// How guesses did lately.
#[derive(Debug, Default)]
struct RecentGuesses {
    /// Guesses that came true, older ones counting less.
    came_true: AtomicU64,
    /// Those that were read for nothing, likewise.
    wasted: AtomicU64,
    /// Whether enough came true for the room that they take.
    pay: AtomicBool,
}

/// Experts of a request that were in memory.
pub type Ready = SmallVec<[(u32, Lease); FEW_EXPERTS]>;

/// An expert and the rows that chose it.
pub type Wanted = (u32, usize);

struct Shared {
    layers: Vec<Shard>,
    account: Mutex<Account>,
    jobs: Jobs,
    /// Loaders that wait for room; see [`Shared::room_freed`].
    starved: AtomicUsize,
    recent: RecentGuesses,
    store: ExpertStore,
    options: CacheOptions,
    counters: CacheCounters,
}

/// The cache.
pub struct ExpertCache {
    shared: Arc<Shared>,
    loaders: Vec<JoinHandle<()>>,
}

/// An expert that stays in memory as long as this lives.
pub struct Lease {
    slot: Option<Arc<PageBuffer>>,
    shared: Arc<Shared>,
    key: Key,
}

impl Lease {
    /// The expert's matrices.
    pub fn view(&self) -> ExpertRef<'_> {
        let data: &[u8] = self.slot.as_ref().map_or(&[], |slot| slot);
        self.shared.store.table().expert(self.key).desc.view(data)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.slot = None;
        self.shared.room_freed();
    }
}

impl ExpertCache {
    /// A cache over the experts of `store`.
    pub fn new(store: ExpertStore, options: CacheOptions) -> std::io::Result<ExpertCache> {
        let table = store.table();
        let layers = (0..table.layers()).map(|layer| {
            let places = 0..table.places(layer);
            let bytes_of = |expert: usize| {
                table.get((layer as u32, expert as u32)).map_or(0, ExpertSource::slot_bytes)
            };
            let policy = LayerPolicy::new(places.clone().map(bytes_of));
            let state = Layer {
                pinned: vec![false; places.len()],
                entries: places.map(|_| Entry::Absent).collect(),
                policy,
                held: 0,
                requests: 0,
            };
            let floor = AtomicI64::new(NOTHING);
            Shard { state: Mutex::new(state), changed: Condvar::new(), floor }
        });
        let largest = table.slot_bytes_max();
        // A guess in a layer's last slot would keep out what is asked for.
        let room = match options.per_layer_max {
            Some(_) => 0,
            None => options.capacity_bytes.saturating_sub(largest),
        };
        let options = CacheOptions { ahead_bytes: options.ahead_bytes.min(room), ..options };
        let shared = Arc::new(Shared {
            layers: layers.collect(),
            account: Mutex::new(Account {
                guesses: VecDeque::with_capacity(2 * GUESSES_NOTED_MAX),
                ..Account::default()
            }),
            jobs: Jobs::new(),
            starved: AtomicUsize::new(0),
            recent: RecentGuesses::default(),
            store,
            options,
            counters: CacheCounters::default(),
        });
        let mut cache = ExpertCache { shared, loaders: Vec::new() };
        for index in 0..options.loaders.max(1) {
            cache.spawn(format!("coli-read-{index}"), false)?;
        }
        if options.ahead_bytes > 0 {
            cache.spawn("coli-read-ahead".to_owned(), true)?;
        }
        Ok(cache)
    }

    fn spawn(&mut self, name: String, ahead: bool) -> std::io::Result<()> {
        let shared = self.shared.clone();
        let loader = thread::Builder::new().name(name).spawn(move || shared.run_loader(ahead))?;
        self.loaders.push(loader);
        Ok(())
    }

    /// The experts and their files.
    pub fn store(&self) -> &ExpertStore {
        &self.shared.store
    }

    /// What the cache did so far.
    pub fn counters(&self) -> &CacheCounters {
        &self.shared.counters
    }

    /// Limits in effect.
    pub fn options(&self) -> &CacheOptions {
        &self.shared.options
    }

    /// Bytes of experts in memory or being read.
    pub fn bytes(&self) -> u64 {
        let account = self.shared.account();
        u64::try_from(account.regular + account.ahead).unwrap_or(0)
    }

    /// Seconds in which a read was under way that somebody waited for.
    pub fn busy_s(&self) -> f64 {
        self.shared.jobs.busy(Instant::now()).as_secs_f64()
    }

    /// Seconds in which any read was under way, guesses included.
    pub fn known_s(&self) -> f64 {
        self.shared.jobs.known(Instant::now()).as_secs_f64()
    }

    /// Asks for experts of a layer, chosen by so many rows each, of `rows` rows in all: leases for
    /// those in memory, loads for the others. Whatever comes back without a lease must be waited
    /// for by [`Pending::next`].
    pub fn request(&self, layer: usize, wanted: &[Wanted], rows: usize) -> (Ready, Pending<'_>) {
        let shared = &self.shared;
        let phase = Phase::of(rows);
        let mut ready = Ready::new();
        let mut pending = Pending { cache: self, layer: layer as u32, experts: SmallVec::new() };
        let mut missing: SmallVec<[Key; FEW_EXPERTS]> = SmallVec::new();
        let mut asked_for = 0;
        let shard = &shared.layers[layer];
        {
            let mut guard = shard.lock();
            let state = &mut *guard;
            state.requests += 1;
            state.policy.advance(rows);
            for &(expert, chosen_by) in wanted {
                let key = (layer as u32, expert);
                state.policy.touch(expert, chosen_by);
                let pinned = state.pinned[expert as usize];
                let tier = match &mut state.entries[expert as usize] {
                    Entry::Ready { slot, ahead, .. } => {
                        let slot = Some(slot.clone());
                        ready.push((expert, Lease { slot, shared: shared.clone(), key }));
                        if ahead.take().is_some() {
                            asked_for += shared.bytes_of(key);
                            if !pinned {
                                state.policy.link(expert);
                            }
                            shared.recent.came_true.fetch_add(1, Ordering::Relaxed);
                            Tier::Guessed
                        } else if pinned {
                            Tier::Pinned
                        } else {
                            Tier::Cached
                        }
                    }
                    Entry::Loading { waiters, ahead, has_room } => {
                        // One that nobody waited for may still be queued behind others.
                        let queued = *waiters == 0 && shared.jobs.promote(key);
                        *waiters += 1;
                        pending.experts.push(expert);
                        let guessed = ahead.take().is_some();
                        if guessed && *has_room {
                            asked_for += shared.bytes_of(key);
                        }
                        if guessed && !queued {
                            shared.recent.came_true.fetch_add(1, Ordering::Relaxed);
                            Tier::Late
                        } else {
                            Tier::Missing
                        }
                    }
                    Entry::Failed { waiters, .. } => {
                        *waiters += 1;
                        pending.experts.push(expert);
                        Tier::Missing
                    }
                    entry @ Entry::Absent => {
                        *entry = Entry::Loading { waiters: 1, ahead: None, has_room: false };
                        missing.push(key);
                        pending.experts.push(expert);
                        Tier::Missing
                    }
                };
                shared.counters.count(phase, tier);
            }
            shard.publish_floor(state);
        }
        shared.count_asked_for(asked_for);
        shared.jobs.need(&missing);
        (ready, pending)
    }

    /// Reads experts that may be needed soon, best guess first, as far as there is room and the
    /// drive is idle. What was asked for gives way at most as far as it had taken the room that is
    /// set aside for guesses.
    pub fn guess(&self, layer: usize, experts: &[u32]) {
        let shared = &self.shared;
        if shared.options.ahead_bytes == 0 || experts.is_empty() {
            return;
        }
        let counters = &shared.counters;
        counters.guessed.add(experts.len() as u64);
        if shared.jobs.idle_share(Instant::now()) < shared.options.idle_share_min {
            counters.dropped_busy.add(experts.len() as u64);
            return;
        }
        if !self.may_guess() {
            counters.dropped_unlikely.add(experts.len() as u64);
            return;
        }
        let mut missing: SmallVec<[Key; FEW_EXPERTS]> = SmallVec::new();
        {
            let mut state = shared.layers[layer].lock();
            let requests = state.requests;
            for &expert in experts {
                match &mut state.entries[expert as usize] {
                    entry @ Entry::Absent => {
                        *entry =
                            Entry::Loading { waiters: 0, ahead: Some(requests), has_room: false };
                        missing.push((layer as u32, expert));
                    }
                    _ => counters.dropped_resident.add(1),
                }
            }
        }
        counters.issued.add(missing.len() as u64);
        // Older guesses that were not begun give way to better ones.
        for key in shared.jobs.replace_guesses(&missing) {
            shared.give_up(key);
        }
    }

    /// Whether guesses are read: when they come true often enough, until that is known, and now and
    /// then whatever the past says, since routing changes.
    fn may_guess(&self) -> bool {
        let recent = &self.shared.recent;
        let came_true = recent.came_true.load(Ordering::Relaxed);
        let settled = came_true + recent.wasted.load(Ordering::Relaxed);
        let tried = self.shared.counters.trials.get();
        self.shared.counters.trials.add(1);
        let judged = settled >= GUESSES_JUDGED;
        let pay = judged && came_true as f64 >= COME_TRUE_SHARE_MIN * settled as f64;
        recent.pay.store(pay, Ordering::Relaxed);
        if settled >= GUESSES_RECENT {
            // Older ones count half.
            for count in [&recent.came_true, &recent.wasted] {
                count.fetch_sub(count.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
            }
        }
        pay || !judged || tried.is_multiple_of(TRIAL_EVERY)
    }

    /// Keeps the first `most` of a list of a layer's experts that are neither in memory nor being
    /// read.
    pub fn retain_absent(&self, layer: usize, experts: &mut Vec<u32>, most: usize) {
        let state = self.shared.layers[layer].lock();
        let absent =
            |expert: &u32| matches!(state.entries.get(*expert as usize), Some(Entry::Absent));
        experts.retain(absent);
        experts.truncate(most);
    }

    /// Reads experts in the background until the cache is full, in the order given.
    pub fn warm(&self, keys: impl IntoIterator<Item = Key>) {
        let shared = &self.shared;
        let mut missing = Vec::new();
        for key in keys {
            let mut state = shared.layers[key.0 as usize].lock();
            if let entry @ Entry::Absent = &mut state.entries[key.1 as usize] {
                *entry = Entry::Loading { waiters: 0, ahead: None, has_room: false };
                missing.push(key);
            }
        }
        shared.jobs.warm(&missing);
    }

    /// Waits until nothing is left to warm the cache with.
    pub fn wait_until_warm(&self) {
        self.shared.jobs.wait_until_warm();
    }

    /// Gives experts the score of so many rows that chose them.
    pub fn seed(&self, scores: impl IntoIterator<Item = (Key, f64)>) {
        for (key, score) in scores {
            self.shared.layers[key.0 as usize].lock().policy.seed(key.1, score);
        }
    }

    /// Keeps an expert in memory once it is there, or lets it go again. False when it cannot be
    /// kept: pinned experts leave half of the cache, and room for one expert, to all others.
    pub fn pin(&self, key: Key, pinned: bool) -> bool {
        let shared = &self.shared;
        let mut account = shared.account();
        let shard = &shared.layers[key.0 as usize];
        let mut guard = shard.lock();
        let state = &mut *guard;
        if state.pinned[key.1 as usize] == pinned {
            return true;
        }
        let bytes = shared.bytes_of(key);
        if pinned {
            let largest = shared.store.table().slot_bytes_max() as i64;
            let least = shared.regular_least();
            let most = (least / 2).min(least - largest);
            if account.pinned + bytes > most || shared.options.per_layer_max.is_some() {
                return false;
            }
        }
        account.pinned += if pinned { bytes } else { -bytes };
        state.pinned[key.1 as usize] = pinned;
        match (&state.entries[key.1 as usize], pinned) {
            (Entry::Ready { ahead: None, .. }, false) => state.policy.link(key.1),
            _ => state.policy.unlink(key.1),
        }
        shard.publish_floor(state);
        drop(guard);
        drop(account);
        shared.room_freed();
        true
    }

    /// Pinned experts that are neither in memory nor being read.
    pub fn absent_pins(&self) -> Vec<Key> {
        let mut absent = Vec::new();
        for (layer, shard) in self.shared.layers.iter().enumerate() {
            let state = shard.lock();
            for (expert, (entry, pinned)) in state.entries.iter().zip(&state.pinned).enumerate() {
                if *pinned && matches!(entry, Entry::Absent) {
                    absent.push((layer as u32, expert as u32));
                }
            }
        }
        absent
    }

    /// Experts in memory that were asked for, each with its worth and whether it is pinned.
    pub fn residents(&self) -> Vec<(Key, i64, bool)> {
        let mut residents = Vec::new();
        for (layer, shard) in self.shared.layers.iter().enumerate() {
            let state = shard.lock();
            for (expert, entry) in state.entries.iter().enumerate() {
                if let Entry::Ready { ahead: None, .. } = entry {
                    let worth = state.policy.worth(expert as u32);
                    residents.push(((layer as u32, expert as u32), worth, state.pinned[expert]));
                }
            }
        }
        residents
    }
}

impl Drop for ExpertCache {
    fn drop(&mut self) {
        self.shared.jobs.stop();
        for loader in self.loaders.drain(..) {
            // A loader that panicked has said so already.
            let _ = loader.join();
        }
    }
}

/// Experts of a request that are being read.
pub struct Pending<'a> {
    cache: &'a ExpertCache,
    layer: u32,
    experts: SmallVec<[u32; FEW_EXPERTS]>,
}

/// Experts that have come, or the one whose load failed.
pub type Arrived = Result<Ready, (u32, Arc<LoadError>)>;

impl Pending<'_> {
    /// Waits for some of the experts and returns all that have come, at most `most`; `None` when
    /// there are no more. A failed load is returned once, and may be asked for again.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self, most: usize) -> Option<Arrived> {
        if self.experts.is_empty() {
            return None;
        }
        let shared = &self.cache.shared;
        let shard = &shared.layers[self.layer as usize];
        let mut state = shard.lock();
        loop {
            let mut arrived = Ready::new();
            let mut at = 0;
            while at < self.experts.len() && arrived.len() < most {
                let expert = self.experts[at];
                let key = (self.layer, expert);
                match &mut state.entries[expert as usize] {
                    Entry::Ready { slot, waiters, .. } => {
                        *waiters -= 1;
                        let slot = Some(slot.clone());
                        arrived.push((expert, Lease { slot, shared: shared.clone(), key }));
                        self.experts.swap_remove(at);
                    }
                    // Those that have come are handed out first.
                    Entry::Failed { error, .. } if arrived.is_empty() => {
                        let error = error.clone();
                        self.experts.swap_remove(at);
                        leave(&mut state, expert);
                        return Some(Err((expert, error)));
                    }
                    _ => at += 1,
                }
            }
            if !arrived.is_empty() {
                return Some(Ok(arrived));
            }
            state = shard.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// One waiter less.
fn leave(state: &mut Layer, expert: u32) {
    let entry = &mut state.entries[expert as usize];
    match entry {
        Entry::Failed { waiters, .. } => {
            *waiters -= 1;
            if *waiters == 0 {
                *entry = Entry::Absent;
            }
        }
        Entry::Ready { waiters, .. } | Entry::Loading { waiters, .. } => *waiters -= 1,
        Entry::Absent => {}
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.experts.is_empty() {
            return;
        }
        let shared = &self.cache.shared;
        {
            let mut state = shared.layers[self.layer as usize].lock();
            for expert in self.experts.drain(..) {
                leave(&mut state, expert);
                let unwanted =
                    matches!(state.entries[expert as usize], Entry::Loading { waiters: 0, .. });
                // A load nobody waits for any more is not begun; one under way is finished and
                // kept.
                if unwanted && shared.jobs.withdraw((self.layer, expert)) {
                    state.entries[expert as usize] = Entry::Absent;
                }
            }
        }
        shared.room_freed();
    }
}
