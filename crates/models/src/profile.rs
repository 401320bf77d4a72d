//! Where the time of a run goes: one clock that always belongs to exactly one activity, so that they
//! sum to the wall time.

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
    /// Every phase, as they are listed.
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

/// Time spent, per stage and phase in the order of [`Activity::ALL`].
pub type Spent = [[Duration; Activity::ALL.len()]; 2];

struct Clock {
    since: Instant,
    stage: Stage,
    phase: Activity,
    spent: Spent,
}

/// The clock of an engine's steps. It stands still until started; phases are entered by the thread
/// that makes the step.
#[derive(Default)]
pub struct Profile {
    running: AtomicBool,
    clock: Mutex<Option<Clock>>,
}

impl Clock {
    fn charge(&mut self) {
        let now = Instant::now();
        self.spent[self.stage as usize][self.phase as usize] += now - self.since;
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

    /// Starts the clock at zero.
    pub fn start(&self) {
        let clock = Clock {
            since: Instant::now(),
            stage: Stage::Prefill,
            phase: Activity::Other,
            spent: Spent::default(),
        };
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner) = Some(clock);
        self.running.store(true, Ordering::Relaxed);
    }

    /// Stops the clock and returns what was spent; `None` when it was not running.
    pub fn stop(&self) -> Option<Spent> {
        let spent = self.with(|clock| {
            clock.charge();
            clock.spent
        });
        self.running.store(false, Ordering::Relaxed);
        spent
    }

    /// From now on the time belongs to `stage`.
    pub fn stage(&self, stage: Stage) {
        self.with(|clock| {
            clock.charge();
            clock.stage = stage;
        });
    }

    /// From now on the time belongs to `phase`.
    pub fn enter(&self, phase: Activity) {
        self.with(|clock| {
            clock.charge();
            clock.phase = phase;
        });
    }

    /// Moves time of the current stage from one phase to another, as far as the first has it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_sum_to_the_wall_time() {
        let profile = Profile::default();
        profile.enter(Activity::Head);
        assert!(profile.stop().is_none(), "nothing is counted before the start");
        let started = Instant::now();
        profile.start();
        for stage in [Stage::Prefill, Stage::Decode] {
            profile.stage(stage);
            for phase in Activity::ALL {
                profile.enter(phase);
            }
            profile.shift(Activity::ExpertsLocal, Activity::DiskWait, Duration::from_secs(9));
        }
        let spent = profile.stop().unwrap();
        let sum: Duration = spent.iter().flatten().sum();
        assert!(sum <= started.elapsed());
        assert_eq!(spent[Stage::Decode as usize][Activity::ExpertsLocal as usize], Duration::ZERO);
    }
}
