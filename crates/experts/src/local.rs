//! The backend that computes experts in this process, from its own cache.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use formats::{EXPERTS_MAX, ExpertRef, ExpertWork, FfnError, expert_ffns, expert_of_row};
use numerics::{Compute, FirstError, NumericError, combine};

use crate::backend::{ExpertBackend, ExpertError, ExpertRows, ExpertStats, RoutedBatch};
use crate::cache::{CacheOptions, ExpertCache};
use crate::ledger::{ByteClass, Ledger, LedgerError, Reservation};
use crate::load::ExpertTable;
use crate::reader::Reader;

/// Choices of a local backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalOptions {
    /// Bytes of experts to keep; `None` takes all that the ledger has left.
    pub cache_bytes: Option<u64>,
    /// Most experts in memory per layer, for tests.
    pub per_layer_max: Option<usize>,
}

/// Threads that read experts: enough for a queue on fast drives, few enough for slow ones.
const LOADERS: usize = 4;

/// Why a local backend cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Not even one expert fits.
    #[error(transparent)]
    Memory(#[from] LedgerError),
    /// Threads could not be started.
    #[error("cannot start reader threads: {0}")]
    Threads(#[from] std::io::Error),
}

/// Experts of this machine.
pub struct LocalExperts {
    cache: ExpertCache,
    wait_ns: AtomicU64,
    _memory: [Reservation; 2],
}

impl LocalExperts {
    /// A backend over `table`. Reserves its read buffers, then its cache, which is at least one
    /// expert and at most all of them.
    pub fn new(
        table: ExpertTable,
        reader: Reader,
        ledger: &std::sync::Arc<Ledger>,
        options: LocalOptions,
    ) -> Result<LocalExperts, StartError> {
        let in_flight = ledger.reserve(ByteClass::InFlight, Self::in_flight_bytes(&table))?;
        let smallest = table.slot_bytes_max();
        let wanted = options.cache_bytes.unwrap_or_else(|| ledger.free());
        let capacity_bytes = wanted.min(table.total_bytes()).max(smallest);
        let memory = ledger.reserve(ByteClass::ExpertCache, capacity_bytes)?;
        let options = CacheOptions {
            capacity_bytes,
            per_layer_max: options.per_layer_max.map(|max| max.max(1)),
            loaders: LOADERS,
        };
        let cache = ExpertCache::new(table, reader, options)?;
        Ok(LocalExperts { cache, wait_ns: AtomicU64::new(0), _memory: [in_flight, memory] })
    }

    /// Bytes of read buffers that a backend over `table` holds.
    pub fn in_flight_bytes(table: &ExpertTable) -> u64 {
        let buffer = table.iter().map(|source| source.buffer_bytes()).max().unwrap_or(0);
        buffer * LOADERS as u64
    }

    /// The cache.
    pub fn cache(&self) -> &ExpertCache {
        &self.cache
    }
}

/// Most rows of experts whose parallel work is shared: beyond them each expert is work enough for
/// all threads, and its results should stay in cache.
const GROUP_ROWS: usize = 64;
/// Columns that one task of the combine takes, at least.
const COMBINE_COLUMNS: usize = 256;

/// Computes some experts for their rows and adds their weighted outputs to the sum.
fn add_experts(
    compute: &Compute,
    layer: usize,
    batch: &RoutedBatch<'_>,
    work: &[(ExpertRows<'_>, ExpertRef<'_>)],
    sum: &mut [i64],
) -> Result<(), ExpertError> {
    let Some((first, expert)) = work.first() else { return Ok(()) };
    let hidden = batch.input.cols();
    let mut group = [ExpertWork { expert: *expert, rows: Some(first.rows) }; EXPERTS_MAX];
    for (group, (rows, expert)) in group.iter_mut().zip(work) {
        *group = ExpertWork { expert: *expert, rows: Some(rows.rows) };
    }
    let total: usize = work.iter().map(|(rows, _)| rows.rows.len()).sum();
    let mut out = compute.scratch.filled_later(total * hidden);
    // Errors name the expert, and the row of the batch rather than that of the expert.
    let of_expert = |at: usize, error: NumericError| {
        let rows = &work[at].0;
        let row = rows.rows.get(error.row()).map_or(error.row(), |row| *row as usize);
        ExpertError::Numeric { layer, expert: rows.expert, source: error.in_row(row) }
    };
    let computed = expert_ffns(compute, &group[..work.len()], batch.input, &mut out);
    computed.map_err(|error| match error {
        FfnError::Input(source) => ExpertError::Numeric { layer, expert: first.expert, source },
        FfnError::Expert { at, error } => of_expert(at, error),
    })?;
    let errors = FirstError::default();
    let step = compute.team.step(hidden, COMBINE_COLUMNS);
    compute.team.columns(sum, hidden, step, |sum| {
        let range = sum.range();
        let mut ys = out.chunks_exact(hidden);
        let mut at = 0;
        for (rows, _) in work {
            for ((row, weight), y) in rows.rows.iter().zip(rows.weights).zip(&mut ys) {
                let y = &y[range.clone()];
                let added =
                    combine::add_weighted(compute.isa, at, *weight, y, sum.row(*row as usize));
                errors.keep(added.map_err(|error| error.after(range.start)));
                at += 1;
            }
        }
    });
    errors.result().map_err(|error| {
        let counts = work.iter().map(|(rows, _)| rows.rows.len());
        let (at, row) = expert_of_row(counts, error.row());
        of_expert(at, error.in_row(row))
    })
}

impl ExpertBackend for LocalExperts {
    fn compute(
        &self,
        compute: &Compute,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sum: &mut [i64],
    ) -> Result<(), ExpertError> {
        let work_of = |expert: u32| {
            let at = batch.experts().binary_search(&expert);
            batch.rows_of(at.unwrap_or(0))
        };
        let (ready, mut pending) = self.cache.request(layer, batch.experts());
        let mut rest = &ready[..];
        while let Some((first, lease)) = rest.first() {
            let shape = lease.view();
            let mut group = [(work_of(*first), shape); EXPERTS_MAX];
            let (mut count, mut rows) = (1, group[0].0.rows.len());
            for (slot, (expert, lease)) in group[1..].iter_mut().zip(&rest[1..]) {
                let work = work_of(*expert);
                rows += work.rows.len();
                if rows > GROUP_ROWS || !lease.view().has_shape_of(&shape) {
                    break;
                }
                *slot = (work, lease.view());
                count += 1;
            }
            add_experts(compute, layer, batch, &group[..count], sum)?;
            rest = &rest[count..];
        }
        drop(ready);
        loop {
            let started = Instant::now();
            let Some((expert, loaded)) = pending.next() else { return Ok(()) };
            let waited = started.elapsed().as_nanos() as u64;
            self.wait_ns.fetch_add(waited, Ordering::Relaxed);
            let lease = loaded.map_err(|source| ExpertError::Load { layer, expert, source })?;
            add_experts(compute, layer, batch, &[(work_of(expert), lease.view())], sum)?;
        }
    }

    fn stats(&self) -> ExpertStats {
        let counters = self.cache.counters();
        ExpertStats {
            hits: counters.hits.load(Ordering::Relaxed),
            misses: counters.misses.load(Ordering::Relaxed),
            bytes_read: self.cache.reader().bytes_read(),
            cached_bytes: self.cache.bytes(),
            wait_s: self.wait_ns.load(Ordering::Relaxed) as f64 * 1e-9,
        }
    }
}
