//! Passes what comes for a worker on later: as far away as a delay makes it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

/// Bytes passed on at once.
const PIECE_BYTES: usize = 64 << 10;

/// A relay, until it is dropped.
pub struct Relay {
    address: SocketAddr,
    stopping: Arc<AtomicBool>,
}

impl Relay {
    /// A relay to a worker; bytes take `delay` to it, and back.
    pub fn start(worker: &str, delay: Duration) -> io::Result<Relay> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let stopping = Arc::new(AtomicBool::new(false));
        let (worker, ends) = (worker.to_owned(), stopping.clone());
        thread::Builder::new().name("coli-relay".to_owned()).spawn(move || {
            for near in listener.incoming() {
                if ends.load(Ordering::SeqCst) {
                    return;
                }
                // A connection that cannot be made is closed.
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(&worker)) else { continue };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    if let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) {
                        pass(from, to, delay);
                    }
                }
            }
        })?;
        Ok(Relay { address, stopping })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Whoever waits for a connection gets one.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

/// Passes bytes of one direction on until either end closes.
fn pass(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
    // Small messages must not wait for others.
    let _ = to.set_nodelay(true);
    let (sender, pieces) = channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut buffer = vec![0; PIECE_BYTES];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            if sender.send((Instant::now() + delay, buffer[..read].to_vec())).is_err() {
                break;
            }
        }
    });
    thread::spawn(move || {
        for (at, bytes) in pieces {
            thread::sleep(at.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}
