//! The cache of experts in memory: byte-priced, least recently used first out, with leases.
//!
//! A lease keeps its expert's bytes where they are: a handed-out expert is never evicted or
//! overwritten. Loads run on their own threads; those who wait for one get it before it can be
//! evicted. Once those who wait for a failed load have heard, the next request tries again.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use formats::{Buffer, ExpertRef};
use smallvec::SmallVec;

use crate::backend::FEW_EXPERTS;
use crate::load::{ExpertTable, LoadError, load_expert};
use crate::reader::Reader;

/// Limits of the cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheOptions {
    /// Most bytes of experts in memory; at least the largest expert.
    pub capacity_bytes: u64,
    /// Most experts in memory per layer, for tests.
    pub per_layer_max: Option<usize>,
    /// Threads that read.
    pub loaders: usize,
}

/// An expert in memory.
#[derive(Debug)]
struct Slot {
    data: Buffer,
}

/// A place in the model.
type Key = (u32, u32);

#[derive(Debug)]
enum Entry {
    /// Queued or being read.
    Loading { waiters: u32 },
    /// In memory. `used` is its key in the recency order.
    Ready { slot: Arc<Slot>, used: u64, waiters: u32 },
    /// Its load failed; kept until everyone who waits has heard.
    Failed { error: Arc<LoadError>, waiters: u32 },
}

#[derive(Debug, Default)]
struct Layer {
    /// Slots taken, loads under way included.
    slots: usize,
    /// Ready experts by last use.
    recency: BTreeMap<u64, u32>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<Key, Entry>,
    layers: Vec<Layer>,
    bytes: u64,
    clock: u64,
    queue: VecDeque<Key>,
    spare: Vec<Buffer>,
    /// Loaders that wait for a lease to end.
    starved: usize,
    stop: bool,
}

/// Experts of a request that were in memory.
pub type Ready = SmallVec<[(u32, Lease); FEW_EXPERTS]>;

/// What the cache did.
#[derive(Debug, Default)]
pub struct CacheCounters {
    /// Requests answered from memory.
    pub hits: AtomicU64,
    /// Requests that had to wait for a read.
    pub misses: AtomicU64,
    /// Experts read.
    pub loads: AtomicU64,
    /// Experts dropped to make room.
    pub evictions: AtomicU64,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    table: ExpertTable,
    reader: Reader,
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
    slot: Option<Arc<Slot>>,
    shared: Arc<Shared>,
    key: Key,
}

impl Lease {
    /// The expert's matrices.
    pub fn view(&self) -> ExpertRef<'_> {
        let data: &[u8] = self.slot.as_ref().map_or(&[], |slot| &slot.data);
        self.shared.table.layer(self.key.0 as usize)[self.key.1 as usize].desc.view(data)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.slot = None;
        // A loader may wait for exactly this slot; taking the lock orders the drop before its look.
        let starved = self.shared.lock().starved > 0;
        if starved {
            self.shared.changed.notify_all();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held is a bug elsewhere; the state is updated in steps that
        // leave it consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes_of(&self, key: Key) -> u64 {
        self.table.layer(key.0 as usize)[key.1 as usize].desc.bytes() as u64
    }

    /// Takes the slot accounting for `key`, evicting as needed; `None` when everything that could
    /// go is leased.
    fn take_slot(&self, state: &mut State, key: Key) -> Option<Buffer> {
        let bytes = self.bytes_of(key);
        let layer = key.0 as usize;
        while self.options.per_layer_max.is_some_and(|max| state.layers[layer].slots >= max) {
            let victim = evictable(state, layer)?;
            self.evict(state, layer, victim);
        }
        while state.bytes + bytes > self.options.capacity_bytes {
            let oldest = (0..state.layers.len())
                .filter_map(|layer| evictable(state, layer).map(|used| (used, layer)))
                .min()?;
            self.evict(state, oldest.1, oldest.0);
        }
        state.bytes += bytes;
        state.layers[layer].slots += 1;
        let fitting = state.spare.iter().position(|buffer| buffer.len() as u64 == bytes);
        Some(match fitting {
            Some(at) => state.spare.swap_remove(at),
            None => {
                // Buffers of other sizes would be held beyond the account.
                state.spare.clear();
                Buffer::default()
            }
        })
    }

    fn evict(&self, state: &mut State, layer: usize, used: u64) {
        let Some(expert) = state.layers[layer].recency.remove(&used) else { return };
        let key = (layer as u32, expert);
        state.layers[layer].slots -= 1;
        state.bytes -= self.bytes_of(key);
        self.counters.evictions.fetch_add(1, Ordering::Relaxed);
        if let Some(Entry::Ready { slot, .. }) = state.entries.remove(&key)
            && let Some(slot) = Arc::into_inner(slot)
        {
            state.spare.push(slot.data);
        }
    }

    /// One loader thread: loads queued experts until the cache is dropped.
    fn run_loader(&self) {
        let mut buffer = Vec::new();
        let mut state = self.lock();
        loop {
            if state.stop {
                return;
            }
            let Some(key) = state.queue.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let Some(data) = self.take_slot(&mut state, key) else {
                state.queue.push_front(key);
                state.starved += 1;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.starved -= 1;
                continue;
            };
            drop(state);
            // A panic is a bug, but it must not leave those who wait for this expert waiting.
            let loaded = catch_unwind(AssertUnwindSafe(|| self.load(key, data, &mut buffer)))
                .unwrap_or_else(|_| Err(LoadError::Panicked { tensor: name_of(key) }));
            state = self.lock();
            self.publish(&mut state, key, loaded);
            self.changed.notify_all();
        }
    }

    fn load(&self, key: Key, data: Buffer, buffer: &mut Vec<u8>) -> Result<Buffer, LoadError> {
        let source = &self.table.layer(key.0 as usize)[key.1 as usize];
        let bytes = source.desc.bytes();
        let mut data = if data.len() == bytes {
            let mut reused = data;
            reused.fill(0);
            reused
        } else {
            Buffer::zeroed(bytes)
        };
        load_expert(&self.reader, &name_of(key), source, buffer, &mut data)?;
        self.counters.loads.fetch_add(1, Ordering::Relaxed);
        Ok(data)
    }

    fn publish(&self, state: &mut State, key: Key, loaded: Result<Buffer, LoadError>) {
        let waiters = match state.entries.get(&key) {
            Some(Entry::Loading { waiters }) => *waiters,
            _ => 0,
        };
        match loaded {
            Ok(data) => {
                state.clock += 1;
                let used = state.clock;
                state.layers[key.0 as usize].recency.insert(used, key.1);
                let slot = Arc::new(Slot { data });
                state.entries.insert(key, Entry::Ready { slot, used, waiters });
            }
            Err(error) => {
                state.layers[key.0 as usize].slots -= 1;
                state.bytes -= self.bytes_of(key);
                if waiters > 0 {
                    let error = Arc::new(error);
                    state.entries.insert(key, Entry::Failed { error, waiters });
                } else {
                    state.entries.remove(&key);
                }
            }
        }
    }

    /// A lease on a ready expert, which becomes the most recently used.
    fn lease(self: &Arc<Self>, state: &mut State, key: Key, waited: bool) -> Option<Lease> {
        let Some(Entry::Ready { slot, used, waiters }) = state.entries.get_mut(&key) else {
            return None;
        };
        state.clock += 1;
        let recency = &mut state.layers[key.0 as usize].recency;
        recency.remove(used);
        recency.insert(state.clock, key.1);
        *used = state.clock;
        *waiters -= u32::from(waited);
        Some(Lease { slot: Some(slot.clone()), shared: self.clone(), key })
    }
}

/// Name of an expert in messages.
fn name_of(key: Key) -> String {
    format!("layer {} expert {}", key.0, key.1)
}

/// The least recently used expert of a layer that nobody holds or waits for.
fn evictable(state: &State, layer: usize) -> Option<u64> {
    let free = |expert: u32| match state.entries.get(&(layer as u32, expert)) {
        Some(Entry::Ready { slot, waiters: 0, .. }) => Arc::strong_count(slot) == 1,
        _ => false,
    };
    state.layers[layer].recency.iter().find(|(_, expert)| free(**expert)).map(|(used, _)| *used)
}

impl ExpertCache {
    /// A cache over the experts of `table`, read by `reader`.
    pub fn new(
        table: ExpertTable,
        reader: Reader,
        options: CacheOptions,
    ) -> std::io::Result<ExpertCache> {
        let mut state = State::default();
        state.layers.resize_with(table.layers(), Layer::default);
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            table,
            reader,
            options,
            counters: CacheCounters::default(),
        });
        let mut cache = ExpertCache { shared, loaders: Vec::new() };
        for index in 0..options.loaders.max(1) {
            let shared = cache.shared.clone();
            let name = format!("coli-read-{index}");
            let loader = thread::Builder::new().name(name).spawn(move || shared.run_loader())?;
            cache.loaders.push(loader);
        }
        Ok(cache)
    }

    /// The experts.
    pub fn table(&self) -> &ExpertTable {
        &self.shared.table
    }

    /// What the cache did so far.
    pub fn counters(&self) -> &CacheCounters {
        &self.shared.counters
    }

    /// Bytes of experts in memory or being read.
    pub fn bytes(&self) -> u64 {
        self.shared.lock().bytes
    }

    /// Most bytes of experts in memory.
    pub fn capacity_bytes(&self) -> u64 {
        self.shared.options.capacity_bytes
    }

    /// The reader of the experts.
    pub fn reader(&self) -> &Reader {
        &self.shared.reader
    }

    /// Asks for experts of a layer: leases for those in memory, loads for the others. Whatever
    /// comes back without a lease must be waited for by [`Pending::next`].
    pub fn request(&self, layer: usize, experts: &[u32]) -> (Ready, Pending<'_>) {
        let shared = &self.shared;
        let mut state = shared.lock();
        let mut ready = Ready::new();
        let mut pending = Pending { cache: self, layer: layer as u32, experts: SmallVec::new() };
        for &expert in experts {
            let key = (layer as u32, expert);
            if let Some(lease) = shared.lease(&mut state, key, false) {
                ready.push((expert, lease));
                continue;
            }
            match state.entries.get_mut(&key) {
                Some(Entry::Loading { waiters } | Entry::Failed { waiters, .. }) => *waiters += 1,
                Some(Entry::Ready { .. }) => {}
                None => {
                    state.entries.insert(key, Entry::Loading { waiters: 1 });
                    state.queue.push_back(key);
                }
            }
            pending.experts.push(expert);
        }
        shared.counters.hits.fetch_add(ready.len() as u64, Ordering::Relaxed);
        shared.counters.misses.fetch_add(pending.experts.len() as u64, Ordering::Relaxed);
        drop(state);
        if !pending.experts.is_empty() {
            shared.changed.notify_all();
        }
        (ready, pending)
    }
}

impl Drop for ExpertCache {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
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

impl Pending<'_> {
    /// Waits for any of the experts; `None` when all have come. A failed load is returned once,
    /// with its expert, and may be asked for again.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<(u32, Result<Lease, Arc<LoadError>>)> {
        if self.experts.is_empty() {
            return None;
        }
        let shared = &self.cache.shared;
        let mut state = shared.lock();
        loop {
            for at in 0..self.experts.len() {
                let expert = self.experts[at];
                let key = (self.layer, expert);
                if let Some(lease) = shared.lease(&mut state, key, true) {
                    self.experts.swap_remove(at);
                    return Some((expert, Ok(lease)));
                }
                if let Some(Entry::Failed { error, .. }) = state.entries.get(&key) {
                    let error = error.clone();
                    self.experts.swap_remove(at);
                    leave(&mut state, key);
                    return Some((expert, Err(error)));
                }
            }
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// One waiter less.
fn leave(state: &mut State, key: Key) {
    match state.entries.get_mut(&key) {
        Some(Entry::Failed { waiters, .. }) => {
            *waiters -= 1;
            if *waiters == 0 {
                state.entries.remove(&key);
            }
        }
        Some(Entry::Ready { waiters, .. }) => *waiters -= 1,
        Some(Entry::Loading { waiters }) => {
            *waiters -= 1;
            // A load nobody waits for any more is not begun; one under way is finished and kept.
            if *waiters == 0
                && let Some(at) = state.queue.iter().position(|queued| *queued == key)
            {
                state.queue.remove(at);
                state.entries.remove(&key);
            }
        }
        None => {}
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.experts.is_empty() {
            return;
        }
        let mut state = self.cache.shared.lock();
        for expert in self.experts.drain(..) {
            leave(&mut state, (self.layer, expert));
        }
        drop(state);
        self.cache.shared.changed.notify_all();
    }
}
