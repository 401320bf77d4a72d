//! `coli convert`: a checkpoint or container into other formats.

use container::{Model, TensorClass};
use lab::convert::Conversion;
use lab::plan::{Choice, Plan};
use runtime::machine::Machine;
use serde_json::json;

use crate::args::ConvertArgs;
use crate::progress::Progress;
use crate::{Outcome, output};

pub fn run(args: &ConvertArgs) -> Outcome {
    let mut choice = Choice::default();
    let classes = [
        (TensorClass::Experts, args.experts),
        (TensorClass::Attention, args.attention),
        (TensorClass::KvB, args.kv_b),
        (TensorClass::DenseMlp, args.dense_mlp),
        (TensorClass::SharedExpert, args.shared_expert),
        (TensorClass::Embedding, args.embedding),
        (TensorClass::Head, args.head),
        (TensorClass::Indexer, args.indexer),
        (TensorClass::Router, args.router),
        (TensorClass::Mtp, args.mtp),
    ];
    for (class, format) in classes {
        if let Some(format) = format {
            choice.set(class, format);
        }
    }
    if let Some(format) = args.dense {
        choice.set_dense(format);
    }
    let threads = args.threads.unwrap_or_else(|| Machine::default().compute_threads());
    let conversion = Conversion::plan(
        &args.source,
        &args.destination,
        &choice,
        args.layout,
        args.shard_gb,
        threads,
    )?;
    note_part!("{}", describe(conversion.the_plan()));
    let plan = plan_json(conversion.the_plan());
    if conversion.is_complete() {
        note!("{} is complete already; nothing to do", args.destination.display());
    } else if args.dry_run {
        note!("dry run: nothing was written");
    }
    if conversion.is_complete() || args.dry_run {
        if args.json {
            output::print_json(&json!({"plan": plan, "written": false}));
        }
        return Ok(());
    }
    let (done, shards) = conversion.resumed();
    if done > 0 {
        note!("resuming: {done} of {shards} files are done");
    }
    let mut progress = Progress::bytes("converting");
    let manifest = conversion.run(&mut |done, total| progress.set(done, total))?;
    drop(progress);
    // What was written must open as any other container.
    Model::open(std::slice::from_ref(&args.destination))?;
    let bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();
    if args.json {
        output::print_json(&json!({
            "plan": plan,
            "written": true,
            "files": manifest.files.len(),
            "bytes": bytes,
        }));
    } else {
        say!(
            "wrote {} in {} to {}",
            output::bytes(bytes),
            output::counted(manifest.files.len(), "file"),
            args.destination.display()
        );
    }
    Ok(())
}

fn formats(used: &std::collections::BTreeMap<String, usize>) -> String {
    used.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
}

fn describe(plan: &Plan) -> String {
    let header = ["class", "tensors", "from", "to", "bytes from", "bytes to", "bits each"];
    let mut rows = vec![header.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>()];
    for (class, line) in &plan.classes {
        rows.push(vec![
            class.name().to_owned(),
            output::count(line.tensors as u64),
            formats(&line.from),
            formats(&line.to),
            output::bytes(line.from_bytes),
            output::bytes(line.to_bytes),
            format!("{:.2}", line.to_bytes as f64 * 8.0 / line.elements.max(1) as f64),
        ]);
    }
    let (from, to) = plan
        .classes
        .values()
        .fold((0, 0), |(from, to), line| (from + line.from_bytes, to + line.to_bytes));
    let tensors: usize = plan.classes.values().map(|line| line.tensors).sum();
    rows.push(vec![
        "all".to_owned(),
        output::count(tensors as u64),
        String::new(),
        String::new(),
        output::bytes(from),
        output::bytes(to),
        String::new(),
    ]);
    output::table(&rows, &[false, true, false, false, true, true, true])
}

fn plan_json(plan: &Plan) -> serde_json::Value {
    let classes = plan.classes.iter().map(|(class, line)| {
        json!({
            "class": class.name(), "tensors": line.tensors, "elements": line.elements,
            "from": line.from, "to": line.to,
            "from_bytes": line.from_bytes, "to_bytes": line.to_bytes,
        })
    });
    classes.collect()
}
