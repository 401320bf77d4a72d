//! What a coordinator knows and decides, without sockets and threads: [`Peers`] carry it out.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use container::Config;
use experts::cache::Key as ExpertKey;
use experts::{ExpertBackend, ExpertError, ExpertRows, LocalExperts, Notice, RoutedBatch};
use numerics::Compute;

use super::difference::Difference;
use super::fleet::{Fleet, Size, State};
use super::hot::Hot;
use super::placement::{Rule, mix};
use super::step::{Action, Step, Wanted};
use crate::identity::{Facts, Holdings};
use crate::items::compute_items;
use crate::session::coordinator::{Event, Hello, Request, Version};
use crate::wire::Shape;
use crate::wire::secure::Key;
use crate::wire::v1::Item;
use crate::wire::v2::{Answer, Outputs, Status};

/// Steps after which shares are looked at again.
const REWEIGH_STEPS: u64 = 1024;
/// Time after which a step without anything to wait for looks again; there is no such step.
const IDLE_TIME: Duration = Duration::from_secs(1);
/// What no sum of a row reaches: 64 contributions below 2^24, on a grid of 2^-32.
pub(super) const SUM_LIMIT: u64 = 1 << 62;
/// Of answers that may be compared one in so many is, and the share of the time that it may take.
const AUDIT_DRAWS: u64 = 4;
const AUDIT_SHARE: u64 = 50;
/// Experts of which one that belongs to a worker is chosen to try it.
const PROBE_DRAWS: usize = 256;
/// Rows of each expert by which a worker is tried.
const PROBED_ROWS: usize = 3;
/// What an older program in another language must be told to come close.
const OTHER_PROGRAM: &str = "a worker of the C engine comes close only with --activations f32 \
    here and IDOT=0 I4S=1 COLI_NO_FUSED_PAIR=1 SPEC_PIN=0 XEXP=0 I4_ACC512=0 I3_AVX512=0 DRAFT=0 \
    COLI_CUDA=0 COLI_METAL=0 COLI_VULKAN=0 there, and is used with --allow-inexact-peers only";

/// Which requests are computed here too, and compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Audit {
    /// None.
    Off,
    /// Of workers whose weights were not all compared by hashes, as many as a fiftieth of the time
    /// for routed experts allows.
    Unverified,
    /// One in so many, which is not 0, of all workers.
    OneIn(u64),
}

/// How a coordinator is made.
#[derive(Clone)]
pub struct CoordinatorOptions {
    /// Workers, `host:port` each.
    pub workers: Vec<String>,
    /// Where experts belong, against the even placement.
    pub rules: Vec<Rule>,
    /// Which requests are computed here too, and compared.
    pub audit: Audit,
    /// Time for a request to a worker of which nothing is known yet, and least time for any.
    pub request_time: Duration,
    /// The key of the cluster: with one, nothing passes that is not encrypted.
    pub key: Option<Key>,
    /// The only protocol version to speak; `None` speaks what a worker speaks, version 1 without a
    /// key only.
    pub version: Option<Version>,
    /// Whether workers of version 1 are used whose outputs are only nearly this machine's. Results
    /// are then not exact.
    pub allow_inexact: bool,
    /// Whether routing weights are sent along where sums are fewer bytes than outputs.
    pub partial_sums: bool,
    /// Calls after which the number of experts that stay here is looked at again.
    pub hot_window_calls: u64,
    /// Whether another worker is asked too when one is late.
    pub hedge: bool,
    /// Whether experts that are chosen most often stay here, as far as memory and time allow.
    pub keep_hot: bool,
    /// Is told when workers come, fail and come back.
    pub notice: Notice,
}

/// What was computed where, in rows per expert that served them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RowCounts {
    /// By workers.
    pub remote: u64,
    /// Here; with those by workers they are all.
    pub local: u64,
    /// Of all, those whose first worker failed.
    pub failed_over: u64,
    /// Of all, those for which another worker was asked too, because the first one was late.
    pub hedged: u64,
    /// Of those by workers, rows of which a request had failed before.
    pub recovered: u64,
    /// Of those by workers, rows whose outputs came as sums.
    pub summed: u64,
    /// Here too, to compare.
    pub audited: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    remote: AtomicU64,
    local: AtomicU64,
    failed_over: AtomicU64,
    hedged: AtomicU64,
    recovered: AtomicU64,
    summed: AtomicU64,
    audited: AtomicU64,
    /// Bytes of requests and answers, as messages have them.
    bytes: AtomicU64,
    steps: AtomicU64,
    /// Ids of requests.
    ids: AtomicU64,
    /// Draws for the audit so far, from a number that differs from run to run.
    draws: AtomicU64,
    /// Whether a worker whose outputs are only nearly right is used.
    inexact: AtomicBool,
    wait_ns: AtomicU64,
    /// Time for routed experts, and of that for comparing answers.
    compute_ns: AtomicU64,
    audit_ns: AtomicU64,
}

impl Counters {
    /// An id that no request had before.
    pub fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// What came of a request of a step.
pub struct Reply {
    /// Number of the request within the step.
    pub number: usize,
    /// The answer, if there was one.
    pub answer: Option<Box<Answer>>,
}

/// Whoever carries out what a step wants: over TCP, or in a simulation.
pub trait Peers {
    /// The time.
    fn now(&self) -> Instant;

    /// Sends a request to a worker by a deadline. A reply with `number` comes from
    /// [`Peers::wait`], also when it could not be sent.
    fn ask(&self, worker: usize, number: usize, request: Request, deadline: Instant);

    /// Tells a worker that an answer is not wanted any more.
    fn cancel(&self, worker: usize, id: u64);

    /// Ends the connection with a worker that did not answer in time.
    fn close(&self, worker: usize);

    /// Waits for a reply, at most until some time.
    fn wait(&self, until: Instant) -> Option<Reply>;
}

/// A request that was sent.
struct Sent {
    id: u64,
    /// Distinct rows of the batch, where sums were asked for.
    rows: Vec<u32>,
}

/// Outputs that have come and are to be added.
pub(super) struct Answered {
    worker: usize,
    /// Number of the request.
    number: usize,
    /// Places of the experts whose outputs count.
    pub experts: Vec<usize>,
    pub answer: Box<Answer>,
}

/// What a worker is tried by.
pub struct Probe {
    worker: usize,
    layer: usize,
    item: Item,
}

/// Why a worker is not used.
pub enum Unfit {
    /// Its outputs are wrong.
    Wrong(String),
    /// It could not say.
    Failed(String),
}

/// What a coordinator knows and decides.
pub struct Core {
    pub(super) options: CoordinatorOptions,
    pub(super) hello: Arc<Hello>,
    pub(super) local: Arc<LocalExperts>,
    pub(super) compute: Compute,
    fleet: Mutex<Fleet>,
    hot: Mutex<Hot>,
    counters: Counters,
}

impl Core {
    /// A coordinator of these workers with the experts of this machine, all of them. `seed` must
    /// not be known to workers: it says which answers are compared.
    pub fn new(
        config: &Config,
        local: Arc<LocalExperts>,
        compute: &Compute,
        options: CoordinatorOptions,
        seed: u64,
    ) -> Core {
        let rules = options.rules.clone();
        let mut fleet = Fleet::new(&options.workers, rules, options.request_time);
        fleet.hedges = options.hedge;
        fleet.expert_bytes = local.table().slot_bytes_max();
        let hello = Hello {
            facts: Facts {
                isa: compute.isa.level().to_string(),
                threads: compute.team.threads() as u32,
                ..Facts::new(config, compute.activations)
            },
            holdings: Arc::new(Holdings::of(&local, config)),
            shape: Shape::of(config),
            key: options.key.clone(),
        };
        let table = local.table();
        let experts: Vec<usize> = (0..table.layers()).map(|layer| table.places(layer)).collect();
        let fit = match options.keep_hot {
            true => local.capacity_bytes() / table.slot_bytes_max().max(1),
            false => 0,
        };
        let hot = Hot::new(&experts, fit as usize, options.hot_window_calls);
        Core {
            hot: Mutex::new(hot),
            options,
            hello: Arc::new(hello),
            local,
            compute: compute.clone(),
            fleet: Mutex::new(fleet),
            counters: Counters { draws: AtomicU64::new(seed), ..Counters::default() },
        }
    }

    /// What is known of the workers.
    pub fn fleet(&self) -> MutexGuard<'_, Fleet> {
        self.fleet.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hot(&self) -> MutexGuard<'_, Hot> {
        self.hot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What every worker is told.
    pub fn hello(&self) -> &Arc<Hello> {
        &self.hello
    }

    /// The experts of this machine.
    pub fn local(&self) -> &LocalExperts {
        &self.local
    }

    /// The name of a worker.
    pub fn name(&self, at: usize) -> String {
        self.fleet().peers()[at].name.clone()
    }

    pub(super) fn notice(&self, at: usize, text: &str) {
        (self.options.notice)(&format!("worker {} {text}", self.name(at)));
    }

    /// What was computed where.
    pub fn rows(&self) -> RowCounts {
        let counters = &self.counters;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RowCounts {
            remote: load(&counters.remote),
            local: load(&counters.local),
            failed_over: load(&counters.failed_over),
            hedged: load(&counters.hedged),
            recovered: load(&counters.recovered),
            summed: load(&counters.summed),
            audited: load(&counters.audited),
        }
    }

    /// Bytes of requests and answers so far, encryption not counted.
    pub fn wire_bytes(&self) -> u64 {
        self.counters.bytes.load(Ordering::Relaxed)
    }

    /// Experts that stay here because they are chosen most often.
    pub fn kept_here(&self) -> usize {
        self.hot().len()
    }

    /// Seconds that steps waited for workers.
    pub fn waited_s(&self) -> f64 {
        self.counters.wait_ns.load(Ordering::Relaxed) as f64 * 1e-9
    }

    /// A worker failed: says so once. Returns when it is tried again.
    pub fn leave(&self, at: usize, why: &str, now: Instant) -> Instant {
        let (retry_at, news) = self.fleet().failed(at, why, now);
        if news {
            let name = self.name(at);
            (self.options.notice)(&format!(
                "worker {name}: {why}; its experts are computed elsewhere until it is back"
            ));
        }
        retry_at
    }

    /// The connection of a worker has ended. Returns when it is tried again.
    pub fn ended(&self, at: usize, why: &str, now: Instant) -> Instant {
        // One that was left has its time already.
        let known = match self.fleet().peers()[at].state {
            State::Sick { retry_at } => Some(retry_at),
            _ => None,
        };
        known.unwrap_or_else(|| self.leave(at, why, now))
    }

    /// A worker is wrong: it is never asked again, and that is said once.
    pub fn quarantine(&self, at: usize, why: &str) {
        let is_news = self.fleet().quarantine(at, why);
        if is_news {
            let other = match self.fleet().version(at) {
                Version::One => format!(" ({OTHER_PROGRAM})"),
                Version::Two => String::new(),
            };
            (self.options.notice)(&format!(
                "worker {} is not used any more: {why}; both must have the same model and the same \
                 --activations, {} here{other}",
                self.name(at),
                self.compute.activations
            ));
        }
    }

    /// A worker takes no further requests.
    pub fn draining(&self, at: usize) {
        if !self.fleet().draining(at) {
            return;
        }
        self.notice(at, "is ending; its experts are computed elsewhere until it is back");
    }

    /// A worker says what it is. Returns what is to be said of it once it is used.
    pub fn greeted(&self, at: usize, version: Version, event: Event) -> String {
        let Event::Joined { facts, holdings, compared } = event else { return String::new() };
        let (held, facts) = (holdings.len(), facts.map(|facts| *facts));
        let said = match (&facts, compared) {
            (None, _) => " (version 1, by comparing outputs)".to_owned(),
            (_, 0) => format!(" with {held} experts (no hashes; outputs were compared)"),
            (_, compared) if compared == held => format!(" with {held} experts"),
            (_, compared) => format!(" with {held} experts, {compared} of them with hashes"),
        };
        let holdings = facts.is_some().then_some(holdings);
        let verified = compared == held && held > 0;
        self.fleet().greeted(at, version, facts, holdings, verified);
        said
    }

    /// A request by which to try a worker: rows that nobody can foresee for an expert that it would
    /// get, or might. `None` when it holds none.
    pub fn probe(
        &self,
        at: usize,
        version: Version,
        noise: &mut impl FnMut() -> u64,
    ) -> Option<(Probe, Request)> {
        let shape = self.hello.shape;
        let hidden = shape.hidden as usize;
        let (mine, time) = {
            let fleet = self.fleet();
            let all: Vec<ExpertKey> = self.local.table().keys().collect();
            // Some at random: of a large model with many workers it would take long to look at all.
            let drawn = |noise: &mut dyn FnMut() -> u64| {
                all.get((noise() % all.len().max(1) as u64) as usize).copied()
            };
            let some: Vec<ExpertKey> = (0..PROBE_DRAWS).filter_map(|_| drawn(noise)).collect();
            let belongs = |key: &&ExpertKey| fleet.belongs(at, key.0 as usize, key.1);
            let mut mine: Vec<ExpertKey> = some.iter().filter(belongs).copied().collect();
            if mine.is_empty() {
                // It gets what others cannot do.
                mine = all.into_iter().filter(|key| fleet.has(at, *key)).collect();
            }
            let one = Size { experts: 1, rows: PROBED_ROWS as u64, row_bytes: 0 };
            (mine, fleet.deadline(at, one))
        };
        let (layer, expert) = *mine.get((noise() % mine.len().max(1) as u64) as usize)?;
        // Between -1 and 1.
        let mut value = || (noise() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        let values: Vec<f32> = (0..PROBED_ROWS * hidden).map(|_| value()).collect();
        let rows: Vec<u32> = (0..PROBED_ROWS as u32).collect();
        let item = ExpertRows { expert, rows: &rows, weights: &[1.0; PROBED_ROWS] };
        let time_ms = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        let (id, items) = (self.counters.next_id(), std::iter::once(item));
        let request = Request::new(version, &shape, id, (layer, time_ms, false), items, &values);
        let item = Item { expert, rows: values };
        Some((Probe { worker: at, layer: layer as usize, item }, request))
    }

    /// Whether a difference of a worker is one that was allowed.
    fn is_tolerated(&self, at: usize, difference: &Difference) -> bool {
        self.options.allow_inexact
            && difference.is_small()
            && self.fleet().version(at) == Version::One
    }

    /// Whether results may depend on who computed them.
    pub fn is_inexact(&self) -> bool {
        self.counters.inexact.load(Ordering::Relaxed)
    }

    /// Time for a worker to answer a probe.
    pub fn probe_time(&self, at: usize) -> Duration {
        self.fleet().deadline(at, Size { experts: 1, rows: PROBED_ROWS as u64, row_bytes: 0 })
    }

    /// Compares an answer to a probe with this machine's own.
    pub fn check_probe(&self, probe: &Probe, answer: &Answer) -> Result<(), Unfit> {
        let theirs = match &answer.outputs {
            _ if answer.statuses != [Status::Computed] => {
                let text = answer.statuses.first().map_or("nothing", |status| status.text());
                let (layer, expert) = (probe.layer, probe.item.expert);
                return Err(Unfit::Failed(format!("layer {layer}, expert {expert}: {text}")));
            }
            Outputs::Rows(rows) => &rows[..],
            Outputs::Sums(_) => &[],
        };
        let (shape, item) = (self.hello.shape, &probe.item);
        let hidden = shape.hidden as usize;
        let mut ours = vec![0.0; item.rows.len()];
        let deliver = &mut |row: usize, output: &[f32]| {
            ours[row * hidden..][..hidden].copy_from_slice(output);
        };
        let items = std::slice::from_ref(item);
        compute_items(&self.local, &self.compute, shape, probe.layer, items, deliver)
            .map_err(|error| Unfit::Failed(format!("its outputs cannot be compared: {error}")))?;
        match Difference::between(probe.layer, item.expert, theirs, &ours, hidden) {
            Some(difference) if self.is_tolerated(probe.worker, &difference) => {
                if !self.counters.inexact.swap(true, Ordering::Relaxed) {
                    let what = format!(
                        "is only nearly exact: {difference}; with --allow-inexact-peers it is \
                         used, and answers depend on what it computes"
                    );
                    self.notice(probe.worker, &what);
                }
                Ok(())
            }
            Some(difference) => Err(Unfit::Wrong(difference.to_string())),
            None => Ok(()),
        }
    }

    /// Does what a step says is to be done.
    fn carry_out(
        &self,
        step: &mut Step,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sent: &mut Vec<Sent>,
        peers: &dyn Peers,
    ) {
        let Core { hello, counters, options, .. } = self;
        let shape = &hello.shape;
        for action in step.take_actions() {
            match action {
                Action::Ask { number, worker, experts, time } => {
                    let deadline = peers.now() + time;
                    let id = counters.next_id();
                    let version = self.fleet().version(worker);
                    let items = experts.iter().map(|at| batch.rows_of(*at));
                    let most = self.fleet().limits(worker).bytes;
                    let sum_bytes = u64::from(shape.hidden) * size_of::<i64>() as u64;
                    let sums = options.partial_sums
                        && less_as_sums(items.clone())
                            .is_some_and(|rows| rows as u64 * sum_bytes <= most);
                    let time_ms = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
                    let head = (layer as u32, time_ms, sums);
                    let values = batch.input.values();
                    let mut request = Request::new(version, shape, id, head, items, values);
                    counters.bytes.fetch_add(request.bytes(), Ordering::Relaxed);
                    let rows = if sums { std::mem::take(&mut request.rows) } else { Vec::new() };
                    sent.push(Sent { id, rows });
                    self.fleet().asked(worker, id, experts.len(), deadline, time);
                    peers.ask(worker, number, request, deadline);
                }
                Action::Cancel { number, worker } => {
                    peers.cancel(worker, sent[number].id);
                }
                Action::Draining { worker } => self.draining(worker),
                Action::Leave { worker, why } => {
                    let is_ready = self.fleet().peers()[worker].state == State::Ready;
                    if is_ready {
                        self.leave(worker, &why, peers.now());
                        peers.close(worker);
                    }
                }
            }
        }
    }

    /// A request was answered, whether or not anybody waits for that.
    pub fn closed(&self, at: usize, id: u64) {
        self.fleet().closed(at, id);
    }

    /// Leaves workers that have not answered by their deadline. Returns them.
    fn leave_overdue(&self, peers: &dyn Peers, now: Instant) -> Vec<usize> {
        let mut left = Vec::new();
        loop {
            let overdue = self.fleet().overdue(now);
            let Some((at, time)) = overdue else { return left };
            let why = format!("it did not answer within {:.1} s", time.as_secs_f64());
            self.leave(at, &why, now);
            peers.close(at);
            left.push(at);
        }
    }

    /// Adds the weighted outputs of a layer's experts to `sum`, as [`ExpertBackend::compute`] says.
    pub fn compute(
        &self,
        peers: &dyn Peers,
        compute: &Compute,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sum: &mut [i64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExpertError> {
        let Core { local, counters, hello, .. } = self;
        let count_of = |experts: &[usize]| {
            experts.iter().map(|at| batch.rows_of(*at).rows.len() as u64).sum::<u64>()
        };
        let wanted = |of: ExpertRows<'_>| Wanted { expert: of.expert, rows: of.rows.len() as u32 };
        let row_bytes = u64::from(hello.shape.hidden) * size_of::<f32>() as u64;
        let steps = counters.steps.fetch_add(1, Ordering::Relaxed) + 1;
        self.leave_overdue(peers, peers.now());
        let mut step = {
            let mut fleet = self.fleet();
            if steps.is_multiple_of(REWEIGH_STEPS) {
                fleet.reweigh();
            }
            let mut hot = self.hot();
            // Rules come first.
            let is_free = |expert: &u32| !fleet.is_ruled(layer, *expert);
            hot.chosen(layer, batch.experts().iter().copied().filter(is_free));
            let stays = |expert| hot.stays(layer, expert) && is_free(&expert);
            let wanted = batch.iter().map(wanted).collect();
            Step::new(&fleet, layer, wanted, row_bytes, stays, peers.now())
        };
        let mut sent: Vec<Sent> = Vec::new();
        self.carry_out(&mut step, layer, batch, &mut sent, peers);
        let is_among =
            |places: &[usize], expert: u32| places.iter().any(|at| batch.experts()[*at] == expert);
        let here = step.here();
        counters.local.fetch_add(count_of(&here), Ordering::Relaxed);
        let part = batch.part(&compute.scratch, |expert| is_among(&here, expert));
        let begun = peers.now();
        local.compute(compute, layer, &part, sum, meanwhile)?;
        let computed = peers.now().duration_since(begun);
        let mut waited_for = Duration::ZERO;
        // Answers are added when all have come: a worker that is found wrong meanwhile is not
        // believed in anything.
        let mut answers: Vec<Answered> = Vec::new();
        while !step.is_done() {
            let started = peers.now();
            // Also for those whose answers are not wanted any more.
            let times = [step.next_time(), self.fleet().next_deadline()];
            let until = times.into_iter().flatten().min().unwrap_or(started + IDLE_TIME);
            let reply = peers.wait(until);
            let now = peers.now();
            waited_for += now.duration_since(started);
            for at in self.leave_overdue(peers, now) {
                step.lost(&self.fleet(), at, now);
            }
            match reply {
                Some(Reply { number, answer: Some(answer) })
                    if matches!(answer.outputs, Outputs::Sums(_))
                        && !step.is_wanted_whole(number, &answer.statuses) =>
                {
                    // Another answer has had a part of what is added up in this one.
                    step.failed(&self.fleet(), number, now);
                }
                Some(Reply { number, answer: Some(answer) }) => {
                    let experts = {
                        let mut fleet = self.fleet();
                        step.answered(&mut fleet, number, &answer.statuses, now)
                    };
                    counters.bytes.fetch_add(answer.bytes(), Ordering::Relaxed);
                    let worker = step.worker_of(number);
                    let answered = Answered { worker, number, experts, answer };
                    answers.extend(self.accept(&step, layer, batch, &sent, answered, peers)?);
                }
                Some(Reply { number, answer: None }) => {
                    self.closed(step.worker_of(number), sent[number].id);
                    step.failed(&self.fleet(), number, now);
                }
                None => step.time_passed(&self.fleet(), now),
            }
            self.carry_out(&mut step, layer, batch, &mut sent, peers);
        }
        counters.wait_ns.fetch_add(waited_for.as_nanos() as u64, Ordering::Relaxed);
        let all = peers.now().duration_since(begun).as_nanos() as u64;
        counters.compute_ns.fetch_add(all, Ordering::Relaxed);
        self.hot().took(computed, waited_for);
        let mut disbelieved: Vec<usize> = Vec::new();
        #[cfg(feature = "mutations")]
        let several = answers.len() > 1;
        for answered in answers {
            #[cfg(feature = "mutations")]
            let before = sum.to_vec();
            let Answered { worker, number, experts, .. } = &answered;
            let is_wrong = self.fleet().peers()[*worker].state == State::Quarantined;
            let (rows, asked) = (&sent[*number].rows, step.experts_of(*number));
            if !is_wrong && self.add(batch, rows, asked, &answered, sum) {
                let rows = count_of(experts);
                counters.remote.fetch_add(rows, Ordering::Relaxed);
                if matches!(answered.answer.outputs, Outputs::Sums(_)) {
                    counters.summed.fetch_add(rows, Ordering::Relaxed);
                }
                let again: Vec<usize> =
                    experts.iter().copied().filter(|at| step.has_failed(*at)).collect();
                counters.recovered.fetch_add(count_of(&again), Ordering::Relaxed);
            } else {
                disbelieved.extend((!is_wrong).then_some(*worker));
                step.disbelieve(experts);
            }
            #[cfg(feature = "mutations")]
            if several && crate::mutation::is(crate::mutation::Mutation::FloatSums) {
                crate::mutation::add_as_floats(sum, &before);
            }
        }
        let left_over = step.left_over();
        if !left_over.is_empty() {
            counters.local.fetch_add(count_of(&left_over), Ordering::Relaxed);
            let part = batch.part(&compute.scratch, |expert| is_among(&left_over, expert));
            local.compute(compute, layer, &part, sum, &mut || {})?;
        }
        counters.failed_over.fetch_add(step.failed_rows, Ordering::Relaxed);
        counters.hedged.fetch_add(step.hedged_rows, Ordering::Relaxed);
        // This machine's own outputs were within the range of the sum.
        for worker in disbelieved {
            let why = format!("an output of layer {layer} is beyond the range of the sum");
            self.quarantine(worker, &why);
        }
        Ok(())
    }

    /// An answer of which anything is to be added. It is compared with this machine's own when it
    /// is drawn for that.
    fn accept(
        &self,
        step: &Step,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sent: &[Sent],
        answered: Answered,
        peers: &dyn Peers,
    ) -> Result<Option<Answered>, ExpertError> {
        let Core { counters, options, .. } = self;
        if answered.experts.is_empty() {
            return Ok(None);
        }
        // No worker can foresee which of its answers are compared.
        let draw = mix(counters.draws.fetch_add(1, Ordering::Relaxed));
        let is_audited = match options.audit {
            Audit::Off => false,
            Audit::OneIn(requests) => draw.is_multiple_of(requests.max(1)),
            Audit::Unverified => {
                let spent = counters.audit_ns.load(Ordering::Relaxed);
                let all = counters.compute_ns.load(Ordering::Relaxed);
                draw.is_multiple_of(AUDIT_DRAWS)
                    && spent <= all / AUDIT_SHARE
                    && !self.fleet().is_verified(answered.worker)
            }
        };
        if is_audited {
            let begun = peers.now();
            let rows = answered.experts.iter().map(|at| batch.rows_of(*at).rows.len() as u64);
            counters.audited.fetch_add(rows.sum(), Ordering::Relaxed);
            let (rows, asked) = (&sent[answered.number].rows, step.experts_of(answered.number));
            let found = self.difference(batch, layer, rows, asked, &answered)?;
            if let Some(difference) = found
                && !self.is_tolerated(answered.worker, &difference)
            {
                self.quarantine(answered.worker, &difference.to_string());
            }
            let took = peers.now().duration_since(begun).as_nanos() as u64;
            counters.audit_ns.fetch_add(took, Ordering::Relaxed);
        }
        Ok(Some(answered))
    }
}

/// The number of distinct rows, where sums of them and weights for that are fewer bytes than
/// outputs.
fn less_as_sums<'a>(items: impl Iterator<Item = ExpertRows<'a>> + Clone) -> Option<usize> {
    let mut rows: Vec<u32> = items.flat_map(|item| item.rows).copied().collect();
    let outputs = rows.len();
    rows.sort_unstable();
    rows.dedup();
    (rows.len() * 2 < outputs).then_some(rows.len())
}
