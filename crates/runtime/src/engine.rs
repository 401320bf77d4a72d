//! The engine: a loaded model, its experts, and the plan of every byte it may hold.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use container::{Config, ContainerError, Model};
use experts::local::StartError;
use experts::{
    ByteClass, ExpertBackend, ExpertStats, ExpertStore, FileSet, IoMode, Ledger, LedgerError,
    LocalExperts, LocalOptions, MirrorError, Notice, ReadAhead, ReadError, Reservation, UsageShape,
};
use models::{Activity, Family, Int8Classes, ModelError, Profile, Row, StepContext, open_family};
use numerics::{Activations, Buf, Compute, Isa};

use crate::kv::{BatchKv, SequenceKv};
use crate::plan::{MemoryPlan, Prepared, kv_bytes};
use crate::routing::{RouteLog, TraceError};
use crate::session::{Session, StepError, Want, Work};

/// Prefill chunk when none is asked for: large enough that each expert of a layer is read once
/// for many tokens, small enough for the scratch it needs.
pub const PREFILL_CHUNK: usize = 512;
/// Rows whose logits are computed together: enough to share the head's weights, few enough for a
/// large vocabulary.
pub(crate) const LOGIT_ROWS: usize = 8;

/// Makes a backend of a model's routed experts over those of this machine; an error says why not.
pub type MakeBackend = Arc<
    dyn Fn(&Config, Arc<LocalExperts>, &Compute) -> Result<Box<dyn ExpertBackend>, String>
        + Send
        + Sync,
>;

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
    /// How experts are read; `None` chooses: through the page cache when all fit in memory; else
    /// past it, or in place when the files lie in memory anyway.
    pub io: Option<IoMode>,
    /// Most bytes of experts read per second; `None` sets no limit. Mapped files have none.
    pub read_limit: Option<u64>,
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
    /// Makes a backend over this machine's experts, such as one that asks other machines; `None`
    /// computes all of them here.
    pub others: Option<MakeBackend>,
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
            read_limit: None,
            mirrors: Vec::new(),
            read_ahead: ReadAhead::Router,
            always_idle: false,
            fill: false,
            route_trace: None,
            others: None,
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
    /// Something about reads that mapped files do not need.
    #[error(
        "{option} has no effect with --io mmap: the system reads mapped files; give another --io"
    )]
    Mapped {
        /// The option.
        option: &'static str,
    },
    /// A mirror of them.
    #[error(transparent)]
    Mirror(#[from] MirrorError),
    /// The backend over this machine's experts.
    #[error("{0}")]
    Others(String),
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
    /// Who computes routed experts, if not this machine's own alone.
    others: Option<Box<dyn ExpertBackend>>,
    io: IoMode,
    read_limit: Option<u64>,
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

impl Engine {
    /// Opens a model: checks its headers, plans memory, loads dense weights. `progress` is told
    /// bytes loaded and bytes in all.
    pub fn open(
        options: &EngineOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Engine, OpenError> {
        let Prepared { model, store, compute, plan, step_rows } = Prepared::new(options)?;
        // What is read once goes through the page cache and is not counted among experts' bytes.
        let reader = store.reader().counting_apart();
        let (context, kv, is_mapped) = (plan.context, plan.kv, plan.io == IoMode::Mmap);
        let ledger = Ledger::new(plan.limit);
        let memory = vec![
            ledger.reserve(ByteClass::Process, plan.process)?,
            ledger.reserve(ByteClass::Scratch, plan.scratch)?,
            ledger.reserve(ByteClass::Kv, kv)?,
        ];
        let family =
            open_family(&model, &reader, &ledger, context, options.int8_classes, progress)?;
        let local = LocalOptions {
            cache_bytes: options.cache_bytes,
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
        let experts = Arc::new(experts);
        let others =
            options.others.as_ref().map(|make| make(&model.config, experts.clone(), &compute));
        let others = others.transpose().map_err(OpenError::Others)?;
        let routes = RouteLog::new(usage_shape(&model.config), options.route_trace.clone())?;
        Ok(Engine {
            model,
            family,
            experts,
            others,
            io: plan.io,
            read_limit: options.read_limit,
            routes,
            compute,
            ledger,
            sessions: Ledger::new(kv),
            context,
            prefill_chunk: plan.prefill_chunk.min(context),
            step_rows,
            turn: Mutex::new(()),
            profile: Profile::default(),
            _memory: memory,
        })
    }

    /// What opening would plan, with the container and its experts; no weight is read.
    pub fn plan(options: &EngineOptions) -> Result<(MemoryPlan, Model, ExpertStore), OpenError> {
        let Prepared { model, store, plan, .. } = Prepared::new(options)?;
        Ok((plan, model, store))
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

    fn backend(&self) -> &dyn ExpertBackend {
        self.others.as_deref().unwrap_or(&*self.experts)
    }

    /// What the routers chose.
    pub fn routes(&self) -> &RouteLog {
        &self.routes
    }

    /// How experts are read.
    pub fn io(&self) -> IoMode {
        self.io
    }

    /// Most bytes of experts read per second, if there is a limit.
    pub fn read_limit(&self) -> Option<u64> {
        self.read_limit
    }

    /// Bytes of dense weights in memory.
    pub fn dense_bytes(&self) -> u64 {
        self.family.dense_bytes()
    }

    /// What the experts' backend did.
    pub fn expert_stats(&self) -> ExpertStats {
        self.backend().stats()
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
            experts: self.backend(),
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
