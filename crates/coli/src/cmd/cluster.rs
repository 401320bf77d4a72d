//! `coli cluster`: parts of a cluster.

mod status;

use std::env;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cluster::registry::{Client, HEARTBEAT_EVERY, Registration, ServerOptions, serve};
use cluster::wire::secure::{Key, Policy};
use cluster::worker::{Counts, Server, Stop, WorkerOptions, open};
use container::{HeldExperts, TensorClass};
use experts::ReadAhead;
use models::Int8Classes;
use numerics::NUMERICS_VERSION;
use runtime::machine::Machine;
use serde_json::json;

use crate::args::{ClusterArgs, ClusterCommand, RegistryArgs, WorkerArgs};
use crate::failure::Failure;
use crate::{Outcome, key, model, output, workers};

/// Port of a worker when none is given.
const WORKER_PORT: u16 = 9100;
/// Experts of a layer that are read ahead by a table, and layers ahead.
const PAIRS_TOP: usize = 4;
const PAIRS_DISTANCE: usize = 1;
/// Environment name of the port, kept from other programs of this protocol.
const WORKER_PORT_VARIABLE: &str = "CLUSTER_WORKER_PORT";

/// Environment name of the host that others use, kept from other programs of this protocol.
const ADVERTISE_VARIABLE: &str = "CLUSTER_ADVERTISE_HOST";

pub fn run(args: &ClusterArgs) -> Outcome {
    match &args.what {
        ClusterCommand::Worker(args) => worker(args),
        ClusterCommand::Registry(args) => registry(args),
        ClusterCommand::Status(args) => status::run(args),
        ClusterCommand::Key(args) => {
            key::create(&args.file)?;
            say!("{} has a new key; copy it to every machine of the cluster", args.file.display());
            Ok(())
        }
    }
}

/// Starts this process anew with an allocator that gives large buffers back to the system and
/// shares the others between threads: with its usual settings each thread keeps its own, far beyond
/// the ceiling.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn bound_allocator() {
    use std::os::unix::process::CommandExt;
    let settings = [("MALLOC_ARENA_MAX", "1"), ("MALLOC_MMAP_THRESHOLD_", "131072")];
    if settings.iter().all(|(name, _)| env::var_os(name).is_some()) {
        return;
    }
    if let Ok(program) = env::current_exe() {
        let mut command = std::process::Command::new(program);
        // What was set stays; without the others the worker runs all the same.
        let unset = settings.iter().filter(|(name, _)| env::var_os(name).is_none());
        let _ = command.args(env::args_os().skip(1)).envs(unset.copied()).exec();
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn bound_allocator() {}

fn worker(args: &WorkerArgs) -> Outcome {
    bound_allocator();
    let key = key::load(args.cluster_key.as_deref())?;
    let address = listen_address(args, key.is_some())?;
    let policy = Policy { plain: key.is_none() || args.allow_plaintext, key };
    let machine = Machine::default();
    let compute = model::compute(args.isa, args.threads, args.activations)?;
    let (level, threads) = (compute.isa.level(), compute.team.threads());
    let ceiling = args.ram.or_else(|| machine.default_ceiling().map(|bound| bound.bytes));
    let unknown = "the system does not say how much memory is free; give --ram";
    let dirs = model::dirs(&args.model)?;
    let name = dirs[0].file_name().unwrap_or(dirs[0].as_os_str()).to_string_lossy().into_owned();
    let read_ahead = match &args.pairs {
        Some(file) => model::read_ahead_by(file, &dirs[0], PAIRS_TOP, PAIRS_DISTANCE)?,
        None => ReadAhead::Off,
    };
    let options = WorkerOptions {
        dirs,
        held: HeldExperts {
            layers: args.layers.clone().unwrap_or(HeldExperts::ALL.layers),
            experts: args.experts.clone().unwrap_or(HeldExperts::ALL.experts),
        },
        ram_bytes: ceiling.ok_or_else(|| Failure::usage(unknown))?,
        process_bytes: machine.rss_bytes().unwrap_or(0),
        int8: Int8Classes::default().contains(TensorClass::Experts),
        io: args.io,
        read_limit: args.read_limit,
        read_ahead,
        policy: policy.clone(),
    };
    let opened = open(&options, compute).map_err(|error| Failure::usage(error.to_string()))?;
    if let Some(why) = opened.fallback.as_ref().filter(|_| args.io.is_some()) {
        note!("warning: {why}");
    }
    let listener = TcpListener::bind(address)
        .map_err(|error| Failure::usage(format!("cannot listen on {address}: {error}")))?;
    let address = listener.local_addr().unwrap_or(address);
    note!(
        "{name} | {} | {} | {} activations | {} of {} | RAM ceiling {}, expert cache {} | {} reads \
         | requests of at most {} | {} | numerics {NUMERICS_VERSION}",
        level,
        output::counted(threads, "thread"),
        args.activations,
        output::counted(opened.experts, "expert"),
        output::bytes(opened.experts_bytes),
        output::bytes(options.ram_bytes),
        output::bytes(opened.cache_bytes),
        opened.io.name(),
        output::bytes(opened.limits.request_bytes),
        match (&policy.key, policy.plain) {
            (Some(_), false) => "encrypted",
            (Some(_), true) => "encrypted or plain",
            (None, _) => "plain",
        }
    );
    let notice: experts::Notice = Arc::new(|text: &str| note!("{text}"));
    let server = Server::new(listener, opened.worker, opened.limits, notice)
        .context("cannot serve")
        .map_err(Failure::Failed)?;
    stop_on_signals(server.stop()).map_err(Failure::Failed)?;
    let registry = workers::registry(args.cluster_registry.as_deref(), policy.key.as_ref())?;
    let registration = match registry {
        Some(client) => Some(register(args, client, &server, address)?),
        None => None,
    };
    say!("worker ready on {address}");
    server.run();
    drop(registration);
    let Counts { connections, requests, rows, failed, refused, .. } = server.worker().counts();
    note!(
        "{} of {} for {} answered, {failed} failed, {} refused",
        output::counted(requests as usize, "request"),
        output::counted(rows as usize, "row"),
        output::counted(connections as usize, "connection"),
        output::counted(refused as usize, "connection")
    );
    Ok(())
}

/// Keeps a worker on the list of a registry.
fn register(
    args: &WorkerArgs,
    client: Client,
    server: &Server,
    address: SocketAddr,
) -> Result<Registration, Failure> {
    let old = env::var(ADVERTISE_VARIABLE).ok().filter(|host| !host.trim().is_empty());
    let given = args.advertise.clone().or(old);
    let (host, port) = match &given {
        None if address.ip().is_unspecified() => {
            return Err(Failure::usage(format!(
                "--listen {address} names no address by which others reach this worker: give \
                 --advertise HOST"
            )));
        }
        None => (address.ip().to_string(), address.port()),
        Some(given) => advertised(given.trim(), address.port())?,
    };
    let facts = server.worker().welcome().facts.clone();
    let record = json!({
        "node_id": format!("{host}:{port}"), "host": host, "port": port, "role": "expert",
        "protocol_versions": [1, 2], "engine": facts.engine, "model": facts.model,
        "numerics": facts.numerics, "activations": facts.activations, "isa": facts.isa,
        "threads": facts.threads, "ram_bytes": facts.ram_bytes, "cache_bytes": facts.cache_bytes,
        "experts_held": server.worker().experts().table().keys().count(),
    });
    let (stop, status) = (server.stop(), server.status());
    let status = move || {
        let counts = status.counts();
        let state = if stop.is_stopping() { "draining" } else { "ready" };
        let said = json!({
            "state": state, "requests": counts.requests, "rows": counts.rows,
            "failed": counts.failed, "us_per_expert": counts.us_per_expert(),
        });
        said.as_object().cloned().unwrap_or_default()
    };
    let notice: experts::Notice = Arc::new(|text: &str| note!("{text}"));
    let record = record.as_object().cloned().unwrap_or_default();
    Registration::start(client, HEARTBEAT_EVERY, record, status, notice)
        .context("cannot keep this worker on the list")
        .map_err(Failure::Failed)
}

/// Host and port of `HOST[:PORT]`.
fn advertised(given: &str, port: u16) -> Result<(String, u16), Failure> {
    let refuse = || Failure::usage(format!("--advertise {given:?}: give HOST or HOST:PORT"));
    let (host, port) = match given.rsplit_once(':') {
        // An IPv6 address without a port.
        Some((before, _)) if before.contains(':') && !before.ends_with(']') => (given, port),
        Some((host, port)) => (host, port.parse().map_err(|_| refuse())?),
        None => (given, port),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    match host.is_empty() || port == 0 {
        true => Err(refuse()),
        false => Ok((host.to_owned(), port)),
    }
}

fn registry(args: &RegistryArgs) -> Outcome {
    let key = key::load(args.cluster_key.as_deref())?;
    if !args.listen.ip().is_loopback() && key.is_none() && !args.allow_plaintext {
        return Err(Failure::usage(format!(
            "--listen {} can be reached by others: give --cluster-key FILE (coli cluster key \
             makes one), or --allow-plaintext if the network is yours alone",
            args.listen
        )));
    }
    let listener = TcpListener::bind(args.listen)
        .map_err(|error| Failure::usage(format!("cannot listen on {}: {error}", args.listen)))?;
    let address = listener.local_addr().unwrap_or(args.listen);
    let options = ServerOptions {
        stale_after: Duration::from_secs(args.stale_after),
        token: key.as_ref().map(Key::registry_token),
    };
    say!("registry ready on http://{address}");
    match serve(listener, options).context("cannot serve").map_err(Failure::Failed)? {}
}

/// The address that the flags and the environment name.
fn listen_address(args: &WorkerArgs, has_key: bool) -> Result<SocketAddr, Failure> {
    let address = match args.listen {
        Some(address) => address,
        None => (Ipv4Addr::LOCALHOST, usual_port()?).into(),
    };
    if !address.ip().is_loopback() && !has_key && !args.allow_plaintext {
        return Err(Failure::usage(format!(
            "--listen {address} can be reached by others: give --cluster-key FILE (coli cluster \
             key makes one), or --allow-plaintext if the network is yours alone"
        )));
    }
    Ok(address)
}

/// The port where no address is given.
fn usual_port() -> Result<u16, Failure> {
    match env::var(WORKER_PORT_VARIABLE) {
        Err(_) => Ok(WORKER_PORT),
        Ok(text) => text.parse().map_err(|_| {
            Failure::usage(format!("{WORKER_PORT_VARIABLE}={text:?} is not a port number"))
        }),
    }
}

/// Ends the server at the first Ctrl-C or SIGTERM, and the process at the second.
#[cfg(unix)]
fn stop_on_signals(stop: Stop) -> anyhow::Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
    std::thread::Builder::new().name("coli-signals".to_owned()).spawn(move || {
        for (at, _) in signals.forever().enumerate() {
            if at > 0 {
                std::process::exit(130);
            }
            note!("ending: requests that have begun are answered");
            // Apart, so that the second signal is heard.
            let stop = stop.clone();
            std::thread::spawn(move || stop.stop());
        }
    })?;
    Ok(())
}

/// Ends the server at the first Ctrl-C, and the process at the second.
#[cfg(not(unix))]
fn stop_on_signals(stop: Stop) -> anyhow::Result<()> {
    let asked = std::sync::atomic::AtomicBool::new(false);
    ctrlc::set_handler(move || {
        if asked.swap(true, std::sync::atomic::Ordering::SeqCst) {
            std::process::exit(130);
        }
        stop.stop();
    })?;
    Ok(())
}
