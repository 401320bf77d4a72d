//! `coli cluster`: parts of a cluster.

use std::env;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;

use anyhow::Context;
use cluster::wire::secure::Policy;
use cluster::worker::{Counts, Server, Stop, WorkerOptions, open};
use container::{HeldExperts, TensorClass};
use models::Int8Classes;
use numerics::{Compute, Isa, NUMERICS_VERSION, Team};
use runtime::machine::Machine;

use crate::args::{ClusterArgs, ClusterCommand, WorkerArgs};
use crate::failure::Failure;
use crate::{Outcome, key, model, output};

/// Port of a worker when none is given.
const WORKER_PORT: u16 = 9100;
/// Environment name of the port, kept from other programs of this protocol.
const WORKER_PORT_VARIABLE: &str = "CLUSTER_WORKER_PORT";

pub fn run(args: &ClusterArgs) -> Outcome {
    match &args.what {
        ClusterCommand::Worker(args) => worker(args),
        ClusterCommand::Key(args) => {
            key::create(&args.file)?;
            say!("{} has a new key; copy it to every machine of the cluster", args.file.display());
            Ok(())
        }
    }
}

fn worker(args: &WorkerArgs) -> Outcome {
    let key = key::load(args.cluster_key.as_deref())?;
    let address = listen_address(args, key.is_some())?;
    let policy = Policy { plain: key.is_none() || args.allow_plaintext, key };
    let machine = Machine::default();
    let isa = args.isa.map_or_else(|| Some(Isa::detect()), Isa::at);
    let isa = isa.ok_or_else(|| Failure::usage("this CPU does not have the level of --isa"))?;
    let threads = args.threads.unwrap_or_else(|| machine.compute_threads());
    let team = Team::new(threads).context("cannot start compute threads");
    let compute = Compute::new(isa, Arc::new(team.map_err(Failure::Failed)?), args.activations);
    let ceiling = args.ram.or_else(|| machine.default_ceiling().map(|bound| bound.bytes));
    let unknown = "the system does not say how much memory is free; give --ram";
    let dirs = model::dirs(&args.model)?;
    let name = dirs[0].file_name().unwrap_or(dirs[0].as_os_str()).to_string_lossy().into_owned();
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
        isa.level(),
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
    say!("worker ready on {address}");
    server.run();
    let Counts { connections, requests, rows, failed, refused } = server.worker().counts();
    note!(
        "{} of {} for {} answered, {failed} failed, {} refused",
        output::counted(requests as usize, "request"),
        output::counted(rows as usize, "row"),
        output::counted(connections as usize, "connection"),
        output::counted(refused as usize, "connection")
    );
    Ok(())
}

/// The address that the flags and the environment name.
fn listen_address(args: &WorkerArgs, has_key: bool) -> Result<SocketAddr, Failure> {
    let address = match args.listen {
        Some(address) => address,
        None => (Ipv4Addr::LOCALHOST, usual_port()?).into(),
    };
    if !address.ip().is_loopback() && !has_key && !args.allow_plaintext {
        return Err(Failure::usage(format!(
            "--listen {address} can be reached by others: give --cluster-key FILE (coli cluster key \
             makes one), or --allow-plaintext if the network is yours alone"
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
            stop.stop();
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
