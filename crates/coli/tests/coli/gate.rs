//! The parity gate: every MoE call of every configuration, over real worker processes, has the sum
//! of this machine, and every row of it was a worker's.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use cluster::coordinator::placement::Rule;
use cluster::coordinator::{
    Audit, Coordinator, CoordinatorOptions, Peer, REQUEST_TIME, RowCounts, State,
};
use cluster::session::coordinator::Version;
use cluster::wire::secure::Key;
use experts::{ExpertBackend, ExpertError, ExpertStats, LocalExperts, ReadAhead, RoutedBatch};
use numerics::{Activations, Compute};
use runtime::{Engine, EngineOptions, Fingerprint, Want};

use crate::cluster::{Worker, fleet_with};
use crate::support::{arg, fixture, run};

/// Computes everything twice and compares the sums of routed experts, before anything is added.
struct Compared {
    cluster: Arc<Coordinator>,
    local: Arc<LocalExperts>,
    hidden: usize,
    calls: AtomicU64,
    /// The first difference, in words.
    difference: Mutex<Option<String>>,
}

impl Compared {
    /// The first expert and row in which the two differ, each expert computed alone.
    fn first(&self, compute: &Compute, layer: usize, batch: &RoutedBatch<'_>) -> String {
        let count = batch.input.values().len();
        for expert in batch.experts() {
            let part = batch.part(&compute.scratch, |other| other == *expert);
            let (mut theirs, mut ours) = (vec![0; count], vec![0; count]);
            self.cluster.compute(compute, layer, &part, &mut theirs, &mut || {}).unwrap();
            self.local.compute(compute, layer, &part, &mut ours, &mut || {}).unwrap();
            if let Some(at) = (0..count).find(|at| theirs[*at] != ours[*at]) {
                let (row, element) = (at / self.hidden, at % self.hidden);
                return format!(
                    "layer {layer}, expert {expert}, row {row}, element {element}: {}, not {}",
                    theirs[at], ours[at]
                );
            }
        }
        format!("layer {layer}: only the sum of experts {:?} differs", batch.experts())
    }
}

impl ExpertBackend for Compared {
    fn compute(
        &self,
        compute: &Compute,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sum: &mut [i64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExpertError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut ours = sum.to_vec();
        self.local.compute(compute, layer, batch, &mut ours, &mut || {})?;
        self.cluster.compute(compute, layer, batch, sum, meanwhile)?;
        if sum != ours {
            let mut difference = self.difference.lock().unwrap();
            if difference.is_none() {
                *difference = Some(self.first(compute, layer, batch));
            }
        }
        Ok(())
    }

    fn stats(&self) -> ExpertStats {
        self.cluster.stats()
    }
}

/// How a coordinator speaks to its workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Way {
    pub version: Version,
    pub encrypted: bool,
    pub sums: bool,
}

pub const ONE: Way = Way { version: Version::One, encrypted: false, sums: false };
pub const TWO: Way = Way { version: Version::Two, encrypted: false, sums: false };
pub const SEALED: Way = Way { version: Version::Two, encrypted: true, sums: false };
pub const SUMS: Way = Way { version: Version::Two, encrypted: true, sums: true };

/// What a run with workers did.
pub struct Ran {
    pub fingerprint: String,
    pub rows: RowCounts,
    pub calls: u64,
    pub difference: Option<String>,
    pub peers: Vec<Peer>,
    pub said: Vec<String>,
}

fn key() -> Key {
    let mut bytes = [7; 32];
    bytes[3] = 9;
    Key::new(bytes)
}

fn options(model: &str, activations: Activations) -> EngineOptions {
    EngineOptions {
        ram_bytes: Some(2_000_000_000),
        threads: Some(2),
        activations,
        read_ahead: ReadAhead::Off,
        ..EngineOptions::new(vec![fixture(model)])
    }
}

/// Gives each worker every n-th expert, whatever their addresses are.
fn rules(workers: &[Worker]) -> Vec<Rule> {
    let rule = |expert: usize| {
        let address = &workers[expert % workers.len()].address;
        format!("layers 0-1000,experts {expert}={address}").parse().unwrap()
    };
    (0..64).map(rule).collect()
}

/// Logits of some tokens, the first ones in one step, the others one by one.
fn fingerprint(options: &EngineOptions) -> String {
    let engine = Engine::open(options, &mut |_, _| {}).unwrap();
    let vocab = engine.config().vocab_size as u32;
    let tokens: Vec<u32> = (0..28).map(|i| (i * 7919 + 5) % vocab).collect();
    let mut session = engine.session().unwrap();
    let mut fingerprint = Fingerprint::default();
    let (prompt, rest) = tokens.split_at(20);
    for tokens in std::iter::once(prompt).chain(rest.chunks(1)) {
        let mut each = |hidden: &[f32]| engine.each_logits(hidden, |row| fingerprint.add(row));
        engine.prefill(&mut session, tokens, Want::All, &mut each, &mut |_| true).unwrap();
    }
    fingerprint.hex()
}

/// The logits with workers. Nothing but the comparison of sums would find a wrong one: outputs are
/// not audited.
pub fn with(model: &str, activations: Activations, workers: &[Worker], way: Way) -> Ran {
    let made: Arc<OnceLock<Arc<Compared>>> = Arc::default();
    let said = Arc::new(Mutex::new(Vec::new()));
    let notes = said.clone();
    let coordinator = CoordinatorOptions {
        workers: workers.iter().map(|worker| worker.address.clone()).collect(),
        rules: rules(workers),
        audit: Audit::Off,
        request_time: REQUEST_TIME,
        key: way.encrypted.then(key),
        version: Some(way.version),
        allow_inexact: false,
        partial_sums: way.sums,
        hot_window_calls: 8,
        hedge: false,
        keep_hot: false,
        notice: Arc::new(move |text: &str| notes.lock().unwrap().push(text.to_owned())),
    };
    let keep = made.clone();
    let options = EngineOptions {
        others: Some(Arc::new(move |config, local, compute| {
            let cluster =
                Coordinator::new(config, local.clone(), compute, coordinator.clone(), None);
            let cluster = Arc::new(cluster.map_err(|error| error.to_string())?);
            let (hidden, difference) = (config.hidden_size, Mutex::default());
            let calls = AtomicU64::new(0);
            let compared = Arc::new(Compared { cluster, local, hidden, calls, difference });
            keep.set(compared.clone()).map_err(|_| "made twice".to_owned())?;
            Ok(Box::new(compared) as Box<dyn ExpertBackend>)
        })),
        ..options(model, activations)
    };
    let fingerprint = fingerprint(&options);
    let compared = made.get().unwrap();
    let said = std::mem::take(&mut *said.lock().unwrap());
    Ran {
        fingerprint,
        rows: compared.cluster.rows(),
        calls: compared.calls.load(Ordering::Relaxed),
        difference: compared.difference.lock().unwrap().take(),
        peers: compared.cluster.peers(),
        said,
    }
}

/// Workers of a model, for a way to speak to them.
pub fn workers(model: &str, activations: Activations, count: usize, way: Way) -> Vec<Worker> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    std::fs::write(&file, key().to_hex()).unwrap();
    let flags = ["--cluster-key", arg(&file)];
    let flags = if way.encrypted { &flags[..] } else { &[] };
    fleet_with(arg(&fixture(model)), &activations.to_string(), count, flags)
}

#[test]
fn every_moe_call_has_this_machines_sum_with_one_two_and_three_workers_by_every_protocol() {
    for model in ["glm-dsa", "glm-int4-g64", "glm-e8"] {
        for activations in [Activations::F32, Activations::Int8] {
            let alone = fingerprint(&options(model, activations));
            for way in [ONE, TWO, SEALED, SUMS] {
                for count in 1..=3 {
                    let what = format!("{model}, {activations}, {count} workers, {way:?}");
                    let workers = workers(model, activations, count, way);
                    let ran = with(model, activations, &workers, way);
                    assert_eq!(ran.difference, None, "{what}");
                    assert_eq!(ran.fingerprint, alone, "{what}");
                    assert!(ran.calls >= 9, "{what}");
                    let RowCounts { remote, summed, .. } = ran.rows;
                    let rows = RowCounts { remote, summed, ..RowCounts::default() };
                    assert_eq!(ran.rows, rows, "{what}: {:?}", ran.said);
                    for peer in &ran.peers {
                        assert!(peer.state == State::Ready && peer.rows > 0, "{what}: {peer:?}");
                    }
                    // With three experts per row at one worker sums are fewer bytes, and asked for.
                    let is_summed = way.sums && model == "glm-dsa" && count == 1;
                    assert!(summed == 0 || way.sums, "{what}");
                    assert!(summed > 0 || !is_summed, "{what}");
                }
            }
        }
    }
}

#[test]
fn a_key_is_made_once_and_machines_without_it_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    for file in [&first, &second] {
        run(&["cluster", "key", arg(file)]).expect(0);
    }
    let again = run(&["cluster", "key", arg(&first)]).expect(2);
    assert!(again.stderr.contains("exists"), "{}", again.stderr);
    let model = fixture("glm-dsa");
    let flags = ["--model", arg(&model), "--cluster-key", arg(&first)];
    let worker = Worker::start(&flags);
    let generate = ["run", "--ids", "1,2,3", "--max-tokens", "3", "--model", arg(&model), "--json"];
    let ask = |flags: &[&str]| {
        let workers = ["--cluster-workers", &worker.address];
        run(&[&generate[..], &workers, flags].concat()).expect(0)
    };
    let with = ask(&["--cluster-key", arg(&first)]);
    let rows = &with.json()["cluster"];
    assert!(rows["remote_rows"].as_u64() > Some(0) && rows["local_rows"] == 0, "{rows}");
    for (flags, what) in [
        (&["--cluster-key", arg(&second)][..], "different --cluster-key"),
        (&[], "asks for encryption"),
    ] {
        let refused = ask(flags);
        assert!(refused.stderr.contains(what), "{}", refused.stderr);
        assert!(refused.stderr.contains(&worker.address), "{}", refused.stderr);
        assert_eq!(refused.json()["cluster"]["remote_rows"], 0);
        assert_eq!(refused.json()["ids"], with.json()["ids"]);
    }
    // A key that cannot be read stops the start; nothing goes on without it.
    std::fs::write(&second, "not a key").unwrap();
    for (file, what) in [(arg(&second), "64 hexadecimal"), ("/nonexistent", "No such file")] {
        let flags = ["--cluster-workers", &worker.address, "--cluster-key", file];
        let refused = run(&[&generate[..], &flags].concat()).expect(2);
        assert!(refused.stderr.contains(what), "{}", refused.stderr);
        let flags = ["cluster", "worker", "--model", arg(&model), "--cluster-key", file];
        let refused = run(&flags).expect(2);
        assert!(refused.stderr.contains(what), "{}", refused.stderr);
    }
}

#[test]
fn a_worker_with_other_weights_arithmetic_or_activations_is_refused_before_any_token() {
    let dir = tempfile::tempdir().unwrap();
    let [right, flipped] = ["right", "flipped"].map(|name| dir.path().join(name));
    // One bit of one expert, before conversion: the same formats and shapes, other hashes.
    let source = crate::support::copy(&fixture("glm-int4-g64"));
    run(&["convert", arg(source.path()), arg(&right)]).expect(0);
    flip_expert_bit(source.path());
    run(&["convert", arg(source.path()), arg(&flipped)]).expect(0);
    let generate = |model: &Path, flags: &[&str]| {
        let args = ["run", "--ids", "1,2,3", "--max-tokens", "3", "--json", "--model", arg(model)];
        run(&[&args[..], flags].concat()).expect(0)
    };
    let plain = fixture("glm-int4-g32");
    for (model, theirs, activations, what) in [
        (&right, &flipped, "int8", "has other weights at the worker"),
        (&plain, &fixture("glm-int8-row"), "int8", "has other weights at the worker"),
        (&right, &right, "f32", "--activations"),
        (&right, &fixture("glm-groups"), "int8", "both must have the same model"),
    ] {
        let ids = generate(model, &[]).json()["ids"].clone();
        let worker = Worker::start(&["--model", arg(theirs), "--activations", activations]);
        let outcome = generate(model, &["--cluster-workers", &worker.address]);
        assert!(outcome.stderr.contains(what), "{what}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(&worker.address), "{}", outcome.stderr);
        assert_eq!(outcome.json()["ids"], ids, "{what}");
        assert_eq!(outcome.json()["cluster"]["remote_rows"], 0, "{what}");
    }
    // The right one, whose hashes were compared.
    let worker = Worker::start(&["--model", arg(&right), "--experts", "0-1"]);
    let outcome = generate(&right, &["--cluster-workers", &worker.address]);
    assert!(outcome.stderr.contains("is ready with"), "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("hashes"), "{}", outcome.stderr);
    assert!(outcome.json()["cluster"]["remote_rows"].as_u64() > Some(0));
    assert_eq!(outcome.json()["ids"], generate(&right, &[]).json()["ids"]);
}

/// Mistakes that the gate must find; `cargo test -p coli --features mutations --test coli
/// mutations`.
#[cfg(feature = "mutations")]
mod mutations {
    use cluster::mutation::{Mutation, set};

    use super::*;

    /// Whether the gate lets a configuration pass. Workers are not tried when they join here
    /// either: the gate itself must see what is wrong.
    fn passes(model: &str, count: usize, way: Way) -> bool {
        let workers = workers(model, Activations::Int8, count, way);
        let ran = with(model, Activations::Int8, &workers, way);
        assert_eq!(ran.rows.local, 0, "{:?}", ran.said);
        ran.difference.is_none()
    }

    #[test]
    fn the_gate_finds_workers_that_leave_the_rotation_out_and_sums_of_floats() {
        for way in [ONE, TWO, SUMS] {
            for count in [1, 3] {
                set(Some(Mutation::NoRotation));
                assert!(!passes("glm-e8", count, way), "{way:?}");
                assert!(passes("glm-dsa", count, way), "{way:?}");
                assert!(passes("glm-int4-g64", count, way), "{way:?}");
                set(Some(Mutation::FloatSums));
                assert_eq!(passes("glm-int4-g64", count, way), count == 1, "{way:?}");
                set(None);
                assert!(passes("glm-e8", count, way), "{way:?}");
            }
        }
    }
}

/// Flips a bit of the last byte of an expert's matrix.
fn flip_expert_bit(dir: &Path) {
    let path = dir.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let (_, tensor) = header
        .as_object()
        .unwrap()
        .iter()
        .find(|(name, _)| name.contains("experts.1.up_proj.weight") && !name.contains("qs"))
        .unwrap();
    let end = tensor["data_offsets"][1].as_u64().unwrap() as usize;
    bytes[8 + length + end - 1] ^= 0x10;
    std::fs::write(&path, bytes).unwrap();
}
