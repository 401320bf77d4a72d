//! `coli bench cluster`: one machine beside a fleet of such machines.

use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use cluster::coordinator::placement::Rule;
use cluster::relay::Relay;
use container::{Config, LayerKind};
use lab::bench::{FedFigures, Rates, feed};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::args::{BenchClusterArgs, CoordinatorArgs, EngineArgs};
use crate::failure::Failure;
use crate::{Outcome, apart, model, output, workers};

/// Ratio from which on workers pay.
const PAYS: f64 = 1.1;
/// Share of a token's time below which waiting for reads is not what binds.
const WAIT_SHARE: f64 = 0.1;

/// What one measurement is of: nobody else, or these workers.
#[derive(Serialize, Deserialize)]
struct Measurement {
    workers: Vec<String>,
    rules: Vec<String>,
}

/// What it found.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Found {
    tok_per_s: f64,
    fingerprint: String,
    /// Share of experts that were found in memory.
    hit_rate: f64,
    /// Bytes that this process read per token.
    read_bytes: f64,
    /// Milliseconds per token of waiting for reads, and for workers.
    wait_ms: f64,
    remote_ms: f64,
    /// Bytes to and from workers per token.
    wire_bytes: f64,
    /// Rows computed here beside workers, and experts that stayed for that.
    local_rows: u64,
    kept_experts: usize,
    failed_over_rows: u64,
    /// Of each worker: rows, and mean milliseconds of a request.
    workers: Vec<(u64, f64)>,
}

/// A way to compute, and all that was found of it.
struct Arm {
    name: String,
    rules: Vec<String>,
    found: Vec<Found>,
}

pub fn run(args: &BenchClusterArgs) -> Outcome {
    let CoordinatorArgs { cluster_workers, cluster_registry, cluster_key, place, .. } =
        &args.engine.cluster;
    if !cluster_workers.is_empty() || cluster_registry.is_some() || cluster_key.is_some() {
        return Err(Failure::usage(
            "coli bench cluster starts workers of its own, on loopback addresses; it does not use \
             --cluster-workers, --cluster-registry or --cluster-key",
        ));
    }
    if !place.is_empty() {
        return Err(Failure::usage("coli bench cluster has --place-set in place of --place"));
    }
    if !(0.0..=10_000.0).contains(&args.delay) {
        return Err(Failure::usage("--delay must be 0 to 10000 milliseconds"));
    }
    if let Some(what) = &args.measurement {
        let what: Measurement = serde_json::from_str(what)
            .map_err(|error| Failure::usage(format!("--measurement: {error}")))?;
        apart::end_with_the_parent();
        let found = measure(args, what)?;
        output::print_json(&json!(found));
        return Ok(());
    }
    let mut arms = vec![Arm { name: "alone".to_owned(), rules: Vec::new(), found: Vec::new() }];
    let sets = match &args.place_set[..] {
        [] => vec![(output::counted(args.workers.into(), "worker"), Vec::new())],
        sets => {
            let sets = sets.iter().map(|set| Ok((set.clone(), rules_of(set, args.workers)?)));
            sets.collect::<Result<_, Failure>>()?
        }
    };
    arms.extend(sets.into_iter().map(|(name, rules)| Arm { name, rules, found: Vec::new() }));
    for repetition in 0..args.options.reps {
        for (at, arm) in arms.iter_mut().enumerate() {
            let fleet = if at == 0 { Fleet::default() } else { Fleet::start(args)? };
            let found = fleet.measure(&arm.rules)?;
            if !args.options.json {
                note!(
                    "{} of {}, {}: {:.2} tok/s",
                    repetition + 1,
                    args.options.reps,
                    arm.name,
                    found.tok_per_s
                );
            }
            arm.found.push(found);
        }
    }
    for arm in &arms[1..] {
        let is_local =
            !arm.rules.is_empty() && arm.rules.iter().all(|rule| rule.ends_with("=local"));
        let rows = |found: &Found| found.workers.iter().map(|(rows, _)| rows).sum::<u64>();
        if !is_local && arm.found.iter().any(|found| rows(found) == 0) {
            return Err(Failure::Failed(anyhow::anyhow!(
                "{}: no worker computed anything",
                arm.name
            )));
        }
    }
    let first = &arms[0].found[0].fingerprint;
    let is_same = |found: &Found| found.fingerprint == *first;
    if !arms.iter().all(|arm| arm.found.iter().all(is_same)) {
        return Err(Failure::Failed(anyhow::anyhow!("logits differ between the measurements")));
    }
    let config = Config::load(&model::dirs(&args.engine.model)?[0])?;
    let sparse = (0..config.layers)
        .filter(|layer| config.layer_kind(*layer) == Some(LayerKind::Sparse))
        .count();
    show(args, &arms, sparse);
    Ok(())
}

/// The rules of a set, each of which names a worker that there will be.
fn rules_of(set: &str, workers: u8) -> Result<Vec<String>, Failure> {
    let rules = set.split(';').map(|rule| rule.trim().to_owned());
    let rules: Vec<String> = rules.filter(|rule| !rule.is_empty()).collect();
    for rule in &rules {
        let refuse = |why: &str| Failure::usage(format!("--place-set: {rule:?}: {why}"));
        let place = rule.parse::<Rule>().map_err(|why| refuse(&why))?.place;
        let is_there = (1..=workers).any(|at| place == format!("worker-{at}"));
        if place != "local" && !is_there {
            return Err(refuse(&format!("there are worker-1 to worker-{workers}, and local")));
        }
    }
    Ok(rules)
}

/// Feeds tokens to an engine of this process.
fn measure(args: &BenchClusterArgs, what: Measurement) -> Result<Found, Failure> {
    let mut engine_args = args.engine.clone();
    if what.workers.is_empty() {
        engine_args.cluster = CoordinatorArgs::default();
    }
    engine_args.cluster.cluster_workers = what.workers;
    engine_args.cluster.place = what
        .rules
        .iter()
        .map(|rule| {
            rule.parse().map_err(|why| Failure::usage(format!("--place-set: {rule:?} {why}")))
        })
        .collect::<Result<_, Failure>>()?;
    let (engine, workers) = model::open_fed(&engine_args, 2 * args.tokens)?;
    let before = workers.get().map_or(0, |cluster| cluster.wire_bytes());
    let FedFigures { tokens, seconds, experts, fingerprint } =
        feed(&engine, args.tokens, args.tokens)?;
    let per_token = |value: f64| value / tokens as f64;
    let found_in_memory = experts.hits + experts.guessed_hits;
    let asked = (found_in_memory + experts.misses).max(1);
    let cluster = workers.get();
    let rows = cluster.map(|cluster| cluster.rows()).unwrap_or_default();
    // The tokens that filled caches are in it too.
    let wire = cluster.map_or(0, |cluster| cluster.wire_bytes() - before) as f64 / 2.0;
    let peers = cluster.map(|cluster| cluster.peers()).unwrap_or_default();
    Ok(Found {
        tok_per_s: tokens as f64 / seconds,
        fingerprint,
        hit_rate: found_in_memory as f64 / asked as f64,
        read_bytes: per_token(experts.bytes_read as f64),
        wait_ms: per_token(experts.wait_s * 1e3),
        remote_ms: per_token(experts.remote_s * 1e3),
        wire_bytes: per_token(wire),
        local_rows: rows.local,
        kept_experts: cluster.map_or(0, |cluster| cluster.kept_here()),
        failed_over_rows: rows.failed_over,
        workers: peers.iter().map(|peer| (peer.rows, peer.mean_s() * 1e3)).collect(),
    })
}

/// Workers as processes, ended when dropped.
#[derive(Default)]
struct Fleet {
    children: Vec<Child>,
    addresses: Vec<String>,
    /// In between, where there is a delay.
    relays: Vec<Relay>,
}

impl Fleet {
    fn start(args: &BenchClusterArgs) -> Result<Fleet, Failure> {
        let program = env::current_exe().map_err(|error| Failure::Failed(error.into()))?;
        let mut fleet = Fleet::default();
        for _ in 0..args.workers {
            let mut command = Command::new(&program);
            command.args(worker_flags(&args.engine)?);
            workers::without_environment(&mut command);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
            let child = command.spawn().map_err(|error| Failure::Failed(error.into()))?;
            fleet.children.push(child);
            let Some(child) = fleet.children.last_mut() else { continue };
            let mut line = String::new();
            if let Some(out) = child.stdout.as_mut() {
                // What cannot be read is no address.
                let _ = BufReader::new(out).read_line(&mut line);
            }
            let Some(address) = line.trim().strip_prefix("worker ready on ") else {
                return Err(Failure::Failed(anyhow::anyhow!(
                    "a worker did not start; try its flags by hand: coli {}",
                    shown(&worker_flags(&args.engine)?)
                )));
            };
            if args.delay > 0.0 {
                let delay = std::time::Duration::from_secs_f64(args.delay / 1e3);
                let relay = Relay::start(address, delay);
                let relay = relay.map_err(|error| Failure::Failed(error.into()))?;
                fleet.addresses.push(relay.address().to_string());
                fleet.relays.push(relay);
            } else {
                fleet.addresses.push(address.to_owned());
            }
        }
        Ok(fleet)
    }

    fn measure(&self, rules: &[String]) -> Result<Found, Failure> {
        let named = |rule: &String| {
            // Longer numbers first: worker-1 is the beginning of worker-12.
            (0..self.addresses.len()).rev().fold(rule.clone(), |rule, at| {
                rule.replace(&format!("worker-{}", at + 1), &self.addresses[at])
            })
        };
        let rules = rules.iter().map(named).collect();
        let what = Measurement { workers: self.addresses.clone(), rules };
        let failed = |why: String| Failure::Failed(anyhow::anyhow!("a measurement failed: {why}"));
        let what = serde_json::to_string(&what).map_err(|error| failed(error.to_string()))?;
        let said = apart::measured(&what).map_err(failed)?;
        serde_json::from_str(&said).map_err(|error| failed(error.to_string()))
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for child in &mut self.children {
            // One that has ended already is no matter.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The flags of a worker that are those of this process.
fn worker_flags(args: &EngineArgs) -> Result<Vec<OsString>, Failure> {
    let mut flags: Vec<OsString> =
        ["cluster", "worker", "--listen", "127.0.0.1:0"].map(Into::into).to_vec();
    let dirs = model::dirs(&args.model)?;
    flags.extend(["--model".into(), dirs[0].clone().into_os_string()]);
    if dirs.len() > 1 {
        let rest =
            env::join_paths(&dirs[1..]).map_err(|error| Failure::usage(error.to_string()))?;
        flags.extend(["--model-dirs".into(), rest]);
    }
    flags.extend(["--activations".into(), args.activations.to_string().into()]);
    let number = |bytes: u64| (bytes as f64 / 1e9).to_string();
    let given = [
        ("--ram", args.ram.map(number)),
        ("--read-limit", args.read_limit.map(number)),
        ("--threads", args.threads.map(|count| count.to_string())),
        ("--io", args.io.map(|mode| mode.name().to_owned())),
        ("--isa", args.isa.map(|level| level.to_string())),
    ];
    for (flag, value) in given {
        flags.extend(value.into_iter().flat_map(|value| [flag.into(), value.into()]));
    }
    Ok(flags)
}

fn shown(flags: &[OsString]) -> String {
    flags.iter().map(|flag| flag.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

impl Arm {
    fn median(&self, of: impl Fn(&Found) -> f64) -> f64 {
        Rates::of(self.found.iter().map(of).collect()).median
    }

    fn rates(&self) -> Rates {
        Rates::of(self.found.iter().map(|found| found.tok_per_s).collect())
    }
}

/// Whether workers pay, and why.
fn verdict(alone: &Arm, with: &Arm) -> (bool, String) {
    let (here, there) = (alone.rates().median, with.rates().median);
    let ratio = there / here;
    let rows: u64 = with.found.iter().flat_map(|found| &found.workers).map(|(rows, _)| rows).sum();
    if rows == 0 {
        return (false, format!("no worker was asked, {ratio:.2} x as fast"));
    }
    let token_ms = 1e3 / here;
    let wait_ms = alone.median(|found| found.wait_ms);
    let read = output::bytes(alone.median(|found| found.read_bytes) as u64);
    let wire = output::bytes(with.median(|found| found.wire_bytes) as u64);
    let remote_ms = with.median(|found| found.remote_ms);
    let waits = format!(
        "alone a token reads {read} and waits {wait_ms:.1} of its {token_ms:.1} ms for them"
    );
    if ratio >= PAYS {
        let why = match wait_ms > WAIT_SHARE * token_ms {
            true => format!("{waits}, and workers read at the same time"),
            false => "workers compute at the same time".to_owned(),
        };
        return (true, format!("distribution pays, {ratio:.2} x as fast: {why}"));
    }
    let why = match wait_ms > WAIT_SHARE * token_ms {
        false => format!(
            "the experts that are asked for are in this machine's memory, so it waits {wait_ms:.1} \
             of {token_ms:.1} ms for reads, and with workers a token waits {remote_ms:.1} ms for \
             them"
        ),
        true => format!(
            "{waits}, and with workers it waits {remote_ms:.1} ms for {wire} to and from them"
        ),
    };
    (false, format!("distribution does not pay, {ratio:.2} x as fast, because {why}"))
}

fn show(args: &BenchClusterArgs, arms: &[Arm], sparse: usize) {
    let alone = &arms[0];
    if args.options.json {
        let arm = |arm: &Arm| {
            let rates = arm.rates();
            let (pays, why) = verdict(alone, arm);
            let mut value = json!({
                "name": arm.name, "tok_per_s": rates.median, "tok_per_s_min": rates.spread.0,
                "tok_per_s_max": rates.spread.1, "runs": arm.found,
            });
            if arm.name != alone.name {
                value["pays"] = json!(pays);
                value["verdict"] = json!(why);
            }
            value
        };
        let arms: Vec<Value> = arms.iter().map(arm).collect();
        output::print_json(&json!({ "arms": arms, "delay_ms": args.delay }));
        return;
    }
    let head = [
        "",
        "tok/s",
        "(least to greatest)",
        "hit rate",
        "read/token",
        "wire/token",
        "waits for reads",
        "for workers",
    ];
    let mut table = vec![head.map(str::to_owned).to_vec()];
    for arm in arms {
        let Rates { median, spread } = arm.rates();
        let is_alone = arm.name == alone.name;
        let dash = |text: String, none: bool| if none { "-".to_owned() } else { text };
        table.push(vec![
            arm.name.clone(),
            format!("{median:.2}"),
            match arm.found.len() {
                1 => String::new(),
                _ => format!("({:.2} to {:.2})", spread.0, spread.1),
            },
            format!("{:.0} %", arm.median(|found| found.hit_rate) * 100.0),
            output::bytes(arm.median(|found| found.read_bytes) as u64),
            dash(output::bytes(arm.median(|found| found.wire_bytes) as u64), is_alone),
            format!("{:.1} ms", arm.median(|found| found.wait_ms)),
            dash(format!("{:.1} ms", arm.median(|found| found.remote_ms)), is_alone),
        ]);
    }
    say_part!("{}", output::table(&table, &[false, true, true, true, true, true, true, true]));
    for arm in &arms[1..] {
        let Some(last) = arm.found.last() else { continue };
        let asked = last.workers.iter().enumerate().filter(|(_, (rows, _))| *rows > 0);
        let each = asked.map(|(at, (rows, mean_ms))| {
            format!("worker-{} {} rows, {mean_ms:.2} ms a request", at + 1, output::count(*rows))
        });
        say!("{}: {}", arm.name, each.collect::<Vec<_>>().join("; "));
        if last.local_rows + last.failed_over_rows > 0 {
            say!(
                "{}: {} rows computed by the coordinator, which keeps {}; {} after a failure",
                arm.name,
                output::count(last.local_rows),
                output::counted(last.kept_experts, "expert"),
                output::count(last.failed_over_rows)
            );
        }
        if args.delay > 0.0 {
            let call_ms = arm.median(|found| found.remote_ms) / sparse.max(1) as f64;
            let trip_ms = 2.0 * args.delay;
            say!(
                "{}: a sparse layer waits {call_ms:.1} ms, {:.2} x the round trip of \
                 {trip_ms:.1} ms",
                arm.name,
                call_ms / trip_ms
            );
        }
        say!("{}: {}", arm.name, verdict(alone, arm).1);
    }
    say!("fingerprint {} in every measurement", alone.found[0].fingerprint);
}
