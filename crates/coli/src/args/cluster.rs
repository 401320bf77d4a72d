//! Options of `coli cluster`.

use std::net::SocketAddr;
use std::ops::Range;

use clap::{Args, Subcommand};
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
    /// Hold experts and compute them for coordinators that ask by protocol COLIEX01, version 1
    Worker(WorkerArgs),
}

/// `coli cluster worker`.
#[derive(Args, Debug)]
#[command(after_help = "\
A worker needs config.json and the routed experts of its range, and nothing else of the model. It
answers with unweighted outputs that have the same bits as those of any other machine. Version 1 of
the protocol has neither keys nor encryption, so anything but a loopback address must be asked for.
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
    /// Listen on other than loopback addresses without encryption: whoever reaches the port can
    /// use the worker and read what passes
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

/// `A-B`, both counted in, or one number.
fn parse_span(text: &str) -> Result<Range<usize>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.parse::<u32>().map(|number| number as usize);
    match (number(first), number(last)) {
        (Ok(first), Ok(last)) if first <= last => Ok(first..last + 1),
        (Ok(_), Ok(_)) => Err("the first must not be after the last".to_owned()),
        _ => Err("must be A-B, such as 0-127, or one number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_name_their_first_and_last() {
        assert_eq!(parse_span("3-7"), Ok(3..8));
        assert_eq!(parse_span("5"), Ok(5..6));
        for bad in ["", "-", "7-3", "-3", "a-b", "1-2-3", "1..2", "99999999999"] {
            assert!(parse_span(bad).is_err(), "{bad}");
        }
    }
}
