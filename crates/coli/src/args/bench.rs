//! Options of `coli bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use formats::Format;
use numerics::Activations;

use super::{
    EngineArgs, ModelArgs, parse_activations, parse_batch, parse_count, parse_format,
    parse_percent, parse_rows, parse_threads,
};

/// `coli bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// What to measure
    #[command(subcommand)]
    pub what: BenchCommand,
}

/// The benches.
#[derive(Subcommand, Debug)]
pub enum BenchCommand {
    /// Generated tokens per second beside the read-bandwidth limit of the same run, measured on an
    /// array of 1 GiB (which counts against --ram)
    Decode(BenchDecodeArgs),
    /// Prompt tokens per second beside the limits of reading and multiplying of the same run
    Prefill(BenchPrefillArgs),
    /// Matrix products of each weight format, activation mode and row count, beside the limits of
    /// the same run
    Kernels(BenchKernelsArgs),
    /// Expert bytes per second of every reader, from files that are not in the page cache
    Io(BenchIoArgs),
    /// Generated tokens per second of a model that does not fit in memory, beside what its drive
    /// allows
    Stream(BenchStreamArgs),
    /// Cache policies replayed on a route trace, beside the best that foresight could do
    Cache(BenchCacheArgs),
    /// Tokens per second with workers on this machine beside those of one process, and whether they
    /// pay
    Cluster(BenchClusterArgs),
    /// What a person waits for: a short chat turn and a question about a long document
    Ux(BenchUxArgs),
}

/// What every bench takes.
#[derive(Args, Debug)]
pub struct BenchOptions {
    /// Repetitions that count; decode, prefill and kernels run one more first, to warm up
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = parse_count)]
    pub reps: usize,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// `coli bench decode`.
#[derive(Args, Debug)]
pub struct BenchDecodeArgs {
    /// Tokens per repetition
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = parse_count)]
    pub tokens: usize,
    /// Sequences decoded together, beside one alone in the same run
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_batch)]
    pub batch: usize,
    #[command(flatten)]
    pub options: BenchOptions,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `coli bench prefill`.
#[derive(Args, Debug)]
pub struct BenchPrefillArgs {
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = parse_count)]
    pub tokens: usize,
    #[command(flatten)]
    pub options: BenchOptions,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `coli bench kernels`.
#[derive(Args, Debug)]
pub struct BenchKernelsArgs {
    /// Weight formats, comma-separated [default: one of each kind]
    #[arg(long, value_name = "FORMATS", value_delimiter = ',', value_parser = parse_format)]
    pub formats: Vec<Format>,
    /// Rows of activations, comma-separated
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1,4,16,64,256",
          value_parser = parse_rows)]
    pub rows: Vec<usize>,
    /// Levels, comma-separated, or all [default: the CPU's highest]
    #[arg(long, value_name = "LEVELS", value_delimiter = ',', env = "COLI_ISA")]
    pub isa: Vec<String>,
    /// Activation modes, comma-separated: int8, f32
    #[arg(long, value_name = "MODES", value_delimiter = ',', default_value = "int8,f32",
          value_parser = parse_activations)]
    pub activations: Vec<Activations>,
    /// Compute threads [default: physical cores this process may use]
    #[arg(long, value_name = "N", env = "COLI_THREADS", value_parser = parse_threads)]
    pub threads: Option<usize>,
    #[command(flatten)]
    pub options: BenchOptions,
}

/// `coli bench io`.
#[derive(Args, Debug)]
pub struct BenchIoArgs {
    #[command(flatten)]
    pub options: BenchOptions,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// `coli bench stream`.
#[derive(Args, Debug)]
pub struct BenchStreamArgs {
    /// Tokens per repetition
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = parse_count)]
    pub tokens: usize,
    #[command(flatten)]
    pub options: BenchOptions,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `coli bench cache`.
#[derive(Args, Debug)]
pub struct BenchCacheArgs {
    /// Route trace, written by --route-trace
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// Cache sizes in percent of all experts, comma-separated
    #[arg(long, value_name = "PERCENTS", value_delimiter = ',', default_value = "10,25,50",
          value_parser = parse_percent)]
    pub sizes: Vec<usize>,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// `coli bench ux`.
#[derive(Args, Debug)]
pub struct BenchUxArgs {
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = parse_count)]
    pub tokens: usize,
    #[command(flatten)]
    pub options: BenchOptions,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `coli bench cluster`.
#[derive(Args, Debug)]
#[command(after_help = "\
Every measurement has processes of its own: one that computes everything itself, then for each set
of rules a coordinator and its workers, in turns. All have the same --ram, --threads, --io and
--read-limit, so the first is what one machine does, the others what a fleet of such machines does.
With --delay everything that passes takes that long each way, as between machines.")]
pub struct BenchClusterArgs {
    /// Workers to start, 1 to 16
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u8).range(1..=16))]
    pub workers: u8,
    /// Tokens that are fed one by one, after as many that fill caches
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = parse_count)]
    pub tokens: usize,
    /// Milliseconds that everything takes to a worker, and back
    #[arg(long, value_name = "MS", default_value_t = 0.0)]
    pub delay: f64,
    /// Rules of --place, separated by semicolons, for workers called worker-1, worker-2 and so on;
    /// repeatable, each set is measured. Without any, experts are spread evenly
    #[arg(long, value_name = "RULES")]
    pub place_set: Vec<String>,
    /// For one measurement in a process of its own
    #[arg(long, hide = true)]
    pub measurement: Option<String>,
    #[command(flatten)]
    pub options: BenchOptions,
    #[command(flatten)]
    pub engine: EngineArgs,
}
