//! `coli cluster status`: the workers, what they are, hold and do.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use cluster::coordinator::{Observed, Unseen, observe};
use cluster::registry::Member;
use serde_json::{Value, json};

use crate::args::StatusArgs;
use crate::failure::Failure;
use crate::{Outcome, key, output, workers};

/// Time for a worker to say what it is.
const TIME: Duration = Duration::from_secs(5);
/// Layers with missing experts that are listed.
const GAPS_SHOWN: usize = 8;
/// Workers that are asked at the same time.
const AT_ONCE: usize = 16;

/// A worker, as it is listed and as it answers.
struct Row {
    address: String,
    listed: Option<Member>,
    observed: Result<Observed, Unseen>,
}

pub fn run(args: &StatusArgs) -> Outcome {
    let key = key::load(args.cluster_key.as_deref())?;
    let registry = workers::registry(args.cluster_registry.as_deref(), key.as_ref())?;
    let named = workers::listed(&args.cluster_workers);
    for name in &named {
        workers::check_name(name).map_err(Failure::usage)?;
    }
    if registry.is_none() && named.is_empty() {
        return Err(Failure::usage("give --cluster-registry URL or --cluster-workers HOST:PORT,…"));
    }
    let members = match &registry {
        Some(client) => client.topology().map_err(|error| Failure::Failed(error.into()))?,
        None => Vec::new(),
    };
    let (experts, others): (Vec<Member>, Vec<Member>) =
        members.into_iter().partition(|member| member.role == "expert");
    let mut found: BTreeMap<String, Option<Member>> =
        named.into_iter().map(|address| (address, None)).collect();
    found.extend(experts.into_iter().map(|member| (member.address.clone(), Some(member))));
    let found: Vec<(String, Option<Member>)> = found.into_iter().collect();
    let mut rows = Vec::new();
    for some in found.chunks(AT_ONCE) {
        thread::scope(|scope| {
            let asked: Vec<_> = some
                .iter()
                .map(|(address, _)| scope.spawn(|| observe(address, key.clone(), TIME)))
                .collect();
            for ((address, listed), observed) in some.iter().zip(asked) {
                let why = || "this program failed while it asked".to_owned();
                let panicked = |_| Err(Unseen { is_there: false, why: why() });
                let observed = observed.join().unwrap_or_else(panicked);
                let (address, listed) = (address.clone(), listed.clone());
                rows.push(Row { address, listed, observed });
            }
        });
    }
    if args.json {
        output::print_json(&as_json(&rows, &others));
    } else {
        show(&rows, &others);
    }
    match !rows.is_empty() && rows.iter().all(|row| row.observed.is_ok()) {
        true => Ok(()),
        false => Err(Failure::Reported(1)),
    }
}

impl Row {
    /// How it is, in a word.
    fn state(&self) -> &str {
        let listed = self.listed.as_ref().and_then(|member| member.record["state"].as_str());
        match &self.observed {
            Err(Unseen { is_there: true, .. }) => "refuses",
            Err(_) => "silent",
            Ok(_) => match listed {
                Some("draining") => "draining",
                _ => "ready",
            },
        }
    }

    fn said(&self, field: &str) -> Option<u64> {
        self.listed.as_ref()?.record[field].as_u64()
    }
}

/// What workers of a model hold together.
#[derive(Default)]
struct Coverage {
    workers: usize,
    /// Experts of a layer.
    per_layer: u32,
    /// How many workers hold each expert.
    held: BTreeMap<(u32, u32), usize>,
}

impl Coverage {
    /// Experts that two workers or more hold.
    fn twice(&self) -> usize {
        self.held.values().filter(|count| **count > 1).count()
    }

    /// Layers from the first to the last that is held of which experts are missing, with how many
    /// are held.
    fn gaps(&self) -> Vec<(u32, usize)> {
        let mut layers: BTreeMap<u32, usize> = BTreeMap::new();
        for (layer, _) in self.held.keys() {
            *layers.entry(*layer).or_default() += 1;
        }
        let ends = layers.keys().next().zip(layers.keys().next_back());
        let Some((first, last)) = ends else { return Vec::new() };
        let all = (*first..=*last).map(|layer| (layer, layers.get(&layer).copied().unwrap_or(0)));
        all.filter(|(_, held)| *held < self.per_layer as usize).collect()
    }

    /// First and last layer of which any expert is held.
    fn layers(&self) -> Option<(u32, u32)> {
        self.held.keys().next().zip(self.held.keys().next_back()).map(|(a, b)| (a.0, b.0))
    }
}

/// What is held of each model.
fn coverage(rows: &[Row]) -> BTreeMap<String, Coverage> {
    let mut models: BTreeMap<String, Coverage> = BTreeMap::new();
    for observed in rows.iter().filter_map(|row| row.observed.as_ref().ok()) {
        let facts = &observed.facts;
        let name = format!("{} {}", facts.model, facts.activations);
        let coverage = models.entry(name).or_default();
        coverage.per_layer = facts.experts;
        coverage.workers += 1;
        for key in observed.holdings.keys() {
            *coverage.held.entry(key).or_default() += 1;
        }
    }
    models
}

fn show(rows: &[Row], others: &[Member]) {
    if rows.is_empty() {
        say!("no expert workers");
    } else {
        let head = [
            "worker",
            "state",
            "model",
            "activations",
            "experts",
            "in memory",
            "RAM",
            "level",
            "ping",
            "per expert",
            "rows",
            "failed",
        ];
        let mut table = vec![head.map(str::to_owned).to_vec()];
        for row in rows {
            let dash = || "-".to_owned();
            let number = |value: Option<u64>| value.map_or_else(dash, output::count);
            let mut cells = vec![row.address.clone(), row.state().to_owned()];
            match &row.observed {
                Ok(Observed { facts, holdings, load, ping }) => cells.extend([
                    facts.model.chars().take(8).collect(),
                    facts.activations.clone(),
                    output::count(holdings.len() as u64),
                    output::bytes(load.cached_bytes),
                    output::bytes(facts.ram_bytes),
                    format!("{} x{}", facts.isa, facts.threads),
                    format!("{:.2} ms", ping.as_secs_f64() * 1e3),
                    match row.said("us_per_expert") {
                        None | Some(0) => dash(),
                        Some(us) => format!("{:.2} ms", us as f64 / 1e3),
                    },
                    output::count(load.rows),
                    number(row.said("failed")),
                ]),
                Err(_) => cells.extend((2..head.len()).map(|_| dash())),
            }
            table.push(cells);
        }
        let right = [false, false, false, false, true, true, true, false, true, true, true, true];
        say_part!("{}", output::table(&table, &right));
    }
    for row in rows {
        if let Err(Unseen { why, .. }) = &row.observed {
            say!("{}: {why}", row.address);
        }
    }
    for (model, coverage) in coverage(rows) {
        let (hash, activations) = model.split_once(' ').unwrap_or((&model, ""));
        let hash: String = hash.chars().take(8).collect();
        let (first, last) = coverage.layers().unwrap_or((0, 0));
        say!(
            "model {hash}, {activations}: {} of layers {first}-{last} held by {}, {} of them by \
             two or more",
            output::counted(coverage.held.len(), "expert"),
            output::counted(coverage.workers, "worker"),
            output::count(coverage.twice() as u64)
        );
        for (layer, held) in coverage.gaps().into_iter().take(GAPS_SHOWN) {
            say!("  layer {layer}: {held} of {} experts are held", coverage.per_layer);
        }
    }
    for member in others {
        say!(
            "{} at {} is listed as {}, which computes no experts",
            member.id,
            member.address,
            member.role
        );
    }
}

fn as_json(rows: &[Row], others: &[Member]) -> Value {
    let worker = |row: &Row| {
        let mut value = json!({ "address": row.address, "state": row.state() });
        match &row.observed {
            Ok(Observed { facts, holdings, load, ping }) => {
                value["facts"] = json!(facts);
                value["experts_held"] = json!(holdings.len());
                value["cached_bytes"] = json!(load.cached_bytes);
                value["waiting"] = json!(load.waiting);
                value["rows"] = json!(load.rows);
                value["ping_ms"] = json!(ping.as_secs_f64() * 1e3);
            }
            Err(Unseen { why, .. }) => value["error"] = json!(why),
        }
        value["listed"] = row.listed.as_ref().map_or(Value::Null, |member| member.record.clone());
        value
    };
    let models = coverage(rows).into_iter().map(|(model, coverage)| {
        json!({
            "model": model, "workers": coverage.workers, "experts_held": coverage.held.len(),
            "experts_held_twice": coverage.twice(),
        })
    });
    json!({
        "workers": rows.iter().map(worker).collect::<Vec<_>>(),
        "models": models.collect::<Vec<_>>(),
        "others": others.iter().map(|member| member.record.clone()).collect::<Vec<_>>(),
    })
}
