//! A worker's TCP server: a thread per connection that reads, and one that computes what a peer of
//! version 2 asks while further messages come. Every message has a deadline from its first byte to
//! its last; between messages a connection may rest as long as it likes, and the system finds out
//! when its peer is gone.

use std::collections::{HashMap, HashSet};
use std::io::{self, ErrorKind, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use experts::{ExpertBackend, ExpertError, Notice};

use super::limits::{Limits, Permit, Permits};
use super::{Counters, Counts, Worker};
use crate::session::SessionError;
use crate::session::worker::{Welcome, Wish, WorkerSession};
use crate::tcp::{self, TcpError};
use crate::wire::v2::{Answer, Asked, Compute, Load, Outputs, Status as ItemStatus};

/// Bytes read from a socket at once.
const READ_BYTES: usize = 64 << 10;
/// Pause after a connection could not be accepted, such as for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time within which a connection must say something at all.
const FIRST_TIME: Duration = Duration::from_secs(60);
/// Time for telling a peer that the worker ends: what rests takes it at once.
const DRAIN_TIME: Duration = Duration::from_millis(50);
/// Small answers that a peer may leave untaken.
const UNREAD_MAX: u32 = 1024;
/// Experts of which is said that they could not be computed, at most.
const FAILED_MAX: usize = 1000;
/// Time after which the reason of an end is said again.
const REPEAT_AFTER: Duration = Duration::from_secs(60);
/// Time in which a peer may read why its connection ends, and most bytes that it may still send.
const LINGER_TIME: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 64 << 20;

/// Why a connection ended, if not by its peer between requests.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Tcp(#[from] TcpError),
    #[error("others send large requests; it was not taken in time")]
    Busy,
    #[error("it does not take the answers to what it asks")]
    Unread,
    #[error("its request failed: {0}")]
    Failed(ExpertError),
}

/// A connection, for whoever reads from it and whoever writes to it.
struct Connection {
    stream: TcpStream,
    session: Mutex<WorkerSession>,
    /// Held while bytes are taken from the session and written: they leave in order.
    writing: Mutex<()>,
    /// Requests whose answers are not wanted any more.
    cancelled: Mutex<HashSet<u64>>,
    /// Requests that wait or are computed.
    open_requests: AtomicU32,
}

impl Connection {
    fn new(stream: TcpStream, welcome: Arc<Welcome>) -> Connection {
        Connection {
            stream,
            session: Mutex::new(WorkerSession::new(welcome)),
            writing: Mutex::default(),
            cancelled: Mutex::default(),
            open_requests: AtomicU32::new(0),
        }
    }

    fn session(&self) -> MutexGuard<'_, WorkerSession> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cancelled(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.cancelled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes whatever the session has to say, each piece within `time` for its bytes.
    fn flush(&self, time: impl Fn(u64) -> Duration) -> Result<(), TcpError> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.write_all(&time)
    }

    /// The same, unless somebody is writing, who then writes that too.
    fn try_flush(&self, time: impl Fn(u64) -> Duration) -> Result<(), TcpError> {
        while self.session().has_outgoing() {
            let Ok(_writing) = self.writing.try_lock() else { return Ok(()) };
            self.write_all(&time)?;
        }
        Ok(())
    }

    fn write_all(&self, time: &impl Fn(u64) -> Duration) -> Result<(), TcpError> {
        loop {
            let bytes = self.session().take_outgoing();
            if bytes.is_empty() {
                return Ok(());
            }
            tcp::write_until(&self.stream, &bytes, Instant::now() + time(bytes.len() as u64))?;
        }
    }
}

/// A connection that is open.
struct Open {
    connection: Arc<Connection>,
    /// Whether a request is coming, computed or answered.
    in_request: bool,
}

struct Shared {
    worker: Worker,
    welcome: Arc<Welcome>,
    limits: Limits,
    permits: Permits,
    open: Mutex<HashMap<u64, Open>>,
    stopping: AtomicBool,
    address: SocketAddr,
    notice: Notice,
    /// Experts that could not be computed, each of which was said.
    failed: Mutex<HashSet<(usize, u32)>>,
    /// Why a connection ended last, and when that was said.
    ended: Mutex<Option<(String, Instant)>>,
}

/// A server that listens.
pub struct Server {
    listener: TcpListener,
    shared: Arc<Shared>,
}

/// Ends a server from elsewhere.
#[derive(Clone)]
pub struct Stop(Arc<Shared>);

impl Stop {
    /// Whether the server is ending.
    pub fn is_stopping(&self) -> bool {
        self.0.is_stopping()
    }

    /// Ends the server: no further connection is taken, those that rest are closed, and requests
    /// that have begun to come are still answered.
    pub fn stop(&self) {
        self.0.stopping.store(true, Ordering::SeqCst);
        let open: Vec<(Arc<Connection>, bool)> =
            self.0.open().values().map(|open| (open.connection.clone(), open.in_request)).collect();
        for (connection, in_request) in open {
            // Whoever cannot be told finds out; one that is being written to hears of it after
            // that.
            let _ = connection.session().drain();
            let _ = connection.try_flush(|_| DRAIN_TIME);
            if !in_request {
                // One that has just got a request can still answer it.
                let _ = connection.stream.shutdown(Shutdown::Read);
            }
        }
        // Whoever waits for a connection gets one.
        let _ = TcpStream::connect_timeout(&self.0.address, Duration::from_secs(1));
    }
}

/// What a server did.
#[derive(Clone)]
pub struct Status(Arc<Shared>);

impl Status {
    /// Up to now.
    pub fn counts(&self) -> Counts {
        self.0.worker.counts()
    }
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, HashMap<u64, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counters(&self) -> &Counters {
        &self.worker.counters
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Notes whether a connection is in a request; false when it must end now.
    fn set_in_request(&self, id: u64, in_request: bool) -> bool {
        if let Some(open) = self.open().get_mut(&id) {
            open.in_request = in_request;
        }
        in_request || !self.is_stopping()
    }

    /// Says which expert could not be computed, once for each.
    fn note_failed(&self, error: &ExpertError) {
        let key = match error {
            ExpertError::Load { layer, expert, .. }
            | ExpertError::NotHeld { layer, expert }
            | ExpertError::Numeric { layer, expert, .. } => (*layer, *expert),
        };
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failed.len() < FAILED_MAX && failed.insert(key) {
            (self.notice)(&format!("an expert could not be computed: {error}"));
        }
    }

    /// Says why a connection ended, the same reason once in a while.
    fn note_end(&self, peer: SocketAddr, why: &End) {
        let why = why.to_string();
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news =
            ended.as_ref().is_none_or(|(last, at)| *last != why || at.elapsed() >= REPEAT_AFTER);
        if is_news {
            (self.notice)(&format!("the connection with {peer} ends: {why}"));
            *ended = Some((why, Instant::now()));
        }
    }

    fn load(&self, connection: &Connection) -> Load {
        Load {
            waiting: connection.open_requests.load(Ordering::Relaxed),
            rows: self.counters().rows.load(Ordering::Relaxed),
            cached_bytes: self.worker.experts().stats().cached_bytes,
        }
    }
}

impl Server {
    /// A server of `worker` on a listening socket; `notice` is told why connections end.
    pub fn new(
        listener: TcpListener,
        worker: Worker,
        limits: Limits,
        notice: Notice,
    ) -> io::Result<Server> {
        let mut address = listener.local_addr()?;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        let shared = Shared {
            welcome: Arc::new(Welcome {
                request_bytes: limits.request_bytes,
                ..worker.welcome().clone()
            }),
            worker,
            limits,
            permits: Permits::new(limits.large_requests),
            open: Mutex::default(),
            stopping: AtomicBool::new(false),
            address,
            notice,
            failed: Mutex::default(),
            ended: Mutex::default(),
        };
        Ok(Server { listener, shared: Arc::new(shared) })
    }

    /// What ends it.
    pub fn stop(&self) -> Stop {
        Stop(self.shared.clone())
    }

    /// What it did, for whoever asks later.
    pub fn status(&self) -> Status {
        Status(self.shared.clone())
    }

    /// The worker.
    pub fn worker(&self) -> &Worker {
        &self.shared.worker
    }

    /// Serves until it is ended, and every request that had begun has been answered.
    pub fn run(&self) {
        thread::scope(|scope| {
            for id in 0.. {
                let accepted = self.listener.accept();
                if self.shared.stopping.load(Ordering::SeqCst) {
                    break;
                }
                let (stream, peer) = match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        // A peer that is gone already is no matter.
                        if error.kind() != ErrorKind::ConnectionAborted {
                            (self.shared.notice)(&format!("cannot accept a connection: {error}"));
                            thread::sleep(ACCEPT_PAUSE);
                        }
                        continue;
                    }
                };
                self.shared.counters().connections.fetch_add(1, Ordering::Relaxed);
                let refuse = |why: &str| {
                    self.shared.counters().refused.fetch_add(1, Ordering::Relaxed);
                    (self.shared.notice)(&format!("{peer} is refused: {why}"));
                };
                if self.shared.open().len() >= self.shared.limits.connections {
                    refuse(&format!("{} connections are open", self.shared.limits.connections));
                    continue;
                }
                if let Err(error) = tcp::prepare(&stream) {
                    refuse(&error.to_string());
                    continue;
                }
                let connection = Arc::new(Connection::new(stream, self.shared.welcome.clone()));
                let entry = Open { connection: connection.clone(), in_request: false };
                self.shared.open().insert(id, entry);
                let shared = &*self.shared;
                let spawned = thread::Builder::new()
                    .name("coli-peer".to_owned())
                    .spawn_scoped(scope, move || serve(shared, id, &connection, peer));
                if let Err(error) = spawned {
                    self.shared.open().remove(&id);
                    refuse(&error.to_string());
                }
            }
        });
    }
}

/// One connection from its first byte to its last.
fn serve(shared: &Shared, id: u64, connection: &Connection, peer: SocketAddr) {
    let ended = thread::scope(|scope| {
        let (jobs, queue) = sync_channel(1);
        let (jobs, queue) = (Some(jobs), Some(queue));
        let mut peer = Peer { shared, id, connection, jobs, queue, unread: 0 };
        let ended = peer.read(|queue| {
            let compute = move || compute(shared, id, connection, &queue);
            let name = "coli-peer-compute".to_owned();
            thread::Builder::new().name(name).spawn_scoped(scope, compute).map(|_| ())
        });
        // What has been asked is still answered where that is possible.
        peer.jobs = None;
        ended
    });
    if let Err(why) = ended {
        if !matches!(why, End::Failed(_)) {
            shared.counters().refused.fetch_add(1, Ordering::Relaxed);
        }
        shared.note_end(peer, &why);
        linger(&connection.stream);
    }
    shared.open().remove(&id);
    let _ = connection.stream.shutdown(Shutdown::Both);
}

/// Lets a peer read why its connection ends: a connection that is closed with bytes unread is
/// reset.
fn linger(stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Write);
    let deadline = Instant::now() + LINGER_TIME;
    let (mut buffer, mut came) = (vec![0; READ_BYTES], 0);
    while came < LINGER_BYTES
        && let Ok(read) = tcp::read_until(stream, &mut buffer, deadline)
    {
        came += read;
    }
}

/// Something for whoever computes what a peer of version 2 asks, and writes to it.
enum Job<'a> {
    Compute(Request<'a>),
    /// What the session has to say is to be written: whoever reads never waits for that.
    Flush,
}

/// A request of version 2 on its way to being computed.
struct Request<'a> {
    id: u64,
    request: Box<Compute>,
    arrived: Instant,
    permit: Option<Permit<'a>>,
}

/// The reading side of a connection.
struct Peer<'a> {
    shared: &'a Shared,
    id: u64,
    connection: &'a Connection,
    jobs: Option<SyncSender<Job<'a>>>,
    /// Until somebody computes.
    queue: Option<Receiver<Job<'a>>>,
    /// Small answers since nothing was left to write.
    unread: u32,
}

impl<'a> Peer<'a> {
    /// Reads until the connection ends; `start` makes somebody compute.
    fn read(&mut self, start: impl Fn(Receiver<Job<'a>>) -> io::Result<()>) -> Result<(), End> {
        let Peer { shared, connection, .. } = *self;
        let limits = &shared.limits;
        let mut buffer = vec![0; READ_BYTES];
        let mut wishes = Vec::new();
        // For the request that is coming, and since when.
        let mut permit: Option<(Permit<'a>, Instant)> = None;
        // When the message that is coming began.
        let mut started: Option<Instant> = None;
        let mut is_first = true;
        loop {
            let begun_bytes = connection.session().begun_bytes();
            let have = if begun_bytes == 0 {
                started = None;
                let busy = connection.open_requests.load(Ordering::SeqCst) > 0;
                if !shared.set_in_request(self.id, busy) {
                    return Ok(());
                }
                let time = is_first.then_some(FIRST_TIME);
                connection.stream.set_read_timeout(time).map_err(TcpError::Io)?;
                match (&connection.stream).read(&mut buffer) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    // Closed while it rested, by its peer or by the end of the server.
                    Ok(0) | Err(_) => return Ok(()),
                    Ok(have) => have,
                }
            } else {
                let began = *started.get_or_insert_with(Instant::now);
                let mut deadline = began + limits.time_for(begun_bytes);
                if begun_bytes > Limits::FREE_BYTES && permit.is_none() {
                    let taken = shared.permits.take(deadline).ok_or(End::Busy)?;
                    permit = Some((taken, Instant::now()));
                }
                if let Some((_, since)) = permit {
                    // What came before the permit was given had its time.
                    deadline = since + limits.time_for_large(begun_bytes);
                }
                tcp::read_until(&connection.stream, &mut buffer, deadline)?
            };
            is_first = false;
            started.get_or_insert_with(Instant::now);
            shared.set_in_request(self.id, true);
            let received = connection.session().receive(&buffer[..have], &mut wishes);
            // Also what explains an error.
            let flushed = self.say();
            received?;
            flushed?;
            let any = !wishes.is_empty();
            for wish in wishes.drain(..) {
                self.grant(wish, &mut permit, &start)?;
                started = None;
            }
            // What has been asked before is answered; what begins now is not.
            let is_idle = connection.open_requests.load(Ordering::SeqCst) == 0;
            if any && is_idle && shared.is_stopping() {
                return Ok(());
            }
        }
    }

    /// Has what the session has to say written.
    fn say(&mut self) -> Result<(), End> {
        let Peer { shared, connection, .. } = *self;
        if self.queue.is_some() {
            // Nobody else writes yet.
            return Ok(connection.flush(|bytes| shared.limits.time_for(bytes))?);
        }
        if !connection.session().has_outgoing() {
            self.unread = 0;
            return Ok(());
        }
        // Nothing else bounds what a peer asks for and does not take.
        self.unread += 1;
        if self.unread > UNREAD_MAX {
            return Err(End::Unread);
        }
        if let Some(jobs) = &self.jobs {
            // Whoever has something to do looks when it is done.
            let _ = jobs.try_send(Job::Flush);
        }
        Ok(())
    }

    fn grant(
        &mut self,
        wish: Wish,
        permit: &mut Option<(Permit<'a>, Instant)>,
        start: &impl Fn(Receiver<Job<'a>>) -> io::Result<()>,
    ) -> Result<(), End> {
        let Peer { shared, connection, .. } = *self;
        let limits = &shared.limits;
        match wish {
            Wish::Greeted(_) => {
                if let Some(queue) = self.queue.take() {
                    start(queue).map_err(TcpError::Io)?;
                }
            }
            Wish::V1(request) => {
                let (reply, computed) = shared.worker.reply(request);
                connection.session().reply_v1(&reply);
                connection.flush(|bytes| limits.time_for(bytes))?;
                drop(permit.take());
                computed.map_err(End::Failed)?;
            }
            Wish::Compute { id, request } => {
                let arrived = Instant::now();
                let mut permit = permit.take().map(|(permit, _)| permit);
                let counts = (0..request.experts.len()).map(|at| request.item(at).1.len() as u32);
                let rows = request.values.len() as u32 / shared.worker.shape().hidden;
                let asked = Asked { counts: counts.collect(), rows, sums: request.sums };
                let bytes = asked.answer_bytes(shared.worker.shape().hidden);
                if permit.is_none() && bytes > Limits::FREE_BYTES {
                    permit = shared.permits.take(arrived + limits.time_for(bytes));
                    if permit.is_none() {
                        return self.answer_none(id, &request, ItemStatus::Busy);
                    }
                }
                if shared.is_stopping() {
                    return self.answer_none(id, &request, ItemStatus::Draining);
                }
                connection.open_requests.fetch_add(1, Ordering::SeqCst);
                let job = Job::Compute(Request { id, request, arrived, permit });
                // Who computes lives as long as there is anything to compute, unless it cannot
                // write.
                if self.jobs.as_ref().is_none_or(|jobs| jobs.send(job).is_err()) {
                    return Err(End::Tcp(TcpError::Cut));
                }
            }
            Wish::Cancel(id) => {
                // Those that nobody asked, or that are answered already, are forgotten.
                let mut cancelled = connection.cancelled();
                if connection.open_requests.load(Ordering::SeqCst) > 0 && cancelled.len() < 16 {
                    cancelled.insert(id);
                }
            }
            Wish::Ping(id) => {
                connection.session().pong(id, &shared.load(connection))?;
                self.say()?;
            }
        }
        Ok(())
    }

    /// Answers that nothing was computed, and why.
    fn answer_none(&mut self, id: u64, request: &Compute, status: ItemStatus) -> Result<(), End> {
        let statuses = vec![status; request.experts.len()];
        let outputs =
            if request.sums { Outputs::Sums(Vec::new()) } else { Outputs::Rows(Vec::new()) };
        let answer = Answer { waited_us: 0, computed_us: 0, statuses, outputs };
        self.connection.session().answer(id, &answer)?;
        self.say()
    }
}

/// Computes what a peer of version 2 asks, one request after another.
fn compute(shared: &Shared, id: u64, connection: &Connection, jobs: &Receiver<Job<'_>>) {
    let limits = &shared.limits;
    let flush = || connection.flush(|bytes| limits.time_for(bytes)).is_ok();
    while let Ok(job) = jobs.recv() {
        let Request { id: request_id, request, arrived, permit } = match job {
            Job::Compute(request) => request,
            Job::Flush if flush() => continue,
            Job::Flush => {
                // Whoever reads finds out.
                let _ = connection.stream.shutdown(Shutdown::Both);
                return;
            }
        };
        let is_wanted = || !connection.cancelled().contains(&request_id);
        let mut failed = |error: &ExpertError| shared.note_failed(error);
        let answer = shared.worker.answer(&request, arrived, is_wanted, &mut failed);
        let answered = connection.session().answer(request_id, &answer);
        drop((request, answer));
        let written = answered.is_ok() && flush();
        drop(permit);
        let left = {
            // Whoever stops the server sees either a request or a connection that rests.
            let mut open = shared.open();
            let left = connection.open_requests.fetch_sub(1, Ordering::SeqCst) - 1;
            if left == 0 {
                connection.cancelled().clear();
            }
            if let Some(open) = open.get_mut(&id).filter(|_| left == 0) {
                open.in_request = false;
            }
            left
        };
        if !written {
            // Whoever reads finds out.
            let _ = connection.stream.shutdown(Shutdown::Both);
            return;
        }
        if left == 0 && shared.is_stopping() {
            let _ = connection.stream.shutdown(Shutdown::Read);
        }
    }
    // What explains the end, once there is nothing else to do.
    flush();
}
