//! Opening what the flags name.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use container::{Config, Family, Tokenizer};
use experts::{IoMode, Pairs, ReadAhead, RouteShape};
use lab::manifest::Manifest;
use models::Int8Classes;
use numerics::{Activations, Compute, Isa, Level, NUMERICS_VERSION, Team};
use runtime::engine::PREFILL_CHUNK;
use runtime::machine::Machine;
use runtime::{Engine, EngineOptions};

use crate::args::{EngineArgs, ModelArgs, Pin, Prefetch, SamplingArgs};
use crate::bundled;
use crate::failure::Failure;
use crate::history::History;
use crate::output;
use crate::progress::Progress;
use crate::tuned::{self, Found};
use crate::workers::{self, Workers};

/// The directories of the model that the flags name, primary first.
pub fn dirs(args: &ModelArgs) -> Result<Vec<PathBuf>, Failure> {
    let mut dirs: Vec<PathBuf> = args.model.iter().cloned().collect();
    for dir in &args.model_dirs {
        if dir.as_os_str().is_empty() {
            return Err(Failure::usage("--model-dirs (COLI_MODEL_DIRS) has an empty entry"));
        }
        if !dirs.contains(dir) {
            dirs.push(dir.clone());
        }
    }
    if dirs.is_empty() {
        dirs.push(bundled::find()?);
    }
    for dir in &dirs {
        if !dir.is_dir() {
            let what = if dir.exists() {
                "is not a directory; give the one it lies in"
            } else {
                "does not exist"
            };
            return Err(Failure::usage(format!("{} {what}", dir.display())));
        }
        // A damaged manifest does not matter to the weights; `doctor` reports it.
        let manifest = Manifest::load(dir).ok().flatten();
        if manifest.is_some_and(|manifest| !manifest.complete) {
            return Err(Failure::usage(format!(
                "{} is an unfinished conversion; give the same convert command again to finish it",
                dir.display()
            )));
        }
    }
    Ok(dirs)
}

/// The ceiling where none is given.
fn ceiling() -> Option<u64> {
    Machine::default().default_ceiling().map(|bound| bound.bytes)
}

/// Engine options of the flags, and of what was measured for the model where no flag says
/// otherwise; what was found is returned too.
pub fn tuned_options(args: &EngineArgs) -> Result<(EngineOptions, Option<Found>), Failure> {
    let mut options = engine_options(args)?;
    let mut found =
        (!args.no_tuned).then(|| tuned::find(&options.dirs, args.ram.or_else(ceiling))).flatten();
    if let Some(found) = &mut found {
        let mut settings = found.settings.clone();
        settings.threads = args.threads.unwrap_or(settings.threads);
        settings.prefill_chunk = args.prefill_chunk.unwrap_or(settings.prefill_chunk);
        settings.io = args.io.or(settings.io);
        let chosen = args.no_prefetch || args.prefetch.is_some();
        settings.prefetch = settings.prefetch.filter(|_| !chosen);
        // Mapped files are read by the system.
        let needs_reads = args.read_limit.is_some() || !args.mirror.is_empty();
        if needs_reads && settings.io == Some(IoMode::Mmap) {
            settings.io = args.io;
            found.settings.io = None;
        }
        options = settings.apply(&options);
    }
    Ok((options, found))
}

/// The level of a flag, or the best that there is.
fn isa_of(level: Option<Level>) -> Result<Isa, Failure> {
    let Some(level) = level else { return Ok(Isa::detect()) };
    Isa::at(level).ok_or_else(|| Failure::usage(format!("this CPU does not have {level}")))
}

/// Level, threads and activations of the flags, without an engine.
pub fn compute(
    level: Option<Level>,
    threads: Option<usize>,
    activations: Activations,
) -> Result<Compute, Failure> {
    let threads = threads.unwrap_or_else(|| Machine::default().compute_threads());
    let team = Team::new(threads).map_err(runtime::OpenError::from)?;
    Ok(Compute::new(isa_of(level)?, Arc::new(team), activations))
}

/// Engine options of the flags alone.
pub fn engine_options(args: &EngineArgs) -> Result<EngineOptions, Failure> {
    let isa = isa_of(args.isa)?;
    Ok(EngineOptions {
        dirs: dirs(&args.model)?,
        ram_bytes: args.ram,
        threads: args.threads,
        isa,
        activations: args.activations,
        int8_classes: int8_classes(args)?,
        context: args.ctx,
        sessions: 1,
        prefill_chunk: args.prefill_chunk.unwrap_or(PREFILL_CHUNK),
        cache_bytes: None,
        cache_experts: args.cache_experts,
        held_bytes: 0,
        io: args.io,
        read_limit: args.read_limit,
        mirrors: args.mirror.clone(),
        read_ahead: read_ahead(args)?,
        always_idle: false,
        fill: true,
        route_trace: args.route_trace.clone(),
        others: None,
        notice: Arc::new(|text| note!("warning: {text}")),
    })
}

/// Reads ahead by a table for a model: `top` experts of a layer, so many layers ahead.
pub fn read_ahead_by(
    file: &Path,
    dir: &Path,
    top: usize,
    distance: usize,
) -> Result<ReadAhead, Failure> {
    let config = Config::load(dir)?;
    let shape = RouteShape { layers: config.all_layers(), experts: config.moe.experts };
    let table = Arc::new(Pairs::load(file, shape)?);
    Ok(ReadAhead::Pairs { table, top, distance })
}

/// What `--prefetch` and its companions ask for.
fn read_ahead(args: &EngineArgs) -> Result<ReadAhead, Failure> {
    let asked = match args.no_prefetch {
        true => Prefetch::Off,
        false => args.prefetch.unwrap_or(Prefetch::Router),
    };
    if args.pairs.is_some() && asked != Prefetch::Pairs {
        return Err(Failure::usage("--pairs has no effect without --prefetch pairs"));
    }
    match asked {
        Prefetch::Off => Ok(ReadAhead::Off),
        Prefetch::Router => Ok(ReadAhead::Router),
        Prefetch::Pairs => {
            let Some(file) = &args.pairs else {
                return Err(Failure::usage(
                    "--prefetch pairs needs --pairs FILE, a table of coli route pairs",
                ));
            };
            read_ahead_by(file, &dirs(&args.model)?[0], args.pairs_top, args.pairs_distance)
        }
    }
}

/// The classes of `--int8-classes`.
fn int8_classes(args: &EngineArgs) -> Result<Int8Classes, Failure> {
    let Some(names) = &args.int8_classes else { return Ok(Int8Classes::default()) };
    if args.activations != Activations::Int8 {
        return Err(Failure::usage("--int8-classes has no effect with --activations f32"));
    }
    let class = |name: &String| {
        let known = Int8Classes::POSSIBLE;
        known.into_iter().find(|class| class.name() == name).ok_or_else(|| {
            let names: Vec<&str> = known.iter().map(|class| class.name()).collect();
            Failure::usage(format!("--int8-classes {name:?}: known are {}", names.join(", ")))
        })
    };
    let named = names.iter().filter(|name| *name != "none").map(class);
    let classes = named.collect::<Result<Vec<_>, _>>()?;
    Ok(Int8Classes::of(&classes))
}

/// An opened model and what belongs to its use.
pub struct Opened {
    pub engine: Engine,
    pub history: History,
    pub workers: Workers,
}

/// Opens the engine with a progress bar, says what is in effect, and prepares its cache by the
/// history.
pub fn open(args: &EngineArgs) -> Result<Opened, Failure> {
    let (options, found) = tuned_options(args)?;
    let (engine, workers) = match (open_with_workers(args, options), found) {
        (opened, None) => opened?,
        (Ok(opened), Some(found)) => {
            note!("settings of coli tune where no flag says otherwise: {found}");
            opened
        }
        (Err(failure), Some(_)) => {
            let opened = open_with_workers(args, engine_options(args)?)?;
            warn_of_tuned(&failure);
            opened
        }
    };
    let history = History::open(args, &engine)?;
    Ok(Opened { engine, history, workers })
}

fn open_with_workers(
    args: &EngineArgs,
    mut options: EngineOptions,
) -> Result<(Engine, Workers), Failure> {
    let workers = workers::add(&args.cluster, &mut options)?;
    Ok((open_with(args, options)?, workers))
}

/// Says that a model can be opened without the settings that were found for it, and not with them.
pub fn warn_of_tuned(failure: &Failure) {
    note!(
        "warning: the settings of coli tune do not work any more, they are not used; give coli \
         tune again, or coli tune --forget ({failure})"
    );
}

/// Opens an engine for tokens that are fed to it, with the workers of its flags.
pub fn open_fed(args: &EngineArgs, positions: usize) -> Result<(Engine, Workers), Failure> {
    let options = engine_options(args)?;
    let context = bench_context(&options, positions)?;
    open_with_workers(args, EngineOptions { context: Some(context), ..options })
}

/// Finishes the route trace, if there is one.
pub fn close(engine: &Engine) -> Result<(), Failure> {
    Ok(engine.routes().flush_trace()?)
}

/// Context of benches where none is asked for: they need little, and several sessions of a model's
/// longest would not fit.
const BENCH_CONTEXT: usize = 4096;

/// The context of a bench that needs so many positions.
fn bench_context(options: &EngineOptions, positions: usize) -> Result<usize, Failure> {
    let longest = Config::load(&options.dirs[0])?.max_position;
    let context = options.context.unwrap_or(BENCH_CONTEXT.max(positions).min(longest));
    if positions > context {
        return Err(Failure::usage(format!(
            "the bench needs a context of {positions} tokens, {context} is what there is; \
             lower --tokens or raise --ctx (the model's longest is {longest})"
        )));
    }
    Ok(context)
}

/// [`open`] for a bench that holds memory of its own under the ceiling and has several sessions,
/// each of at least `positions` tokens.
pub fn open_for_bench(
    args: &EngineArgs,
    held_bytes: u64,
    sessions: usize,
    positions: usize,
) -> Result<Engine, Failure> {
    workers::refuse(&args.cluster, "a bench")?;
    let options = engine_options(args)?;
    let context = bench_context(&options, positions)?;
    let options = EngineOptions { held_bytes, sessions, context: Some(context), ..options };
    let engine = open_with(args, options)?;
    // A bench is the same whatever was run before, unless told otherwise.
    if matches!(args.pin, Pin::File(_)) {
        History::open(args, &engine)?;
    }
    Ok(engine)
}

fn open_with(args: &EngineArgs, options: EngineOptions) -> Result<Engine, Failure> {
    let mut progress = Progress::bytes("loading weights");
    let engine = Engine::open(&options, &mut |done, total| progress.set(done, total))?;
    drop(progress);
    let report = engine.model().report();
    for warning in report.warnings.iter().cloned().chain(unused(report)) {
        note!("warning: {warning}");
    }
    print_banner(&engine, args);
    Ok(engine)
}

/// What a user should know when stored tensors take no part: the configuration may be another
/// model's.
pub fn unused(report: &container::Report) -> Option<String> {
    let (count, names) = &report.unused;
    (*count > 0).then(|| {
        format!("{count} stored tensors are not used by this configuration, first {}", names[0])
    })
}

/// Effective values, on stderr.
fn print_banner(engine: &Engine, args: &EngineArgs) {
    let (config, compute) = (engine.config(), engine.compute());
    let name = engine.model().dirs.first().and_then(|dir| dir.file_name());
    let threads = compute.team.threads();
    note!(
        "{} ({}) | {} | {} thread{} | {} activations | ctx {} | RAM ceiling {}, dense {}, \
         expert cache {} | {} reads{} | numerics {NUMERICS_VERSION}",
        name.map(|name| name.to_string_lossy()).unwrap_or_default(),
        config.family.row().name,
        compute.isa.level(),
        threads,
        if threads == 1 { "" } else { "s" },
        compute.activations,
        engine.context(),
        output::bytes(engine.ledger().limit()),
        output::bytes(engine.dense_bytes()),
        match args.cache_experts {
            None => output::bytes(engine.cache_bytes()),
            Some(max) => format!("at most {max} per layer"),
        },
        engine.io().name(),
        match engine.experts().read_ahead() {
            ReadAhead::Off => String::new(),
            other => format!(", prefetch by {}", other.name()),
        },
    );
}

/// The tokenizer of the primary directory.
pub fn tokenizer(args: &ModelArgs) -> Result<Tokenizer, Failure> {
    let dirs = dirs(args)?;
    Ok(Tokenizer::load_required(&dirs[0])?)
}

/// Ids of the family's scoring prefix, where the vocabulary has them all.
pub fn family_prefix(family: Family, tokenizer: &Tokenizer) -> Vec<u32> {
    let ids = family.row().scoring_prefix.iter().map(|token| tokenizer.token_id(token));
    ids.collect::<Option<Vec<u32>>>().unwrap_or_default()
}

/// Sampler options of the flags; a sampled run without a seed draws one.
pub fn sampler(args: &SamplingArgs) -> Result<runtime::SamplerOptions, Failure> {
    let options = runtime::SamplerOptions {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        seed: args.seed.unwrap_or_else(draw_seed),
    };
    options.check().map_err(Failure::usage)?;
    if args.max_tokens == 0 {
        return Err(Failure::usage("--max-tokens must be at least 1"));
    }
    if options.temperature == 0.0 {
        let ignored = [
            (args.top_k != 0, "--top-k"),
            (args.top_p != 1.0, "--top-p"),
            (args.min_p != 0.0, "--min-p"),
            (args.seed.is_some(), "--seed"),
        ];
        if let Some((_, name)) = ignored.iter().find(|(given, _)| *given) {
            return Err(Failure::usage(format!(
                "{name} has no effect at temperature 0; give --temperature too"
            )));
        }
    }
    Ok(options)
}

/// A seed nobody chose.
fn draw_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() >> 16
}
