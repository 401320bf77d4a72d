//! The one table of flags; help, usage errors and environment names come from it.

use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use container::Layout;
use experts::IoMode;
use formats::Format;
use numerics::{Activations, Level};

/// Runs Mixture-of-Experts language models (GLM-5.2, OLMoE) on machines that cannot hold them:
/// routed experts stream from disk through a cache with a hard memory ceiling, and every logit has
/// the same bits whatever the cache, chunking, batch, threads or CPU.
#[derive(Parser, Debug)]
#[command(
    name = "coli",
    version,
    propagate_version = true,
    after_help = "\
Start here:
  coli run \"Once upon a time\"            complete a text with the bundled model
  coli chat                              talk to it
  coli info --model DIR                  what a model is and what it needs
  coli doctor --model DIR --deep         check every tensor of it
  coli run --model DIR --ram 24 PROMPT   run a model larger than 24 GB of memory
  coli convert SRC DST --experts int4-g64 --dense int8
                                         make a smaller container of a checkpoint
  coli oracle --model DIR --reference ref.json --activations f32
                                         compare with a transformers reference

A model is a directory with config.json, tokenizer files and *.safetensors. Without --model the
bundled demonstration model is used. Options with [env: COLI_…] in their help can be given as that
environment variable, such as COLI_RAM=24. Exit codes: 0 ok, 1 something failed or a check did not
hold, 2 wrong usage or unusable input, 130 a second Ctrl-C."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

mod bench;
mod cluster;
mod mirror;

pub use bench::*;
pub use cluster::*;
pub use mirror::*;

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Generate one text, streamed to stdout
    Run(RunArgs),
    /// Talk to a model
    Chat(ChatArgs),
    /// Compare with a reference token by token
    Oracle(OracleArgs),
    /// Measure negative log-likelihood and perplexity
    Score(ScoreArgs),
    /// Show what a model is and what it needs
    Info(InfoArgs),
    /// Check a model: pass, warn or fail, with a remedy each
    Doctor(DoctorArgs),
    /// Convert a checkpoint or container to other weight formats
    Convert(ConvertArgs),
    /// Make a random-weight model of true shapes
    Synth(SynthArgs),
    /// Show what a model takes and gives on this machine, and what binds
    Plan(PlanArgs),
    /// Measure which settings are fastest on this machine, and keep them for this model
    Tune(TuneArgs),
    /// Measure speed beside the physical limit
    Bench(BenchArgs),
    /// Keep copies of experts on another drive
    Mirror(MirrorArgs),
    /// Work on records of which experts were chosen
    Route(RouteArgs),
    /// Compute routed experts for programs on other machines
    Cluster(ClusterArgs),
}

/// Which model.
#[derive(Args, Debug, Clone)]
pub struct ModelArgs {
    /// Model directory [default: the bundled model]
    #[arg(long, value_name = "DIR", env = "COLI_MODEL")]
    pub model: Option<PathBuf>,
    /// Directories that hold one model together, primary first (colon-separated); --model, when
    /// given, comes before them
    #[arg(long, value_name = "DIRS", env = "COLI_MODEL_DIRS", value_delimiter = ':')]
    pub model_dirs: Vec<PathBuf>,
}

/// How a model runs.
#[derive(Args, Debug, Clone)]
pub struct EngineArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Memory ceiling in GB (10^9 bytes) for everything the process holds [default: what host and
    /// control group leave free, less a reserve]
    #[arg(long, value_name = "GB", env = "COLI_RAM", value_parser = parse_gb,
          allow_negative_numbers = true)]
    pub ram: Option<u64>,
    /// Context in tokens [default: the smaller of the model's and what memory allows]
    #[arg(long, value_name = "N", env = "COLI_CTX", value_parser = parse_count)]
    pub ctx: Option<usize>,
    /// Compute threads [default: physical cores this process may use]
    #[arg(long, value_name = "N", env = "COLI_THREADS", value_parser = parse_threads)]
    pub threads: Option<usize>,
    /// Activations that meet quantised weights: exact int8 blocks, or f32
    #[arg(long, value_name = "MODE", env = "COLI_ACTIVATIONS", default_value = "int8",
          value_parser = parse_activations)]
    pub activations: Activations,
    /// Tensor classes that take int8 activations, comma-separated, or none [default: those of the
    /// numerics version, see coli info]; another list gives other bits
    #[arg(long, value_name = "CLASSES", env = "COLI_INT8_CLASSES", value_delimiter = ',')]
    pub int8_classes: Option<Vec<String>>,
    /// Prompt tokens per step [default: 512]
    #[arg(long, value_name = "N", env = "COLI_PREFILL_CHUNK", value_parser = parse_count)]
    pub prefill_chunk: Option<usize>,
    /// Most experts kept in memory per layer, for tests
    #[arg(long, value_name = "N", env = "COLI_CACHE_EXPERTS", value_parser = parse_count)]
    pub cache_experts: Option<usize>,
    /// How experts are read: buffered (through the page cache), direct (past it), uring (past it,
    /// each read as many at once), mmap (computed where they lie, for files that stay in memory)
    /// [default: buffered when all experts fit in memory, else direct]
    #[arg(long, value_name = "MODE", env = "COLI_IO", value_parser = parse_io)]
    pub io: Option<IoMode>,
    /// Most GB (10^9 bytes) of experts read per second: leaves the drive to others, or shows what a
    /// slower one would give
    #[arg(long, value_name = "GB/S", env = "COLI_READ_LIMIT", value_parser = parse_rate,
          allow_negative_numbers = true)]
    pub read_limit: Option<u64>,
    /// What is read before it is asked for, while the drive is idle: off, router (what the next
    /// layer's router would choose now), or pairs (what most often followed, see --pairs)
    /// [default: router]
    #[arg(long, value_name = "WHAT", env = "COLI_PREFETCH", conflicts_with = "no_prefetch")]
    pub prefetch: Option<Prefetch>,
    /// The same as --prefetch off
    #[arg(long)]
    pub no_prefetch: bool,
    /// Table of coli route pairs for --prefetch pairs
    #[arg(long, value_name = "FILE", env = "COLI_PAIRS")]
    pub pairs: Option<PathBuf>,
    /// Experts of a layer that --prefetch pairs reads ahead at a time
    #[arg(long, value_name = "K", env = "COLI_PAIRS_TOP", default_value_t = 4,
          value_parser = parse_count)]
    pub pairs_top: usize,
    /// Layers that --prefetch pairs looks ahead, 1 or 2
    #[arg(long, value_name = "D", env = "COLI_PAIRS_DISTANCE", default_value_t = 1,
          value_parser = parse_distance)]
    pub pairs_distance: usize,
    /// Experts to keep in memory: auto (by the history of earlier turns), none, or a file with a
    /// history
    #[arg(long, value_name = "WHICH", env = "COLI_PIN", default_value = "auto",
          value_parser = parse_pin)]
    pub pin: Pin,
    /// Ignore the settings that coli tune found for this model
    #[arg(long, env = "COLI_NO_TUNED")]
    pub no_tuned: bool,
    /// Leave the history of routed experts as it is
    #[arg(long, env = "COLI_NO_USAGE")]
    pub no_usage: bool,
    /// Write what the routers choose to a file
    #[arg(long, value_name = "FILE", env = "COLI_ROUTE_TRACE")]
    pub route_trace: Option<PathBuf>,
    /// Directory with copies of experts on another drive, made by coli mirror stage; with =WEIGHT
    /// its share of the reads of what it has beside 1 for the model's own files. Repeatable
    #[arg(long, value_name = "DIR[=WEIGHT]", env = "COLI_MIRROR", value_delimiter = ':',
          value_parser = parse_mirror)]
    pub mirror: Vec<(PathBuf, f64)>,
    #[command(flatten)]
    pub cluster: CoordinatorArgs,
    /// Force an instruction-set level: scalar, avx2, avxvnni, avx512, avx512vnni, amx [default:
    /// the CPU's highest]
    #[arg(long, value_name = "LEVEL", env = "COLI_ISA", value_parser = parse_level)]
    pub isa: Option<Level>,
}

/// What is read before it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Prefetch {
    /// Nothing.
    Off,
    /// Experts that the next layer's router would choose now.
    Router,
    /// Experts that most often followed, by a table.
    Pairs,
}

/// Which experts are kept in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pin {
    /// By the history of earlier turns, where there is one.
    Auto,
    /// None.
    None,
    /// By a history that the user names.
    File(PathBuf),
}

/// How tokens are chosen.
#[derive(Args, Debug, Clone)]
pub struct SamplingArgs {
    /// Most tokens to generate
    #[arg(
        long,
        value_name = "N",
        env = "COLI_MAX_TOKENS",
        default_value_t = 256,
        allow_negative_numbers = true
    )]
    pub max_tokens: usize,
    /// Sampling temperature; 0 always takes the most likely token
    #[arg(
        long,
        value_name = "T",
        env = "COLI_TEMPERATURE",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub temperature: f32,
    /// Sample among the K most likely tokens; 0 takes all
    #[arg(long, value_name = "K", env = "COLI_TOP_K", default_value_t = 0)]
    pub top_k: usize,
    /// Sample among the most likely tokens that together have probability P
    #[arg(
        long,
        value_name = "P",
        env = "COLI_TOP_P",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    pub top_p: f32,
    /// Drop tokens less likely than P times the most likely
    #[arg(
        long,
        value_name = "P",
        env = "COLI_MIN_P",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub min_p: f32,
    /// Divide logits of tokens seen in prompt or answer
    #[arg(
        long,
        value_name = "X",
        env = "COLI_REPETITION_PENALTY",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    pub repetition_penalty: f32,
    /// Subtract from logits of tokens in the answer
    #[arg(
        long,
        value_name = "X",
        env = "COLI_PRESENCE_PENALTY",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub presence_penalty: f32,
    /// Subtract from logits per occurrence in the answer
    #[arg(
        long,
        value_name = "X",
        env = "COLI_FREQUENCY_PENALTY",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub frequency_penalty: f32,
    /// Seed of the sampling [default: drawn and printed]
    #[arg(long, value_name = "S", env = "COLI_SEED", allow_negative_numbers = true)]
    pub seed: Option<u64>,
}

/// `coli run`.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// Text to continue; `-` reads stdin
    pub prompt: Option<String>,
    /// Feed token ids instead of text and print ids
    #[arg(
        long,
        value_name = "1,2,3",
        value_delimiter = ',',
        conflicts_with = "prompt",
        allow_negative_numbers = true
    )]
    pub ids: Option<Vec<u32>>,
    /// Print the BLAKE3 of all raw logits that tokens were chosen from
    #[arg(long)]
    pub fingerprint: bool,
    /// Show where the time went
    #[arg(long, env = "COLI_PROFILE")]
    pub profile: bool,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `coli chat`.
#[derive(Args, Debug)]
#[command(after_help = "\
Type a message and Enter; Alt-Enter begins a new line, a pasted text of several lines is one
message. /reset forgets the conversation, /more lets the last answer go on, /stats shows
figures, /help lists commands. Ctrl-C stops an answer, Ctrl-D or /quit leaves.")]
pub struct ChatArgs {
    /// First message of the system
    #[arg(long, value_name = "TEXT", env = "COLI_SYSTEM")]
    pub system: Option<String>,
    /// Let the model think first, where its template has a switch for it
    #[arg(long, value_name = "ON", env = "COLI_THINKING")]
    pub thinking: Option<bool>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `coli oracle`.
#[derive(Args, Debug)]
pub struct OracleArgs {
    /// Reference: {prompt_ids, full_ids, tf_pred}
    #[arg(long, value_name = "FILE")]
    pub reference: PathBuf,
    /// Most tokens of the greedy continuation to compare [default: all of full_ids]
    #[arg(long, value_name = "N", env = "COLI_MAX_TOKENS", allow_negative_numbers = true)]
    pub max_tokens: Option<usize>,
    /// Print the BLAKE3 of the raw logits of all teacher-forced positions
    #[arg(long)]
    pub fingerprint: bool,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `coli score`.
#[derive(Args, Debug)]
pub struct ScoreArgs {
    /// Cases, one JSON object per line: {"text": …} or {"context": …, "continuation": …}
    #[arg(required_unless_present = "text", conflicts_with = "text")]
    pub file: Option<PathBuf>,
    /// A text file, scored in windows of the context
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Text before every case; '' for none [default: the family's]
    #[arg(long, value_name = "TEXT")]
    pub prefix: Option<String>,
    /// Tokens per window of --text, prefix included [default: the context]
    #[arg(long, value_name = "N", value_parser = parse_count, conflicts_with = "file")]
    pub window: Option<usize>,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `coli info`.
#[derive(Args, Debug)]
pub struct InfoArgs {
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// `coli doctor`.
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// Read and check every tensor, then run one step
    #[arg(long)]
    pub deep: bool,
    /// Ask every worker of --cluster-workers and --cluster-registry for outputs of some experts,
    /// and compare them with this machine's
    #[arg(long)]
    pub cluster: bool,
    /// Print the checks as JSON on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `coli plan`.
#[derive(Args, Debug)]
pub struct PlanArgs {
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `coli tune`.
#[derive(Args, Debug)]
#[command(after_help = "\
Tries values of --io and --prefetch (where experts are streamed), --threads and --prefill-chunk,
one after another, under the memory ceiling of --ram, and keeps what is clearly faster. Results are
the same with every setting. What was found is used by run, chat, oracle, score and plan wherever no
flag says otherwise; benches never use it.")]
pub struct TuneArgs {
    /// Generated tokens per measurement
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = parse_count)]
    pub tokens: usize,
    /// Prompt tokens per measurement
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = parse_count)]
    pub prompt: usize,
    /// Measure and show, keep nothing
    #[arg(long, conflicts_with = "forget")]
    pub dry_run: bool,
    /// Make one measurement, for the process that asks for it
    #[arg(long, value_name = "JSON", hide = true)]
    pub measurement: Option<String>,
    /// Forget what was found for this model, and measure nothing
    #[arg(long)]
    pub forget: bool,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `coli convert`.
#[derive(Args, Debug)]
#[command(after_help = "\
Formats: f32, bf16, f16, int8-row (int8), int4-row, int2-row, int4-g16 … int4-g256, int3-g64,
e8-iq3, mxfp4, fp8-e4m3-b128 (fp8), fp8-e4m3-b128-ue8m0. A class without a format keeps its own.
An interrupted conversion goes on where it stopped when the same command is given again.")]
pub struct ConvertArgs {
    /// Model directory to read (colon-separated for several, primary first)
    #[arg(value_delimiter = ':', required = true)]
    pub source: Vec<PathBuf>,
    /// Directory to write
    pub destination: PathBuf,
    /// Format of routed experts
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub experts: Option<Format>,
    /// Format of every other matrix but the router, where none is given below
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub dense: Option<Format>,
    /// Format of attention projections but kv_b
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub attention: Option<Format>,
    /// Format of kv_b
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub kv_b: Option<Format>,
    /// Format of dense feed-forward layers
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub dense_mlp: Option<Format>,
    /// Format of shared experts
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub shared_expert: Option<Format>,
    /// Format of the embedding
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub embedding: Option<Format>,
    /// Format of the head
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub head: Option<Format>,
    /// Format of the sparse-attention indexer
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub indexer: Option<Format>,
    /// Format of the router
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub router: Option<Format>,
    /// Format of the joining projection of multi-token-prediction layers
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub mtp: Option<Format>,
    /// Size of output files in GB (10^9 bytes)
    #[arg(long, value_name = "GB", default_value = "4", value_parser = parse_gb)]
    pub shard_gb: u64,
    /// Layout of routed experts: r16k4 (each one run of bytes, as it is computed), r16k4-rans (the
    /// same, entropy-coded: int4 only, fewer bytes for slow drives), canonical (rows, as other
    /// tools read them)
    #[arg(long, value_name = "LAYOUT", default_value = "r16k4", value_parser = parse_layout)]
    pub layout: Layout,
    /// Compute threads [default: physical cores this process may use]
    #[arg(long, value_name = "N", env = "COLI_THREADS", value_parser = parse_threads)]
    pub threads: Option<usize>,
    /// Print the plan and stop
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// Shapes of `coli synth`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Like {
    /// GLM-5.2: 78 layers, 256 experts, hidden 6144
    #[value(name = "glm-5.2")]
    Glm,
    /// OLMoE-1B-7B: 16 layers, 64 experts, hidden 2048
    Olmoe,
}

/// `coli synth`.
#[derive(Args, Debug)]
pub struct SynthArgs {
    /// Directory to write
    pub destination: PathBuf,
    /// Shape to start from
    #[arg(long, value_name = "SHAPE")]
    pub like: Like,
    /// Decoder layers
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub layers: Option<usize>,
    /// Of them, first layers without experts
    #[arg(long, value_name = "N")]
    pub dense_layers: Option<usize>,
    /// Experts per layer
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub experts: Option<usize>,
    /// Experts per token
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub top_k: Option<usize>,
    /// Width of the residual stream
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub hidden: Option<usize>,
    /// Width of dense feed-forward layers
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub intermediate: Option<usize>,
    /// Width of an expert
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub expert_intermediate: Option<usize>,
    /// Attention heads
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub heads: Option<usize>,
    /// Vocabulary
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub vocab: Option<usize>,
    /// Longest context
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub context: Option<usize>,
    /// Format of routed experts
    #[arg(long, value_name = "FORMAT", default_value = "int4-g64", value_parser = parse_format)]
    pub experts_format: Format,
    /// Format of every other matrix
    #[arg(long, value_name = "FORMAT", default_value = "int8-row", value_parser = parse_format)]
    pub dense_format: Format,
    /// Layout of routed experts, as in coli convert
    #[arg(long, value_name = "LAYOUT", default_value = "r16k4", value_parser = parse_layout)]
    pub layout: Layout,
    /// Seed of the weights
    #[arg(long, value_name = "S", default_value_t = 417)]
    pub seed: u64,
    /// Size of output files in GB (10^9 bytes)
    #[arg(long, value_name = "GB", default_value = "4", value_parser = parse_gb)]
    pub shard_gb: u64,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// `coli route`.
#[derive(Args, Debug)]
pub struct RouteArgs {
    /// What to do
    #[command(subcommand)]
    pub what: RouteCommand,
}

/// What is done with records of routing.
#[derive(Subcommand, Debug)]
pub enum RouteCommand {
    /// Count which experts follow which, one and two layers on, and write the coupling table
    Pairs(RoutePairsArgs),
}

/// `coli route pairs`.
#[derive(Args, Debug)]
pub struct RoutePairsArgs {
    /// Route trace to count
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// Coupling table to write; a file that is anything else is not overwritten
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// Beginning of the names of this program's environment variables.
const VARIABLE_PREFIX: &str = "COLI_";

/// The first environment variable that looks like an option of this program and is none.
pub fn unknown_variable() -> Option<String> {
    let mut known = Vec::new();
    collect_variables(&Cli::command(), &mut known);
    std::env::vars_os()
        .map(|(name, _)| name.to_string_lossy().into_owned())
        .filter(|name| name.starts_with(VARIABLE_PREFIX) && !known.contains(name))
        .min()
}

fn collect_variables(command: &clap::Command, known: &mut Vec<String>) {
    let variables = command.get_arguments().filter_map(clap::Arg::get_env);
    known.extend(variables.map(|name| name.to_string_lossy().into_owned()));
    for command in command.get_subcommands() {
        collect_variables(command, known);
    }
}

fn parse_gb(text: &str) -> Result<u64, String> {
    let gb: f64 = text.parse().map_err(|_| "not a number of gigabytes".to_owned())?;
    if !(gb > 0.0 && gb <= 1e9) {
        return Err("must be above 0 and at most 10^9".to_owned());
    }
    Ok((gb * 1e9) as u64)
}

/// Least and greatest rate of `--read-limit`, in 10^9 bytes per second.
const READ_LIMITS: std::ops::RangeInclusive<f64> = 0.001..=1000.0;

fn parse_rate(text: &str) -> Result<u64, String> {
    match text.parse::<f64>() {
        Ok(rate) if READ_LIMITS.contains(&rate) => Ok((rate * 1e9) as u64),
        Ok(_) => Err("must be from 0.001 to 1000".to_owned()),
        Err(_) => Err("not a number of gigabytes per second".to_owned()),
    }
}

fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(count) => Ok(count),
        Err(_) => Err("not a whole number".to_owned()),
    }
}

/// Most sequences of one batch.
const BATCH_MAX: usize = 1024;

fn parse_count_up_to(text: &str, most: usize) -> Result<usize, String> {
    match parse_count(text)? {
        count if count <= most => Ok(count),
        _ => Err(format!("must be at most {most}")),
    }
}

fn parse_batch(text: &str) -> Result<usize, String> {
    parse_count_up_to(text, BATCH_MAX)
}

fn parse_rows(text: &str) -> Result<usize, String> {
    parse_count_up_to(text, lab::bench::ROWS_MAX)
}

fn parse_threads(text: &str) -> Result<usize, String> {
    parse_count_up_to(text, numerics::team::THREADS_MAX)
}

fn parse_activations(text: &str) -> Result<Activations, String> {
    match text {
        "int8" => Ok(Activations::Int8),
        "f32" => Ok(Activations::F32),
        _ => Err("must be int8 or f32".to_owned()),
    }
}

fn parse_level(text: &str) -> Result<Level, String> {
    let level: Level = text.parse()?;
    if level.is_available() {
        return Ok(level);
    }
    let have: Vec<_> =
        Level::ALL.into_iter().filter(|l| l.is_available()).map(Level::name).collect();
    Err(format!("this CPU does not have it; it has {}", have.join(", ")))
}

fn parse_percent(text: &str) -> Result<usize, String> {
    parse_count_up_to(text, 100)
}

fn parse_distance(text: &str) -> Result<usize, String> {
    parse_count_up_to(text, experts::pairs::DISTANCE_MAX)
}

fn parse_pin(text: &str) -> Result<Pin, String> {
    match text {
        "auto" => Ok(Pin::Auto),
        "none" => Ok(Pin::None),
        "" => Err("must be auto, none or a file".to_owned()),
        file => Ok(Pin::File(PathBuf::from(file))),
    }
}

fn parse_io(text: &str) -> Result<IoMode, String> {
    IoMode::from_name(text).ok_or_else(|| {
        let names: Vec<_> = IoMode::ALL.iter().map(|mode| mode.name()).collect();
        format!("must be one of {}", names.join(", "))
    })
}

fn parse_layout(text: &str) -> Result<Layout, String> {
    let layouts = [Layout::Canonical, Layout::R16k4, Layout::R16k4Rans];
    layouts.into_iter().find(|layout| layout.name() == text).ok_or_else(|| {
        let names: Vec<_> = layouts.iter().map(|layout| layout.name()).collect();
        format!("must be one of {}", names.join(", "))
    })
}

/// Largest weight of a mirror: beyond it the model's own files would hardly be read.
const MIRROR_WEIGHT_MAX: f64 = 1000.0;

fn parse_mirror(text: &str) -> Result<(PathBuf, f64), String> {
    let (dir, weight) = match text.rsplit_once('=') {
        None => (text, 1.0),
        Some((dir, weight)) => {
            let weight: f64 = weight.parse().map_err(|_| format!("{weight:?} is no weight"))?;
            (dir, weight)
        }
    };
    if dir.is_empty() {
        return Err("the directory is missing".to_owned());
    }
    if !(weight > 0.0 && weight <= MIRROR_WEIGHT_MAX) {
        return Err(format!("the weight must be above 0 and at most {MIRROR_WEIGHT_MAX}"));
    }
    Ok((PathBuf::from(dir), weight))
}

fn parse_format(text: &str) -> Result<Format, String> {
    Format::from_name(text).ok_or_else(|| {
        "not a weight format; known are f32, bf16, f16, int8-row, int4-row, int2-row, \
         int4-g{16,32,48,64,96,128,192,256}, int3-g64, e8-iq3, mxfp4, fp8-e4m3-b128, \
         fp8-e4m3-b128-ue8m0"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_are_decimal_gigabytes_and_strict() {
        assert_eq!(parse_gb("1.5"), Ok(1_500_000_000));
        for bad in ["0", "-1", "nan", "inf", "12GB", ""] {
            assert!(parse_gb(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_group_of_eight_bits_is_refused_by_name() {
        assert!(parse_format("int8-g64").is_err());
        assert!(parse_format("int4-g65").is_err());
        assert!(parse_format("int4-g64").is_ok());
    }
}
