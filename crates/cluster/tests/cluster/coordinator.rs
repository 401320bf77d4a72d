use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use cluster::coordinator::{Audit, Coordinator, CoordinatorOptions, Discovery, RowCounts, State};
use cluster::session::coordinator::Version;
use cluster::wire::secure::Policy;
use cluster::worker::{Limits, Server, Stop, WorkerOptions, open};
use container::{Config, HeldExperts};
use experts::{
    ByteClass, ExpertBackend, ExpertStore, FileSet, Ledger, LocalExperts, LocalOptions, ReadAhead,
    Reader, Route, RoutedBatch,
};
use formats::Input;
use numerics::{Activations, Compute, Isa, Team};

use crate::support::fixture;

fn compute(isa: Isa) -> Compute {
    Compute::new(isa, Arc::new(Team::new(2).unwrap()), Activations::Int8)
}

/// All experts of a fixture, as a coordinator has them.
pub fn local(name: &str) -> (Config, Arc<LocalExperts>) {
    let model = container::Model::open(&[fixture(name)]).unwrap();
    let held = HeldExperts::ALL;
    let table = experts::load::ExpertTable::new(&model, model.held_experts(&held), true).unwrap();
    let reader = Reader::new(Arc::new(FileSet::open(&model.shards).unwrap()));
    let ledger = Ledger::new(200_000_000);
    assert!(ledger.reserve(ByteClass::Process, 1).is_ok());
    let store = ExpertStore::new(table, reader);
    let local = LocalExperts::new(store, &ledger, LocalOptions::default()).unwrap();
    (model.config, Arc::new(local))
}

/// A worker in this process, ended when dropped.
pub struct Worker {
    pub address: String,
    stop: Stop,
    server: Option<JoinHandle<()>>,
}

impl Worker {
    pub fn start(dir: &Path, isa: Isa) -> Worker {
        Worker::at("127.0.0.1:0", dir, isa)
    }

    fn at(address: &str, dir: &Path, isa: Isa) -> Worker {
        let options = WorkerOptions {
            dirs: vec![dir.to_owned()],
            held: HeldExperts::ALL,
            ram_bytes: 400_000_000,
            process_bytes: 0,
            int8: true,
            io: None,
            read_limit: None,
            read_ahead: ReadAhead::Off,
            policy: Policy { key: None, plain: true },
        };
        let opened = open(&options, compute(isa)).unwrap();
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let worker = opened.worker;
        let limits = Limits::new(1 << 20);
        let server = Server::new(listener, worker, limits, Arc::new(|_| {})).unwrap();
        let stop = server.stop();
        let server = Some(thread::spawn(move || server.run()));
        Worker { address, stop, server }
    }

    fn end(&mut self) {
        self.stop.stop();
        if let Some(server) = self.server.take() {
            server.join().unwrap();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

/// A coordinator and what it says.
fn coordinator(
    name: &str,
    workers: &[&str],
    change: impl FnOnce(&mut CoordinatorOptions),
) -> (Coordinator, Config, Arc<Mutex<Vec<String>>>) {
    coordinator_with(name, workers, None, change)
}

/// A coordinator that finds further workers, and what it says.
pub fn coordinator_with(
    name: &str,
    workers: &[&str],
    discovery: Option<Discovery>,
    change: impl FnOnce(&mut CoordinatorOptions),
) -> (Coordinator, Config, Arc<Mutex<Vec<String>>>) {
    let (config, local) = local(name);
    let said = Arc::new(Mutex::new(Vec::new()));
    let notes = said.clone();
    let mut options = CoordinatorOptions {
        workers: workers.iter().map(|name| (*name).to_owned()).collect(),
        rules: Vec::new(),
        audit: Audit::Off,
        request_time: Duration::from_secs(20),
        key: None,
        version: None,
        allow_inexact: false,
        partial_sums: false,
        hot_window_calls: 8,
        hedge: false,
        keep_hot: false,
        notice: Arc::new(move |text: &str| notes.lock().unwrap().push(text.to_owned())),
    };
    change(&mut options);
    let made = Coordinator::new(&config, local, &compute(Isa::detect()), options, discovery);
    let made = made.unwrap();
    (made, config, said)
}

/// The sum of some rows that are routed to four experts each.
pub fn sum(backend: &dyn ExpertBackend, config: &Config, rows: usize, seed: usize) -> Vec<i64> {
    let compute = compute(Isa::detect());
    let (hidden, experts) = (config.hidden_size, config.moe.experts);
    let value = |at: usize| ((at * 31 + seed * 77) as f32 * 0.73).sin();
    let values: Vec<f32> = (0..rows * hidden).map(value).collect();
    let top_k = 2;
    let route = |at: usize| Route {
        expert: ((at / top_k * 5 + at % top_k + seed) % experts) as u32,
        weight: 0.2 + 0.1 * (at % 5) as f32,
    };
    let routes: Vec<Route> = (0..rows * top_k).map(route).collect();
    let input = Input::new("rows", &values[..], hidden);
    let batch = RoutedBatch::new(&compute.scratch, &input, &routes, top_k, experts);
    let layer = (0..config.layers)
        .find(|layer| config.layer_kind(*layer) == Some(container::LayerKind::Sparse))
        .unwrap();
    let mut sum = vec![0; rows * hidden];
    let mut called = 0;
    backend.compute(&compute, layer, &batch, &mut sum, &mut || called += 1).unwrap();
    assert_eq!(called, 1);
    sum
}

#[test]
fn one_two_and_three_workers_give_the_sum_of_this_machine() {
    for name in ["glm-dsa", "glm-int4-g64", "glm-e8", "olmoe-int4-g48"] {
        let (_, alone) = local(name);
        let levels: Vec<Isa> = Isa::available().collect();
        let level = |at: usize| levels[at % levels.len()];
        let workers: Vec<Worker> =
            (0..3).map(|at| Worker::start(&fixture(name), level(at))).collect();
        for count in 1..=3 {
            let names: Vec<&str> = workers.iter().take(count).map(|w| &w.address[..]).collect();
            let (cluster, config, said) = coordinator(name, &names, |_| {});
            let mut rows = 0;
            for (seed, batch) in [1, 7, 40].into_iter().enumerate() {
                let want = sum(&alone, &config, batch, seed);
                assert_eq!(sum(&cluster, &config, batch, seed), want, "{name}, {count} workers");
                rows += 2 * batch as u64;
            }
            // Every row was a worker's.
            let want = RowCounts { remote: rows, ..RowCounts::default() };
            assert_eq!(cluster.rows(), want, "{name}, {count} workers: {said:?}");
            let peers = cluster.peers();
            assert_eq!(peers.iter().map(|peer| peer.rows).sum::<u64>(), rows);
            assert!(peers.iter().all(|peer| peer.failures == 0));
        }
    }
}

#[test]
fn rules_keep_experts_here() {
    let worker = Worker::start(&fixture("glm-dsa"), Isa::detect());
    let (_, alone) = local("glm-dsa");
    let (cluster, config, _) = coordinator("glm-dsa", &[&worker.address], |options| {
        options.rules = vec!["layers 0-99,experts 0-1=local".parse().unwrap()];
    });
    assert_eq!(sum(&cluster, &config, 9, 1), sum(&alone, &config, 9, 1));
    let rows = cluster.rows();
    assert!(rows.local > 0 && rows.remote > 0 && rows.local + rows.remote == 18, "{rows:?}");
}

#[test]
fn a_worker_that_ends_costs_one_notice_and_no_bit_and_is_used_again_when_it_is_back() {
    let (_, alone) = local("glm-dsa");
    let mut workers =
        [Isa::detect(), Isa::SCALAR].map(|isa| Worker::start(&fixture("glm-dsa"), isa));
    let names = workers.each_ref().map(|worker| &worker.address[..]);
    let (cluster, config, said) = coordinator("glm-dsa", &names, |_| {});
    let mut seed = 0;
    let mut same = || {
        seed += 1;
        assert_eq!(sum(&cluster, &config, 20, seed), sum(&alone, &config, 20, seed));
    };
    same();
    // Ports differ from run to run, and with them what each worker gets of four experts.
    let lost = cluster.peers().iter().position(|peer| peer.rows > 0).unwrap();
    workers[lost].end();
    (0..5).for_each(|_| same());
    // The other one had what it could not.
    assert_eq!(cluster.rows().local, 0);
    let notices = |said: &Vec<String>| said.iter().filter(|s| s.contains("elsewhere")).count();
    assert_eq!(notices(&said.lock().unwrap()), 1);

    // Again at the same address.
    let address = workers[lost].address.clone();
    workers[lost] = Worker::at(&address, &fixture("glm-dsa"), Isa::detect());
    while cluster.peers()[lost].state != State::Ready {
        same();
    }
    let before = cluster.peers()[lost].rows;
    same();
    assert!(cluster.peers()[lost].rows > before);
}

#[test]
fn a_worker_that_never_greets_is_not_waited_for_longer_than_a_request() {
    let (_, alone) = local("glm-dsa");
    let well = Worker::start(&fixture("glm-dsa"), Isa::detect());
    // It takes connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = silent.local_addr().unwrap().to_string();
    let (cluster, config, said) = coordinator("glm-dsa", &[&name, &well.address], |options| {
        options.request_time = Duration::from_millis(50);
    });
    assert!(matches!(cluster.peers()[0].state, State::Sick { .. }));
    assert_eq!(sum(&cluster, &config, 20, 3), sum(&alone, &config, 20, 3));
    assert!(said.lock().unwrap().iter().any(|said| said.contains("in time")));
}

#[test]
fn a_worker_with_other_weights_of_the_same_shape_is_refused_by_name() {
    let other = Worker::start(&fixture("glm-int8-row"), Isa::detect());
    let (_, alone) = local("glm-int4-g32");
    // By samples of its weights, and by its outputs where it says nothing of its weights.
    for (version, what) in [(Version::Two, "has other weights"), (Version::One, "differs")] {
        let (cluster, config, said) = coordinator("glm-int4-g32", &[&other.address], |options| {
            options.version = Some(version)
        });
        let state = cluster.peers()[0].state.clone();
        match version {
            Version::Two => assert!(matches!(state, State::Sick { .. }), "{state:?}"),
            Version::One => assert_eq!(state, State::Quarantined),
        }
        assert_eq!(sum(&cluster, &config, 5, 2), sum(&alone, &config, 5, 2));
        assert_eq!(cluster.rows().remote, 0);
        let said = said.lock().unwrap();
        assert!(said[0].contains(&other.address) && said[0].contains(what), "{said:?}");
        // How another program comes close is said where it may be one.
        assert_eq!(said[0].contains("IDOT=0"), version == Version::One);
    }
}

/// What a worker in the middle does after some pieces of answers.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    /// Changes a bit of the last number of each.
    Lies,
    /// The same, from the first one on, as a worker that adds in another order does.
    IsNear,
    /// Says nothing any more.
    IsMute,
}

/// Passes bytes between a coordinator and a worker, honestly so many pieces of answers long.
fn between(worker: &str, honest: usize, then: Then) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let worker = worker.to_owned();
    thread::spawn(move || {
        let replies = Arc::new(AtomicUsize::new(0));
        for stream in listener.incoming() {
            let (Ok(mut near), Ok(mut far)) = (stream, TcpStream::connect(&worker)) else { return };
            let (mut to, mut from) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            let replies = replies.clone();
            thread::spawn(move || std::io::copy(&mut from, &mut to));
            thread::spawn(move || {
                let mut buffer = vec![0; 1 << 20];
                while let Ok(read @ 1..) = far.read(&mut buffer) {
                    // A reply of this size comes in one piece over a loopback.
                    if replies.fetch_add(1, Ordering::Relaxed) >= honest {
                        match then {
                            Then::Lies | Then::IsNear => buffer[read - 4] ^= 1,
                            Then::IsMute => continue,
                        }
                    }
                    if near.write_all(&buffer[..read]).is_err() {
                        break;
                    }
                }
            });
        }
    });
    address
}

#[test]
fn a_worker_that_falls_silent_is_left_though_others_answer_for_it() {
    let (_, alone) = local("glm-dsa");
    let worker = Worker::start(&fixture("glm-dsa"), Isa::detect());
    // Preface, greeting, two outputs and one answer.
    let silent = between(&worker.address, 5, Then::IsMute);
    let (cluster, config, said) = coordinator("glm-dsa", &[&silent, &worker.address], |options| {
        options.request_time = Duration::from_millis(250);
        options.hedge = true;
    });
    assert_eq!(cluster.peers()[0].state, State::Ready, "{said:?}");
    let is_left = || matches!(cluster.peers()[0].state, State::Sick { .. });
    let mut seed = 0;
    while !is_left() {
        assert_eq!(sum(&cluster, &config, 20, seed), sum(&alone, &config, 20, seed));
        seed += 1;
        assert!(seed < 1000, "{said:?}");
    }
    assert!(said.lock().unwrap().iter().any(|said| said.contains(&silent)));
}

#[test]
fn a_lying_worker_is_found_by_audit_and_what_it_answered_is_recomputed() {
    let (_, alone) = local("glm-dsa");
    let worker = Worker::start(&fixture("glm-dsa"), Isa::detect());
    // Preface, greeting and the two outputs that are compared at first are right.
    let liar = between(&worker.address, 4, Then::Lies);
    let (cluster, config, said) =
        coordinator("glm-dsa", &[&liar], |options| options.audit = Audit::OneIn(1));
    assert_eq!(cluster.peers()[0].state, State::Ready, "{said:?}");
    for seed in 0..3 {
        assert_eq!(sum(&cluster, &config, 3, seed), sum(&alone, &config, 3, seed));
    }
    assert_eq!(cluster.peers()[0].state, State::Quarantined);
    let rows = cluster.rows();
    assert_eq!((rows.remote, rows.failed_over), (0, 6), "{rows:?}");

    // Without the audit the wrong bit would be in the sum.
    let liar = between(&worker.address, 4, Then::Lies);
    let (cluster, config, _) = coordinator("glm-dsa", &[&liar], |_| {});
    assert_ne!(sum(&cluster, &config, 3, 0), sum(&alone, &config, 3, 0));
}

#[test]
fn a_nearly_exact_worker_of_version_1_is_used_when_that_is_allowed_and_answers_say_so() {
    let worker = Worker::start(&fixture("glm-dsa"), Isa::detect());
    for (allow_inexact, version, used) in [
        (false, Version::One, false),
        (true, Version::One, true),
        // Peers of this program are exact or wrong.
        (true, Version::Two, false),
    ] {
        // Preface and greeting come first in version 2.
        let honest = if version == Version::One { 0 } else { 2 };
        let near = between(&worker.address, honest, Then::IsNear);
        let (cluster, config, said) = coordinator("glm-dsa", &[&near], |options| {
            (options.allow_inexact, options.version) = (allow_inexact, Some(version));
            options.audit = Audit::OneIn(1);
        });
        sum(&cluster, &config, 3, 1);
        assert_eq!(cluster.rows().remote > 0, used, "{said:?}");
        assert_eq!(cluster.is_inexact(), used);
        let state = if used { State::Ready } else { State::Quarantined };
        assert_eq!(cluster.peers()[0].state, state, "{said:?}");
    }
}
