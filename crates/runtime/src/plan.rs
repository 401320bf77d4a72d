//! The plan of every byte an engine may hold, made before a weight is read.

use std::sync::Arc;

use container::{Attention, Config, Model, TensorClass};
use experts::load::ExpertTable;
use experts::reader::{RateLimit, open_files};
use experts::{ExpertStore, FileSet, IoMode, LocalExperts, Mirror, MirrorError, Reader};
use models::{KvShape, PAGE, planned_dense_bytes};
use numerics::rope::RopeTable;
use numerics::{Compute, Team};

use crate::engine::{EngineOptions, LOGIT_ROWS, OpenError, usage_shape};
use crate::machine::{Machine, MemoryBound};
use crate::routing::RouteLog;

/// Megabytes by which the process's own memory differs from run to run: added to the least ceiling
/// that is named, so that naming it again is enough.
const PROCESS_VARIES_MB: f64 = 1.0;
/// Share of the working memory in use that is kept besides, for buffers to be used again.
const SCRATCH_KEPT_SHARE: u64 = 4;
/// Least context the default plan aims at before it gives memory to the expert cache.
const CONTEXT_FLOOR: usize = 512;
/// Ceiling assumed where the system does not say how much memory there is.
const CEILING_UNKNOWN: u64 = 4_000_000_000;

/// What an engine would hold, in bytes, and how it would read.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    /// The ceiling.
    pub limit: u64,
    /// What bounds it: `--ram`, the host, or a control group's file.
    pub bound_by: String,
    /// The process as it is.
    pub process: u64,
    /// Dense weights.
    pub dense: u64,
    /// Activations of the largest step.
    pub scratch: u64,
    /// Read buffers.
    pub in_flight: u64,
    /// The largest expert; 0 when experts stay in their files.
    pub expert: u64,
    /// Key/value state of all sessions.
    pub kv: u64,
    /// Rotary tables.
    pub tables: u64,
    /// All experts.
    pub experts: u64,
    /// Tokens a session may hold.
    pub context: usize,
    /// Tokens per prefill step, at most.
    pub prefill_chunk: usize,
    /// How experts are read.
    pub io: IoMode,
    /// Why they are not read as asked, if they are not.
    pub fallback: Option<String>,
}

impl MemoryPlan {
    /// Bytes that are left for experts in memory, at most those of all of them.
    pub fn cache(&self) -> u64 {
        if self.expert == 0 {
            return 0;
        }
        let others = self.fixed() - self.expert + self.kv + self.tables;
        self.limit.saturating_sub(others).min(self.experts)
    }

    fn fixed(&self) -> u64 {
        self.process + self.dense + self.scratch + self.in_flight + self.expert
    }

    fn check(&self) -> Result<(), OpenError> {
        let (kv, tables, limit) = (self.kv, self.tables, self.limit);
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

/// A model that is opened as far as can be without reading a weight.
pub(crate) struct Prepared {
    pub model: Model,
    pub store: ExpertStore,
    pub compute: Compute,
    pub plan: MemoryPlan,
    /// Rows of the largest step.
    pub step_rows: usize,
}

impl Prepared {
    /// Checks headers, opens files and mirrors, starts threads, and plans memory.
    pub fn new(options: &EngineOptions) -> Result<Prepared, OpenError> {
        let model = Model::open(&options.dirs)?;
        let threads = options.threads.unwrap_or_else(|| Machine::default().compute_threads());
        let compute = Compute::new(options.isa, Arc::new(Team::new(threads)?), options.activations);
        let int8_experts = options.int8_classes.contains(TensorClass::Experts);
        let table = ExpertTable::of(&model, int8_experts)?;
        let machine = Machine::default();
        let MemoryBound { bytes: limit, bound_by } = match options.ram_bytes {
            Some(bytes) => MemoryBound { bytes, bound_by: "--ram".to_owned() },
            None => machine.default_ceiling().unwrap_or(MemoryBound {
                bytes: CEILING_UNKNOWN,
                bound_by: "nothing that the system tells".to_owned(),
            }),
        };
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
        let (largest, experts) = (table.slot_bytes_max(), table.total_bytes());
        // A guess at what will be left: the drive is read past the page cache when it is needed
        // again and again, and through it when everything is read once.
        let fits = dense.saturating_add(experts).saturating_add(scratch) <= limit / 10 * 9;
        let files = FileSet::open(&model.shards)?;
        // What mapped files would not heed.
        let needs_reads = match options {
            _ if options.read_limit.is_some() => Some("--read-limit"),
            _ if !options.mirrors.is_empty() => Some("--mirror"),
            _ => None,
        };
        let may_map = needs_reads.is_none();
        let asked = options.io.unwrap_or_else(|| table.default_mode(&files, fits, may_map));
        let opened = open_files(files, asked);
        if let Some(why) = opened.fallback.as_ref().filter(|_| options.io.is_some()) {
            (options.notice)(why);
        }
        let is_mapped = asked == IoMode::Mmap;
        if let Some(option) = needs_reads.filter(|_| is_mapped) {
            return Err(OpenError::Mapped { option });
        }
        let limit_of_reads =
            options.read_limit.map(|bytes_per_s| Arc::new(RateLimit::new(bytes_per_s as f64)));
        let mirrors = options.mirrors.iter().map(|(dir, weight)| {
            let mirror =
                Mirror::open(dir.clone(), *weight, &model, &table, opened.mode, &options.notice)?;
            Ok(mirror.limited(limit_of_reads.clone()))
        });
        let mirrors = mirrors.collect::<Result<Vec<_>, MirrorError>>()?;
        let reader = Reader::new(opened.files).limited(limit_of_reads);
        let store = ExpertStore::new(table, reader).with_mirrors(mirrors, options.notice.clone());
        let in_flight = LocalExperts::in_flight_bytes(&store, &options.read_ahead);
        let mut plan = MemoryPlan {
            limit,
            bound_by,
            process: machine.rss_bytes().unwrap_or(0),
            dense,
            scratch: scratch + options.held_bytes + RouteLog::bytes_of(usage_shape(config)),
            in_flight: if is_mapped { 0 } else { in_flight },
            expert: if is_mapped { 0 } else { largest },
            kv: 0,
            tables: 0,
            experts,
            context: 0,
            prefill_chunk: chunk,
            io: if is_mapped { IoMode::Mmap } else { opened.mode },
            fallback: opened.fallback,
        };
        plan.context = plan_context(options, config, &kv_shape, &plan)?;
        let sessions = options.sessions.max(1) as u64;
        plan.kv = kv_bytes(&kv_shape, plan.context).saturating_mul(sessions);
        plan.tables = RopeTable::bytes_of(rope_dim(config), plan.context) as u64;
        plan.check()?;
        Ok(Prepared { model, store, compute, plan, step_rows })
    }
}

/// Rotary numbers per head.
fn rope_dim(config: &Config) -> usize {
    match config.attention {
        Attention::Mla { rope, .. } => rope,
        Attention::Gqa { head_dim, .. } => head_dim,
    }
}

/// Bytes of a session's state: whole pages.
pub(crate) fn kv_bytes(shape: &KvShape, context: usize) -> u64 {
    context.next_multiple_of(PAGE) as u64 * shape.bytes_per_position() as u64
}

fn plan_context(
    options: &EngineOptions,
    config: &Config,
    shape: &KvShape,
    plan: &MemoryPlan,
) -> Result<usize, OpenError> {
    let max = config.max_position;
    if let Some(asked) = options.context {
        if asked > max {
            return Err(OpenError::Context { asked, max });
        }
        return Ok(asked.max(1));
    }
    // Half of what is left may go to keys and values, the rest to experts.
    let left = plan.limit.saturating_sub(plan.fixed()) / 2 / options.sessions.max(1) as u64;
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
