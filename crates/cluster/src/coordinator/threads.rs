//! The threads of a coordinator: for each worker one that connects and sends, and one that reads.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use experts::{ExpertError, ExpertRows, LocalExperts};
use numerics::Compute;

use super::difference::Difference;
use super::fleet::{Fleet, State};
use super::link::{Link, LinkError, Waiting};
use super::placement::mix;
use super::{CoordinatorOptions, Counters};
use crate::items::compute_items;
use crate::session::coordinator::{Event, Hello, Request};
use crate::wire::v1::Item;
use crate::wire::v2::{Outputs, Status};

/// Experts that a worker is asked for when it joins, and rows of each.
const PROBED_EXPERTS: usize = 2;
const PROBED_ROWS: usize = 3;
/// Rest after which a worker is asked whether it is there, and time for it to say so.
const PING_EVERY: Duration = Duration::from_secs(10);
const PONG_TIME: Duration = Duration::from_secs(10);
/// What an older program in another language must be told to come close.
const OTHER_PROGRAM: &str = "a worker of the C engine comes close only with --activations f32 \
    here and IDOT=0 I4S=1 COLI_NO_FUSED_PAIR=1 SPEC_PIN=0 XEXP=0 I4_ACC512=0 I3_AVX512=0 DRAFT=0 \
    COLI_CUDA=0 COLI_METAL=0 COLI_VULKAN=0 there, and is not used all the same";

/// What the threads of a coordinator share.
pub(super) struct Shared {
    pub options: CoordinatorOptions,
    pub hello: Arc<Hello>,
    pub local: Arc<LocalExperts>,
    pub compute: Compute,
    pub fleet: Mutex<Fleet>,
    /// Connections of the workers that have one.
    pub links: Vec<Mutex<Option<Arc<Link>>>>,
    /// A worker has joined or failed to.
    pub joined: Condvar,
    pub counters: Counters,
}

/// Something for the thread of a worker.
pub(super) enum Job {
    /// A request, and who waits for its answer.
    Ask { request: Request, waiting: Waiting, deadline: Instant },
    /// An answer that is not wanted any more.
    Cancel(u64),
    /// The connection of this number has ended.
    Ended(u64, LinkError),
    /// The coordinator ends.
    Stop,
}

/// Why a worker did not join.
enum Refused {
    Link(LinkError),
    Wrong(Difference),
    Status(Status),
    Here(ExpertError),
}

impl Shared {
    pub fn fleet(&self) -> MutexGuard<'_, Fleet> {
        self.fleet.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self, at: usize) -> &str {
        &self.options.workers[at]
    }

    /// A worker failed: says so once, and when it is tried again.
    pub fn leave(&self, at: usize, why: &str) -> Instant {
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

    pub fn quarantine(&self, at: usize, why: &str) {
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

    /// Ends the connection with a worker.
    pub fn close(&self, at: usize) {
        let link = self.links[at].lock().unwrap_or_else(PoisonError::into_inner).clone();
        link.into_iter().for_each(|link| link.close());
    }

    fn set_link(&self, at: usize, link: Option<Arc<Link>>) {
        *self.links[at].lock().unwrap_or_else(PoisonError::into_inner) = link;
    }

    /// The thread of one worker: connects, sends, and tries again after failures. `own` reaches it.
    pub fn run(self: Arc<Self>, at: usize, jobs: &Receiver<Job>, own: &Sender<Job>) {
        let mut link: Option<Arc<Link>> = None;
        let mut retry_at = Some(Instant::now());
        let mut number = 0;
        let mut pinged_at: Option<Instant> = None;
        loop {
            if link.is_none() && retry_at.is_some_and(|at| at <= Instant::now()) {
                number += 1;
                pinged_at = None;
                (link, retry_at) = self.clone().connect(at, number, own);
            }
            // Without a link until the next try, with one until the next ping.
            let timeout = match (&link, retry_at) {
                (Some(_), _) => Some(PING_EVERY),
                (None, Some(at)) => Some(at.saturating_duration_since(Instant::now())),
                (None, None) => None,
            };
            let job = match timeout {
                None => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(timeout) => jobs.recv_timeout(timeout),
            };
            let failed = match (job, &link) {
                (Ok(Job::Ask { request, waiting, deadline }), Some(link)) => {
                    link.ask(request, waiting, deadline).err()
                }
                (Ok(Job::Ask { waiting, .. }), None) => {
                    waiting.tell(None);
                    None
                }
                (Ok(Job::Cancel(id)), Some(link)) => {
                    link.cancel(id, Instant::now() + PONG_TIME).err()
                }
                (Ok(Job::Ended(of, why)), Some(_)) if of == number => Some(why),
                (Ok(Job::Ended(..) | Job::Cancel(_)), _) => None,
                (Ok(Job::Stop) | Err(RecvTimeoutError::Disconnected), _) => break,
                (Err(RecvTimeoutError::Timeout), Some(link)) => ping(link, &mut pinged_at),
                (Err(RecvTimeoutError::Timeout), None) => None,
            };
            if let Some(why) = failed {
                retry_at = Some(self.leave(at, &why.to_string()));
                link.take().into_iter().for_each(|link| link.close());
                self.set_link(at, None);
            }
            // A worker that was found wrong meanwhile is left.
            if link.is_some() && self.fleet().peers()[at].state == State::Quarantined {
                link.take().into_iter().for_each(|link| link.close());
                self.set_link(at, None);
                retry_at = None;
            }
        }
        link.into_iter().for_each(|link| link.close());
    }

    /// Tries to join a worker: its connection, or when to try again.
    fn connect(
        self: Arc<Self>,
        at: usize,
        number: u64,
        own: &Sender<Job>,
    ) -> (Option<Arc<Link>>, Option<Instant>) {
        match self.join(at) {
            Ok((link, compared)) => {
                let link = Arc::new(link);
                let (shared, reading, own) = (self.clone(), link.clone(), own.clone());
                let spawned = thread::Builder::new().name(format!("coli-worker-{at}-read")).spawn(
                    move || {
                        let why = reading.read(|| shared.is_draining(at));
                        let _ = own.send(Job::Ended(number, why));
                    },
                );
                if let Err(error) = spawned {
                    return (None, Some(self.leave(at, &error.to_string())));
                }
                self.set_link(at, Some(link.clone()));
                if !self.fleet().ready(at) {
                    link.close();
                    return (None, None);
                }
                self.joined.notify_all();
                (self.options.notice)(&format!("worker {} is ready{compared}", self.name(at)));
                (Some(link), None)
            }
            Err(Refused::Wrong(difference)) => {
                self.quarantine(at, &difference.to_string());
                (None, None)
            }
            Err(Refused::Link(error)) => (None, Some(self.leave(at, &error.to_string()))),
            Err(Refused::Status(status)) => {
                let why = format!("it cannot compute: {}", status.text());
                (None, Some(self.leave(at, &why)))
            }
            Err(Refused::Here(error)) => {
                let why = format!("its outputs cannot be compared: {error}");
                (None, Some(self.leave(at, &why)))
            }
        }
    }

    fn is_draining(&self, at: usize) {
        self.fleet().draining(at);
        (self.options.notice)(&format!(
            "worker {} is ending; its experts are computed elsewhere until it is back",
            self.name(at)
        ));
    }

    /// Connects to a worker and compares what it is, and some of its outputs. Returns what is to be
    /// said of it.
    fn join(&self, at: usize) -> Result<(Link, String), Refused> {
        let time = self.options.request_time;
        let (link, event) =
            Link::connect(self.name(at), &self.hello, time).map_err(Refused::Link)?;
        let version = link.version();
        let mut said = " (version 1, by comparing outputs)".to_owned();
        if let Event::Joined { facts, holdings, compared } = event {
            let facts = facts.map(|facts| *facts);
            if facts.is_some() {
                said = match (compared, holdings.len()) {
                    (0, held) => format!(" with {held} experts (no hashes; outputs were compared)"),
                    (compared, held) if compared == held => format!(" with {held} experts"),
                    (compared, held) => {
                        format!(" with {held} experts, {compared} of them with hashes")
                    }
                };
            }
            let holdings = facts.is_some().then_some(holdings);
            self.fleet().greeted(at, version, facts, holdings);
        }
        self.probe(at, &link)?;
        Ok((link, said))
    }

    /// Compares outputs of some experts that a worker would get, for rows that nobody can foresee.
    fn probe(&self, at: usize, link: &Link) -> Result<(), Refused> {
        let shape = self.hello.shape;
        let hidden = shape.hidden as usize;
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
            let values: Vec<f32> = (0..PROBED_ROWS * hidden).map(|_| value()).collect();
            let time = self.fleet().deadline(at);
            let rows: Vec<u32> = (0..PROBED_ROWS as u32).collect();
            let item = ExpertRows { expert, rows: &rows, weights: &[1.0; PROBED_ROWS] };
            let head = (layer, u32::try_from(time.as_millis()).unwrap_or(u32::MAX), false);
            let items = std::iter::once(item);
            let id = self.counters.next_id();
            let request = Request::new(link.version(), &shape, id, head, items, &values);
            let answer = link.answer(request, Instant::now() + time).map_err(Refused::Link)?;
            let theirs = match answer.outputs {
                _ if answer.statuses != [Status::Computed] => {
                    return Err(Refused::Status(answer.statuses[0]));
                }
                Outputs::Rows(rows) => rows,
                Outputs::Sums(_) => Vec::new(),
            };
            let mut ours = vec![0.0; values.len()];
            let items = [Item { expert, rows: values }];
            let (compute, layer) = (&self.compute, layer as usize);
            compute_items(&self.local, compute, shape, layer, &items, &mut |row, output| {
                ours[row * hidden..][..hidden].copy_from_slice(output);
            })
            .map_err(Refused::Here)?;
            let found = Difference::between(layer, expert, &theirs, &ours, hidden);
            if let Some(difference) = found {
                return Err(Refused::Wrong(difference));
            }
        }
        Ok(())
    }
}

/// Asks a worker that rests whether it is there; an error when it has not said so.
fn ping(link: &Link, pinged_at: &mut Option<Instant>) -> Option<LinkError> {
    let silent = link.silent();
    if link.is_waiting() || silent < PING_EVERY {
        // Answers have deadlines of their own.
        *pinged_at = None;
        return None;
    }
    match *pinged_at {
        Some(at) if at.elapsed() >= PONG_TIME && silent >= at.elapsed() => Some(LinkError::Silent),
        Some(_) => None,
        None => {
            *pinged_at = Some(Instant::now());
            link.ping(Instant::now() + PONG_TIME).err()
        }
    }
}

/// A number that differs from run to run.
pub(super) fn entropy() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
