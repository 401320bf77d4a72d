//! `coli route`: records of which experts were chosen.

use std::io::ErrorKind;
use std::path::Path;

use experts::pairs::{DISTANCE_MAX, Recall};
use experts::{Pairs, RouteShape, SidecarError, Trace, durable};
use serde_json::json;

use crate::args::{RouteArgs, RouteCommand, RoutePairsArgs};
use crate::failure::Failure;
use crate::{Outcome, output};

pub fn run(args: &RouteArgs) -> Outcome {
    match &args.what {
        RouteCommand::Pairs(args) => pairs(args),
    }
}

fn pairs(args: &RoutePairsArgs) -> Outcome {
    refuse_other_files(&args.out)?;
    let trace = Trace::load(&args.trace, RouteShape::ANY)?;
    let pairs = Pairs::of(&trace);
    if pairs.lines() == 0 {
        return Err(Failure::usage(format!(
            "{}: {} in {}, none of which can be coupled: that takes calls of neighbouring \
             layers with as many rows; nothing was written",
            args.trace.display(),
            output::counted(trace.rows(), "row"),
            output::counted(trace.calls().len(), "call"),
        )));
    }
    durable::write(&args.out, pairs.to_text().as_bytes())?;
    let top_k = trace.top_k();
    let recalls: [Recall; DISTANCE_MAX] =
        std::array::from_fn(|at| pairs.recall(&trace, at + 1, top_k));
    if args.json {
        let recall = recalls.iter().enumerate().map(|(at, recall)| {
            json!({"distance": at + 1, "recall": recall.share(), "selections": recall.selections})
        });
        output::print_json(&json!({
            "file": args.out, "lines": pairs.lines(), "experts": pairs.experts(),
            "calls": trace.calls().len(), "rows": trace.rows(), "top_k": top_k,
            "recall": recall.collect::<Vec<_>>(),
        }));
        return Ok(());
    }
    say!(
        "wrote {} about {} to {}, from {} in {}",
        output::counted(pairs.lines(), "line"),
        output::counted(pairs.experts(), "expert"),
        args.out.display(),
        output::counted(trace.rows(), "row"),
        output::counted(trace.calls().len(), "call"),
    );
    let shares = recalls.iter().enumerate().map(|(at, recall)| {
        let share = recall
            .share()
            .map_or("nothing to predict".to_owned(), |s| format!("{:.1}%", s * 100.0));
        format!("{share} {} ahead", output::counted(at + 1, "layer"))
    });
    let shares = shares.collect::<Vec<_>>().join(", ");
    say!("recall on this trace itself, predicting {top_k} per row: {shares}");
    Ok(())
}

/// Refuses to overwrite a file that is no coupling table.
fn refuse_other_files(path: &Path) -> Outcome {
    let refused = |what: String| {
        let path = path.display();
        Failure::usage(format!("{path}: {what}; nothing was written, give another --out"))
    };
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => {}
        Ok(_) => return Err(refused("not a regular file".to_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(refused(error.to_string())),
    }
    match Pairs::load(path, RouteShape::ANY) {
        Ok(_) => Ok(()),
        Err(SidecarError::Read { source, .. }) => Err(refused(source.to_string())),
        Err(_) => Err(refused("exists and is no coupling table of this version".to_owned())),
    }
}
