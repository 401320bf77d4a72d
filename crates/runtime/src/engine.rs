//! The engine: a loaded model, its experts, and the plan of every byte it may hold.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use container::{Attention, Config, ContainerError, Model, TensorClass};
use experts::load::ExpertTable;
use experts::local::StartError;
use experts::reader::open_files;
use experts::{
    ByteClass, ExpertBackend, ExpertStats, ExpertStore, FileSet, IoMode, Ledger, LedgerError,
    LocalExperts, LocalOptions, Mirror, MirrorError, Notice, ReadAhead, ReadError, Reader,
    Reservation, UsageShape,
};
use models::{
    Activity, Family, Int8Classes, KvShape, ModelError, PAGE, Profile, Row, StepContext,
    open_family, planned_dense_bytes,
};
use numerics::rope::RopeTable;
use numerics::{Activations, Buf, Compute, Isa, Team};

use crate::kv::{BatchKv, SequenceKv};
use crate::machine::Machine;
use crate::routing::{RouteLog, TraceError};
use crate::session::{Session, StepError, Want, Work};

/// Prefill chunk when none is asked for: large enough that each expert of a layer is read once
/// for many tokens, small enough for the scratch it needs.
pub const PREFILL_CHUNK: usize = 512;
/// Rows whose logits are computed together: enough to share the head's weights, few enough for a
/// large vocabulary.
const LOGIT_ROWS: usize = 8;
/// Megabytes by which the process's own memory differs from run to run: added to the least ceiling
/// that is named, so that naming it again is enough.
const PROCESS_VARIES_MB: f64 = 1.0;
/// Share of the working memory in use that is kept besides, for buffers to be used again.
const SCRATCH_KEPT_SHARE: u64 = 4;
/// Least context the default plan aims at before it gives memory to the expert cache.
const CONTEXT_FLOOR: usize = 512;
/// Ceiling assumed where the system does not say how much memory there is.
const CEILING_UNKNOWN: u64 = 4_000_000_000;

/// How an engine is opened.
#[derive(Clone)]
pub struct EngineOptions {
    /// Directories of the model, primary first.
    pub dirs: Vec<PathBuf>,
    /// Memory ceiling in bytes; `None` takes the machine's default.
    pub ram_bytes: Option<u64>,
    /// Compute threads; `None` takes the machine's cores.
    pub threads: Option<usize>,
    /// Instruction-set level.
    pub isa: Isa,
    /// Activation mode.
    pub activations: Activations,
    /// Tensor classes that take int8 activations in int8 mode.
    pub int8_classes: Int8Classes,
    /// Context in tokens; `None` takes what model and memory allow.
    pub context: Option<usize>,
    /// Sessions that exist at the same time.
    pub sessions: usize,
    /// Tokens per prefill step.
    pub prefill_chunk: usize,
    /// Most bytes of experts in memory; `None` takes what the ceiling leaves.
    pub cache_bytes: Option<u64>,
    /// Most experts in memory per layer, for tests.
    pub cache_experts: Option<usize>,
    /// Bytes under the ceiling that the caller holds itself.
    pub held_bytes: u64,
    /// How experts are read; `None` chooses: through the page cache when all fit in memory, past it
    /// otherwise.
    pub io: Option<IoMode>,
    /// Directories with copies of experts on other drives, each with its share of reads beside 1.
    pub mirrors: Vec<(PathBuf, f64)>,
    /// What is read before it is asked for.
    pub read_ahead: ReadAhead,
    /// Read ahead however busy the drive is, for tests.
    pub always_idle: bool,
    /// Whether all experts are read in the background when all fit in memory.
    pub fill: bool,
    /// File to write what the routers choose to.
    pub route_trace: Option<PathBuf>,
    /// Is told what is no error but worth knowing.
    pub notice: Notice,
}

impl EngineOptions {
    /// The defaults for a model in `dirs`.
    pub fn new(dirs: Vec<PathBuf>) -> EngineOptions {
        EngineOptions {
            dirs,
            ram_bytes: None,
            threads: None,
            isa: Isa::detect(),
            activations: Activations::Int8,
            int8_classes: Int8Classes::default(),
            context: None,
            sessions: 1,
            prefill_chunk: PREFILL_CHUNK,
            cache_bytes: None,
            cache_experts: None,
            held_bytes: 0,
            io: None,
            mirrors: Vec::new(),
            read_ahead: ReadAhead::Router,
            always_idle: false,
            fill: false,
            route_trace: None,
            notice: Arc::new(|_| {}),
        }
    }
}

/// Why an engine could not be opened. Every variant means unusable input or options.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The container.
    #[error(transparent)]
    Container(#[from] ContainerError),
    /// A file of it.
    #[error(transparent)]
    Files(#[from] ReadError),
    /// Its dense weights.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Its experts.
    #[error(transparent)]
    Experts(#[from] StartError),
    /// A mirror of them.
    #[error(transparent)]
    Mirror(#[from] MirrorError),
    /// The route trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A reservation.
    #[error(transparent)]
    Memory(#[from] LedgerError),
    /// The ceiling is below what cannot be streamed.
    #[error(
        "this model needs at least --ram {needed_gb}, {limit_gb} is given; {parts}; \
         raise --ram, lower --ctx or --prefill-chunk, or convert dense weights to a smaller format"
    )]
    Ceiling {
        /// Least ceiling in 10^9 bytes, rounded up to what `--ram` takes.
        needed_gb: String,
        /// What it is for.
        parts: String,
        /// The ceiling in 10^9 bytes.
        limit_gb: String,
    },
    /// The context asked for is longer than the model's.
    #[error("--ctx {asked} is longer than the model's {max}")]
    Context {
        /// Asked for.
        asked: usize,
        /// The model's.
        max: usize,
    },
    /// Threads could not be started.
    #[error("cannot start compute threads: {0}")]
    Threads(#[from] std::io::Error),
}

/// A loaded model.
pub struct Engine {
    model: Model,
    family: Box<dyn Family>,
    experts: Arc<LocalExperts>,
    io: IoMode,
    routes: RouteLog,
    compute: Compute,
    ledger: Arc<Ledger>,
    sessions: Arc<Ledger>,
    context: usize,
    prefill_chunk: usize,
    step_rows: usize,
    turn: Mutex<()>,
    profile: Profile,
    _memory: Vec<Reservation>,
}

/// What must be in memory whatever the cache, in bytes.
struct Plan {
    process: u64,
    dense: u64,
    scratch: u64,
    in_flight: u64,
    expert: u64,
}

impl Plan {
    fn fixed(&self) -> u64 {
        self.process + self.dense + self.scratch + self.in_flight + self.expert
    }

    fn check(&self, kv: u64, tables: u64, limit: u64) -> Result<(), OpenError> {
        let needed = self.fixed() + kv + tables;
        if needed <= limit {
            return Ok(());
        }
        let parts = [
            ("process", self.process),
            ("dense weights", self.dense),
            ("KV", kv),
            ("rotary tables", tables),
            ("scratch", self.scratch),
            ("read buffers", self.in_flight),
            ("one expert", self.expert),
        ];
        let parts = parts.map(|(name, bytes)| format!("{name} {:.1} MB", bytes as f64 / 1e6));
        Err(OpenError::Ceiling {
            needed_gb: format!("{:.3}", (needed as f64 / 1e6 + PROCESS_VARIES_MB).ceil() / 1e3),
            parts: parts.join(", "),
            limit_gb: format!("{:.3}", limit as f64 / 1e9),
        })
    }
}

impl Engine {
    /// Opens a model: checks its headers, plans memory, loads dense weights. `progress` is told
    /// bytes loaded and bytes in all.
    pub fn open(
        options: &EngineOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Engine, OpenError> {
        let model = Model::open(&options.dirs)?;
        let reader = Reader::new(Arc::new(FileSet::open(&model.shards)?));
        let threads = options.threads.unwrap_or_else(|| Machine::default().compute_threads());
        let compute = Compute::new(options.isa, Arc::new(Team::new(threads)?), options.activations);
        let int8_experts = options.int8_classes.contains(TensorClass::Experts);
        let table = ExpertTable::of(&model, int8_experts)?;
        let machine = Machine::default();
        let limit = options.ram_bytes.unwrap_or_else(|| {
            machine.default_ceiling().map_or(CEILING_UNKNOWN, |bound| bound.bytes)
        });

        let config = &model.config;
        let kv_shape = KvShape::of(&model);
        let longest = options.context.unwrap_or(config.max_position);
        let chunk = options.prefill_chunk.clamp(1, longest.max(1));
        // A step has the rows of a chunk, or one of each session.
        let step_rows = chunk.max(options.sessions);
        let in_use = scratch_bytes(config, step_rows, threads);
        // Buffers that wait for the next layer come on top of those in use.
        let waiting = in_use / SCRATCH_KEPT_SHARE;
        compute.scratch.keep(waiting as usize);
        let scratch = in_use + waiting;
        let dense = planned_dense_bytes(&model, options.int8_classes)?;
        let (largest, total) = (table.slot_bytes_max(), table.total_bytes());
        // A guess at what will be left: the drive is read past the page cache when it is needed
        // again and again, and through it when everything is read once.
        let fits = dense.saturating_add(total).saturating_add(scratch) <= limit / 10 * 9;
        let asked = options.io.unwrap_or(if fits { IoMode::Buffered } else { IoMode::Direct });
        let opened = open_files(FileSet::open(&model.shards)?, asked);
        if let Some(why) = opened.fallback.filter(|_| options.io.is_some()) {
            (options.notice)(&why);
        }
        let is_mapped = asked == IoMode::Mmap;
        let io = if is_mapped { IoMode::Mmap } else { opened.mode };
        let mirrors = options.mirrors.iter().map(|(dir, weight)| {
            Mirror::open(dir.clone(), *weight, &model, &table, opened.mode, &options.notice)
        });
        let mirrors = mirrors.collect::<Result<Vec<_>, _>>()?;
        let store = ExpertStore::new(table, Reader::new(opened.files))
            .with_mirrors(mirrors, options.notice.clone());
        let in_flight = LocalExperts::in_flight_bytes(&store, &options.read_ahead);
        let plan = Plan {
            process: machine.rss_bytes().unwrap_or(0),
            dense,
            scratch: scratch + options.held_bytes + RouteLog::bytes_of(usage_shape(config)),
            in_flight: if is_mapped { 0 } else { in_flight },
            expert: if is_mapped { 0 } else { largest },
        };
        let context = plan_context(options, config, &kv_shape, &plan, limit)?;
        let kv = kv_bytes(&kv_shape, context).saturating_mul(options.sessions.max(1) as u64);
        plan.check(kv, RopeTable::bytes_of(rope_dim(config), context) as u64, limit)?;

        let ledger = Ledger::new(limit);
        let memory = vec![
            ledger.reserve(ByteClass::Process, plan.process)?,
            ledger.reserve(ByteClass::Scratch, plan.scratch)?,
            ledger.reserve(ByteClass::Kv, kv)?,
        ];
        let family =
            open_family(&model, &reader, &ledger, context, options.int8_classes, progress)?;
        let local = LocalOptions {
            cache_bytes: options.cache_bytes.map(|bytes| bytes.min(ledger.free())),
            per_layer_max: options.cache_experts,
            read_ahead: options.read_ahead.clone(),
            always_idle: options.always_idle,
            fill: options.fill,
        };
        let experts = if is_mapped {
            LocalExperts::mapped(store, &FileSet::open(&model.shards)?, &ledger)?
        } else {
            LocalExperts::new(store, &ledger, local)?
        };
        let routes = RouteLog::new(usage_shape(&model.config), options.route_trace.clone())?;
        Ok(Engine {
            model,
            family,
            experts: Arc::new(experts),
            io,
            routes,
            compute,
            ledger,
            sessions: Ledger::new(kv),
            context,
            prefill_chunk: chunk.min(context),
            step_rows,
            turn: Mutex::new(()),
            profile: Profile::default(),
            _memory: memory,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        self.family.config()
    }

    /// The container.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The account of every byte.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The clock of this engine's steps.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Level, threads and activation mode.
    pub fn compute(&self) -> &Compute {
        &self.compute
    }

    /// Tokens a session may hold.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Tokens per prefill step.
    pub fn prefill_chunk(&self) -> usize {
        self.prefill_chunk
    }

    /// Most bytes of routed experts kept in memory.
    pub fn cache_bytes(&self) -> u64 {
        self.experts.capacity_bytes()
    }

    /// The experts of this machine.
    pub fn experts(&self) -> &LocalExperts {
        &self.experts
    }

    /// What the routers chose.
    pub fn routes(&self) -> &RouteLog {
        &self.routes
    }

    /// How experts are read.
    pub fn io(&self) -> IoMode {
        self.io
    }

    /// Bytes of dense weights in memory.
    pub fn dense_bytes(&self) -> u64 {
        self.family.dense_bytes()
    }

    /// What the experts' backend did.
    pub fn expert_stats(&self) -> ExpertStats {
        self.experts.stats()
    }

    /// A new, empty session. Its state is taken from the memory planned for sessions.
    pub fn session(&self) -> Result<Session, LedgerError> {
        let bytes = kv_bytes(self.family.kv_shape(), self.context);
        Ok(Session {
            kv: SequenceKv::new(self.family.kv_shape()),
            tokens: Vec::new(),
            context: self.context,
            _memory: self.sessions.reserve(ByteClass::Kv, bytes)?,
        })
    }

    /// Feeds tokens to several sessions in one pass over the layers. Returns the wanted hidden
    /// states of each work item, `[wanted, hidden]`. On error no session has changed.
    pub fn step(&self, work: &mut [Work<'_>]) -> Result<Vec<Vec<f32>>, StepError> {
        self.step_observed(work, &mut |_, _| true)
    }

    /// [`Engine::step`] with an observer that is told layers done and in all, and returns whether
    /// to go on. Steps of several threads take turns: memory is planned for one.
    pub fn step_observed(
        &self,
        work: &mut [Work<'_>],
        observe: &mut dyn FnMut(usize, usize) -> bool,
    ) -> Result<Vec<Vec<f32>>, StepError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rows = Vec::new();
        for (sequence, item) in work.iter().enumerate() {
            let (used, wanted) = (item.session.tokens.len(), item.tokens.len());
            if wanted > item.session.room() {
                return Err(StepError::Context { used, wanted, context: item.session.context });
            }
            let tokens = item.tokens.iter().enumerate();
            rows.extend(tokens.map(|(at, &token)| Row { token, sequence, position: used + at }));
        }
        if rows.len() > self.step_rows {
            return Err(StepError::Rows { rows: rows.len(), planned: self.step_rows });
        }
        if rows.is_empty() {
            return Ok(work.iter().map(|_| Vec::new()).collect());
        }
        let sequences = work.iter_mut().map(|item| &mut item.session.kv).collect();
        let mut kv = BatchKv { sequences };
        let profile = &self.profile;
        profile.enter(Activity::Other);
        let context = StepContext {
            compute: &self.compute,
            profile,
            experts: &*self.experts,
            routes: Some(&self.routes),
        };
        let forward = self.family.forward(context, &rows, &mut kv, observe);
        profile.enter(Activity::Other);
        let hidden = forward?;
        let width = self.config().hidden_size;
        let mut first = 0;
        let mut out = Vec::with_capacity(work.len());
        for item in work {
            let count = item.tokens.len();
            let wanted = match item.want {
                Want::Nothing => count..count,
                Want::Last => count.saturating_sub(1)..count,
                Want::All => 0..count,
            };
            out.push(hidden[(first + wanted.start) * width..(first + wanted.end) * width].to_vec());
            item.session.tokens.extend_from_slice(item.tokens);
            first += count;
        }
        Ok(out)
    }

    /// Logits of hidden states, `[rows, vocab]`.
    pub fn logits(&self, hidden: &[f32]) -> Result<Buf<f32>, StepError> {
        self.profile.enter(Activity::Head);
        let logits = self.family.logits(&self.compute, hidden);
        self.profile.enter(Activity::Other);
        Ok(logits?)
    }

    /// Hands the logits of each hidden state to `each`, in order, a few rows at a time.
    pub fn each_logits(
        &self,
        hidden: &[f32],
        mut each: impl FnMut(&[f32]),
    ) -> Result<(), StepError> {
        for rows in hidden.chunks(LOGIT_ROWS * self.config().hidden_size) {
            self.logits(rows)?.chunks_exact(self.config().vocab_size).for_each(&mut each);
        }
        Ok(())
    }

    /// Feeds tokens in chunks. `each` gets the wanted hidden states in order; `progress` is told
    /// the share done, from 0 to 1, after every layer, and returns whether to go on.
    ///
    /// Returns the number of tokens fed; fewer than given when `progress` said stop.
    pub fn prefill(
        &self,
        session: &mut Session,
        tokens: &[u32],
        want: Want,
        each: &mut dyn FnMut(&[f32]) -> Result<(), StepError>,
        progress: &mut dyn FnMut(f64) -> bool,
    ) -> Result<usize, StepError> {
        if tokens.len() > session.room() {
            let (used, wanted, context) = (session.tokens.len(), tokens.len(), session.context);
            return Err(StepError::Context { used, wanted, context });
        }
        let mut done = 0;
        for chunk in tokens.chunks(self.prefill_chunk) {
            let last = done + chunk.len() == tokens.len();
            let want = if want == Want::Last && !last { Want::Nothing } else { want };
            let mut observe = |layer: usize, layers: usize| {
                let part = chunk.len() as f64 * layer as f64 / layers as f64;
                progress((done as f64 + part) / tokens.len() as f64)
            };
            let work = Work { session: &mut *session, tokens: chunk, want };
            let hidden = match self.step_observed(&mut [work], &mut observe) {
                Err(StepError::Model(ModelError::Cancelled { .. })) => break,
                result => result?,
            };
            each(&hidden[0])?;
            done += chunk.len();
        }
        Ok(done)
    }
}

/// Shape of a model's history of routed experts.
pub fn usage_shape(config: &Config) -> UsageShape {
    let family = config.family.row().model_types.first().copied().unwrap_or_default();
    UsageShape { layers: config.layers, experts: config.moe.experts, family }
}

/// Rotary numbers per head.
fn rope_dim(config: &Config) -> usize {
    match config.attention {
        Attention::Mla { rope, .. } => rope,
        Attention::Gqa { head_dim, .. } => head_dim,
    }
}

/// Bytes of a session's state: whole pages.
fn kv_bytes(shape: &KvShape, context: usize) -> u64 {
    context.next_multiple_of(PAGE) as u64 * shape.bytes_per_position() as u64
}

fn plan_context(
    options: &EngineOptions,
    config: &Config,
    shape: &KvShape,
    plan: &Plan,
    limit: u64,
) -> Result<usize, OpenError> {
    let max = config.max_position;
    if let Some(asked) = options.context {
        if asked > max {
            return Err(OpenError::Context { asked, max });
        }
        return Ok(asked.max(1));
    }
    // Half of what is left may go to keys and values, the rest to experts.
    let left = limit.saturating_sub(plan.fixed()) / 2 / options.sessions.max(1) as u64;
    let page = kv_bytes(shape, PAGE) + RopeTable::bytes_of(rope_dim(config), PAGE) as u64;
    let page = page.max(1);
    let fits = usize::try_from(left / page).unwrap_or(usize::MAX).saturating_mul(PAGE);
    Ok(fits.max(CONTEXT_FLOOR).min(max))
}

/// Upper bound of the activations of a step of `chunk` rows.
fn scratch_bytes(config: &Config, chunk: usize, threads: usize) -> u64 {
    let hidden = config.hidden_size;
    let (heads, per_head, latent) = match config.attention {
        Attention::Mla { q_lora, kv_lora, nope, rope, v_dim, .. } => {
            (config.heads, nope + rope + v_dim, q_lora + 2 * kv_lora + rope)
        }
        Attention::Gqa { kv_heads, head_dim, .. } => {
            (config.heads, 2 * head_dim, 2 * kv_heads * head_dim)
        }
    };
    // Queries and weights of the indexer and the keys it selects, and the scores of its waves.
    let (index, waves) = match &config.attention {
        Attention::Mla { indexer: Some(indexer), .. } if config.max_position > indexer.topk => {
            (indexer.heads * (indexer.head_dim + 1) + 2 * indexer.topk, models::WAVE_SCORES)
        }
        _ => (0, 0),
    };
    let widest = config.dense_intermediate.max(config.shared_intermediate());
    let widest = widest.max(config.moe.expert_intermediate);
    // Residual, norms, outputs, i64 sums and int8 forms of a row; then its heads and widest layer.
    let row = 12 * hidden
        + 3 * heads * per_head
        + 4 * latent
        + 2 * index
        + 4 * widest
        + config.moe.experts * 3;
    let per_thread = models::attention_scratch(config, chunk);
    let floats =
        chunk * row + threads * (per_thread + waves) + waves + 2 * LOGIT_ROWS * config.vocab_size;
    floats as u64 * size_of::<f32>() as u64
}
