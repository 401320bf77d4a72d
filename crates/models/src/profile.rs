//! Where the time of a run goes: one clock that always belongs to exactly one activity, so that
//! they sum to the wall time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a step is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activity {
    /// Norm, projections, scores and values of attention, the indexer included.
    Attention,
    /// Scores and choice of experts.
    Router,
    /// Routed and shared experts computed here, and their combine.
    ExpertsLocal,
    /// Waiting for experts computed elsewhere.
    ExpertsRemote,
    /// Waiting for experts that are being read.
    DiskWait,
    /// Final norm and head.
    Head,
    /// Embedding, dense layers, sampling, and everything else.
    Other,
}

impl Activity {
    /// Every activity, as they are listed.
    pub const ALL: [Activity; 7] = [
        Activity::Attention,
        Activity::Router,
        Activity::ExpertsLocal,
        Activity::ExpertsRemote,
        Activity::DiskWait,
        Activity::Head,
        Activity::Other,
    ];

    /// Name in figures.
    pub const fn name(self) -> &'static str {
        match self {
            Activity::Attention => "attention",
            Activity::Router => "router",
            Activity::ExpertsLocal => "experts_local",
            Activity::ExpertsRemote => "experts_remote",
            Activity::DiskWait => "disk_wait",
            Activity::Head => "head",
            Activity::Other => "other",
        }
    }
}

/// Whether a prompt is read or an answer made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Reading a prompt.
    Prefill,
    /// Making an answer.
    Decode,
}

/// Time spent, per stage and activity in the order of [`Activity::ALL`].
pub type Spent = [[Duration; Activity::ALL.len()]; 2];

struct Clock {
    since: Instant,
    stage: Stage,
    activity: Activity,
    spent: Spent,
}

/// The clock of an engine's steps. It stands still until started; activities are entered by the
/// thread that makes the step.
#[derive(Default)]
pub struct Profile {
    running: AtomicBool,
    clock: Mutex<Option<Clock>>,
}

impl Clock {
    fn charge(&mut self) {
        let now = Instant::now();
        self.spent[self.stage as usize][self.activity as usize] += now - self.since;
        self.since = now;
    }
}

impl Profile {
    fn with<R>(&self, act: impl FnOnce(&mut Clock) -> R) -> Option<R> {
        if !self.running.load(Ordering::Relaxed) {
            return None;
        }
        self.clock.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map(act)
    }

    /// Starts the clock at zero. It runs as long as what is returned; a second start takes it over.
    pub fn start(&self) -> Running<'_> {
        let clock = Clock {
            since: Instant::now(),
            stage: Stage::Prefill,
            activity: Activity::Other,
            spent: Spent::default(),
        };
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner) = Some(clock);
        self.running.store(true, Ordering::Relaxed);
        Running { profile: self }
    }

    /// Whether the clock runs.
    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::Relaxed)
    }

    /// From now on the time belongs to `activity`.
    pub fn enter(&self, activity: Activity) {
        self.with(|clock| {
            clock.charge();
            clock.activity = activity;
        });
    }

    /// Moves time of the current stage from one activity to another, as far as the first has it.
    pub fn shift(&self, from: Activity, to: Activity, time: Duration) {
        self.with(|clock| {
            clock.charge();
            let spent = &mut clock.spent[clock.stage as usize];
            let time = time.min(spent[from as usize]);
            spent[from as usize] -= time;
            spent[to as usize] += time;
        });
    }
}

/// A running clock; it stops when this is dropped.
pub struct Running<'a> {
    profile: &'a Profile,
}

impl Running<'_> {
    /// From now on the time belongs to `stage`.
    pub fn stage(&self, stage: Stage) {
        self.profile.with(|clock| {
            clock.charge();
            clock.stage = stage;
        });
    }

    /// Stops the clock; what was spent.
    pub fn stop(self) -> Spent {
        let spent = self.profile.with(|clock| {
            clock.charge();
            clock.spent
        });
        spent.unwrap_or_default()
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.profile.running.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activities_sum_to_the_wall_time() {
        let profile = Profile::default();
        profile.enter(Activity::Head);
        let before = Instant::now();
        let running = profile.start();
        let started = Instant::now();
        for stage in [Stage::Prefill, Stage::Decode] {
            running.stage(stage);
            for activity in Activity::ALL {
                profile.enter(activity);
                // A little work, so that each has its time.
                std::hint::black_box((0..20_000u64).fold(0, |sum, i| sum ^ i.rotate_left(3)));
            }
        }
        let least = started.elapsed();
        let spent = running.stop();
        let sum: Duration = spent.iter().flatten().sum();
        assert!(sum >= least && sum <= before.elapsed(), "{sum:?} of {least:?}");
        assert!(spent.iter().flatten().all(|time| *time > Duration::ZERO));
        assert!(!profile.is_running());
    }

    #[test]
    fn time_is_moved_only_as_far_as_there_is_any() {
        let profile = Profile::default();
        let running = profile.start();
        profile.enter(Activity::ExpertsLocal);
        profile.enter(Activity::Other);
        profile.shift(Activity::ExpertsLocal, Activity::DiskWait, Duration::from_secs(9));
        let spent = running.stop()[Stage::Prefill as usize];
        assert_eq!(spent[Activity::ExpertsLocal as usize], Duration::ZERO);
        assert!(spent[Activity::DiskWait as usize] < Duration::from_secs(9));
    }
}
