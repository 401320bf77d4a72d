//! The threads of a coordinator: for each worker one that connects and sends, and one that reads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::core::{Core, Unfit};
use super::fleet::State;
use super::link::{Link, LinkError, Waiting};
use super::placement::mix;
use crate::session::coordinator::{Event, Request, Version};

/// Experts by which a worker is tried when it joins.
const PROBED_EXPERTS: usize = 2;
/// Rest after which a worker is asked whether it is there, and time for it to say so.
const PING_EVERY: Duration = Duration::from_secs(10);
const PONG_TIME: Duration = Duration::from_secs(10);
/// What the threads of a coordinator share.
pub(super) struct Shared {
    pub core: Core,
    /// A worker has joined or failed to.
    pub joined: Condvar,
    /// Of each worker.
    ends: RwLock<Vec<End>>,
    pub threads: Mutex<Vec<JoinHandle<()>>>,
    stopping: AtomicBool,
}

/// A worker, as seen from here.
struct End {
    /// Reaches its thread.
    jobs: Sender<Job>,
    /// Its connection, while there is one.
    link: Mutex<Option<Arc<Link>>>,
}

/// Something for the thread of a worker.
pub(super) enum Job {
    /// A request, and who waits for its answer.
    Ask { request: Box<Request>, waiting: Waiting, deadline: Instant },
    /// An answer that is not wanted any more.
    Cancel(u64),
    /// The connection of this number has ended.
    Ended(u64, LinkError),
    /// What the connection of this number has to say is to be sent.
    Flush(u64),
    /// The coordinator ends.
    Stop,
}

impl Shared {
    /// A coordinator's workers, each with its thread.
    pub fn new(core: Core) -> Arc<Shared> {
        let names: Vec<String> =
            core.fleet().peers().iter().map(|peer| peer.name.clone()).collect();
        let shared = Arc::new(Shared {
            core,
            joined: Condvar::new(),
            ends: RwLock::default(),
            threads: Mutex::default(),
            stopping: AtomicBool::new(false),
        });
        names.iter().for_each(|name| shared.add(name));
        shared
    }

    /// Adds a worker, unless it is there already.
    pub fn add(self: &Arc<Self>, name: &str) {
        if self.is_stopping() {
            return;
        }
        let mut ends = self.ends.write().unwrap_or_else(PoisonError::into_inner);
        let at = self.core.fleet().add(name);
        if at < ends.len() {
            return;
        }
        let (sender, receiver) = channel();
        ends.push(End { jobs: sender.clone(), link: Mutex::default() });
        drop(ends);
        let shared = self.clone();
        let spawned = thread::Builder::new()
            .name(format!("coli-worker-{at}"))
            .spawn(move || shared.run(at, &receiver, &sender));
        match spawned {
            Ok(thread) => self.keep(thread),
            // Without its thread a worker never joins.
            Err(error) => {
                self.leave(at, &error.to_string());
            }
        }
    }

    /// Keeps a thread, to be waited for at the end.
    pub fn keep(&self, thread: JoinHandle<()>) {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
    }

    fn ends(&self) -> RwLockReadGuard<'_, Vec<End>> {
        self.ends.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the thread of a worker something to do; the job comes back when there is none.
    pub fn send(&self, at: usize, job: Job) -> Result<(), Job> {
        self.ends()[at].jobs.send(job).map_err(|failed| failed.0)
    }

    /// Ends all threads.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        for end in &*self.ends() {
            // One that has ended needs no telling.
            let _ = end.jobs.send(Job::Stop);
        }
    }

    /// Whether the coordinator ends.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// A worker failed. Returns when it is tried again.
    pub fn leave(&self, at: usize, why: &str) -> Instant {
        let retry_at = self.core.leave(at, why, Instant::now());
        self.joined.notify_all();
        retry_at
    }

    /// Ends the connection with a worker.
    pub fn close(&self, at: usize) {
        let link = self.ends()[at].link.lock().unwrap_or_else(PoisonError::into_inner).clone();
        link.into_iter().for_each(|link| link.close());
    }

    fn set_link(&self, at: usize, link: Option<Arc<Link>>) {
        *self.ends()[at].link.lock().unwrap_or_else(PoisonError::into_inner) = link;
    }

    /// The thread of one worker: connects, sends, and tries again after failures. `own` reaches it.
    pub fn run(self: Arc<Self>, at: usize, jobs: &Receiver<Job>, own: &Sender<Job>) {
        let mut link: Option<Arc<Link>> = None;
        let mut retry_at = Some(Instant::now());
        let mut number = 0;
        let mut pinged_at: Option<Instant> = None;
        loop {
            let is_wrong = self.core.fleet().peers()[at].state == State::Quarantined;
            if is_wrong {
                link.take().into_iter().for_each(|link| link.close());
                self.set_link(at, None);
                retry_at = None;
            }
            if self.is_stopping() {
                break;
            }
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
                    link.ask(*request, waiting, deadline).err()
                }
                (Ok(Job::Ask { waiting, .. }), None) => {
                    waiting.tell(None);
                    None
                }
                (Ok(Job::Cancel(id)), Some(link)) => {
                    link.cancel(id, Instant::now() + PONG_TIME).err()
                }
                (Ok(Job::Flush(of)), Some(link)) if of == number => {
                    link.flush(Instant::now() + PONG_TIME).err()
                }
                (Ok(Job::Ended(of, why)), Some(_)) if of == number => Some(why),
                (Ok(Job::Ended(..) | Job::Flush(_) | Job::Cancel(_)), _) => None,
                (Ok(Job::Stop) | Err(RecvTimeoutError::Disconnected), _) => break,
                (Err(RecvTimeoutError::Timeout), Some(link)) => ping(link, &mut pinged_at),
                (Err(RecvTimeoutError::Timeout), None) => None,
            };
            if let Some(why) = failed {
                retry_at = Some(self.core.ended(at, &why.to_string(), Instant::now()));
                link.take().into_iter().for_each(|link| link.close());
                self.set_link(at, None);
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
            Ok((link, said)) => {
                let link = Arc::new(link);
                let (shared, reading, own) = (self.clone(), link.clone(), own.clone());
                let spawned = thread::Builder::new().name(format!("coli-worker-{at}-read")).spawn(
                    move || {
                        let draining = || shared.core.draining(at);
                        // Whoever reads never waits for what is written.
                        let flush = || drop(own.send(Job::Flush(number)));
                        let why = reading.read(draining, |id| shared.core.closed(at, id), flush);
                        let _ = own.send(Job::Ended(number, why));
                    },
                );
                if let Err(error) = spawned {
                    return (None, Some(self.leave(at, &error.to_string())));
                }
                self.set_link(at, Some(link.clone()));
                if !self.core.fleet().ready(at) {
                    link.close();
                    return (None, None);
                }
                self.joined.notify_all();
                self.core.notice(at, &format!("is ready{said}"));
                (Some(link), None)
            }
            Err(Unfit::Wrong(difference)) => {
                self.core.quarantine(at, &difference);
                self.joined.notify_all();
                (None, None)
            }
            Err(Unfit::Failed(why)) => (None, Some(self.leave(at, &why))),
        }
    }

    /// Connects to a worker and compares what it is, and some of its outputs. Returns what is to be
    /// said of it.
    fn join(&self, at: usize) -> Result<(Link, String), Unfit> {
        let failed = |error: LinkError| Unfit::Failed(error.to_string());
        let (hello, options) = (self.core.hello(), &self.core.options);
        let (name, only, time) = (self.core.name(at), options.version, options.request_time);
        let (link, event) = Link::connect(&name, hello, only, time).map_err(failed)?;
        if let Event::Joined { facts: Some(_), holdings, .. } = &event
            && holdings.is_empty()
        {
            return Err(Unfit::Failed("it holds no experts".to_owned()));
        }
        let said = self.core.greeted(at, link.version(), event);
        if self.core.fleet().is_given_what_it_lacks(at, self.core.local().table().keys()) {
            let what = "does not hold all that --place gives it; the rest is computed here";
            self.core.notice(at, what);
        }
        // Others than the first comparison must find a mistake that is made on purpose.
        #[cfg(feature = "mutations")]
        if crate::mutation::name().is_some() {
            return Ok((link, said));
        }
        let mut noise = mix(u64::from(std::process::id()) ^ entropy());
        let mut next = || {
            noise = mix(noise);
            noise
        };
        for _ in 0..PROBED_EXPERTS {
            let Some((probe, request)) = self.core.probe(at, link.version(), &mut next) else {
                break;
            };
            let deadline = Instant::now() + self.core.probe_time(at);
            let answer = link.answer(request, deadline).map_err(failed)?;
            self.core.check_probe(&probe, &answer)?;
        }
        Ok((link, said))
    }
}

/// Asks a worker that rests whether it is there; an error when it has not said so.
fn ping(link: &Link, pinged_at: &mut Option<Instant>) -> Option<LinkError> {
    let silent = link.silent();
    if link.version() == Version::One {
        // Nothing in it asks whether a worker is there; the system finds out.
        return None;
    }
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
