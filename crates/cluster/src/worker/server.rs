//! A worker's TCP server: a thread per connection, each with deadlines from the first byte of a
//! request to the last of its reply. Between requests a connection may rest as long as it likes;
//! the system finds out when its peer is gone.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use experts::Notice;

use super::limits::{Limits, Permit, Permits};
use super::{Counters, Worker};
use crate::tcp::{self, TcpError};
use crate::wire::WireError;
use crate::wire::v1::RequestReader;

/// Bytes read from a socket at once.
const READ_BYTES: usize = 64 << 10;
/// Pause after a connection could not be accepted, such as for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why a connection ended, if not by its peer between requests.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Tcp(#[from] TcpError),
    #[error("others send large requests; it was not taken in time")]
    Busy,
    #[error("it sent a request before the last one was answered")]
    Early,
    #[error("its request failed: {0}")]
    Failed(experts::ExpertError),
}

/// A connection that is open.
struct Open {
    stream: TcpStream,
    /// Whether a request is coming, computed or answered.
    in_request: bool,
}

struct Shared {
    worker: Worker,
    limits: Limits,
    permits: Permits,
    open: Mutex<HashMap<u64, Open>>,
    stopping: AtomicBool,
    address: SocketAddr,
    notice: Notice,
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
    /// Ends the server: no further connection is taken, those that rest are closed, and requests
    /// that have begun to come are still answered.
    pub fn stop(&self) {
        self.0.stopping.store(true, Ordering::SeqCst);
        for open in self.0.open().values().filter(|open| !open.in_request) {
            // One that has just got a request can still answer it.
            let _ = open.stream.shutdown(Shutdown::Read);
        }
        // Whoever waits for a connection gets one.
        let _ = TcpStream::connect_timeout(&self.0.address, Duration::from_secs(1));
    }
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, HashMap<u64, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counters(&self) -> &Counters {
        &self.worker.counters
    }

    /// Notes whether a connection is in a request; false when it must end now.
    fn set_in_request(&self, id: u64, in_request: bool) -> bool {
        if let Some(open) = self.open().get_mut(&id) {
            open.in_request = in_request;
        }
        in_request || !self.stopping.load(Ordering::SeqCst)
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
            worker,
            limits,
            permits: Permits::new(limits.large_requests),
            open: Mutex::default(),
            stopping: AtomicBool::new(false),
            address,
            notice,
        };
        Ok(Server { listener, shared: Arc::new(shared) })
    }

    /// What ends it.
    pub fn stop(&self) -> Stop {
        Stop(self.shared.clone())
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
                let entry = tcp::prepare(&stream).and_then(|()| stream.try_clone());
                match entry {
                    Ok(stream) => {
                        self.shared.open().insert(id, Open { stream, in_request: false });
                    }
                    Err(error) => {
                        refuse(&error.to_string());
                        continue;
                    }
                }
                let shared = &*self.shared;
                let spawned = thread::Builder::new()
                    .name("coli-peer".to_owned())
                    .spawn_scoped(scope, move || serve(shared, id, stream, peer));
                if let Err(error) = spawned {
                    self.shared.open().remove(&id);
                    refuse(&error.to_string());
                }
            }
        });
    }
}

/// One connection from its first byte to its last.
fn serve(shared: &Shared, id: u64, stream: TcpStream, peer: SocketAddr) {
    let ended = requests(shared, id, &stream);
    shared.open().remove(&id);
    if let Err(why) = ended {
        if !matches!(why, End::Failed(_)) {
            shared.counters().refused.fetch_add(1, Ordering::Relaxed);
        }
        (shared.notice)(&format!("the connection with {peer} ends: {why}"));
    }
    let _ = stream.shutdown(Shutdown::Both);
}

fn requests(shared: &Shared, id: u64, mut stream: &TcpStream) -> Result<(), End> {
    let Shared { worker, limits, .. } = shared;
    let mut reader = RequestReader::new(worker.shape(), limits.request_bytes);
    let mut buffer = vec![0; READ_BYTES];
    while shared.set_in_request(id, false) {
        stream.set_read_timeout(None).map_err(TcpError::Io)?;
        let first = match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            // Closed while it rested, by its peer or by the end of the server.
            Err(_) => return Ok(()),
            Ok(first) => first,
        };
        shared.set_in_request(id, true);
        let started = Instant::now();
        let mut permit: Option<Permit<'_>> = None;
        let (mut have, mut came) = (first, first as u64);
        let request = loop {
            let mut input = &buffer[..have];
            if let Some(request) = reader.take(&mut input)? {
                if !input.is_empty() {
                    return Err(End::Early);
                }
                break request;
            }
            let deadline = started + limits.time_for(came);
            if came > Limits::FREE_BYTES && permit.is_none() {
                permit = Some(shared.permits.take(deadline).ok_or(End::Busy)?);
            }
            have = tcp::read_until(stream, &mut buffer, deadline)?;
            came += have as u64;
        };
        let (reply, computed) = worker.reply(request);
        tcp::write_until(stream, &reply, Instant::now() + limits.time_for(reply.len() as u64))?;
        drop(permit);
        computed.map_err(End::Failed)?;
    }
    Ok(())
}
