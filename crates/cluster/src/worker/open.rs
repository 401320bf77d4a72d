//! Opening a worker: some experts of a model and the memory to compute them, all under one ceiling.

use std::path::PathBuf;
use std::sync::Arc;

use container::{Config, ContainerError, HeldExperts, Model};
use experts::load::ExpertTable;
use experts::local::StartError;
use experts::reader::{RateLimit, open_files};
use experts::{
    ByteClass, ExpertStore, FileSet, IoMode, Ledger, LocalExperts, LocalOptions, ReadAhead,
    ReadError, Reader, Reservation,
};
use numerics::Compute;

use super::{Limits, Worker};
use crate::identity::{Facts, Holdings, greeting};
use crate::session::worker::Welcome;
use crate::wire::Shape;
use crate::wire::secure::Policy;

/// Share of the ceiling that one request's rows may have, and the most that they need: half of a
/// prefill step of 512 rows to 8 experts of the widest models.
const REQUEST_SHARE: u64 = 64;
const REQUEST_BYTES_MAX: u64 = 32 << 20;

/// What a worker is made of.
pub struct WorkerOptions {
    /// Directories of the model, primary first.
    pub dirs: Vec<PathBuf>,
    /// The experts it holds.
    pub held: HeldExperts,
    /// Memory ceiling in bytes.
    pub ram_bytes: u64,
    /// Bytes that the process holds already.
    pub process_bytes: u64,
    /// Whether routed experts take int8 activations.
    pub int8: bool,
    /// How experts are read; `None` chooses.
    pub io: Option<IoMode>,
    /// Most bytes of experts read per second.
    pub read_limit: Option<u64>,
    /// What is read before it is asked for: nothing, or by a table.
    pub read_ahead: ReadAhead,
    /// The key, and whether peers without one are taken.
    pub policy: Policy,
}

/// Why a worker could not be opened. Every variant means unusable input or options.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The container.
    #[error(transparent)]
    Container(#[from] ContainerError),
    /// A file of it.
    #[error(transparent)]
    Files(#[from] ReadError),
    /// Its experts.
    #[error(transparent)]
    Experts(#[from] StartError),
    /// The ceiling is below what a worker needs.
    #[error(
        "a worker of this model needs at least --ram {needed_gb:.3}, {limit_gb:.3} is given: \
             process {process_mb:.1} MB, requests {requests_mb:.1} MB, scratch {scratch_mb:.1} MB, \
             read buffers and one expert {expert_mb:.1} MB"
    )]
    Ceiling {
        /// Least ceiling, in 10^9 bytes.
        needed_gb: f64,
        /// The ceiling.
        limit_gb: f64,
        /// For the process as it is, in 10^6 bytes.
        process_mb: f64,
        /// For requests that come and are answered.
        requests_mb: f64,
        /// For the activations of one of them.
        scratch_mb: f64,
        /// For read buffers and the largest expert.
        expert_mb: f64,
    },
    /// There is nothing to hold.
    #[error("the model has no routed experts in these layers and experts; it has {has}")]
    NoExperts {
        /// Layers and experts that it has.
        has: String,
    },
    /// A limit of reads that are not made by this process.
    #[error("--read-limit has no effect with --io mmap: the system reads mapped files")]
    MappedLimit,
}

/// A worker that is ready to serve, and what it has.
pub struct Opened {
    /// The worker.
    pub worker: Worker,
    /// What it takes from them.
    pub limits: Limits,
    /// How it reads.
    pub io: IoMode,
    /// Why not as asked, if so.
    pub fallback: Option<String>,
    /// Experts it holds.
    pub experts: usize,
    /// Their bytes.
    pub experts_bytes: u64,
    /// Bytes of them that may be in memory.
    pub cache_bytes: u64,
    /// What all of that is reserved from.
    pub memory: Vec<Reservation>,
}

/// Opens a worker: checks headers, opens files, plans memory. No expert is read before it is asked
/// for.
pub fn open(options: &WorkerOptions, compute: Compute) -> Result<Opened, OpenError> {
    let model = Model::open_experts(&options.dirs, &options.held)?;
    let table = ExpertTable::new(&model, model.held_experts(&options.held), options.int8)?;
    let (experts, experts_bytes) = (table.iter().count(), table.total_bytes());
    if experts == 0 {
        let config = &model.config;
        let last = config.all_layers().saturating_sub(1);
        let has = format!("layers 0-{last}, experts 0-{}", config.moe.experts.saturating_sub(1));
        return Err(OpenError::NoExperts { has });
    }
    let ledger = Ledger::new(options.ram_bytes);
    let limits = limits_of(options.ram_bytes);
    let scratch = Worker::scratch_bytes(&model.config, limits.request_bytes);
    compute.scratch.keep((scratch / 5) as usize);
    let reserve = [
        (ByteClass::Process, options.process_bytes),
        (ByteClass::InFlight, limits.held_bytes()),
        (ByteClass::Scratch, scratch),
    ];
    let reserved = reserve.map(|(class, bytes)| ledger.reserve(class, bytes)).into_iter();
    let Ok(memory) = reserved.collect::<Result<Vec<_>, _>>() else {
        return Err(too_low(options, &model.config, table.slot_bytes_max()));
    };
    let files = FileSet::open(&model.shards)?;
    let fits = experts_bytes <= ledger.free() / 10 * 9;
    let limited = options.read_limit.is_some();
    let asked = options.io.unwrap_or_else(|| table.default_mode(&files, fits, !limited));
    if asked == IoMode::Mmap && limited {
        return Err(OpenError::MappedLimit);
    }
    let opened = open_files(files, asked);
    let limit = options.read_limit.map(|rate| Arc::new(RateLimit::new(rate as f64)));
    let largest = table.slot_bytes_max();
    let store = ExpertStore::new(table, Reader::new(opened.files).limited(limit));
    let expert = match asked {
        IoMode::Mmap => 0,
        _ => LocalExperts::in_flight_bytes(&store, &options.read_ahead) + largest,
    };
    if expert > ledger.free() {
        return Err(too_low(options, &model.config, expert));
    }
    let local = if asked == IoMode::Mmap {
        LocalExperts::mapped(store, &FileSet::open(&model.shards)?, &ledger)?
    } else {
        let read_ahead = options.read_ahead.clone();
        let local = LocalOptions { read_ahead, ..LocalOptions::default() };
        LocalExperts::new(store, &ledger, local)?
    };
    let cache_bytes = local.capacity_bytes();
    let holdings = Holdings::of(&local, &model.config);
    let facts = Facts {
        isa: compute.isa.level().to_string(),
        threads: compute.team.threads() as u32,
        ram_bytes: options.ram_bytes,
        cache_bytes,
        request_bytes: limits.request_bytes,
        ..Facts::new(&model.config, compute.activations)
    };
    let welcome = Welcome {
        greeting: greeting(&facts, &holdings),
        facts,
        shape: Shape::of(&model.config),
        request_bytes: limits.request_bytes,
        policy: options.policy.clone(),
    };
    Ok(Opened {
        worker: Worker::new(local, compute, welcome),
        limits,
        io: if asked == IoMode::Mmap { asked } else { opened.mode },
        fallback: opened.fallback,
        experts,
        experts_bytes,
        cache_bytes,
        memory,
    })
}

/// Why a ceiling does not do; what would must hold the larger requests that it brings.
fn too_low(options: &WorkerOptions, config: &Config, expert: u64) -> OpenError {
    let needs = |ceiling: u64| {
        let limits = limits_of(ceiling);
        let scratch = Worker::scratch_bytes(config, limits.request_bytes);
        (
            limits.held_bytes(),
            scratch,
            options.process_bytes + limits.held_bytes() + scratch + expert,
        )
    };
    let (requests, scratch, mut needed) = needs(options.ram_bytes);
    // Each step adds a fraction of the one before.
    for _ in 0..64 {
        needed = needed.max(needs(needed).2);
    }
    let process = options.process_bytes;
    let [process_mb, requests_mb, scratch_mb, expert_mb] =
        [process, requests, scratch, expert].map(|bytes| bytes as f64 / 1e6);
    OpenError::Ceiling {
        // A little more than now: the process differs from run to run.
        needed_gb: (needed as f64 / 1e6 + 2.0).ceil() / 1e3,
        limit_gb: options.ram_bytes as f64 / 1e9,
        process_mb,
        requests_mb,
        scratch_mb,
        expert_mb,
    }
}

/// What a worker with a ceiling takes from its peers.
fn limits_of(ram_bytes: u64) -> Limits {
    Limits::new((ram_bytes / REQUEST_SHARE).min(REQUEST_BYTES_MAX))
}
