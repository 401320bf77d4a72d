//! Expert workers that the flags name.

use std::env;
use std::net::ToSocketAddrs;
use std::sync::{Arc, OnceLock};

use cluster::coordinator::{Coordinator, CoordinatorOptions, REQUEST_TIME, State};
use container::Config;
use experts::ExpertBackend;
use runtime::EngineOptions;
use serde_json::{Value, json};

use crate::args::CoordinatorArgs;
use crate::failure::Failure;
use crate::{key, output};

/// Environment name of the list, kept from other programs of this protocol.
const WORKERS_VARIABLE: &str = "CLUSTER_WORKERS";

/// The coordinator of an engine that was opened with [`add`].
pub type Workers = Arc<OnceLock<Arc<Coordinator>>>;

/// Workers of the flags, without repetitions.
fn names(args: &CoordinatorArgs) -> Result<Vec<String>, Failure> {
    let mut listed = args.cluster_workers.clone();
    listed.retain(|name| !name.trim().is_empty());
    if listed.is_empty() {
        let old = env::var(WORKERS_VARIABLE).unwrap_or_default();
        listed = old.split(',').map(str::to_owned).collect();
        listed.retain(|name| !name.trim().is_empty());
    }
    let mut names: Vec<String> = Vec::new();
    for name in listed.iter().map(|name| name.trim()) {
        let addresses = name.to_socket_addrs().map_err(|error| {
            Failure::usage(format!("worker {name:?}: {error}; workers are given as HOST:PORT"))
        })?;
        for address in addresses {
            let is_safe = args.cluster_key.is_some() || args.allow_plaintext;
            if !address.ip().is_loopback() && !is_safe {
                return Err(Failure::usage(format!(
                    "worker {name} is beyond this machine: give the --cluster-key FILE that it has, \
                     or --allow-plaintext if the network is yours alone"
                )));
            }
        }
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// Makes an engine use the workers that the flags name; none name none, and nothing changes.
pub fn add(args: &CoordinatorArgs, options: &mut EngineOptions) -> Result<Workers, Failure> {
    let workers = Workers::default();
    let names = names(args)?;
    if names.is_empty() {
        let unused = [
            (args.audit.is_some(), "--audit"),
            (!args.place.is_empty(), "--place"),
            (args.partial_sums, "--partial-sums"),
            (args.no_hedge, "--no-hedge"),
        ];
        if let Some((_, name)) = unused.iter().find(|(given, _)| *given) {
            return Err(Failure::usage(format!("{name} has no effect without --cluster-workers")));
        }
        return Ok(workers);
    }
    let config = Config::load(&options.dirs[0])?;
    let (layers, experts) = (config.all_layers(), config.moe.experts);
    if let Some(rule) = args.place.iter().find(|rule| !rule.is_within(layers, experts)) {
        let (first, last) = (rule.layers.start, rule.layers.end - 1);
        return Err(Failure::usage(format!(
            "--place layers {first}-{last}: this model has layers 0-{}, experts 0-{}",
            layers - 1,
            experts.saturating_sub(1)
        )));
    }
    let rows = options.prefill_chunk.min(options.context.unwrap_or(config.max_position));
    options.held_bytes += Coordinator::held_bytes(&config, rows.max(options.sessions));
    let coordinator = CoordinatorOptions {
        workers: names,
        rules: args.place.clone(),
        audit: args.audit.unwrap_or(0),
        request_time: REQUEST_TIME,
        key: key::load(args.cluster_key.as_deref())?,
        version: None,
        partial_sums: args.partial_sums,
        hedge: !args.no_hedge,
        notice: Arc::new(|text: &str| note!("{text}")),
    };
    let made = workers.clone();
    options.others = Some(Arc::new(move |config, local, compute| {
        let coordinator = Coordinator::new(config, local, compute, coordinator.clone());
        let coordinator = Arc::new(coordinator.map_err(|error| error.to_string())?);
        let _ = made.set(coordinator.clone());
        Ok(Box::new(coordinator) as Box<dyn ExpertBackend>)
    }));
    Ok(workers)
}

/// Refuses workers where they are not used.
pub fn refuse(args: &CoordinatorArgs, what: &str) -> Result<(), Failure> {
    match args.cluster_workers.iter().all(|name| name.trim().is_empty()) {
        true => Ok(()),
        false => Err(Failure::usage(format!("{what} does not use --cluster-workers"))),
    }
}

/// What workers did, for people; nothing without any.
pub fn note(workers: &Workers) {
    let Some(coordinator) = workers.get() else { return };
    let rows = coordinator.rows();
    note!(
        "workers: {} rows computed by them, {} here, {} after a failure, {} compared",
        output::count(rows.remote),
        output::count(rows.local),
        output::count(rows.failed_over),
        output::count(rows.audited)
    );
}

/// What workers did; null without any.
pub fn json(workers: &Workers) -> Value {
    let Some(coordinator) = workers.get() else { return Value::Null };
    let (rows, peers) = (coordinator.rows(), coordinator.peers());
    let quarantined = peers.iter().filter(|peer| peer.state == State::Quarantined);
    json!({
        "remote_rows": rows.remote,
        "local_rows": rows.local,
        "failed_over_rows": rows.failed_over,
        "hedged_rows": rows.hedged,
        "audited_rows": rows.audited,
        "wire_bytes": coordinator.wire_bytes(),
        "quarantined": quarantined.map(|peer| &peer.name).collect::<Vec<_>>(),
        "workers": peers.iter().map(|peer| json!({
            "name": peer.name, "rows": peer.rows, "failures": peer.failures,
        })).collect::<Vec<_>>(),
    })
}
