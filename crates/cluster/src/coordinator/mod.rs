//! Routed experts computed by workers, with the experts of this machine for whatever they do not.
//!
//! All requests of a layer leave before the first answer is awaited. Whatever a worker does (wrong,
//! late, nothing), the sum is that of this machine's own experts: outputs are the same bits
//! wherever they are computed, and the sum is one of integers.

mod difference;
pub mod fleet;
mod link;
pub mod placement;
pub mod step;
mod threads;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use container::Config;
use experts::{
    ExpertBackend, ExpertError, ExpertRows, ExpertStats, LocalExperts, Notice, RoutedBatch,
};
use numerics::{Compute, combine};

use self::difference::Difference;
use self::fleet::Fleet;
pub use self::fleet::{Peer, State, UnknownPlace};
use self::link::{Reply, Waiting};
use self::placement::{Rule, mix};
use self::step::{Action, Step, Wanted};
use self::threads::{Job, Shared, entropy};
use crate::identity::{Facts, Holdings};
use crate::session::coordinator::{Hello, Request};
use crate::wire::Shape;
use crate::wire::secure::Key;
use crate::wire::v2::{Answer, Outputs, Status};

/// Time that opening waits for workers to join.
const JOIN_TIME: Duration = Duration::from_secs(10);
/// Time for which ending waits for the threads of the workers.
const THREAD_TIME: Duration = Duration::from_secs(5);
/// Steps after which shares are looked at again.
const REWEIGH_STEPS: u64 = 1024;
/// How a coordinator is made.
#[derive(Clone)]
pub struct CoordinatorOptions {
    /// Workers, `host:port` each.
    pub workers: Vec<String>,
    /// Where experts belong, against the even placement.
    pub rules: Vec<Rule>,
    /// One request in so many is computed here too, and compared; 0 for none.
    pub audit: u64,
    /// Time for a request to a worker of which nothing is known yet, and least time for any.
    pub request_time: Duration,
    /// The key of the cluster: with one, nothing passes that is not encrypted.
    pub key: Option<Key>,
    /// Whether routing weights are sent along where sums are fewer bytes than outputs.
    pub partial_sums: bool,
    /// Whether another worker is asked too when one is late.
    pub hedge: bool,
    /// Is told when workers come, fail and come back.
    pub notice: Notice,
}

/// Usual time for a request to a worker of which nothing is known yet.
pub const REQUEST_TIME: Duration = Duration::from_secs(10);

/// What was computed where, in rows per expert that served them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RowCounts {
    /// By workers.
    pub remote: u64,
    /// Here, because they belong here or no worker was there.
    pub local: u64,
    /// Here or by another worker, because the first one failed.
    pub failed_over: u64,
    /// By another worker too, because the first one was late.
    pub hedged: u64,
    /// Here too, to compare.
    pub audited: u64,
}

#[derive(Debug, Default)]
struct Counters {
    remote: AtomicU64,
    local: AtomicU64,
    failed_over: AtomicU64,
    hedged: AtomicU64,
    audited: AtomicU64,
    /// Bytes of requests and answers, as messages have them.
    bytes: AtomicU64,
    steps: AtomicU64,
    /// Ids of requests.
    ids: AtomicU64,
    /// Draws for the audit so far, from a number that differs from run to run.
    draws: AtomicU64,
    wait_ns: AtomicU64,
}

impl Counters {
    /// An id that no request had before.
    fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// A request that was sent.
struct Sent {
    id: u64,
    /// Distinct rows of the batch, where sums were asked for.
    rows: Vec<u32>,
}

/// Outputs that have come and are to be added.
struct Answered {
    worker: usize,
    /// Number of the request.
    number: usize,
    /// Places of the experts whose outputs count.
    experts: Vec<usize>,
    answer: Box<Answer>,
}

/// The experts of a cluster.
pub struct Coordinator {
    shared: Arc<Shared>,
    jobs: Vec<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

impl Coordinator {
    /// Bytes of requests and answers that a step of so many rows holds, at most.
    pub fn held_bytes(config: &Config, rows: usize) -> u64 {
        let row_bytes = (config.hidden_size * size_of::<f32>()) as u64;
        // Encoded once, answered once, a copy of each at most.
        4 * rows as u64 * config.moe.top_k as u64 * row_bytes
    }

    /// Connects to workers and compares some outputs of each with those of `local`, which holds all
    /// experts of the model. Waits until each has joined or failed to, some seconds at most.
    pub fn new(
        config: &Config,
        local: Arc<LocalExperts>,
        compute: &Compute,
        options: CoordinatorOptions,
    ) -> Result<Coordinator, UnknownPlace> {
        let rules = options.rules.clone();
        let mut fleet = Fleet::new(&options.workers, rules, options.request_time)?;
        fleet.hedges = options.hedge;
        let count = options.workers.len();
        let hello = Hello {
            facts: Facts {
                isa: compute.isa.level().to_string(),
                threads: compute.team.threads() as u32,
                ..Facts::new(config, compute.activations)
            },
            holdings: Arc::new(Holdings::of(local.table())),
            shape: Shape::of(config),
            key: options.key.clone(),
        };
        let shared = Arc::new(Shared {
            options,
            hello: Arc::new(hello),
            local,
            compute: compute.clone(),
            fleet: Mutex::new(fleet),
            links: (0..count).map(|_| Mutex::default()).collect(),
            joined: Condvar::new(),
            counters: Counters { draws: AtomicU64::new(entropy()), ..Counters::default() },
        });
        let (mut jobs, mut threads) = (Vec::new(), Vec::new());
        for at in 0..count {
            let (sender, receiver) = channel();
            let (shared_there, own) = (shared.clone(), sender.clone());
            let spawned = thread::Builder::new()
                .name(format!("coli-worker-{at}"))
                .spawn(move || shared_there.run(at, &receiver, &own));
            match spawned {
                Ok(thread) => threads.push(thread),
                // Without its thread a worker never joins.
                Err(error) => {
                    shared.leave(at, &error.to_string());
                }
            }
            jobs.push(sender);
        }
        let coordinator = Coordinator { shared, jobs, threads };
        coordinator.wait_joined();
        Ok(coordinator)
    }

    fn wait_joined(&self) {
        let deadline = Instant::now() + JOIN_TIME;
        let mut fleet = self.shared.fleet();
        while fleet.peers().iter().any(|peer| peer.state == State::Joining) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.shared.joined.wait_timeout(fleet, left);
            fleet = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The workers now.
    pub fn peers(&self) -> Vec<Peer> {
        self.shared.fleet().peers().to_vec()
    }

    /// What was computed where.
    pub fn rows(&self) -> RowCounts {
        let Counters { remote, local, failed_over, hedged, audited, .. } = &self.shared.counters;
        let [remote, local, failed_over, hedged, audited] =
            [remote, local, failed_over, hedged, audited].map(|n| n.load(Ordering::Relaxed));
        RowCounts { remote, local, failed_over, hedged, audited }
    }

    /// Bytes of requests and answers so far, encryption not counted.
    pub fn wire_bytes(&self) -> u64 {
        self.shared.counters.bytes.load(Ordering::Relaxed)
    }

    /// Does what a step says is to be done.
    fn carry_out(
        &self,
        step: &mut Step,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sent: &mut Vec<Sent>,
        replies: &Sender<Reply>,
    ) {
        let Shared { hello, counters, options, .. } = &*self.shared;
        let shape = &hello.shape;
        for action in step.take_actions() {
            match action {
                Action::Ask { number, worker, experts, time } => {
                    let now = Instant::now();
                    let id = counters.next_id();
                    let version = self.shared.fleet().version(worker);
                    let items = experts.iter().map(|at| batch.rows_of(*at));
                    let sums = options.partial_sums && is_less_as_sums(items.clone());
                    let time_ms = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
                    let head = (layer as u32, time_ms, sums);
                    let values = batch.input.values();
                    let mut request = Request::new(version, shape, id, head, items, values);
                    let bytes = request.bytes() + request.answer_bytes(shape.hidden);
                    counters.bytes.fetch_add(bytes, Ordering::Relaxed);
                    let rows = if sums { std::mem::take(&mut request.rows) } else { Vec::new() };
                    sent.push(Sent { id, rows });
                    let waiting = Waiting { number, replies: replies.clone() };
                    let job = Job::Ask { request, waiting, deadline: now + time };
                    if let Err(failed) = self.jobs[worker].send(job)
                        && let Job::Ask { waiting, .. } = failed.0
                    {
                        waiting.tell(None);
                    }
                }
                Action::Cancel { number, worker } => {
                    // Whoever has ended answers nothing in any case.
                    let _ = self.jobs[worker].send(Job::Cancel(sent[number].id));
                }
                Action::Leave { worker, time } => {
                    let why = format!("it did not answer within {:.1} s", time.as_secs_f64());
                    self.shared.leave(worker, &why);
                    self.shared.close(worker);
                }
            }
        }
    }

    /// Adds what an answer brought, weighted, unless an output leaves the grid.
    fn add(
        &self,
        batch: &RoutedBatch<'_>,
        rows: &[u32],
        asked: &[usize],
        answered: &Answered,
        sum: &mut [i64],
    ) -> bool {
        let Shared { compute, hello, .. } = &*self.shared;
        let hidden = hello.shape.hidden as usize;
        let mut add_row = |row: u32, added: &[i64]| {
            let sum = &mut sum[row as usize * hidden..][..hidden];
            sum.iter_mut().zip(added).for_each(|(sum, added)| *sum = sum.wrapping_add(*added));
        };
        let outputs = match &answered.answer.outputs {
            Outputs::Sums(sums) => {
                rows.iter()
                    .zip(sums.chunks_exact(hidden))
                    .for_each(|(row, sum)| add_row(*row, sum));
                return true;
            }
            Outputs::Rows(outputs) => outputs_of(batch, asked, answered, outputs, hidden),
        };
        let total: usize = outputs.iter().map(|(_, outputs)| outputs.len()).sum();
        let mut weighted = compute.scratch.zeroed::<i64>(total);
        let mut sums = weighted.chunks_exact_mut(hidden);
        for (at, outputs) in &outputs {
            let weights = batch.rows_of(*at).weights.iter();
            let rows = weights.zip(outputs.chunks_exact(hidden)).zip(&mut sums).enumerate();
            for (row, ((weight, y), sum)) in rows {
                // A worker whose outputs leave the grid is not believed; if they are right, this
                // machine comes to the same and says so.
                if combine::add_weighted(compute.isa, row, *weight, y, sum).is_err() {
                    return false;
                }
            }
        }
        let mut added = weighted.chunks_exact(hidden);
        for (at, _) in &outputs {
            let rows = batch.rows_of(*at).rows.iter();
            rows.zip(&mut added).for_each(|(row, added)| add_row(*row, added));
        }
        true
    }

    /// The first output of an answer that is not what this machine computes.
    fn difference(
        &self,
        batch: &RoutedBatch<'_>,
        layer: usize,
        rows: &[u32],
        asked: &[usize],
        answered: &Answered,
    ) -> Result<Option<Difference>, ExpertError> {
        let Shared { compute, hello, local, .. } = &*self.shared;
        let hidden = hello.shape.hidden as usize;
        let chosen = |expert: u32| answered.experts.iter().any(|at| batch.experts()[*at] == expert);
        let part = batch.part(&compute.scratch, chosen);
        match &answered.answer.outputs {
            Outputs::Sums(theirs) => {
                let mut ours = vec![0; batch.input.values().len()];
                local.compute(compute, layer, &part, &mut ours, &mut || {})?;
                let differs = |(row, theirs): (&u32, &[i64])| {
                    ours[*row as usize * hidden..][..hidden] != *theirs
                };
                let mut sums = rows.iter().zip(theirs.chunks_exact(hidden));
                Ok(sums.any(differs).then_some(Difference::Sum { layer }))
            }
            Outputs::Rows(outputs) => {
                let theirs = outputs_of(batch, asked, answered, outputs, hidden);
                let mut difference = None;
                local.outputs(compute, layer, &part, &mut |rows, ours| {
                    let of_expert =
                        |(at, _): &&(usize, &[f32])| batch.experts()[*at] == rows.expert;
                    let theirs = theirs.iter().find(of_expert).map_or(&[][..], |found| found.1);
                    let found = Difference::between(layer, rows.expert, theirs, ours, hidden);
                    difference = difference.take().or(found);
                })?;
                Ok(difference)
            }
        }
    }
}

/// Outputs that count, with the places of their experts.
fn outputs_of<'a>(
    batch: &RoutedBatch<'_>,
    asked: &[usize],
    answered: &Answered,
    mut outputs: &'a [f32],
    hidden: usize,
) -> Vec<(usize, &'a [f32])> {
    let mut found = Vec::with_capacity(answered.experts.len());
    for (at, status) in asked.iter().zip(&answered.answer.statuses) {
        if *status == Status::Computed {
            let (of_expert, rest) = outputs.split_at(batch.rows_of(*at).rows.len() * hidden);
            outputs = rest;
            if answered.experts.contains(at) {
                found.push((*at, of_expert));
            }
        }
    }
    found
}

/// Whether sums of distinct rows, and the weights for them, are fewer bytes than outputs.
fn is_less_as_sums<'a>(items: impl Iterator<Item = ExpertRows<'a>> + Clone) -> bool {
    let mut rows: Vec<u32> = items.flat_map(|item| item.rows).copied().collect();
    let outputs = rows.len();
    rows.sort_unstable();
    rows.dedup();
    rows.len() * 2 < outputs
}

impl ExpertBackend for Coordinator {
    fn compute(
        &self,
        compute: &Compute,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sum: &mut [i64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExpertError> {
        let Shared { local, counters, options, hello, .. } = &*self.shared;
        let count_of = |experts: &[usize]| {
            experts.iter().map(|at| batch.rows_of(*at).rows.len() as u64).sum::<u64>()
        };
        let wanted = |of: ExpertRows<'_>| Wanted { expert: of.expert, rows: of.rows.len() as u32 };
        let row_bytes = u64::from(hello.shape.hidden) * size_of::<f32>() as u64;
        let steps = counters.steps.fetch_add(1, Ordering::Relaxed) + 1;
        let mut step = {
            let mut fleet = self.shared.fleet();
            if steps.is_multiple_of(REWEIGH_STEPS) {
                fleet.reweigh();
            }
            Step::new(&fleet, layer, batch.iter().map(wanted).collect(), row_bytes, Instant::now())
        };
        let (sender, replies) = channel();
        let mut sent: Vec<Sent> = Vec::new();
        self.carry_out(&mut step, layer, batch, &mut sent, &sender);
        let is_among =
            |places: &[usize], expert: u32| places.iter().any(|at| batch.experts()[*at] == expert);
        let here = step.here();
        counters.local.fetch_add(count_of(&here), Ordering::Relaxed);
        let part = batch.part(&compute.scratch, |expert| is_among(&here, expert));
        local.compute(compute, layer, &part, sum, meanwhile)?;
        // Answers are added when all have come: a worker that is found wrong meanwhile is not
        // believed in anything.
        let mut answers: Vec<Answered> = Vec::new();
        while !step.is_done() {
            let started = Instant::now();
            let left = step.next_time().map_or(THREAD_TIME, |at| at.duration_since(started));
            let reply = replies.recv_timeout(left);
            counters.wait_ns.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
            let now = Instant::now();
            match reply {
                Ok(Reply { number, answer: Some(answer) }) => {
                    let experts = {
                        let mut fleet = self.shared.fleet();
                        step.answered(&mut fleet, number, &answer.statuses, now)
                    };
                    let worker = step.worker_of(number);
                    let answered = Answered { worker, number, experts, answer };
                    self.accept(&mut step, layer, batch, &sent, answered, &mut answers)?;
                }
                Ok(Reply { number, answer: None }) => {
                    step.failed(&self.shared.fleet(), number, now);
                }
                Err(_) => step.time_passed(&self.shared.fleet(), now),
            }
            self.carry_out(&mut step, layer, batch, &mut sent, &sender);
        }
        let mut disbelieved: Vec<usize> = Vec::new();
        for answered in answers {
            let Answered { worker, number, experts, .. } = &answered;
            let is_wrong = self.shared.fleet().peers()[*worker].state == State::Quarantined;
            let (rows, asked) = (&sent[*number].rows, step.experts_of(*number));
            if !is_wrong && self.add(batch, rows, asked, &answered, sum) {
                counters.remote.fetch_add(count_of(experts), Ordering::Relaxed);
            } else {
                disbelieved.extend((!is_wrong).then_some(*worker));
                step.disbelieve(experts);
            }
        }
        let left_over = step.left_over();
        if !left_over.is_empty() {
            let part = batch.part(&compute.scratch, |expert| is_among(&left_over, expert));
            local.compute(compute, layer, &part, sum, &mut || {})?;
        }
        counters.failed_over.fetch_add(step.failed_rows, Ordering::Relaxed);
        counters.hedged.fetch_add(step.hedged_rows, Ordering::Relaxed);
        // This machine's own outputs were within the range of the sum.
        for worker in disbelieved {
            let why = format!("an output of layer {layer} is beyond the range of the sum");
            self.shared.quarantine(worker, &why);
        }
        debug_assert!(options.workers.len() == self.jobs.len());
        Ok(())
    }

    fn wants_guesses(&self) -> bool {
        // Guesses would fill this machine's memory with what workers compute.
        false
    }

    fn stats(&self) -> ExpertStats {
        let waited_s = self.shared.counters.wait_ns.load(Ordering::Relaxed) as f64 * 1e-9;
        let stats = self.shared.local.stats();
        ExpertStats { remote_s: waited_s, ..stats }
    }
}

impl Coordinator {
    /// Keeps an answer to be added, and compares it with this machine's own when it is drawn for that.
    fn accept(
        &self,
        step: &mut Step,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sent: &[Sent],
        answered: Answered,
        answers: &mut Vec<Answered>,
    ) -> Result<(), ExpertError> {
        let Shared { counters, options, .. } = &*self.shared;
        if answered.experts.is_empty() {
            return Ok(());
        }
        let computed =
            answered.answer.statuses.iter().filter(|status| **status == Status::Computed).count();
        let is_sum = matches!(answered.answer.outputs, Outputs::Sums(_));
        if is_sum && computed != answered.experts.len() {
            // Another answer has had a part of what is added up here.
            step.disbelieve(&answered.experts);
            return Ok(());
        }
        // No worker can foresee which of its answers are compared.
        let draw = mix(counters.draws.fetch_add(1, Ordering::Relaxed));
        if options.audit > 0 && draw.is_multiple_of(options.audit) {
            let rows = answered.experts.iter().map(|at| batch.rows_of(*at).rows.len() as u64);
            counters.audited.fetch_add(rows.sum(), Ordering::Relaxed);
            let (rows, asked) = (&sent[answered.number].rows, step.experts_of(answered.number));
            let found = self.difference(batch, layer, rows, asked, &answered)?;
            if let Some(difference) = found {
                self.shared.quarantine(answered.worker, &difference.to_string());
            }
        }
        answers.push(answered);
        Ok(())
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        for jobs in self.jobs.drain(..) {
            // One that has ended needs no telling.
            let _ = jobs.send(Job::Stop);
        }
        let deadline = Instant::now() + THREAD_TIME;
        for thread in self.threads.drain(..) {
            // One that waits for a worker's answer is not waited for.
            while !thread.is_finished() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}
