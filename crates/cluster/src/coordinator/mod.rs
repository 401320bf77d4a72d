//! Routed experts computed by workers, with the experts of this machine for whatever they do not.
//!
//! All requests of a layer leave before the first answer is awaited. Whatever a worker does (wrong,
//! late, nothing), the sum is that of this machine's own experts: outputs are the same bits
//! wherever they are computed, and the sum is one of integers.

mod fleet;
mod link;
pub mod placement;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use container::Config;
use experts::{
    ExpertBackend, ExpertError, ExpertRows, ExpertStats, LocalExperts, Notice, RoutedBatch,
};
use numerics::{Compute, combine};

use self::fleet::Fleet;
pub use self::fleet::{Peer, State, UnknownPlace};
use self::link::{Link, LinkError};
use self::placement::{Place, Rule, mix};
use crate::items::compute_items;
use crate::wire::Shape;
use crate::wire::v1::{ITEMS_MAX, Item, put_item, put_request};
use crate::worker::shape_of;

/// Bytes of rows of one request; workers of this program take more.
const REQUEST_BYTES: u64 = 16 << 20;
/// Experts that a worker is asked for when it joins, and rows of each.
const PROBED_EXPERTS: usize = 2;
const PROBED_ROWS: usize = 3;
/// Time that opening waits for workers to join.
const JOIN_TIME: Duration = Duration::from_secs(10);
/// Time beyond its deadline after which a worker's thread is not waited for.
const THREAD_TIME: Duration = Duration::from_secs(5);
/// What an older program in another language must be told to come close.
const OTHER_PROGRAM: &str = "a worker of the C engine comes close only with --activations f32 \
    here and IDOT=0 I4S=1 COLI_NO_FUSED_PAIR=1 SPEC_PIN=0 XEXP=0 I4_ACC512=0 I3_AVX512=0 DRAFT=0 \
    COLI_CUDA=0 COLI_METAL=0 COLI_VULKAN=0 there, and is not used all the same";

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
    /// Here too, to compare.
    pub audited: u64,
}

#[derive(Debug, Default)]
struct Counters {
    remote: AtomicU64,
    local: AtomicU64,
    failed_over: AtomicU64,
    audited: AtomicU64,
    /// Draws for the audit so far, from a number that differs from run to run.
    draws: AtomicU64,
    wait_ns: AtomicU64,
}

struct Shared {
    options: CoordinatorOptions,
    shape: Shape,
    local: Arc<LocalExperts>,
    compute: Compute,
    fleet: Mutex<Fleet>,
    /// A worker has joined or failed to.
    joined: Condvar,
    counters: Counters,
}

/// A request on its way to a worker's thread.
struct Job {
    number: usize,
    request: Vec<u8>,
    asked: Vec<(u32, u32)>,
    deadline: Instant,
    answers: Sender<Answer>,
}

/// What came of it.
struct Answer {
    number: usize,
    items: Option<Vec<Item>>,
}

/// A request of the step that is under way.
struct Asked {
    worker: usize,
    /// Places of its experts in the batch.
    experts: Vec<usize>,
    /// Workers that failed to answer for them.
    failed: Vec<usize>,
    deadline: Instant,
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
        let fleet = Fleet::new(&options.workers, rules, options.request_time)?;
        let count = options.workers.len();
        let shared = Arc::new(Shared {
            options,
            shape: shape_of(config),
            local,
            compute: compute.clone(),
            fleet: Mutex::new(fleet),
            joined: Condvar::new(),
            counters: Counters { draws: AtomicU64::new(entropy()), ..Counters::default() },
        });
        let (mut jobs, mut threads) = (Vec::new(), Vec::new());
        for at in 0..count {
            let (sender, receiver) = channel();
            let shared_there = shared.clone();
            let spawned = thread::Builder::new()
                .name(format!("coli-worker-{at}"))
                .spawn(move || shared_there.run(at, &receiver));
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
        let Counters { remote, local, failed_over, audited, .. } = &self.shared.counters;
        let [remote, local, failed_over, audited] =
            [remote, local, failed_over, audited].map(|count| count.load(Ordering::Relaxed));
        RowCounts { remote, local, failed_over, audited }
    }

    /// Sends the experts at some places of a batch to a worker, in as many requests as it takes;
    /// some workers have `failed` for them.
    fn send(
        &self,
        batch: &RoutedBatch<'_>,
        layer: usize,
        (worker, experts, failed): (usize, &[usize], &[usize]),
        asked: &mut Vec<Asked>,
        answers: &Sender<Answer>,
    ) {
        let shape = self.shared.shape;
        let hidden = shape.hidden as usize;
        let row_bytes = (hidden * size_of::<f32>()) as u64;
        let time = self.shared.fleet().deadline(worker);
        // Requests to one worker follow each other.
        let mut deadline = Instant::now();
        let rows_of = |at: &usize| batch.rows_of(*at).rows.len();
        let mut rest = experts;
        while !rest.is_empty() {
            let (mut count, mut bytes) = (0, 0);
            while count < rest.len().min(ITEMS_MAX) {
                bytes += rows_of(&rest[count]) as u64 * row_bytes;
                if count > 0 && bytes > REQUEST_BYTES {
                    break;
                }
                count += 1;
            }
            let (experts, after) = rest.split_at(count);
            rest = after;
            deadline += time;
            let mut request = Vec::with_capacity(bytes as usize + 64 * (count + 1));
            put_request(&mut request, &shape, layer as u32, count);
            let mut numbers = Vec::with_capacity(count);
            for at in experts {
                let ExpertRows { expert, rows, .. } = batch.rows_of(*at);
                let values = batch.input.values();
                let row = |row: &u32| &values[*row as usize * hidden..][..hidden];
                put_item(&mut request, expert, rows.iter().map(row));
                numbers.push((expert, rows.len() as u32));
            }
            let number = asked.len();
            let job = Job { number, request, asked: numbers, deadline, answers: answers.clone() };
            asked.push(Asked {
                worker,
                experts: experts.to_vec(),
                failed: failed.to_vec(),
                deadline,
            });
            if self.jobs[worker].send(job).is_err() {
                let _ = answers.send(Answer { number, items: None });
            }
        }
    }

    /// Whether every output of an answer can be added: weighted and on the grid.
    fn add_items(
        &self,
        batch: &RoutedBatch<'_>,
        experts: &[usize],
        items: &[Item],
        sum: &mut [i64],
    ) -> bool {
        let Shared { compute, shape, .. } = &*self.shared;
        let hidden = shape.hidden as usize;
        let rows = |at: &usize| batch.rows_of(*at).rows.len();
        let total: usize = experts.iter().map(rows).sum();
        let mut weighted = compute.scratch.zeroed::<i64>(total * hidden);
        let mut sums = weighted.chunks_exact_mut(hidden);
        for (at, item) in experts.iter().zip(items) {
            let of_expert = batch.rows_of(*at);
            let outputs = item.rows.chunks_exact(hidden);
            for (row, ((weight, y), sum)) in
                of_expert.weights.iter().zip(outputs).zip(&mut sums).enumerate()
            {
                // A worker whose outputs leave the grid is not believed; if they are right, this
                // machine comes to the same and says so.
                if combine::add_weighted(compute.isa, row, *weight, y, sum).is_err() {
                    return false;
                }
            }
        }
        let mut added = weighted.chunks_exact(hidden);
        for at in experts {
            for (row, added) in batch.rows_of(*at).rows.iter().zip(&mut added) {
                let sum = &mut sum[*row as usize * hidden..][..hidden];
                sum.iter_mut().zip(added).for_each(|(sum, added)| *sum = sum.wrapping_add(*added));
            }
        }
        true
    }

    /// The first output of an answer that is not what this machine computes.
    fn difference(
        &self,
        batch: &RoutedBatch<'_>,
        layer: usize,
        experts: &[usize],
        items: &[Item],
    ) -> Result<Option<Difference>, ExpertError> {
        let Shared { compute, shape, local, .. } = &*self.shared;
        let hidden = shape.hidden as usize;
        let chosen = |expert: u32| experts.iter().any(|at| batch.experts()[*at] == expert);
        let part = batch.part(&compute.scratch, chosen);
        let mut difference = None;
        local.outputs(compute, layer, &part, &mut |rows, outputs| {
            let item = items.iter().find(|item| item.expert == rows.expert);
            let theirs = item.map_or(&[][..], |item| &item.rows);
            let found = Difference::between(layer, rows.expert, theirs, outputs, hidden);
            difference = difference.take().or(found);
        })?;
        Ok(difference)
    }
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
        let Shared { local, counters, options, .. } = &*self.shared;
        let count_of = |experts: &[usize]| {
            experts.iter().map(|at| batch.rows_of(*at).rows.len() as u64).sum::<u64>()
        };
        let mut shares: Vec<Vec<usize>> = vec![Vec::new(); self.jobs.len()];
        let mut here: Vec<usize> = Vec::new();
        let mut order: Vec<usize> = (0..self.jobs.len()).collect();
        {
            let fleet = self.shared.fleet();
            for (at, expert) in batch.experts().iter().enumerate() {
                match fleet.place(layer, *expert) {
                    Place::Local => here.push(at),
                    Place::Worker(worker) => shares[worker].push(at),
                }
            }
            order.sort_by(|a, b| fleet.request_s(*b).total_cmp(&fleet.request_s(*a)));
        }
        let (sender, answers) = channel();
        let mut asked: Vec<Asked> = Vec::new();
        for worker in order {
            self.send(batch, layer, (worker, &shares[worker], &[]), &mut asked, &sender);
        }
        let is_here =
            |here: &[usize], expert: u32| here.iter().any(|at| batch.experts()[*at] == expert);
        counters.local.fetch_add(count_of(&here), Ordering::Relaxed);
        let part = batch.part(&compute.scratch, |expert| is_here(&here, expert));
        local.compute(compute, layer, &part, sum, meanwhile)?;
        // What workers failed to answer for and no other will.
        let mut left_over: Vec<usize> = Vec::new();
        // Answers are added when all have come: a worker that is found wrong meanwhile is not
        // believed in anything.
        let mut answered: Vec<(usize, Vec<usize>, Vec<Item>)> = Vec::new();
        let mut done = 0;
        while done < asked.len() {
            let started = Instant::now();
            let open = asked.iter().map(|asked| asked.deadline).max();
            let latest = open.unwrap_or(started) + THREAD_TIME;
            let answer = answers.recv_timeout(latest.saturating_duration_since(started));
            counters.wait_ns.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
            let Ok(Answer { number, items }) = answer else {
                // No thread is late by so much: what is open is computed here, and those who have
                // it are left.
                for open in asked.iter().filter(|open| !open.experts.is_empty()) {
                    left_over.extend(&open.experts);
                    self.shared.leave(open.worker, "its thread does not answer");
                }
                break;
            };
            done += 1;
            let Asked { worker, experts, .. } = &mut asked[number];
            let (worker, experts) = (*worker, std::mem::take(experts));
            let rows = count_of(&experts);
            if let Some(items) = items {
                // No worker can foresee which of its answers are compared.
                let draw = mix(counters.draws.fetch_add(1, Ordering::Relaxed));
                if options.audit > 0 && draw.is_multiple_of(options.audit) {
                    counters.audited.fetch_add(rows, Ordering::Relaxed);
                    if let Some(difference) = self.difference(batch, layer, &experts, &items)? {
                        self.shared.quarantine(worker, &difference.to_string());
                    }
                }
                answered.push((worker, experts, items));
                continue;
            }
            counters.failed_over.fetch_add(rows, Ordering::Relaxed);
            let mut failed = std::mem::take(&mut asked[number].failed);
            failed.push(worker);
            let mut others: Vec<Vec<usize>> = vec![Vec::new(); self.jobs.len()];
            for at in experts {
                let expert = batch.experts()[at];
                match self.shared.fleet().other_place(layer, expert, &failed) {
                    Place::Local => left_over.push(at),
                    Place::Worker(other) => others[other].push(at),
                }
            }
            for (worker, experts) in others.into_iter().enumerate() {
                self.send(batch, layer, (worker, &experts, &failed), &mut asked, &sender);
            }
        }
        let mut disbelieved: Vec<usize> = Vec::new();
        for (worker, experts, items) in answered {
            let rows = count_of(&experts);
            let is_wrong = self.shared.fleet().peers()[worker].state == State::Quarantined;
            if !is_wrong && self.add_items(batch, &experts, &items, sum) {
                counters.remote.fetch_add(rows, Ordering::Relaxed);
            } else {
                counters.failed_over.fetch_add(rows, Ordering::Relaxed);
                left_over.extend(experts);
                disbelieved.extend((!is_wrong).then_some(worker));
            }
        }
        if !left_over.is_empty() {
            let part = batch.part(&compute.scratch, |expert| is_here(&left_over, expert));
            local.compute(compute, layer, &part, sum, &mut || {})?;
        }
        // This machine's own outputs were within the range of the sum.
        for worker in disbelieved {
            let why = format!("an output of layer {layer} is beyond the range of the sum");
            self.shared.quarantine(worker, &why);
        }
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

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.jobs.clear();
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

/// An output that is not this machine's.
#[derive(Clone, Copy, Debug)]
struct Difference {
    layer: usize,
    expert: u32,
    /// Largest over the rows of the largest difference over the largest number.
    relative: f64,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { layer, expert, relative } = self;
        write!(
            f,
            "its output of layer {layer}, expert {expert} differs from this machine's by \
             {relative:.1e} of its size"
        )
    }
}

impl Difference {
    fn between(
        layer: usize,
        expert: u32,
        theirs: &[f32],
        ours: &[f32],
        hidden: usize,
    ) -> Option<Difference> {
        let same = theirs.len() == ours.len()
            && theirs.iter().zip(ours).all(|(a, b)| a.to_bits() == b.to_bits());
        if same {
            return None;
        }
        let largest = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
        let of_row = |(theirs, ours): (&[f32], &[f32])| {
            let mut apart = theirs.iter().zip(ours).map(|(a, b)| f64::from(a - b).abs());
            let mut size = ours.iter().map(|b| f64::from(b.abs()));
            largest(&mut apart) / largest(&mut size).max(f64::MIN_POSITIVE)
        };
        let rows = theirs.chunks_exact(hidden).zip(ours.chunks_exact(hidden));
        let relative = largest(&mut rows.map(of_row));
        Some(Difference { layer, expert, relative })
    }
}

/// Why a worker did not join.
enum Refused {
    Link(LinkError),
    Wrong(Difference),
    Here(ExpertError),
}

impl Shared {
    fn fleet(&self) -> MutexGuard<'_, Fleet> {
        self.fleet.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self, at: usize) -> &str {
        &self.options.workers[at]
    }

    /// A worker failed: says so once, and when it is tried again.
    fn leave(&self, at: usize, why: &str) -> Instant {
        let (retry_at, news) = self.fleet().failed(at, Instant::now());
        self.joined.notify_all();
        if news {
            let name = self.name(at);
            (self.options.notice)(&format!(
                "worker {name}: {why}; its experts are computed elsewhere until it answers rightly"
            ));
        }
        retry_at
    }

    fn quarantine(&self, at: usize, why: &str) {
        let news = self.fleet().quarantine(at);
        self.joined.notify_all();
        if news {
            (self.options.notice)(&format!(
                "worker {} is not used any more: {why}; both must have the same model and the same \
                 --activations, {} here ({OTHER_PROGRAM})",
                self.name(at),
                self.compute.activations
            ));
        }
    }

    /// The thread of one worker: connects, asks, and tries again after failures.
    fn run(&self, at: usize, jobs: &Receiver<Job>) {
        let mut link: Option<Link> = None;
        let mut retry_at = Some(Instant::now());
        loop {
            if link.is_none() && retry_at.is_some_and(|at| at <= Instant::now()) {
                match self.join(at) {
                    Ok(joined) if self.fleet().ready(at) => {
                        link = Some(joined);
                        self.joined.notify_all();
                        (self.options.notice)(&format!("worker {} is ready", self.name(at)));
                    }
                    Ok(_) => retry_at = None,
                    Err(Refused::Wrong(difference)) => {
                        self.quarantine(at, &difference.to_string());
                        retry_at = None;
                    }
                    Err(Refused::Link(error)) => {
                        retry_at = Some(self.leave(at, &error.to_string()));
                    }
                    Err(Refused::Here(error)) => {
                        let why = format!("its outputs cannot be compared: {error}");
                        retry_at = Some(self.leave(at, &why));
                    }
                }
            }
            let job = match retry_at.filter(|_| link.is_none()) {
                None => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => jobs.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            let job = match job {
                Ok(job) => job,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let started = Instant::now();
            let asked = link
                .as_mut()
                .map(|link| link.ask(self.shape, &job.request, &job.asked, job.deadline));
            let items = match asked {
                Some(Ok(items)) => {
                    let rows = job.asked.iter().map(|(_, rows)| u64::from(*rows)).sum();
                    self.fleet().answered(at, rows, started.elapsed());
                    Some(items)
                }
                Some(Err(error)) => {
                    link = None;
                    retry_at = Some(self.leave(at, &error.to_string()));
                    None
                }
                None => None,
            };
            // A worker that was found wrong meanwhile is left.
            if self.fleet().peers()[at].state == State::Quarantined {
                (link, retry_at) = (None, None);
            }
            let _ = job.answers.send(Answer { number: job.number, items });
        }
    }

    /// Connects to a worker and compares some of its outputs.
    fn join(&self, at: usize) -> Result<Link, Refused> {
        let mut link = Link::connect(self.name(at)).map_err(Refused::Link)?;
        let hidden = self.shape.hidden as usize;
        // Experts that it would get, and rows, that nobody can foresee.
        let mut noise = mix(u64::from(std::process::id()) ^ entropy());
        let mut next = || {
            noise = mix(noise);
            noise
        };
        let mine: Vec<(u32, u32)> = {
            let fleet = self.fleet();
            let keys = self.local.table().keys();
            keys.filter(|(layer, expert)| fleet.belongs(at, *layer as usize, *expert)).collect()
        };
        for _ in 0..PROBED_EXPERTS.min(mine.len()) {
            let (layer, expert) = mine[(next() % mine.len() as u64) as usize];
            // Between -1 and 1.
            let mut value = || (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            let rows: Vec<f32> = (0..PROBED_ROWS * hidden).map(|_| value()).collect();
            let mut request = Vec::new();
            put_request(&mut request, &self.shape, layer, 1);
            put_item(&mut request, expert, rows.chunks_exact(hidden));
            let deadline = Instant::now() + self.fleet().deadline(at);
            let asked = [(expert, PROBED_ROWS as u32)];
            let theirs = link.ask(self.shape, &request, &asked, deadline).map_err(Refused::Link)?;
            let mut ours = vec![0.0; rows.len()];
            let items = [Item { expert, rows }];
            let (compute, layer) = (&self.compute, layer as usize);
            compute_items(&self.local, compute, self.shape, layer, &items, &mut |row, output| {
                ours[row * hidden..][..hidden].copy_from_slice(output);
            })
            .map_err(Refused::Here)?;
            let found = Difference::between(layer, expert, &theirs[0].rows, &ours, hidden);
            if let Some(difference) = found {
                return Err(Refused::Wrong(difference));
            }
        }
        Ok(link)
    }
}

/// A number that differs from run to run.
fn entropy() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
