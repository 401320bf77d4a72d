//! Whatever happens to workers and connections, in whatever order, the logits are those of this
//! machine.
//!
//! Every seed is a cluster and what happens to it. `COLI_SIM_SEEDS=FIRST..LAST` runs other seeds
//! than the usual ones:
//!
//! ```sh
//! COLI_SIM_SEEDS=0..1000000 \
//!     cargo test --release -p colibri-lab --test lab simulation -- --nocapture
//! ```

mod world;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use cluster::coordinator::core::{Core, Peers};
use cluster::coordinator::{Audit, CoordinatorOptions, RowCounts};
use cluster::session::coordinator::Version;
use cluster::wire::secure::{Key, Policy};
use cluster::worker::{Worker, WorkerOptions, open};
use container::HeldExperts;
use experts::{ExpertBackend, ExpertError, ExpertStats, ReadAhead, RoutedBatch};
use numerics::{Activations, Compute, Isa, Team};
use runtime::{Engine, EngineOptions, Fingerprint, StepError, Want};

use self::world::{Faults, Happened, Node, Noise, World};

/// Seeds of an ordinary test run.
const SEEDS: Range<u64> = 0..400;
/// Longest time for a request.
const DEADLINE_MAX: Duration = Duration::from_secs(30);
/// Models, each with one of the same shape and other weights.
const MODELS: [(&str, &str); 4] = [
    ("glm-int4-g32", "glm-int8-row"),
    ("glm-e8", "glm-e8"),
    ("olmoe-int4-g48", "olmoe-int4-g48"),
    // Three experts per row: sums are fewer bytes where one worker has them.
    ("glm-dsa", "glm-dsa"),
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle").join(name)
}

/// A cluster under an engine.
struct Simulated(Arc<World>);

impl ExpertBackend for Simulated {
    fn compute(
        &self,
        compute: &Compute,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sum: &mut [i64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExpertError> {
        self.0.think();
        let started = self.0.now();
        let computed = self.0.core().compute(&*self.0, compute, layer, batch, sum, meanwhile);
        // Each worker is waited for once, as long as its deadline allows at most.
        let workers = self.0.core().fleet().peers().len() as u32;
        let took = self.0.now().duration_since(started);
        assert!(took <= DEADLINE_MAX * workers, "{took:?} for {workers} workers");
        computed
    }

    fn stats(&self) -> ExpertStats {
        ExpertStats::default()
    }
}

/// Fingerprint of the logits of some tokens, a few of them fed one by one, or why there are none.
fn fingerprint(options: &EngineOptions) -> Result<String, StepError> {
    let engine = Engine::open(options, &mut |_, _| {}).unwrap();
    let vocab = engine.config().vocab_size as u32;
    let tokens: Vec<u32> = (0..16).map(|i| (i * 7919 + 11) % vocab).collect();
    let mut session = engine.session().unwrap();
    let mut fingerprint = Fingerprint::default();
    let (prompt, rest) = tokens.split_at(9);
    for tokens in std::iter::once(prompt).chain(rest.chunks(1)) {
        let mut each = |hidden: &[f32]| engine.each_logits(hidden, |row| fingerprint.add(row));
        engine.prefill(&mut session, tokens, Want::All, &mut each, &mut |_| true)?;
    }
    Ok(fingerprint.hex())
}

fn options(model: &str, activations: Activations) -> EngineOptions {
    EngineOptions {
        ram_bytes: Some(2_000_000_000),
        threads: Some(1),
        activations,
        read_ahead: ReadAhead::Off,
        ..EngineOptions::new(vec![fixture(model)])
    }
}

/// The logits of this machine alone.
fn alone(model: &'static str, activations: Activations) -> String {
    static KNOWN: OnceLock<Mutex<HashMap<(&str, String), String>>> = OnceLock::new();
    let known = KNOWN.get_or_init(Mutex::default);
    let key = (model, activations.to_string());
    if let Some(known) = known.lock().unwrap().get(&key) {
        return known.clone();
    }
    let found = fingerprint(&options(model, activations)).unwrap();
    known.lock().unwrap().insert(key, found.clone());
    found
}

/// A worker of a model; the same one each time.
fn worker(model: &'static str, activations: Activations, part: usize) -> Arc<Worker> {
    type Known = HashMap<(&'static str, String, usize), Arc<Worker>>;
    static KNOWN: OnceLock<Mutex<Known>> = OnceLock::new();
    let known = &mut *KNOWN.get_or_init(Mutex::default).lock().unwrap();
    let key = (model, activations.to_string(), part);
    let made = || {
        let held = match part {
            0 => HeldExperts::ALL,
            part => HeldExperts { layers: 0..usize::MAX, experts: 0..part },
        };
        let worker = WorkerOptions {
            dirs: vec![fixture(model)],
            held,
            ram_bytes: 400_000_000,
            process_bytes: 0,
            int8: true,
            io: None,
            read_limit: None,
            read_ahead: ReadAhead::Off,
            policy: Policy { key: None, plain: true },
        };
        let isa = if part == 0 { Isa::detect() } else { Isa::SCALAR };
        let compute = Compute::new(isa, Arc::new(Team::new(1).unwrap()), activations);
        Arc::new(open(&worker, compute).unwrap().worker)
    };
    known.entry(key).or_insert_with(made).clone()
}

/// What a seed did.
#[derive(Debug, PartialEq)]
struct Outcome {
    /// Or why there is none.
    fingerprint: Result<String, String>,
    rows: RowCounts,
    happened: Happened,
    /// Experts that stayed with the coordinator at the end.
    kept: usize,
    said: Vec<String>,
}

/// A cluster and what happens to it.
fn run(seed: u64) -> (&'static str, Activations, Outcome) {
    run_with(seed, None)
}

/// The same with a coordinator that has its own files, of the model that they are of.
fn run_with(seed: u64, own: Option<(&'static str, &Path)>) -> (&'static str, Activations, Outcome) {
    let mut noise = Noise::new(seed);
    let (mut model, mut other) = MODELS[noise.below(4) as usize];
    if let Some((name, _)) = own {
        (model, other) = (name, name);
    }
    let activations = if noise.once_in(3) { Activations::F32 } else { Activations::Int8 };
    let opposite = match activations {
        Activations::F32 => Activations::Int8,
        Activations::Int8 => Activations::F32,
    };
    let key = noise.once_in(2).then(|| Key::new([noise.next() as u8 | 1; 32]));
    // Some seeds are quiet, so that what is usual is seen too.
    let often = [0, 400, 60, 20][noise.below(4) as usize];
    let rate = |times: u64| if often == 0 { 0 } else { often * times };
    let faults = Faults {
        cut: rate(2),
        damage: rate(2),
        crash: rate(2),
        hang: rate(8),
        item: rate(1),
        slow: rate(4),
        drain: rate(8),
    };
    let count = 1 + noise.below(4) as usize;
    let mut has_liar = false;
    let mut node = |at: usize| {
        let version = if key.is_none() && noise.once_in(4) { Version::One } else { Version::Two };
        let part = if version == Version::Two && noise.once_in(4) { 2 } else { 0 };
        let mut models = vec![worker(model, activations, part)];
        match noise.below(10) {
            // It may come back with something else.
            0 => models.push(worker(other, activations, 0)),
            1 => models.push(worker(model, opposite, 0)),
            2 => models.insert(0, worker(model, opposite, 0)),
            _ => {}
        }
        let policy = match noise.below(12) {
            0 => Policy { key: Some(Key::new([7; 32])), plain: false },
            1 => Policy { key: None, plain: true },
            _ => Policy { plain: key.is_none(), key: key.clone() },
        };
        let mut node = Node::new(format!("worker-{at}:9100"), models, policy, version);
        if noise.once_in(6) {
            has_liar = true;
            node.honest = Some(2 + noise.below(20));
        }
        node.is_up = !noise.once_in(10);
        node
    };
    let nodes: Vec<Node> = (0..count).map(&mut node).collect();
    // Some are named, others are listed by a registry later.
    let named = count - noise.below(3).min(count as u64) as usize;
    let workers: Vec<String> = nodes.iter().take(named).map(|node| node.name.clone()).collect();
    let said = Arc::new(Mutex::new(Vec::new()));
    let notes = said.clone();
    let audit = match (has_liar, noise.below(4)) {
        (true, _) => Audit::OneIn(1),
        (false, 0) => Audit::OneIn(3),
        (false, 1) => Audit::Unverified,
        (false, _) => Audit::Off,
    };
    let coordinator = CoordinatorOptions {
        workers,
        rules: Vec::new(),
        audit,
        request_time: Duration::from_secs(10),
        key,
        version: None,
        allow_inexact: false,
        partial_sums: noise.once_in(3),
        hot_window_calls: 4,
        hedge: noise.once_in(2),
        keep_hot: noise.once_in(2),
        notice: Arc::new(move |text: &str| notes.lock().unwrap().push(text.to_owned())),
    };
    let made: Arc<OnceLock<Arc<World>>> = Arc::default();
    let (keep, nodes) = (made.clone(), Mutex::new(Some(nodes)));
    let draws = noise.next();
    let with = EngineOptions {
        others: Some(Arc::new(move |config, local, compute| {
            let core = Core::new(config, local, compute, coordinator.clone(), draws);
            let nodes = nodes.lock().unwrap().take().unwrap();
            let world = Arc::new(World::new(core, nodes, faults, noise.clone()));
            keep.set(world.clone()).map_err(|_| "made twice".to_owned())?;
            Ok(Box::new(Simulated(world)) as Box<dyn ExpertBackend>)
        })),
        dirs: vec![own.map_or_else(|| fixture(model), |(_, dir)| dir.to_owned())],
        ..options(model, activations)
    };
    let fingerprint = fingerprint(&with).map_err(|error| error.to_string());
    let world = made.get().unwrap();
    let (rows, happened) = (world.core().rows(), world.happened());
    let said = std::mem::take(&mut *said.lock().unwrap());
    let kept = world.core().kept_here();
    (model, activations, Outcome { fingerprint, rows, happened, kept, said })
}

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("COLI_SIM_SEEDS") else { return SEEDS };
    let ends = text.split_once("..").map(|(first, last)| (first.parse(), last.parse()));
    match ends {
        Some((Ok(first), Ok(last))) if first < last => first..last,
        _ => panic!("COLI_SIM_SEEDS={text:?} must be FIRST..LAST, such as 0..1000"),
    }
}

#[test]
fn whatever_happens_to_workers_the_logits_are_those_of_this_machine() {
    let (seeds, mut rows, mut all) = (seeds(), RowCounts::default(), Happened::default());
    let (mut quarantined, mut kept) = (0, 0);
    for seed in seeds.clone() {
        let (model, activations, outcome) = run(seed);
        let want = alone(model, activations);
        assert_eq!(
            outcome.fingerprint.as_ref(),
            Ok(&want),
            "seed {seed}, {model}, {activations}: {outcome:#?}"
        );
        rows.remote += outcome.rows.remote;
        rows.local += outcome.rows.local;
        rows.failed_over += outcome.rows.failed_over;
        rows.hedged += outcome.rows.hedged;
        rows.audited += outcome.rows.audited;
        rows.recovered += outcome.rows.recovered;
        rows.summed += outcome.rows.summed;
        kept += outcome.kept;
        all.crashes += outcome.happened.crashes;
        all.cuts += outcome.happened.cuts;
        all.hangs += outcome.happened.hangs;
        all.refused += outcome.happened.refused;
        all.lies += outcome.happened.lies;
        quarantined += outcome.said.iter().filter(|s| s.contains("not used any more")).count();
        if seed % 1000 == 999 {
            println!("seed {seed}: {rows:?}, {all:?}, {quarantined} quarantined");
        }
    }
    println!("seeds {seeds:?}: {rows:?}, {all:?}, {quarantined} quarantined");
    if seeds == SEEDS {
        // Nothing of what can happen was left out.
        let happened = [
            rows.remote,
            rows.local,
            rows.failed_over,
            rows.hedged,
            rows.audited,
            rows.recovered,
            rows.summed,
            kept as u64,
            all.crashes,
            all.cuts,
            all.hangs,
            all.refused,
            all.lies,
            quarantined as u64,
        ];
        assert!(happened.iter().all(|count| *count > 0), "{happened:?}");
    }
}

#[test]
fn a_seed_does_the_same_each_time() {
    for seed in 1000..1010 {
        assert_eq!(run(seed).2, run(seed).2, "seed {seed}");
    }
}

#[test]
fn a_request_that_nobody_can_serve_fails_by_name_and_any_other_is_exact() {
    // The coordinator's copy of one expert is damaged: only workers can compute it.
    let dir = tempfile::tempdir().unwrap();
    let native = dir.path().join("native");
    let source = [fixture("glm-int4-g32")];
    let choice = lab::plan::Choice::default();
    let layout = container::Layout::R16k4;
    let size = lab::convert::SHARD_BYTES;
    let conversion =
        lab::convert::Conversion::plan(&source, &native, &choice, layout, size, 1).unwrap();
    conversion.run(&mut |_, _| {}).unwrap();
    let opened = container::Model::open(std::slice::from_ref(&native)).unwrap();
    let (layer, expert, record) = opened.shards.records().iter().next().unwrap();
    let path = opened.shards.path(record.file).to_owned();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[record.offset as usize + 100] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let named = format!("layer {layer}, expert {expert}");
    let (mut served, mut failed) = (0, 0);
    for seed in 5000..5150 {
        let (model, activations, outcome) = run_with(seed, Some(("glm-int4-g32", &native)));
        match &outcome.fingerprint {
            Ok(found) => {
                assert_eq!(*found, alone(model, activations), "seed {seed}: {outcome:#?}");
                served += 1;
            }
            Err(why) => {
                assert!(why.contains(&named), "seed {seed}: {why}");
                failed += 1;
            }
        }
    }
    assert!(served >= 5 && failed >= 5, "{served} served, {failed} failed");
}
