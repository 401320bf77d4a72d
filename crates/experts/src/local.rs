//! The backend that computes experts in this process, from its own cache or where they lie.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use formats::{EXPERTS_MAX, ExpertRef, ExpertWork, FfnError, expert_ffns, expert_of_row};
use numerics::{Compute, FirstError, NumericError, combine, function};
use smallvec::SmallVec;

use crate::backend::{
    ExpertBackend, ExpertError, ExpertRows, ExpertStats, FEW_EXPERTS, RoutedBatch,
};
use crate::cache::counters::Tier;
use crate::cache::{CacheOptions, ExpertCache, Key, Lease, Wanted};
use crate::ledger::{ByteClass, Ledger, LedgerError, Reservation};
use crate::load::ExpertTable;
use crate::mapped::MappedExperts;
use crate::pairs::{Pairs, Workspace};
use crate::reader::FileSet;
use crate::store::ExpertStore;

/// What is read before it is asked for.
#[derive(Clone, Debug, Default)]
pub enum ReadAhead {
    /// Nothing.
    #[default]
    Off,
    /// What the next layer's router would choose now.
    Router,
    /// What most often followed a layer's experts.
    Pairs {
        /// What followed what.
        table: Arc<Pairs>,
        /// Experts of a layer that are read ahead at a time.
        top: usize,
        /// Layers ahead.
        distance: usize,
    },
}

impl ReadAhead {
    /// Name, as flags have it.
    pub fn name(&self) -> &'static str {
        match self {
            ReadAhead::Off => "off",
            ReadAhead::Router => "router",
            ReadAhead::Pairs { .. } => "pairs",
        }
    }
}

/// Choices of a local backend.
#[derive(Clone, Debug, Default)]
pub struct LocalOptions {
    /// Bytes of experts to keep; `None` takes all that the ledger has left.
    pub cache_bytes: Option<u64>,
    /// Most experts in memory per layer, for tests.
    pub per_layer_max: Option<usize>,
    /// What is read before it is asked for.
    pub read_ahead: ReadAhead,
    /// Read ahead however busy the drive is, for tests.
    pub always_idle: bool,
    /// Whether all experts are read at once when all of them fit.
    pub fill: bool,
}

/// Bytes of reads that keep a fast drive busy.
const QUEUE_BYTES: u64 = 16 << 20;
/// Fewest and most threads that read: large experts need a few, small ones many, and a thread that
/// waits costs nothing but its stack.
const LOADERS: std::ops::RangeInclusive<u64> = 4..=32;
/// Experts that may be read ahead at a time, and their largest share of the cache.
const AHEAD_EXPERTS: u64 = 4;
const AHEAD_SHARE: u64 = 8;

/// Why a local backend cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Not even one expert fits.
    #[error(transparent)]
    Memory(#[from] LedgerError),
    /// Threads could not be started.
    #[error("cannot start reader threads: {0}")]
    Threads(#[from] std::io::Error),
    /// The files cannot be mapped.
    #[error("the model's files cannot be mapped: {0}; give another --io")]
    Map(std::io::Error),
    /// The experts do not lie in the files as they are computed.
    #[error(
        "--io mmap computes experts where they lie, but {what} lies otherwise; convert the model \
         with coli convert --layout r16k4, or give another --io"
    )]
    NotInPlace {
        /// An expert that does not.
        what: String,
    },
}

/// Where this machine's experts come from.
enum Source {
    /// Memory, filled from files.
    Cache(ExpertCache),
    /// The files themselves.
    Mapped(MappedExperts),
}

/// Experts of this machine.
pub struct LocalExperts {
    source: Source,
    read_ahead: ReadAhead,
    /// For predictions from pairs: working memory and their result.
    predicting: Mutex<(Workspace, Vec<u32>)>,
    wait_ns: AtomicU64,
    _memory: Vec<Reservation>,
}

impl LocalExperts {
    /// A backend over `store`. Reserves its read buffers, then its cache, which is at least one
    /// expert and at most all of them.
    pub fn new(
        store: ExpertStore,
        ledger: &Arc<Ledger>,
        options: LocalOptions,
    ) -> Result<LocalExperts, StartError> {
        let (largest, total) = (store.table().slot_bytes_max(), store.table().total_bytes());
        let loaders = loaders(largest);
        let in_flight = Self::in_flight_bytes(&store, &options.read_ahead);
        let in_flight = ledger.reserve(ByteClass::InFlight, in_flight)?;
        let wanted = options.cache_bytes.unwrap_or(u64::MAX).min(ledger.free());
        let capacity_bytes = wanted.min(total).max(largest);
        let memory = ledger.reserve(ByteClass::ExpertCache, capacity_bytes)?;
        let everything = capacity_bytes >= total && options.per_layer_max.is_none();
        let mut cache = CacheOptions::new(capacity_bytes, loaders);
        cache.per_layer_max = options.per_layer_max.map(|max| max.max(1));
        let read_ahead = match everything {
            true => ReadAhead::Off,
            false => options.read_ahead,
        };
        if !matches!(read_ahead, ReadAhead::Off) {
            // Room for one at least, or there is nothing to read ahead into.
            cache.ahead_bytes = (AHEAD_EXPERTS * largest)
                .min((capacity_bytes / AHEAD_SHARE).max(largest))
                .min(capacity_bytes.saturating_sub(largest));
        }
        if options.always_idle {
            cache.idle_share_min = 0.0;
        }
        let cache = ExpertCache::new(store, cache)?;
        if options.fill && everything {
            cache.warm(cache.store().table().keys());
        }
        Ok(LocalExperts {
            source: Source::Cache(cache),
            read_ahead,
            predicting: Mutex::default(),
            wait_ns: AtomicU64::new(0),
            _memory: vec![in_flight, memory],
        })
    }

    /// A backend that computes experts where they lie in `files`. Their pages are the system's to
    /// keep or drop: they are noted in the ledger and not counted against its ceiling.
    pub fn mapped(
        store: ExpertStore,
        files: &FileSet,
        ledger: &Arc<Ledger>,
    ) -> Result<LocalExperts, StartError> {
        let experts = MappedExperts::new(store, files)?;
        ledger.note_file_pages(experts.len_bytes());
        Ok(LocalExperts {
            source: Source::Mapped(experts),
            read_ahead: ReadAhead::Off,
            predicting: Mutex::default(),
            wait_ns: AtomicU64::new(0),
            _memory: Vec::new(),
        })
    }

    /// Bytes of read buffers that a backend over `store` holds.
    pub fn in_flight_bytes(store: &ExpertStore, read_ahead: &ReadAhead) -> u64 {
        let ahead = usize::from(!matches!(read_ahead, ReadAhead::Off));
        let threads = loaders(store.table().slot_bytes_max()) + ahead;
        store.load_memory_bytes() * threads as u64
    }

    /// What is read before it is asked for.
    pub fn read_ahead(&self) -> &ReadAhead {
        &self.read_ahead
    }

    /// Reads what most often followed a layer's experts, where a table says so.
    fn guess_by_pairs(&self, cache: &ExpertCache, layer: usize, experts: &[u32]) {
        let ReadAhead::Pairs { table, top, distance } = &self.read_ahead else { return };
        let mut predicting = self.predicting.lock().unwrap_or_else(PoisonError::into_inner);
        let (workspace, likely) = &mut *predicting;
        // The next layer's last: they are read first.
        for distance in (1..=*distance).rev() {
            let ahead = layer + distance;
            if ahead >= cache.store().table().layers() {
                continue;
            }
            table.predict(layer, distance, experts, usize::MAX, workspace, likely);
            likely.retain(|expert| cache.store().table().get((ahead as u32, *expert)).is_some());
            cache.retain_absent(ahead, likely, *top);
            cache.guess(ahead, likely);
        }
    }

    /// What an expert is by a sample of its bytes, which are read; `None` where that is not known.
    pub fn sampled_identity(&self, key: Key) -> Option<[u8; 16]> {
        let store = self.cache()?.store();
        store.table().get(key)?.sampled_identity(store.reader())
    }

    /// The cache; `None` when experts are computed where they lie.
    pub fn cache(&self) -> Option<&ExpertCache> {
        match &self.source {
            Source::Cache(cache) => Some(cache),
            Source::Mapped(_) => None,
        }
    }

    /// The experts that are held.
    pub fn table(&self) -> &ExpertTable {
        match &self.source {
            Source::Cache(cache) => cache.store().table(),
            Source::Mapped(mapped) => mapped.table(),
        }
    }

    /// Bytes of experts that may be in memory.
    pub fn capacity_bytes(&self) -> u64 {
        self.cache().map_or(0, |cache| cache.options().capacity_bytes)
    }
}

/// Threads that read experts of so many bytes.
fn loaders(expert_bytes: u64) -> usize {
    (QUEUE_BYTES / expert_bytes.max(1)).clamp(*LOADERS.start(), *LOADERS.end()) as usize
}

/// Most rows of experts whose parallel work is shared: beyond them each expert is work enough for
/// all threads, and its results should stay in cache.
const GROUP_ROWS: usize = 64;
/// Columns that one task of the combine takes, at least.
const COMBINE_COLUMNS: usize = 256;

/// Takes an expert and its unweighted outputs, a row for each row that it serves.
type Deliver<'a> = &'a mut dyn FnMut(&ExpertRows<'_>, &[f32]);

/// Where outputs of experts go.
enum Outputs<'a> {
    /// Weighted, into the sums of their rows.
    Sum(&'a mut [i64]),
    /// Unweighted, to whoever asked.
    Rows(Deliver<'a>),
}

/// Computes some experts for their rows and hands on their outputs.
fn compute_experts(
    compute: &Compute,
    layer: usize,
    batch: &RoutedBatch<'_>,
    work: &[(ExpertRows<'_>, ExpertRef<'_>)],
    outputs: &mut Outputs<'_>,
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
    let sum = match outputs {
        Outputs::Sum(sum) => sum,
        Outputs::Rows(deliver) => {
            let mut rest = &out[..];
            for (rows, _) in work {
                let (of_expert, after) = rest.split_at(rows.rows.len() * hidden);
                if let Some(at) = function::first_non_finite(compute.isa, of_expert) {
                    let row = rows.rows[at / hidden] as usize;
                    let (what, element) = ("expert output", at % hidden);
                    let source = NumericError::NonFinite { what, row, element };
                    return Err(ExpertError::Numeric { layer, expert: rows.expert, source });
                }
                deliver(rows, of_expert);
                rest = after;
            }
            return Ok(());
        }
    };
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

/// The matrices of leased experts.
fn views(leases: &[(u32, Lease)]) -> impl Iterator<Item = (u32, ExpertRef<'_>)> {
    leases.iter().map(|(expert, lease)| (*expert, lease.view()))
}

/// Computes experts that are in memory for their rows of the batch, in groups of one shape.
fn compute_all<'a>(
    compute: &Compute,
    layer: usize,
    batch: &RoutedBatch<'_>,
    mut experts: impl Iterator<Item = (u32, ExpertRef<'a>)>,
    outputs: &mut Outputs<'_>,
) -> Result<(), ExpertError> {
    let work_of = |expert: u32| {
        let at = batch.experts().binary_search(&expert);
        batch.rows_of(at.unwrap_or_else(|_| panic!("expert {expert} is not of the batch")))
    };
    let mut next = experts.next();
    while let Some((expert, first)) = next {
        let mut group = [(work_of(expert), first); EXPERTS_MAX];
        let (mut count, mut rows) = (1, group[0].0.rows.len());
        next = experts.next();
        while let Some((expert, view)) = next
            && count < EXPERTS_MAX
        {
            let work = work_of(expert);
            rows += work.rows.len();
            if rows > GROUP_ROWS || !view.has_shape_of(&first) {
                break;
            }
            group[count] = (work, view);
            count += 1;
            next = experts.next();
        }
        compute_experts(compute, layer, batch, &group[..count], outputs)?;
    }
    Ok(())
}

impl LocalExperts {
    /// Hands the unweighted outputs of the batch's experts to `deliver`, expert by expert in no
    /// particular order. Outputs that are not finite are an error, as they are when weighted.
    pub fn outputs(
        &self,
        compute: &Compute,
        layer: usize,
        batch: &RoutedBatch<'_>,
        deliver: Deliver<'_>,
    ) -> Result<(), ExpertError> {
        self.compute_into(compute, layer, batch, &mut Outputs::Rows(deliver), &mut || {})
    }

    fn compute_into(
        &self,
        compute: &Compute,
        layer: usize,
        batch: &RoutedBatch<'_>,
        outputs: &mut Outputs<'_>,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExpertError> {
        let table = self.table();
        let is_missing = |expert: &&u32| table.get((layer as u32, **expert)).is_none();
        if let Some(&expert) = batch.experts().iter().find(is_missing) {
            return Err(ExpertError::NotHeld { layer, expert });
        }
        let failed = |expert, source| ExpertError::Load { layer, expert, source };
        let cache = match &self.source {
            Source::Cache(cache) => cache,
            Source::Mapped(mapped) => {
                meanwhile();
                for expert in batch.experts() {
                    mapped.verify(layer, *expert).map_err(|error| failed(*expert, error))?;
                }
                let views =
                    batch.experts().iter().map(|expert| (*expert, mapped.view(layer, *expert)));
                return compute_all(compute, layer, batch, views, outputs);
            }
        };
        let wanted: SmallVec<[Wanted; FEW_EXPERTS]> =
            batch.iter().map(|expert| (expert.expert, expert.rows.len())).collect();
        let (ready, mut pending) = cache.request(layer, &wanted, batch.input.rows());
        self.guess_by_pairs(cache, layer, batch.experts());
        meanwhile();
        compute_all(compute, layer, batch, views(&ready), outputs)?;
        drop(ready);
        loop {
            let started = Instant::now();
            let Some(arrived) = pending.next(EXPERTS_MAX) else { return Ok(()) };
            let waited = started.elapsed().as_nanos() as u64;
            self.wait_ns.fetch_add(waited, Ordering::Relaxed);
            let arrived = arrived.map_err(|(expert, error)| failed(expert, error))?;
            compute_all(compute, layer, batch, views(&arrived), outputs)?;
        }
    }
}

impl ExpertBackend for LocalExperts {
    fn compute(
        &self,
        compute: &Compute,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sum: &mut [i64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExpertError> {
        self.compute_into(compute, layer, batch, &mut Outputs::Sum(sum), meanwhile)
    }

    fn wants_guesses(&self) -> bool {
        let has_room = self.cache().is_some_and(|cache| cache.options().ahead_bytes > 0);
        has_room && matches!(self.read_ahead, ReadAhead::Router)
    }

    fn guess(&self, layer: usize, experts: &[u32]) {
        if let Some(cache) = self.cache() {
            cache.guess(layer, experts);
        }
    }

    fn stats(&self) -> ExpertStats {
        let wait_s = self.wait_ns.load(Ordering::Relaxed) as f64 * 1e-9;
        match &self.source {
            Source::Cache(cache) => {
                let counters = cache.counters();
                ExpertStats {
                    hits: counters.hits(),
                    guessed_hits: counters.tier(Tier::Guessed),
                    misses: counters.misses(),
                    bytes_read: cache.store().bytes_read(),
                    cached_bytes: cache.bytes(),
                    wait_s,
                    remote_s: 0.0,
                    busy_s: cache.busy_s(),
                    known_s: cache.known_s(),
                }
            }
            Source::Mapped(mapped) => ExpertStats {
                hits: mapped.selections(),
                cached_bytes: 0,
                wait_s,
                ..ExpertStats::default()
            },
        }
    }
}
