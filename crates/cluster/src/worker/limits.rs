//! What one worker takes from all its peers together.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Limits of a worker's server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections open at a time; further ones are closed at once.
    pub connections: usize,
    /// Bytes of rows of one request.
    pub request_bytes: u64,
    /// Requests of more than [`Limits::FREE_BYTES`] that may come at a time.
    pub large_requests: usize,
    /// Time for a small request, from its first byte.
    pub request_time: Duration,
}

impl Limits {
    /// Bytes of a request, and of its answer, that need no permission.
    pub const FREE_BYTES: u64 = 64 << 10;
    /// Time for a large request beyond that for its bytes: it keeps others from theirs.
    pub const LARGE_TIME: Duration = Duration::from_secs(2);
    /// Bytes per second that a request must come with at least, and a reply be taken with.
    pub const RATE_MIN: u64 = 1 << 20;

    /// The usual limits with requests of at most so many bytes of rows.
    pub fn new(request_bytes: u64) -> Limits {
        Limits {
            connections: 64,
            request_bytes: request_bytes.max(Limits::FREE_BYTES),
            large_requests: 2,
            request_time: Duration::from_secs(10),
        }
    }

    /// Most bytes of requests and answers that are held at a time.
    pub fn held_bytes(&self) -> u64 {
        // Of a connection one request comes, into a list that has room for twice as much, one is
        // read and waits, one is next, one is computed, and an answer leaves.
        let free = self.connections as u64 * Limits::FREE_BYTES * 6;
        // A request, twice where some of its rows are no numbers; its answer as numbers, as a
        // frame, as it is encrypted and as it leaves.
        free + self.large_requests as u64 * self.request_bytes * 6
    }

    /// Time for a large request of which so many bytes have come.
    pub fn time_for_large(&self, bytes: u64) -> Duration {
        Limits::LARGE_TIME.min(self.request_time) + Duration::from_secs(bytes / Limits::RATE_MIN)
    }

    /// Time for `bytes`.
    pub fn time_for(&self, bytes: u64) -> Duration {
        self.request_time + Duration::from_secs(bytes / Limits::RATE_MIN)
    }
}

/// Permits for large requests.
#[derive(Debug)]
pub(super) struct Permits {
    left: Mutex<usize>,
    changed: Condvar,
}

/// A permit, until it is dropped.
pub(super) struct Permit<'a>(&'a Permits);

impl Permits {
    pub fn new(count: usize) -> Permits {
        Permits { left: Mutex::new(count), changed: Condvar::new() }
    }

    /// Waits for a permit, at most until `deadline`.
    pub fn take(&self, deadline: Instant) -> Option<Permit<'_>> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        while *left == 0 {
            let time = deadline.checked_duration_since(Instant::now())?;
            let waited = self.changed.wait_timeout(left, time);
            left = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *left -= 1;
        Some(Permit(self))
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.0.left.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.changed.notify_one();
    }
}
