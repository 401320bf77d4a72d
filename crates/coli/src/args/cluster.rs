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
    /// Make a key for the machines of a cluster
    Key(KeyArgs),
}

/// Workers that compute routed experts.
#[derive(Args, Debug, Clone)]
pub struct CoordinatorArgs {
    /// Expert workers, comma-separated; they compute routed experts, with the same bits, and
    /// whatever they do not is computed here (CLUSTER_WORKERS is read too)
    #[arg(long, value_name = "HOST:PORT,…", env = "COLI_CLUSTER_WORKERS", value_delimiter = ',')]
    pub cluster_workers: Vec<String>,
    /// Key of the cluster, made by `coli cluster key`; with one, nothing is sent unencrypted
    #[arg(long, value_name = "FILE", env = "COLI_CLUSTER_KEY")]
    pub cluster_key: Option<PathBuf>,
    /// Use workers beyond this machine without encryption: whoever is between can read and change
    /// what passes
    #[arg(long, env = "COLI_ALLOW_PLAINTEXT", conflicts_with = "cluster_key")]
    pub allow_plaintext: bool,
    /// Send routing weights along where workers' sums are fewer bytes than their outputs
    #[arg(long, env = "COLI_PARTIAL_SUMS")]
    pub partial_sums: bool,
    /// Do not ask another worker too when one is late
    #[arg(long, env = "COLI_NO_HEDGE")]
    pub no_hedge: bool,
    /// Compute one request in N here too, and leave a worker whose outputs differ; 1 compares all
    #[arg(long, value_name = "N", env = "COLI_AUDIT",
          value_parser = clap::value_parser!(u64).range(1..))]
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
    /// Layers to hold, first and last [default: all]
    #[arg(long, value_name = "A-B", env = "COLI_LAYERS", value_parser = parse_span)]
    pub layers: Option<Range<usize>>,
    /// Experts of each layer to hold, first and last [default: all]
    #[arg(long, value_name = "A-B", env = "COLI_EXPERTS", value_parser = parse_span)]
    pub experts: Option<Range<usize>>,
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
