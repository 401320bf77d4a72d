//! `coli mirror`: copies of experts on another drive.

use container::{Model, Shards};
use experts::Usage;
use experts::usage::Origin;
use lab::mirror::{self, MirrorPlan};
use runtime::engine::usage_shape;
use serde_json::{Value, json};

use crate::args::{MirrorArgs, MirrorCommand, MirrorPlanArgs, MirrorStageArgs, MirrorVerifyArgs};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::{Outcome, history, model, output};

pub fn run(args: &MirrorArgs) -> Outcome {
    match &args.what {
        MirrorCommand::Plan(args) => plan(args),
        MirrorCommand::Stage(args) => stage(args),
        MirrorCommand::Verify(args) => verify(args),
    }
}

/// The model, the plan, and where the choice came from.
fn planned(args: &MirrorPlanArgs) -> Result<(Model, MirrorPlan, String), Failure> {
    let model = Model::open(&model::dirs(&args.model)?)?;
    let (path, origin) = match &args.usage {
        Some(file) if !file.is_file() => {
            let file = file.display();
            return Err(Failure::usage(format!("--usage {file}: there is no such file")));
        }
        Some(file) => (Some(file.clone()), Origin::Named),
        None => (history::path_of(&model)?, Origin::Found),
    };
    let usage = match &path {
        None => None,
        Some(path) => {
            let loaded = Usage::load(path, usage_shape(&model.config), origin);
            let (usage, _) = loaded.map_err(|error| Failure::usage(error.to_string()))?;
            Some(usage).filter(|usage| !usage.is_empty())
        }
    };
    let chosen_by = match (&usage, &path) {
        (Some(_), Some(path)) => format!("by the history {}", path.display()),
        _ => "evenly, because there is no history of turns".to_owned(),
    };
    let plan = mirror::plan(&model, usage.as_ref(), args.budget)?;
    Ok((model, plan, chosen_by))
}

fn plan_json(plan: &MirrorPlan, chosen_by: &str) -> Value {
    json!({
        "experts": plan.experts.len(),
        "bytes": plan.bytes,
        "share": plan.share,
        "chosen": chosen_by,
    })
}

fn describe(model: &Model, plan: &MirrorPlan, chosen_by: &str) -> String {
    format!(
        "{} of {}, {}, chosen {chosen_by}: {:.0} % of the reads can go there",
        output::counted(plan.experts.len(), "expert"),
        output::count(model.shards.records().len() as u64),
        output::bytes(plan.bytes),
        plan.share * 100.0
    )
}

fn plan(args: &MirrorPlanArgs) -> Outcome {
    let (model, plan, chosen_by) = planned(args)?;
    if args.json {
        output::print_json(&plan_json(&plan, &chosen_by));
    } else {
        say!("{}", describe(&model, &plan, &chosen_by));
    }
    Ok(())
}

fn stage(args: &MirrorStageArgs) -> Outcome {
    let (model, plan, chosen_by) = planned(&args.plan)?;
    note!("{}", describe(&model, &plan, &chosen_by));
    let mut progress = Progress::bytes("copying experts");
    let staged = mirror::stage(&model, &plan, &args.to, &mut |done, total| {
        progress.set(done, total);
    });
    drop(progress);
    let manifest = staged?;
    let dir = args.to.display();
    if args.plan.json {
        let mut figures = plan_json(&plan, &chosen_by);
        figures["files"] = json!(manifest.files.len());
        output::print_json(&figures);
    } else {
        say!(
            "wrote {} in {} to {dir}; run with --mirror {dir}",
            output::counted(plan.experts.len(), "expert"),
            output::counted(manifest.files.len(), "file")
        );
    }
    Ok(())
}

fn verify(args: &MirrorVerifyArgs) -> Outcome {
    let model = Model::open(&model::dirs(&args.model)?)?;
    if !args.dir.is_dir() {
        return Err(Failure::usage(format!("{} is not a directory", args.dir.display())));
    }
    let mut bad = Vec::new();
    let shards = Shards::open(std::slice::from_ref(&args.dir))?;
    let checked = mirror::verify(&model, &shards, &mut |layer, expert, why| {
        bad.push((layer, expert, why));
    })?;
    if checked == 0 {
        let dir = args.dir.display();
        return Err(Failure::usage(format!(
            "{dir} has no record of an expert; make a mirror with coli mirror stage"
        )));
    }
    if args.json {
        let list = bad
            .iter()
            .map(|(layer, expert, why)| json!({"layer": layer, "expert": expert, "problem": why}));
        output::print_json(&json!({"experts": checked, "bad": list.collect::<Vec<_>>()}));
    } else {
        for (layer, expert, why) in &bad {
            say!("layer {layer}, expert {expert}: {why}");
        }
        say!("{} read, {} bad", output::counted(checked, "expert"), bad.len());
    }
    if bad.is_empty() { Ok(()) } else { Err(Failure::Reported(1)) }
}
