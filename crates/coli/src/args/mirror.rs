//! Options of `coli mirror`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{ModelArgs, parse_gb};

/// `coli mirror`.
#[derive(Args, Debug)]
pub struct MirrorArgs {
    /// What to do
    #[command(subcommand)]
    pub what: MirrorCommand,
}

/// What can be done with mirrors.
#[derive(Subcommand, Debug)]
pub enum MirrorCommand {
    /// Show which experts a mirror would hold
    Plan(MirrorPlanArgs),
    /// Copy the experts that are chosen most to a directory on another drive
    Stage(MirrorStageArgs),
    /// Read every expert of a mirror and compare it with the model's hashes
    Verify(MirrorVerifyArgs),
}

/// Which experts a mirror holds.
#[derive(Args, Debug)]
pub struct MirrorPlanArgs {
    /// Size of the mirror in GB (10^9 bytes)
    #[arg(long, value_name = "GB", value_parser = parse_gb)]
    pub budget: u64,
    /// History of routed experts to go by [default: the model's own]
    #[arg(long, value_name = "FILE")]
    pub usage: Option<PathBuf>,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// `coli mirror stage`.
#[derive(Args, Debug)]
pub struct MirrorStageArgs {
    /// Directory to write
    #[arg(long, value_name = "DIR")]
    pub to: PathBuf,
    #[command(flatten)]
    pub plan: MirrorPlanArgs,
}

/// `coli mirror verify`.
#[derive(Args, Debug)]
pub struct MirrorVerifyArgs {
    /// The mirror
    pub dir: PathBuf,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}
