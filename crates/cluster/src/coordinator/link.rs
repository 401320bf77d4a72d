//! A connection to one worker: one thread writes, another reads.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::core::Reply;
use crate::session::SessionError;
use crate::session::coordinator::{CoordinatorSession, Event, Hello, Request, Version};
use crate::tcp::{self, TcpError};
use crate::wire::v2::{Answer, Load};

/// Time for a connection to be made.
const CONNECT_TIME: Duration = Duration::from_secs(3);
/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;

/// Why a worker could not be asked, or did not answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error("it cannot be reached: {0}")]
    Connect(std::io::Error),
    #[error("it ended the connection")]
    Ended,
    #[error("it ended the connection before it greeted; its own output may say why")]
    Early,
    #[error("it did not answer in time")]
    Slow,
    #[error("it is ending")]
    Draining,
    #[error("it does not say that it is there")]
    Silent,
    #[error(transparent)]
    Tcp(TcpError),
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// Who waits for an answer.
pub(super) struct Waiting {
    /// Number of the request within the step.
    pub number: usize,
    /// Where the reply goes.
    pub replies: Sender<Reply>,
}

impl Waiting {
    pub fn tell(self, answer: Option<Box<Answer>>) {
        // A step that has ended wants nothing any more.
        let _ = self.replies.send(Reply { number: self.number, answer });
    }
}

/// Who waits for which request.
#[derive(Default)]
struct WaitingFor {
    by_id: HashMap<u64, Waiting>,
    /// Nobody reads any more: there will be no answer.
    ended: bool,
}

/// A connection.
pub(super) struct Link {
    stream: TcpStream,
    session: Mutex<CoordinatorSession>,
    /// Held while bytes are taken from the session and written: they leave in order.
    writing: Mutex<()>,
    waiting: Mutex<WaitingFor>,
    /// When the worker last said anything.
    heard: Mutex<Instant>,
    /// What it said and nobody has looked at.
    early: Mutex<Vec<Event>>,
}

impl Link {
    /// Connects to `host:port` and waits for its greeting, by version 2 or, where the worker does
    /// not speak it and no key asks for encryption, version 1; `only` allows one of them. The
    /// greeting has `time`.
    pub fn connect(
        name: &str,
        hello: &Arc<Hello>,
        only: Option<Version>,
        time: Duration,
    ) -> Result<(Link, Event), LinkError> {
        // A connection that was lost by chance must not make a worker of version 2 one of version
        // 1.
        let attempts = if only == Some(Version::One) { 0 } else { 2 };
        for _ in 0..attempts {
            let link = Link::open(name, Version::Two, hello)?;
            let mut answered = false;
            match link.wait_event(Instant::now() + time, &mut answered) {
                Ok(event) => return Ok((link, event)),
                // So does one that speaks version 1 only.
                Err(LinkError::Ended) if !answered && only.is_none() && hello.key.is_none() => {}
                Err(LinkError::Ended) => return Err(LinkError::Early),
                Err(error) => return Err(error),
            }
        }
        let link = Link::open(name, Version::One, hello)?;
        let holdings = Default::default();
        Ok((link, Event::Joined { facts: None, holdings, compared: 0 }))
    }

    fn open(name: &str, version: Version, hello: &Arc<Hello>) -> Result<Link, LinkError> {
        let addresses = name.to_socket_addrs().map_err(LinkError::Connect)?;
        let mut refused = std::io::Error::other("the name has no address");
        for address in addresses {
            match TcpStream::connect_timeout(&address, CONNECT_TIME) {
                Ok(stream) => {
                    tcp::prepare(&stream).map_err(LinkError::Connect)?;
                    return Ok(Link {
                        stream,
                        session: Mutex::new(CoordinatorSession::new(version, hello.clone())),
                        writing: Mutex::default(),
                        waiting: Mutex::default(),
                        heard: Mutex::new(Instant::now()),
                        early: Mutex::default(),
                    });
                }
                Err(error) => refused = error,
            }
        }
        Err(LinkError::Connect(refused))
    }

    fn session(&self) -> MutexGuard<'_, CoordinatorSession> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self) -> MutexGuard<'_, WaitingFor> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn early(&self) -> MutexGuard<'_, Vec<Event>> {
        self.early.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The version that is spoken.
    pub fn version(&self) -> Version {
        self.session().version()
    }

    /// Time since the worker last said anything.
    pub fn silent(&self) -> Duration {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    /// Whether an answer is waited for.
    pub fn is_waiting(&self) -> bool {
        !self.waiting().by_id.is_empty()
    }

    /// Ends the connection, for both of its threads.
    pub fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Writes whatever the session has to say.
    pub fn flush(&self, deadline: Instant) -> Result<(), LinkError> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let bytes = self.session().take_outgoing();
            if bytes.is_empty() {
                return Ok(());
            }
            tcp::write_until(&self.stream, &bytes, deadline).map_err(ended)?;
        }
    }

    /// Sends a request; its reply comes by `waiting`, also when it could not be sent.
    pub fn ask(
        &self,
        request: Request,
        waiting: Waiting,
        deadline: Instant,
    ) -> Result<(), LinkError> {
        let id = request.id;
        {
            let mut all = self.waiting();
            if all.ended {
                drop(all);
                waiting.tell(None);
                return Err(LinkError::Ended);
            }
            all.by_id.insert(id, waiting);
        }
        // With the session unlocked again.
        let asked = self.session().ask(request);
        let sent = match asked {
            Ok(true) => self.flush(deadline),
            // The connection has become one of another version meanwhile.
            Ok(false) => Ok(()),
            Err(ref error) => Err(error.clone().into()),
        };
        if sent.is_err() || matches!(asked, Ok(false)) {
            let waiting = self.waiting().by_id.remove(&id);
            waiting.into_iter().for_each(|waiting| waiting.tell(None));
        }
        sent
    }

    /// Says that an answer is not wanted any more.
    pub fn cancel(&self, id: u64, deadline: Instant) -> Result<(), LinkError> {
        self.waiting().by_id.remove(&id);
        self.session().cancel(id)?;
        self.flush(deadline)
    }

    /// Asks whether the worker is there.
    pub fn ping(&self, deadline: Instant) -> Result<(), LinkError> {
        self.session().ping(0)?;
        self.flush(deadline)
    }

    /// Reads until there is an event; nobody else reads. Notes whether anything came.
    fn wait_event(&self, deadline: Instant, came: &mut bool) -> Result<Event, LinkError> {
        let mut buffer = vec![0; READ_BYTES];
        let mut events = std::mem::take(&mut *self.early());
        loop {
            self.flush(deadline)?;
            if !events.is_empty() {
                let event = events.remove(0);
                // Those after it are for whoever reads next.
                *self.early() = events;
                return Ok(event);
            }
            let read = tcp::read_until(&self.stream, &mut buffer, deadline).map_err(ended)?;
            *came = true;
            let received = self.session().receive(&buffer[..read], &mut events);
            if let Err(error) = received {
                // What explains it to the worker.
                let _ = self.flush(deadline);
                return Err(error.into());
            }
        }
    }

    /// Sends a request and waits for its answer, before anybody else reads.
    pub fn answer(&self, request: Request, deadline: Instant) -> Result<Box<Answer>, LinkError> {
        let wanted = request.id;
        self.session().ask(request)?;
        loop {
            match self.wait_event(deadline, &mut false)? {
                Event::Answer { id, answer } if id == wanted => return Ok(answer),
                Event::Draining => return Err(LinkError::Draining),
                _ => {}
            }
        }
    }

    /// Asks what the worker is doing, before anybody else reads.
    pub fn load(&self, deadline: Instant) -> Result<Load, LinkError> {
        self.session().ping(1)?;
        loop {
            if let Event::Pong { id: 1, load } = self.wait_event(deadline, &mut false)? {
                return Ok(load);
            }
        }
    }

    /// Reads until the connection ends, and says why it did. `draining` is told when the worker
    /// takes no further requests, `answered` of every answer. Whoever waits for one when the
    /// connection ends has none.
    pub fn read(&self, draining: impl Fn(), answered: impl Fn(u64), flush: impl Fn()) -> LinkError {
        let read = self.read_events(draining, answered, flush);
        let error = read.err().unwrap_or(LinkError::Ended);
        self.close();
        let waiting: Vec<Waiting> = {
            let mut all = self.waiting();
            all.ended = true;
            all.by_id.drain().map(|(_, waiting)| waiting).collect()
        };
        waiting.into_iter().for_each(|waiting| waiting.tell(None));
        error
    }

    fn read_events(
        &self,
        draining: impl Fn(),
        answered: impl Fn(u64),
        flush: impl Fn(),
    ) -> Result<(), LinkError> {
        let mut buffer = vec![0; READ_BYTES];
        let mut events = std::mem::take(&mut *self.early());
        self.stream.set_read_timeout(None).map_err(|error| ended(error.into()))?;
        let mut received = Ok(());
        loop {
            for event in events.drain(..) {
                match event {
                    Event::Answer { id, answer } => {
                        answered(id);
                        let waiting = self.waiting().by_id.remove(&id);
                        if let Some(waiting) = waiting {
                            waiting.tell(Some(answer));
                        }
                    }
                    Event::Draining => draining(),
                    Event::Joined { .. } | Event::Pong { .. } => {}
                }
            }
            // The next request of version 1, or what explains an error: somebody else writes it, so
            // that two peers that send much never wait for each other to read.
            if self.session().has_outgoing() {
                flush();
            }
            received?;
            let read = loop {
                match std::io::Read::read(&mut &self.stream, &mut buffer) {
                    Ok(0) => return Ok(()),
                    Ok(read) => break read,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(ended(error.into())),
                }
            };
            *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            received = self.session().receive(&buffer[..read], &mut events);
        }
    }
}

/// A peer that closes or resets a connection has ended it.
fn ended(error: TcpError) -> LinkError {
    match error {
        TcpError::Cut => LinkError::Ended,
        TcpError::Slow => LinkError::Slow,
        TcpError::Io(error)
            if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) =>
        {
            LinkError::Ended
        }
        other => LinkError::Tcp(other),
    }
}
