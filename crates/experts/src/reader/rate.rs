//! A rate that reads keep to: it leaves the drive to others, and shows what a slower one would
//! give.

use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Reads of this rate take their turns as on a drive that has it: each ends when the drive would
/// have given its bytes after those of all reads before.
#[derive(Debug)]
pub struct RateLimit {
    bytes_per_s: f64,
    /// When the reads so far end.
    free_at: Mutex<Instant>,
}

impl RateLimit {
    /// A limit of so many bytes per second, above 0.
    pub fn new(bytes_per_s: f64) -> RateLimit {
        RateLimit { bytes_per_s, free_at: Mutex::new(Instant::now()) }
    }

    /// Waits until bytes that were read since `started` could have come from such a drive.
    pub fn wait(&self, bytes: usize, started: Instant) {
        let left = self.take(bytes, started).saturating_duration_since(Instant::now());
        if !left.is_zero() {
            thread::sleep(left);
        }
    }

    /// Takes a turn for bytes; returns when it ends.
    fn take(&self, bytes: usize, started: Instant) -> Instant {
        let time = Duration::from_secs_f64(bytes as f64 / self.bytes_per_s);
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        *free_at = (*free_at).max(started) + time;
        *free_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_follow_each_other_at_the_rate_and_an_idle_drive_owes_nothing() {
        let limit = RateLimit::new(1000.0);
        let start = Instant::now() + Duration::from_secs(1);
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(limit.take(500, start), at(500));
        assert_eq!(limit.take(250, at(100)), at(750));
        // Two seconds of rest are not saved up.
        assert_eq!(limit.take(1000, at(2750)), at(3750));
    }
}
