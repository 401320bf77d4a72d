//! The loads that wait to be done, and how busy the drive is with them.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Key;

/// Guesses that wait; older ones are forgotten.
const GUESSES_MAX: usize = 32;
/// Loads queued at a time, as a rule.
const DEMAND_USUAL: usize = 64;
/// Time over which idleness is averaged.
const IDLE_WINDOW_S: f64 = 1.0;

/// Why an expert is loaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Somebody waits for it.
    Demand,
    /// To fill the cache.
    Warm,
    /// It may be needed soon.
    Ahead,
}

/// A load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Job {
    pub key: Key,
    pub kind: Kind,
}

/// A load that was begun.
#[derive(Debug)]
struct UnderWay {
    job: Job,
    /// Whether somebody waits for it.
    awaited: bool,
}

#[derive(Debug, Default)]
struct Queues {
    demand: VecDeque<Key>,
    warm: VecDeque<Key>,
    ahead: VecDeque<Key>,
    under_way: Vec<UnderWay>,
    /// Times that room became free.
    room_signals: u64,
    /// Times that a load under way may have been asked for.
    turns: u64,
    stop: bool,
    busy: BusyClock,
    known: BusyClock,
}

/// How long loads that somebody waits for have been queued or under way.
#[derive(Debug, Default)]
struct BusyClock {
    since: Option<Instant>,
    total: Duration,
    /// Last look: when, and the total then.
    looked: Option<(Instant, Duration)>,
    idle_share: f64,
}

impl BusyClock {
    fn set(&mut self, busy: bool) {
        match (busy, self.since) {
            (true, None) => self.since = Some(Instant::now()),
            (false, Some(since)) => {
                self.total += since.elapsed();
                self.since = None;
            }
            _ => {}
        }
    }

    fn total(&self, now: Instant) -> Duration {
        self.total + self.since.map_or(Duration::ZERO, |since| now.duration_since(since))
    }

    /// Share of recent time without such loads.
    fn idle_share(&mut self, now: Instant) -> f64 {
        let total = self.total(now);
        let Some((looked, then)) = self.looked.replace((now, total)) else {
            self.idle_share = 1.0;
            return 1.0;
        };
        let span_s = now.duration_since(looked).as_secs_f64();
        if span_s > 0.0 {
            let idle = 1.0 - (total.saturating_sub(then).as_secs_f64() / span_s).min(1.0);
            let weight = (span_s / IDLE_WINDOW_S).min(1.0);
            self.idle_share += (idle - self.idle_share) * weight;
        }
        self.idle_share
    }
}

impl Queues {
    /// Whether nobody waits for a load.
    fn is_idle(&self) -> bool {
        self.demand.is_empty() && !self.under_way.iter().any(|load| load.awaited)
    }

    fn is_warm(&self) -> bool {
        let warms = |load: &UnderWay| load.job.kind == Kind::Warm;
        self.warm.is_empty() && !self.under_way.iter().any(warms)
    }

    /// Begins a load.
    fn begin(&mut self, key: Key, kind: Kind) -> Option<Job> {
        let job = Job { key, kind };
        self.under_way.push(UnderWay { job, awaited: kind == Kind::Demand });
        self.update_busy();
        Some(job)
    }

    fn update_busy(&mut self) {
        let busy = !self.is_idle();
        self.busy.set(busy);
        self.known.set(busy || !self.under_way.is_empty());
    }
}

/// The queue of loads.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    queues: Mutex<Queues>,
    /// The loaders: work for them.
    changed: Condvar,
    /// Loaders that wait for room.
    room_changed: Condvar,
    /// The thread that reads guesses: work for it, or its turn to go on.
    ahead_changed: Condvar,
    /// Those who wait for the cache to be warm.
    warm_changed: Condvar,
}

impl Jobs {
    /// An empty queue, with memory for as many as a token needs.
    pub fn new() -> Jobs {
        let jobs = Jobs::default();
        {
            let mut queues = jobs.lock();
            queues.demand.reserve(DEMAND_USUAL);
            queues.ahead.reserve(2 * GUESSES_MAX);
            queues.under_way.reserve(DEMAND_USUAL);
        }
        jobs
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues loads that somebody waits for.
    pub fn need(&self, keys: &[Key]) {
        if keys.is_empty() {
            return;
        }
        let mut queues = self.lock();
        queues.demand.extend(keys);
        queues.update_busy();
        drop(queues);
        keys.iter().for_each(|_| self.changed.notify_one());
    }

    /// Queues loads to fill the cache.
    pub fn warm(&self, keys: &[Key]) {
        self.lock().warm.extend(keys);
        self.changed.notify_all();
    }

    /// Queues guesses in front of older ones; returns those that are forgotten.
    pub fn replace_guesses(&self, keys: &[Key]) -> Vec<Key> {
        if keys.is_empty() {
            return Vec::new();
        }
        let mut queues = self.lock();
        for key in keys.iter().rev() {
            queues.ahead.push_front(*key);
        }
        let keep = queues.ahead.len().min(GUESSES_MAX);
        let forgotten = queues.ahead.split_off(keep).into();
        drop(queues);
        self.ahead_changed.notify_all();
        forgotten
    }

    /// Makes a queued load one that somebody waits for; false when it is not queued.
    pub fn promote(&self, key: Key) -> bool {
        let mut queues = self.lock();
        let place = |queue: &VecDeque<Key>| queue.iter().position(|queued| *queued == key);
        let found = if let Some(at) = place(&queues.ahead) {
            queues.ahead.remove(at);
            true
        } else if let Some(at) = place(&queues.warm) {
            queues.warm.remove(at);
            true
        } else {
            false
        };
        if found {
            queues.demand.push_back(key);
        } else if let Some(load) = queues.under_way.iter_mut().find(|load| load.job.key == key) {
            load.awaited = true;
        }
        queues.update_busy();
        // Its reader may wait for its turn: it has come.
        queues.turns += 1;
        drop(queues);
        if found {
            self.changed.notify_one();
        }
        self.ahead_changed.notify_all();
        found
    }

    /// Takes a load back that was not begun; false when it was.
    pub fn withdraw(&self, key: Key) -> bool {
        let mut queues = self.lock();
        let found = queues.demand.iter().position(|queued| *queued == key);
        if let Some(at) = found {
            queues.demand.remove(at);
            self.tell(queues);
        }
        found.is_some()
    }

    /// Waits for a load to do; `None` when there will be none. Guesses go to the thread for them,
    /// everything else to the others.
    pub fn next(&self, ahead: bool) -> Option<Job> {
        let mut queues = self.lock();
        loop {
            if queues.stop {
                return None;
            }
            if ahead {
                if queues.is_idle()
                    && queues.warm.is_empty()
                    && let Some(key) = queues.ahead.pop_front()
                {
                    return queues.begin(key, Kind::Ahead);
                }
                queues = wait(&self.ahead_changed, queues);
                continue;
            }
            if let Some(key) = queues.demand.pop_front() {
                return queues.begin(key, Kind::Demand);
            }
            if let Some(key) = queues.warm.pop_front() {
                return queues.begin(key, Kind::Warm);
            }
            queues = wait(&self.changed, queues);
        }
    }

    /// Says that a load from [`Jobs::next`] is over.
    pub fn done(&self, job: &Job) {
        let mut queues = self.lock();
        let at = queues.under_way.iter().position(|load| load.job == *job);
        if let Some(at) = at {
            queues.under_way.swap_remove(at);
        }
        self.tell(queues);
    }

    /// Tells those who wait for the drive to be idle, or the cache to be warm, after a load less.
    fn tell(&self, mut queues: MutexGuard<'_, Queues>) {
        queues.update_busy();
        let (idle, warm) = (queues.is_idle(), queues.is_warm());
        drop(queues);
        if idle {
            self.ahead_changed.notify_all();
        }
        if warm {
            self.warm_changed.notify_all();
        }
    }

    /// Waits while others wait for a load and `unasked` says that nobody waits for this one.
    /// Whoever asks for it makes that known and then calls [`Jobs::promote`].
    pub fn wait_until_idle(&self, unasked: impl Fn() -> bool) {
        loop {
            let turn = self.lock().turns;
            // Without the queue's lock: the layer's comes first.
            if !unasked() {
                return;
            }
            let mut queues = self.lock();
            while queues.turns == turn && !queues.is_idle() && !queues.stop {
                queues = wait(&self.ahead_changed, queues);
            }
            if queues.is_idle() || queues.stop {
                return;
            }
        }
    }

    /// Times that room became free, to be given to [`Jobs::wait_for_room`].
    pub fn room_signals(&self) -> u64 {
        self.lock().room_signals
    }

    /// Waits until room has become free since `seen`; false when the cache ends.
    pub fn wait_for_room(&self, seen: u64) -> bool {
        let mut queues = self.lock();
        while queues.room_signals == seen && !queues.stop {
            queues = wait(&self.room_changed, queues);
        }
        !queues.stop
    }

    /// Says that room has become free.
    pub fn signal_room(&self) {
        self.lock().room_signals += 1;
        self.room_changed.notify_all();
    }

    /// Waits until nothing is left to warm the cache with.
    pub fn wait_until_warm(&self) {
        let mut queues = self.lock();
        while !(queues.stop || queues.is_warm()) {
            queues = wait(&self.warm_changed, queues);
        }
    }

    /// Time in which loads that somebody waited for were queued or under way.
    pub fn busy(&self, now: Instant) -> Duration {
        self.lock().busy.total(now)
    }

    /// Time in which any loads were queued or under way, but for guesses that wait.
    pub fn known(&self, now: Instant) -> Duration {
        self.lock().known.total(now)
    }

    /// Share of recent time without those that somebody waited for.
    pub fn idle_share(&self, now: Instant) -> f64 {
        self.lock().busy.idle_share(now)
    }

    /// Ends the waiting of all threads.
    pub fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_all();
        self.room_changed.notify_all();
        self.ahead_changed.notify_all();
        self.warm_changed.notify_all();
    }
}

fn wait<'a>(condvar: &Condvar, queues: MutexGuard<'a, Queues>) -> MutexGuard<'a, Queues> {
    condvar.wait(queues).unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_that_is_taken_back_lets_guesses_go_on() {
        let jobs = Jobs::new();
        jobs.need(&[(1, 2)]);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| jobs.wait_until_idle(|| true));
            assert!(jobs.withdraw((1, 2)));
            waiting.join().unwrap();
        });
        assert!(!jobs.withdraw((1, 2)));
    }

    #[test]
    fn a_read_is_waited_for_once_somebody_asks_however_it_began() {
        let jobs = Jobs::new();
        jobs.warm(&[(0, 0)]);
        let job = jobs.next(false).unwrap();
        assert_eq!(job.kind, Kind::Warm);
        assert!(jobs.lock().is_idle() && !jobs.lock().is_warm());
        assert!(!jobs.promote((0, 0)), "it is under way");
        assert!(!jobs.lock().is_idle());
        jobs.done(&job);
        assert!(jobs.lock().is_idle() && jobs.lock().is_warm());
        assert!(jobs.known(Instant::now()) > Duration::ZERO);
    }
}
