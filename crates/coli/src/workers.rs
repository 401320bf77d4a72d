//! Expert workers that the flags name.

use std::env;
use std::net::{SocketAddr, ToSocketAddrs};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use cluster::coordinator::{
    Audit, Coordinator, CoordinatorOptions, Discovery, Examined, HOT_WINDOW_CALLS, LOOK_EVERY,
    REQUEST_TIME, State,
};
use cluster::registry::Client;
use cluster::wire::secure::Key;
use container::{Config, Model, TensorClass};
use experts::load::ExpertTable;
use experts::{
    ExpertBackend, ExpertStore, FileSet, Ledger, LocalExperts, LocalOptions, ReadAhead, Reader,
};
use models::Int8Classes;
use runtime::EngineOptions;
use runtime::machine::Machine;
use serde_json::{Value, json};

use crate::args::{CoordinatorArgs, EngineArgs};
use crate::failure::Failure;
use crate::{key, model, output};

/// Environment name of the list, kept from other programs of this protocol.
const WORKERS_VARIABLE: &str = "CLUSTER_WORKERS";
/// Environment name of the registry, kept from other programs of this protocol.
const REGISTRY_VARIABLE: &str = "CLUSTER_COORDINATOR";

/// The coordinator of an engine that was opened with [`add`].
pub type Workers = Arc<OnceLock<Arc<Coordinator>>>;

/// Takes the names of other programs out of the environment of a process that is to have workers of
/// its own.
pub fn without_environment(command: &mut Command) {
    command.env_remove(WORKERS_VARIABLE).env_remove(REGISTRY_VARIABLE);
}

/// Names of a list, or of the environment where it is empty, without repetitions.
pub fn listed(given: &[String]) -> Vec<String> {
    let mut listed = given.to_vec();
    listed.retain(|name| !name.trim().is_empty());
    if listed.is_empty() {
        let old = env::var(WORKERS_VARIABLE).unwrap_or_default();
        listed = old.split(',').map(str::to_owned).collect();
        listed.retain(|name| !name.trim().is_empty());
    }
    let mut names: Vec<String> = Vec::new();
    for name in listed.iter().map(|name| name.trim()) {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    names
}

/// The registry of a flag, or of the environment.
pub fn registry(given: Option<&str>, key: Option<&Key>) -> Result<Option<Client>, Failure> {
    let old = env::var(REGISTRY_VARIABLE).unwrap_or_default();
    let Some(url) = given.or(Some(&old[..])).map(str::trim).filter(|url| !url.is_empty()) else {
        return Ok(None);
    };
    if !url.starts_with("http://") || url.len() == "http://".len() {
        return Err(Failure::usage(format!(
            "--cluster-registry {url:?}: registries are given as http://HOST:PORT"
        )));
    }
    Ok(Some(Client::new(url, key)))
}

/// Whether a name is that of a worker; its addresses.
pub fn check_name(name: &str) -> Result<Vec<SocketAddr>, String> {
    let addresses = name.to_socket_addrs();
    let refuse = |error| format!("worker {name:?}: {error}; workers are given as HOST:PORT");
    addresses.map(Iterator::collect).map_err(refuse)
}

/// Whether what passes between this machine and a worker may be seen by others.
fn check_address(name: &str, is_safe: bool) -> Result<(), String> {
    for address in check_name(name)? {
        if !address.ip().is_loopback() && !is_safe {
            return Err(format!(
                "worker {name} is beyond this machine: give the --cluster-key FILE that it has, \
                 or --allow-plaintext if the network is yours alone"
            ));
        }
    }
    Ok(())
}

/// What the flags say of a cluster; nothing where they name none.
struct Named {
    options: CoordinatorOptions,
    discovery: Option<Discovery>,
}

fn named(args: &CoordinatorArgs, config: &Config) -> Result<Option<Named>, Failure> {
    let key = key::load(args.cluster_key.as_deref())?;
    let is_safe = key.is_some() || args.allow_plaintext;
    let workers = listed(&args.cluster_workers);
    for name in &workers {
        check_address(name, is_safe).map_err(Failure::usage)?;
    }
    let registry = registry(args.cluster_registry.as_deref(), key.as_ref())?;
    if workers.is_empty() && registry.is_none() {
        let unused = [
            (args.audit.is_some(), "--audit"),
            (!args.place.is_empty(), "--place"),
            (args.partial_sums, "--partial-sums"),
            (args.allow_inexact_peers, "--allow-inexact-peers"),
            (args.no_hedge, "--no-hedge"),
            (args.no_keep_hot, "--no-keep-hot"),
        ];
        if let Some((_, name)) = unused.iter().find(|(given, _)| *given) {
            return Err(Failure::usage(format!(
                "{name} has no effect without --cluster-workers or --cluster-registry"
            )));
        }
        return Ok(None);
    }
    let (layers, experts) = (config.all_layers(), config.moe.experts);
    if let Some(rule) = args.place.iter().find(|rule| !rule.is_within(layers, experts)) {
        let (first, last) = (rule.layers.start, rule.layers.end - 1);
        return Err(Failure::usage(format!(
            "--place layers {first}-{last}: this model has layers 0-{}, experts 0-{}",
            layers - 1,
            experts.saturating_sub(1)
        )));
    }
    let options = CoordinatorOptions {
        workers,
        rules: args.place.clone(),
        audit: match args.audit {
            None => Audit::Unverified,
            Some(0) => Audit::Off,
            Some(requests) => Audit::OneIn(requests),
        },
        request_time: REQUEST_TIME,
        key,
        version: None,
        allow_inexact: args.allow_inexact_peers,
        partial_sums: args.partial_sums,
        hot_window_calls: HOT_WINDOW_CALLS,
        hedge: !args.no_hedge,
        keep_hot: !args.no_keep_hot,
        notice: Arc::new(|text: &str| note!("{text}")),
    };
    let discovery = registry
        .map(|client| Discovery::new(client, LOOK_EVERY, move |name| check_address(name, is_safe)));
    Ok(Some(Named { options, discovery }))
}

/// Makes an engine use the workers that the flags name; none name none, and nothing changes.
pub fn add(args: &CoordinatorArgs, options: &mut EngineOptions) -> Result<Workers, Failure> {
    let workers = Workers::default();
    let config = Config::load(&options.dirs[0])?;
    let Some(Named { options: coordinator, discovery }) = named(args, &config)? else {
        return Ok(workers);
    };
    let rows = options.prefill_chunk.min(options.context.unwrap_or(config.max_position));
    options.held_bytes += Coordinator::held_bytes(&config, rows.max(options.sessions));
    let made = workers.clone();
    options.others = Some(Arc::new(move |config, local, compute| {
        let (coordinator, discovery) = (coordinator.clone(), discovery.clone());
        let coordinator = Coordinator::new(config, local, compute, coordinator, discovery);
        let coordinator = Arc::new(coordinator.map_err(|error| error.to_string())?);
        let _ = made.set(coordinator.clone());
        Ok(Box::new(coordinator) as Box<dyn ExpertBackend>)
    }));
    Ok(workers)
}

/// Asks every worker that the flags name for outputs of some experts, and compares them.
pub fn examine(args: &EngineArgs, opened: &Model) -> Result<Vec<Examined>, Failure> {
    let none = "--cluster: give --cluster-workers HOST:PORT,… or --cluster-registry URL";
    let named = named(&args.cluster, &opened.config)?.ok_or_else(|| Failure::usage(none))?;
    let compute = model::compute(args.isa, args.threads, args.activations)?;
    let table = ExpertTable::of(opened, Int8Classes::default().contains(TensorClass::Experts))?;
    let files = FileSet::open(&opened.shards).map_err(|error| Failure::Failed(error.into()))?;
    let machine = Machine::default();
    let ceiling = args.ram.or_else(|| machine.default_ceiling().map(|bound| bound.bytes));
    let store = ExpertStore::new(table, Reader::new(Arc::new(files)));
    let in_flight = LocalExperts::in_flight_bytes(&store, &ReadAhead::Off);
    // A few experts at a time are enough.
    let few = in_flight + 16 * store.table().slot_bytes_max();
    let ledger = Ledger::new(ceiling.unwrap_or(few).min(few));
    let local = LocalOptions { read_ahead: ReadAhead::Off, ..LocalOptions::default() };
    let local = LocalExperts::new(store, &ledger, local);
    let local = Arc::new(local.map_err(|error| Failure::Failed(error.into()))?);
    let Named { mut options, discovery } = named;
    if let Some(discovery) = &discovery {
        discovery.check().map_err(|error| Failure::Failed(error.into()))?;
    }
    // What is to be said of a worker is in the checks.
    options.notice = Arc::new(|_: &str| {});
    let coordinator = Coordinator::new(&opened.config, local, &compute, options, discovery);
    Ok(coordinator.map_err(|error| Failure::usage(error.to_string()))?.examine())
}

/// Refuses workers where they are not used.
pub fn refuse(args: &CoordinatorArgs, what: &str) -> Result<(), Failure> {
    let is_empty = args.cluster_workers.iter().all(|name| name.trim().is_empty());
    match is_empty && args.cluster_registry.is_none() {
        true => Ok(()),
        false => Err(Failure::usage(format!("{what} does not use workers"))),
    }
}

/// What workers did, for people; nothing without any.
pub fn note(workers: &Workers) {
    let Some(coordinator) = workers.get() else { return };
    let rows = coordinator.rows();
    note!(
        "workers: {} rows computed by them, {} here; of all {} after a failure, {} asked of two, \
         {} compared",
        output::count(rows.remote),
        output::count(rows.local),
        output::count(rows.failed_over),
        output::count(rows.hedged),
        output::count(rows.audited)
    );
    if coordinator.is_inexact() {
        note!("workers: a worker was only nearly exact, and so is this answer");
    }
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
        "recovered_rows": rows.recovered,
        "summed_rows": rows.summed,
        "audited_rows": rows.audited,
        "exact": !coordinator.is_inexact(),
        "kept_experts": coordinator.kept_here(),
        "wire_bytes": coordinator.wire_bytes(),
        "quarantined": quarantined.map(|peer| &peer.name).collect::<Vec<_>>(),
        "workers": peers.iter().map(|peer| json!({
            "name": peer.name, "rows": peer.rows, "failures": peer.failures,
            "requests": peer.requests, "mean_ms": peer.mean_s() * 1e3,
        })).collect::<Vec<_>>(),
    })
}
