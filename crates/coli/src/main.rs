//! `coli`, the command line: flags in, library calls, figures out. The only reader of the
//! environment and the only place that ends the process.

#[macro_use]
mod output;

mod apart;
mod args;
mod bundled;
mod cmd;
mod failure;
mod history;
mod input;
mod interrupt;
mod key;
mod model;
mod progress;
mod tuned;
mod workers;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};
use crate::failure::Failure;

fn main() -> ExitCode {
    if let Some(name) = args::unknown_variable() {
        note!("error: {name} is set, but this program knows no such option; unset it");
        return ExitCode::from(2);
    }
    #[cfg(feature = "mutations")]
    if let Ok(name) = std::env::var("MUTATION") {
        cluster::mutation::set_by_name(&name);
    }
    let cli = Cli::parse();
    let result = match cli.command {
        Command::Run(args) => cmd::run::run(&args),
        Command::Chat(args) => cmd::chat::run(&args),
        Command::Oracle(args) => cmd::oracle::run(&args),
        Command::Score(args) => cmd::score::run(&args),
        Command::Info(args) => cmd::info::run(&args),
        Command::Doctor(args) => cmd::doctor::run(&args),
        Command::Convert(args) => cmd::convert::run(&args),
        Command::Synth(args) => cmd::synth::run(&args),
        Command::Bench(args) => cmd::bench::run(&args),
        Command::Plan(args) => cmd::plan::run(&args),
        Command::Tune(args) => cmd::tune::run(&args),
        Command::Mirror(args) => cmd::mirror::run(&args),
        Command::Route(args) => cmd::route::run(&args),
        Command::Cluster(args) => cmd::cluster::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.print();
            ExitCode::from(failure.code())
        }
    }
}

/// What every command returns.
type Outcome = Result<(), Failure>;
