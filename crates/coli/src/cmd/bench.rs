//! `coli bench`: speed beside the physical limit.

use lab::bench::{READ_BYTES, decode};
use serde_json::json;

use crate::args::{BenchArgs, BenchCommand, BenchDecodeArgs};
use crate::{Outcome, model, output};

pub fn run(args: &BenchArgs) -> Outcome {
    match &args.what {
        BenchCommand::Decode(args) => run_decode(args),
    }
}

fn run_decode(args: &BenchDecodeArgs) -> Outcome {
    let engine = model::open_holding(&args.engine, READ_BYTES as u64)?;
    let figures = decode(&engine, args.tokens, args.reps)?;
    if args.json {
        output::print_json(&json!({
            "tok_per_s": figures.tok_per_s,
            "tok_per_s_min": figures.spread.0,
            "tok_per_s_max": figures.spread.1,
            "bytes_per_token": figures.bytes_per_token,
            "read_gb_per_s": figures.read_gb_per_s,
            "limit_tok_per_s": figures.limit_tok_per_s(),
            "limit_ratio": figures.limit_ratio(),
        }));
    } else {
        say!(
            "decode {:.2} tok/s (median of {}, {:.2} to {:.2}) | {} per token | read loop {:.1} GB/s \
             | limit {:.2} tok/s | {:.0} % of it",
            figures.tok_per_s,
            args.reps,
            figures.spread.0,
            figures.spread.1,
            output::bytes(figures.bytes_per_token),
            figures.read_gb_per_s,
            figures.limit_tok_per_s(),
            figures.limit_ratio() * 100.0
        );
    }
    Ok(())
}
