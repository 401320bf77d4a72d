//! `coli plan`: what a model would take and give on this machine, and what binds.

use container::{Layout, Model};
use experts::{ExpertStore, IoMode, Usage};
use lab::bench::{Device, READ_BYTES, Rates, ReadLoop, weight_bytes_of};
use numerics::Team;
use runtime::machine::Machine;
use runtime::{Engine, MemoryPlan};
use serde_json::json;

use crate::args::PlanArgs;
use crate::{Outcome, history, model, output, workers};

/// Measurements of the drive; the median counts.
const DEVICE_ROUNDS: usize = 3;
/// 10^9 coded bytes per second and core beyond which decoding, and no longer the drive, binds
/// (BENCHMARKS.md, coded experts).
const DECODE_GB_PER_S: f64 = 0.6;

/// What a token moves and what that takes.
struct Prediction {
    /// Bytes that every token reads from memory: dense weights and its experts.
    ram_bytes: f64,
    /// Bytes that it reads from the drive.
    drive_bytes: f64,
    /// Share of its experts that are in memory.
    hit_rate: f64,
    /// `None` where there is no room to measure it.
    ram_gb_per_s: Option<f64>,
    /// Or why the drive could not be measured.
    drive_gb_per_s: Result<f64, String>,
}

impl Prediction {
    fn ram_s(&self) -> Option<f64> {
        Some(self.ram_bytes / self.ram_gb_per_s? / 1e9)
    }

    fn drive_s(&self) -> Option<f64> {
        match &self.drive_gb_per_s {
            _ if self.drive_bytes == 0.0 => Some(0.0),
            Ok(rate) => Some(self.drive_bytes / rate / 1e9),
            Err(_) => None,
        }
    }

    /// Tokens per second if reads and computation never overlapped: a lower bound of the limit.
    fn tok_per_s(&self) -> Option<f64> {
        Some(1.0 / (self.ram_s()? + self.drive_s()?))
    }

    fn binds(&self) -> &'static str {
        match (self.drive_s(), self.ram_s()) {
            (Some(drive), Some(ram)) if drive > ram => "the drive",
            (Some(_), Some(_)) => "memory bandwidth",
            (None, _) => "unknown without a measurement of the drive",
            (_, None) => "unknown without memory free to measure it",
        }
    }
}

pub fn run(args: &PlanArgs) -> Outcome {
    workers::refuse(&args.engine.cluster, "coli plan")?;
    let (options, tuned) = model::tuned_options(&args.engine)?;
    let (options, tuned, (plan, model, store)) = match (Engine::plan(&options), tuned) {
        (planned, None) => (options, None, planned?),
        (Ok(planned), tuned) => (options, tuned, planned),
        (Err(error), Some(_)) => {
            let options = model::engine_options(&args.engine)?;
            let planned = Engine::plan(&options)?;
            model::warn_of_tuned(&error.into());
            (options, None, planned)
        }
    };
    let (usage, _) = history::load(&args.engine, &model)?;
    let prediction = predict(&plan, &model, &store, usage.as_ref(), options.read_limit)?;
    let advice = advice(&plan, &model, &prediction);
    let experts = store.table().iter().count();
    let kept = (plan.cache() as f64 / (plan.experts.max(1) as f64) * experts as f64) as usize;
    let kept = if plan.io == IoMode::Mmap { experts } else { kept.min(experts) };
    if args.json {
        output::print_json(&json!({
            "ram_ceiling_bytes": plan.limit,
            "bound_by": plan.bound_by,
            "process_bytes": plan.process,
            "dense_bytes": plan.dense,
            "kv_bytes": plan.kv,
            "tables_bytes": plan.tables,
            "scratch_bytes": plan.scratch,
            "in_flight_bytes": plan.in_flight,
            "expert_cache_bytes": plan.cache(),
            "all_experts_bytes": plan.experts,
            "experts": experts,
            "experts_in_memory": kept,
            "context": plan.context,
            "io": plan.io.name(),
            "hit_rate": prediction.hit_rate,
            "ram_bytes_per_token": prediction.ram_bytes,
            "drive_bytes_per_token": prediction.drive_bytes,
            "ram_gb_per_s": prediction.ram_gb_per_s,
            "drive_gb_per_s": prediction.drive_gb_per_s.as_ref().ok(),
            "predicted_tok_per_s": prediction.tok_per_s(),
            "limited_by": prediction.binds(),
            "advice": advice,
        }));
        return Ok(());
    }
    let rows = [
        ("ceiling", output::bytes(plan.limit), format!("by {}", plan.bound_by)),
        ("process", output::bytes(plan.process), String::new()),
        ("dense weights", output::bytes(plan.dense), "stay in memory".to_owned()),
        (
            "keys, values",
            output::bytes(plan.kv),
            format!("context {}", output::count(plan.context as u64)),
        ),
        ("rotary tables", output::bytes(plan.tables), String::new()),
        ("scratch", output::bytes(plan.scratch), "activations of the largest step".to_owned()),
        ("read buffers", output::bytes(plan.in_flight), String::new()),
        (
            "expert cache",
            output::bytes(plan.cache()),
            format!(
                "{} of {} experts, {} in all",
                output::count(kept as u64),
                output::count(experts as u64),
                output::bytes(plan.experts)
            ),
        ),
    ];
    let rows: Vec<Vec<String>> =
        rows.into_iter().map(|(name, bytes, what)| vec![name.to_owned(), bytes, what]).collect();
    say_part!("{}", output::table(&rows, &[false, true, false]));
    say!(
        "reads        {}, {}",
        plan.io.name(),
        why_io(&plan, args, tuned.as_ref().is_some_and(|found| found.settings.io.is_some()))
    );
    if let Some(found) = &tuned {
        say!("settings     of coli tune where no flag says otherwise: {found}");
    }
    let by = if usage.is_some() { "by the history of turns" } else { "if all were chosen alike" };
    let ram = match (prediction.ram_gb_per_s, prediction.ram_s()) {
        (Some(rate), Some(seconds)) => format!("at {rate:.1} GB/s: {:.1} ms", seconds * 1e3),
        _ => "at a rate that is not known: too little memory is free to measure it".to_owned(),
    };
    say!("a token      {} from memory {ram}", output::bytes(prediction.ram_bytes as u64));
    let drive = match (&prediction.drive_gb_per_s, prediction.drive_s()) {
        (Ok(rate), Some(seconds)) => format!("at {rate:.2} GB/s: {:.1} ms", seconds * 1e3),
        (Err(why), _) => format!("at a rate that is not known: {why}"),
        (Ok(_), None) => String::new(),
    };
    say!(
        "             {} from the drive ({:.0} % of its experts in memory {by}) {drive}",
        output::bytes(prediction.drive_bytes as u64),
        prediction.hit_rate * 100.0
    );
    match prediction.tok_per_s() {
        Some(rate) => say!("predicted    {rate:.2} tok/s, limited by {}", prediction.binds()),
        None => say!("predicted    nothing: {}", prediction.binds()),
    }
    for line in advice {
        say!("advice       {line}");
    }
    Ok(())
}

fn why_io(plan: &MemoryPlan, args: &PlanArgs, is_tuned: bool) -> String {
    if let Some(why) = &plan.fallback {
        return why.clone();
    }
    match (args.engine.io, plan.io) {
        (Some(_), _) => "as asked".to_owned(),
        (None, _) if is_tuned => "as coli tune measured".to_owned(),
        (None, IoMode::Mmap) => {
            "because the files lie in memory and are computed in place".to_owned()
        }
        (None, IoMode::Buffered) => {
            "because all experts fit in memory and are read once".to_owned()
        }
        (None, _) => "because experts are read again and again, and the page cache would hold \
                      them a second time"
            .to_owned(),
    }
}

fn predict(
    plan: &MemoryPlan,
    model: &Model,
    store: &ExpertStore,
    usage: Option<&Usage>,
    read_limit: Option<u64>,
) -> Result<Prediction, crate::failure::Failure> {
    let weights = weight_bytes_of(model)?;
    let routed_bytes = weights.expert * weights.routed as f64;
    let share = (plan.cache() as f64 / plan.experts.max(1) as f64).min(1.0);
    let hit_rate = match usage {
        _ if plan.io == IoMode::Mmap => 1.0,
        None => share,
        Some(usage) => {
            // The experts with the most choices, as many as fit.
            let table = store.table();
            let counts = (0..table.layers())
                .flat_map(|layer| usage.layer(layer).iter().take(table.places(layer)).copied());
            let mut counts: Vec<u64> = counts.collect();
            counts.sort_unstable_by(|a, b| b.cmp(a));
            let kept = (share * counts.len() as f64) as usize;
            // A count may be as large as a number can be.
            let sum = |counts: &[u64]| counts.iter().map(|count| *count as f64).sum::<f64>();
            sum(&counts[..kept.min(counts.len())]) / sum(&counts).max(1.0)
        }
    };
    let device = Device::of(&model.shards).and_then(|device| {
        let device = device.limited(read_limit);
        let rates = (0..DEVICE_ROUNDS).map(|round| device.measure(round));
        Ok(Rates::of(rates.collect::<Result<_, _>>()?).median)
    });
    let threads = Machine::default().compute_threads();
    let team = Team::new(threads).map_err(runtime::OpenError::from)?;
    let room =
        Machine::default().memory_available().is_none_or(|m| m.bytes > READ_BYTES as u64 * 2);
    let ram_gb_per_s = room.then(|| ReadLoop::default().measure(&team));
    Ok(Prediction {
        ram_bytes: (weights.layers + weights.head) as f64 + routed_bytes,
        drive_bytes: routed_bytes * (1.0 - hit_rate),
        hit_rate,
        ram_gb_per_s,
        drive_gb_per_s: device.map_err(|error| error.to_string()),
    })
}

/// What would change most.
fn advice(plan: &MemoryPlan, model: &Model, prediction: &Prediction) -> Vec<String> {
    let mut advice = Vec::new();
    let missing = plan.experts.saturating_sub(plan.cache());
    if plan.io == IoMode::Mmap || missing == 0 {
        return advice;
    }
    advice.push(format!(
        "--ram {:.1} would hold all experts ({} more)",
        (plan.limit + missing) as f64 / 1e9 + 0.1,
        output::bytes(missing)
    ));
    if model.shards.records().is_empty() {
        advice.push("coli convert SRC DST lays experts out as one read each".to_owned());
    }
    let coded = model.shards.records().iter().next().is_some_and(|(layer, expert, _)| {
        let sources = model.expert_sources(layer, expert);
        sources.is_ok_and(|s| s.iter().any(|source| source.layout == Layout::R16k4Rans))
    });
    let threads = Machine::default().compute_threads() as f64;
    let decodes_gb_per_s = threads * DECODE_GB_PER_S;
    let int4 = model.report().stored.keys().any(|(class, format)| {
        *class == container::TensorClass::Experts && format.starts_with("int4")
    });
    let slow = prediction.drive_gb_per_s.as_ref().is_ok_and(|rate| *rate < decodes_gb_per_s);
    if int4 && !coded && slow && prediction.binds() == "the drive" {
        advice.push("coli convert --layout r16k4-rans reads about a tenth fewer bytes".to_owned());
    }
    if prediction.binds() == "the drive" {
        advice.push("a second drive: coli mirror stage, then --mirror".to_owned());
    }
    advice
}
