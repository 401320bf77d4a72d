//! `coli synth`: a random-weight model of true shapes.

use lab::synth::{Like as Shape, Overrides, SynthOptions, write};
use serde_json::json;

use crate::args::{Like, SynthArgs};
use crate::progress::Progress;
use crate::{Outcome, output};

pub fn run(args: &SynthArgs) -> Outcome {
    let options = SynthOptions {
        like: match args.like {
            Like::Glm => Shape::Glm,
            Like::Olmoe => Shape::Olmoe,
        },
        overrides: Overrides {
            layers: args.layers,
            dense_layers: args.dense_layers,
            experts: args.experts,
            top_k: args.top_k,
            hidden: args.hidden,
            intermediate: args.intermediate,
            expert_intermediate: args.expert_intermediate,
            heads: args.heads,
            vocab: args.vocab,
            context: args.context,
        },
        experts: args.experts_format,
        dense: args.dense_format,
        seed: args.seed,
        shard_bytes: args.shard_gb,
        layout: args.layout,
    };
    let mut progress = Progress::bytes("writing");
    let manifest =
        write(&args.destination, &options, &mut |done, total| progress.set(done, total))?;
    drop(progress);
    let bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();
    if args.json {
        output::print_json(&json!({
            "directory": args.destination, "files": manifest.files.len(), "bytes": bytes,
        }));
    } else {
        say!("wrote {} to {}", output::bytes(bytes), args.destination.display());
    }
    Ok(())
}
