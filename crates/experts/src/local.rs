//! The backend that computes experts in this process, from its own cache.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use formats::{ExpertRef, expert_ffn};
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

/// Rows from which on the combine is shared among threads.
const COMBINE_ROWS: usize = 4;
/// Columns that one task of the combine takes, at least.
const COMBINE_COLUMNS: usize = 256;

/// Computes one expert for its rows and adds its weighted outputs to the sum.
fn add_expert(
    compute: &Compute,
    layer: usize,
    batch: &RoutedBatch<'_>,
    work: ExpertRows<'_>,
    expert: ExpertRef<'_>,
    sum: &mut [i64],
) -> Result<(), ExpertError> {
    let hidden = batch.input.cols();
    let mut out = compute.scratch.filled_later(work.rows.len() * hidden);
    let numeric = |source| ExpertError::Numeric { layer, expert: work.expert, source };
    // Rows of the expert's own products are counted among its rows; errors name the batch's.
    let of_batch = |error: NumericError| {
        let row = work.rows.get(error.row()).map_or(error.row(), |row| *row as usize);
        numeric(error.in_row(row))
    };
    expert_ffn(compute, expert, batch.input, Some(work.rows), &mut out).map_err(of_batch)?;
    let shared = work.rows.len() >= COMBINE_ROWS;
    let step = if shared { compute.team.step(hidden, COMBINE_COLUMNS) } else { hidden };
    let errors = FirstError::default();
    compute.team.columns(sum, hidden, step, |sum| {
        let range = sum.range();
        for ((row, weight), y) in work.rows.iter().zip(work.weights).zip(out.chunks_exact(hidden)) {
            let row = *row as usize;
            let y = &y[range.clone()];
            let added = combine::add_weighted(compute.isa, row, *weight, y, sum.row(row));
            errors.keep(row, added.map_err(|error| error.after(range.start)));
        }
    });
    errors.result().map_err(numeric)
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
        for (expert, lease) in ready {
            add_expert(compute, layer, batch, work_of(expert), lease.view(), sum)?;
        }
        loop {
            let started = Instant::now();
            let Some((expert, loaded)) = pending.next() else { return Ok(()) };
            let waited = started.elapsed().as_nanos() as u64;
            self.wait_ns.fetch_add(waited, Ordering::Relaxed);
            let lease = loaded.map_err(|source| ExpertError::Load { layer, expert, source })?;
            add_expert(compute, layer, batch, work_of(expert), lease.view(), sum)?;
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
