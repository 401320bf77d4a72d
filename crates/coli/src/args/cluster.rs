//! Options of `coli cluster`.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use cluster::coordinator::placement::{Rule, parse_span};
use experts::IoMode;
use numerics::{Activations, Level};

use super::{
    ModelArgs, parse_activations, parse_gb, parse_io, parse_level, parse_rate, parse_threads,
};

/// `coli cluster`.
#[derive(Args, Debug)]
pub struct ClusterArgs {
    /// What to be
    #[command(subcommand)]
    pub what: ClusterCommand,
}

/// The parts of a cluster.
#[derive(Subcommand, Debug)]
pub enum ClusterCommand {
    /// Hold experts and compute them for coordinators that ask by protocol COLIEX01
    Worker(WorkerArgs),
    /// Keep a list of the machines of a cluster, which workers join and coordinators read
    #[command(alias = "coordinator")]
    Registry(RegistryArgs),
    /// Show the workers of a cluster: what they are, hold and do
    Status(StatusArgs),
    /// Make a key for the machines of a cluster
    Key(KeyArgs),
}

/// Workers that compute routed experts.
#[derive(Args, Debug, Clone, Default)]
pub struct CoordinatorArgs {
    /// Expert workers, comma-separated; they compute routed experts, with the same bits, and
    /// whatever they do not is computed here (CLUSTER_WORKERS is read too)
    #[arg(long, value_name = "HOST:PORT,…", env = "COLI_CLUSTER_WORKERS", value_delimiter = ',')]
    pub cluster_workers: Vec<String>,
    /// Registry whose workers are used besides, also those that come later, such as
    /// http://10.0.0.1:8765 (CLUSTER_COORDINATOR is read too)
    #[arg(long, value_name = "URL", env = "COLI_CLUSTER_REGISTRY", alias = "cluster-coordinator")]
    pub cluster_registry: Option<String>,
    /// Key of the cluster, made by `coli cluster key`; with one, nothing is sent unencrypted
    #[arg(long, value_name = "FILE", env = "COLI_CLUSTER_KEY")]
    pub cluster_key: Option<PathBuf>,
    /// Use workers beyond this machine without encryption: whoever is between can read and change
    /// what passes
    #[arg(long, env = "COLI_ALLOW_PLAINTEXT", conflicts_with = "cluster_key")]
    pub allow_plaintext: bool,
    /// Use workers of other programs whose outputs differ by no more than 1e-4 of their size.
    /// Answers are then not exact, and marked so
    #[arg(long, env = "COLI_ALLOW_INEXACT_PEERS")]
    pub allow_inexact_peers: bool,
    /// Send routing weights along where workers' sums are fewer bytes than their outputs: where
    /// many of a row's experts are at one worker
    #[arg(long, env = "COLI_PARTIAL_SUMS")]
    pub partial_sums: bool,
    /// Do not ask another worker too when one is late
    #[arg(long, env = "COLI_NO_HEDGE")]
    pub no_hedge: bool,
    /// Leave all experts to workers; by default those that are chosen most often stay here, as many
    /// as memory and time allow
    #[arg(long, env = "COLI_NO_KEEP_HOT")]
    pub no_keep_hot: bool,
    /// Compute one request in N here too, and leave a worker whose outputs differ; 1 compares all,
    /// so that no token depends on an output that was not compared, 0 none [default: some, in a
    /// fiftieth of the time, of workers whose weights were not compared by hashes]
    #[arg(long, value_name = "N", env = "COLI_AUDIT")]
    pub audit: Option<u64>,
    /// Where experts belong: `layers A-B[,experts C-D]=WORKER`, or `=local`; repeatable. Of several
    /// rules for an expert the first counts, and a worker that rules name gets nothing else
    #[arg(long, value_name = "RULE")]
    pub place: Vec<Rule>,
}

/// `coli cluster worker`.
#[derive(Args, Debug)]
#[command(after_help = "\
A worker needs config.json and the routed experts of its range, and nothing else of the model. Its
answers have the same bits as those of any other machine. With --cluster-key it takes encrypted
connections of coordinators with the same key only. Without one it takes anybody's, version 1 of
the protocol included, so anything but a loopback address must be asked for.
Ctrl-C or SIGTERM ends it once the requests that have begun are answered.")]
pub struct WorkerArgs {
    /// Address to listen on; port 0 takes a free one [default: 127.0.0.1, and port 9100 or
    /// CLUSTER_WORKER_PORT]
    #[arg(long, value_name = "ADDR:PORT", env = "COLI_LISTEN")]
    pub listen: Option<SocketAddr>,
    /// Layers to hold, first and last, or one [default: all]
    #[arg(long, value_name = "A-B", env = "COLI_LAYERS", value_parser = parse_span)]
    pub layers: Option<Range<usize>>,
    /// Experts of each layer to hold, first and last, or one [default: all]
    #[arg(long, value_name = "A-B", env = "COLI_EXPERTS", value_parser = parse_span)]
    pub experts: Option<Range<usize>>,
    /// Registry to be listed by, such as http://10.0.0.1:8765 (CLUSTER_COORDINATOR is read too)
    #[arg(long, value_name = "URL", env = "COLI_CLUSTER_REGISTRY", alias = "cluster-coordinator")]
    pub cluster_registry: Option<String>,
    /// Host by which others reach this worker, with a port where that differs [default: the address
    /// of --listen, or CLUSTER_ADVERTISE_HOST]
    #[arg(long, value_name = "HOST[:PORT]", env = "COLI_ADVERTISE", requires = "cluster_registry")]
    pub advertise: Option<String>,
    /// Key of the cluster, made by `coli cluster key`
    #[arg(long, value_name = "FILE", env = "COLI_CLUSTER_KEY")]
    pub cluster_key: Option<PathBuf>,
    /// Take connections without encryption, on any address and beside a key: whoever reaches the
    /// port can use the worker and read what passes
    #[arg(long, env = "COLI_ALLOW_PLAINTEXT")]
    pub allow_plaintext: bool,
    /// Memory ceiling in GB (10^9 bytes) [default: what host and control group leave free, less a
    /// reserve]
    #[arg(long, value_name = "GB", env = "COLI_RAM", value_parser = parse_gb,
          allow_negative_numbers = true)]
    pub ram: Option<u64>,
    /// Compute threads [default: physical cores this process may use]
    #[arg(long, value_name = "N", env = "COLI_THREADS", value_parser = parse_threads)]
    pub threads: Option<usize>,
    /// Activations that meet quantised weights, as the coordinator has them: int8 or f32
    #[arg(long, value_name = "MODE", env = "COLI_ACTIVATIONS", default_value = "int8",
          value_parser = parse_activations)]
    pub activations: Activations,
    /// How experts are read, as in coli run
    #[arg(long, value_name = "MODE", env = "COLI_IO", value_parser = parse_io)]
    pub io: Option<IoMode>,
    /// Read experts that most often followed the last ones, by a table of coli route pairs
    #[arg(long, value_name = "FILE", env = "COLI_PAIRS")]
    pub pairs: Option<PathBuf>,
    /// Most GB (10^9 bytes) of experts read per second
    #[arg(long, value_name = "GB/S", env = "COLI_READ_LIMIT", value_parser = parse_rate,
          allow_negative_numbers = true)]
    pub read_limit: Option<u64>,
    /// Force an instruction-set level, as in coli run
    #[arg(long, value_name = "LEVEL", env = "COLI_ISA", value_parser = parse_level)]
    pub isa: Option<Level>,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// `coli cluster key`.
#[derive(Args, Debug)]
pub struct KeyArgs {
    /// File to write, which must not exist; copy it to every machine of the cluster
    pub file: PathBuf,
}

/// `coli cluster registry`.
#[derive(Args, Debug)]
#[command(after_help = "\
Machines register by POST /v1/cluster/register and say every 10 seconds that they are there; GET
/v1/cluster/topology lists them. With --cluster-key requests must carry a token made from it.
The registry is believed in nothing that matters: coordinators compare every worker themselves.")]
pub struct RegistryArgs {
    /// Address to listen on; port 0 takes a free one
    #[arg(
        long,
        value_name = "ADDR:PORT",
        env = "COLI_REGISTRY_LISTEN",
        default_value = "127.0.0.1:8765"
    )]
    pub listen: SocketAddr,
    /// Seconds without a sign of life after which a machine is taken off the list; machines give
    /// one every 10 seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u64).range(20..=86_400))]
    pub stale_after: u64,
    /// Key of the cluster, made by `coli cluster key`
    #[arg(long, value_name = "FILE", env = "COLI_CLUSTER_KEY")]
    pub cluster_key: Option<PathBuf>,
    /// Listen on other than loopback addresses without a key: whoever reaches the port can see and
    /// change the list
    #[arg(long, env = "COLI_ALLOW_PLAINTEXT")]
    pub allow_plaintext: bool,
}

/// `coli cluster status`.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Registry whose workers are shown (CLUSTER_COORDINATOR is read too)
    #[arg(long, value_name = "URL", env = "COLI_CLUSTER_REGISTRY", alias = "cluster-coordinator")]
    pub cluster_registry: Option<String>,
    /// Workers that are shown besides (CLUSTER_WORKERS is read too)
    #[arg(long, value_name = "HOST:PORT,…", env = "COLI_CLUSTER_WORKERS", value_delimiter = ',')]
    pub cluster_workers: Vec<String>,
    /// Key of the cluster, made by `coli cluster key`
    #[arg(long, value_name = "FILE", env = "COLI_CLUSTER_KEY")]
    pub cluster_key: Option<PathBuf>,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}
