//! The experts of one layer that workers compute: whom to ask, what to do when an answer fails, is
//! late or never comes. No sockets, no clocks: time is an argument, and what is to be done comes
//! out as actions.

use std::time::{Duration, Instant};

use super::fleet::{Fleet, Size};
use super::placement::Place;
use crate::wire::v2::Status;

/// What limits one request.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    /// Most experts.
    pub experts: usize,
    /// Most bytes of rows, counted per expert that gets them.
    pub bytes: u64,
}

/// An expert of the step: its number and how many rows it gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// The expert.
    pub expert: u32,
    /// Rows.
    pub rows: u32,
}

/// Something that whoever drives the step must do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Send a request.
    Ask {
        /// Number of the request within the step.
        number: usize,
        /// To whom.
        worker: usize,
        /// Places of its experts among those of the step.
        experts: Vec<usize>,
        /// Time for the answer.
        time: Duration,
    },
    /// An answer is not wanted any more.
    Cancel {
        /// Number of the request.
        number: usize,
        /// Who was asked.
        worker: usize,
    },
    /// A worker takes no further requests.
    Draining {
        /// Which.
        worker: usize,
    },
    /// A worker is of no use at the moment.
    Leave {
        /// Which.
        worker: usize,
        /// Why.
        why: String,
    },
}

/// How an expert stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Standing {
    /// So many requests for it are open.
    Open(u32),
    /// An answer has come.
    Answered,
    /// Nobody else computes it.
    LeftOver,
    /// It belongs here.
    Here,
}

#[derive(Clone, Debug)]
struct Share {
    worker: usize,
    experts: Vec<usize>,
    asked_at: Instant,
    /// When another worker is asked too.
    hedge_at: Option<Instant>,
    /// Whether another worker was.
    hedged: bool,
    open: bool,
}

/// A layer's experts on their way.
#[derive(Clone, Debug)]
pub struct Step {
    layer: usize,
    wanted: Vec<Wanted>,
    row_bytes: u64,
    standing: Vec<Standing>,
    /// Workers that failed for each expert, or that were asked for it as well.
    tried: Vec<Vec<usize>>,
    shares: Vec<Share>,
    actions: Vec<Action>,
    /// Rows that were asked for twice because the first answer was late.
    pub hedged_rows: u64,
    /// Rows of which a request failed.
    pub failed_rows: u64,
    /// Experts of which one did.
    has_failed: Vec<bool>,
}

impl Step {
    /// Begins a layer: every expert that belongs to a worker and does not stay here is asked for,
    /// the slowest worker's first.
    pub fn new(
        fleet: &Fleet,
        layer: usize,
        wanted: Vec<Wanted>,
        row_bytes: u64,
        stays: impl Fn(u32) -> bool,
        now: Instant,
    ) -> Step {
        let count = wanted.len();
        let mut step = Step {
            layer,
            wanted,
            row_bytes,
            standing: vec![Standing::Here; count],
            tried: vec![Vec::new(); count],
            shares: Vec::new(),
            actions: Vec::new(),
            hedged_rows: 0,
            failed_rows: 0,
            has_failed: vec![false; count],
        };
        let mut parts: Vec<Vec<usize>> = vec![Vec::new(); fleet.peers().len()];
        for at in 0..count {
            let expert = step.wanted[at].expert;
            if let Place::Worker(worker) = fleet.place(layer, expert)
                && !stays(expert)
                && step.fits(fleet, worker, at)
            {
                step.standing[at] = Standing::Open(0);
                parts[worker].push(at);
            }
        }
        let mut order: Vec<usize> = (0..parts.len()).collect();
        order.sort_by(|a, b| fleet.late_s(*b).total_cmp(&fleet.late_s(*a)));
        for worker in order {
            step.ask(fleet, worker, &parts[worker], true, now);
        }
        step
    }

    /// Places of the experts that belong here.
    pub fn here(&self) -> Vec<usize> {
        self.standing_of(Standing::Here)
    }

    /// Places of the experts that nobody else computes, once the step is done.
    pub fn left_over(&self) -> Vec<usize> {
        self.standing_of(Standing::LeftOver)
    }

    fn standing_of(&self, wanted: Standing) -> Vec<usize> {
        (0..self.standing.len()).filter(|at| self.standing[*at] == wanted).collect()
    }

    /// What is to be done now.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Whether everything that others compute has come, or will not.
    pub fn is_done(&self) -> bool {
        !self.standing.iter().any(|standing| matches!(standing, Standing::Open(_)))
    }

    /// When something is to be done though nothing came.
    pub fn next_time(&self) -> Option<Instant> {
        self.shares.iter().filter(|share| share.open).filter_map(|share| share.hedge_at).min()
    }

    /// Whether a worker takes all rows of an expert at once.
    fn fits(&self, fleet: &Fleet, worker: usize, at: usize) -> bool {
        u64::from(self.wanted[at].rows) * self.row_bytes <= fleet.limits(worker).bytes
    }

    fn rows_of(&self, experts: &[usize]) -> u64 {
        experts.iter().map(|at| u64::from(self.wanted[*at].rows)).sum()
    }

    /// Asks a worker for experts, in as many requests as it takes.
    fn ask(&mut self, fleet: &Fleet, worker: usize, experts: &[usize], hedge: bool, now: Instant) {
        let limits = fleet.limits(worker);
        // Requests to one worker follow each other: each has the time of all up to it.
        let mut whole = Size::default();
        let mut rest = experts;
        while !rest.is_empty() {
            let (mut count, mut bytes) = (0, 0);
            while count < rest.len().min(limits.experts) {
                bytes += u64::from(self.wanted[rest[count]].rows) * self.row_bytes;
                if count > 0 && bytes > limits.bytes {
                    break;
                }
                count += 1;
            }
            let (experts, after) = rest.split_at(count);
            rest = after;
            let rows = self.rows_of(experts);
            let size = Size { experts: count, rows, row_bytes: rows * self.row_bytes };
            whole.experts += size.experts;
            whole.rows += size.rows;
            whole.row_bytes += size.row_bytes;
            let time = fleet.deadline(worker, whole);
            for at in experts {
                if let Standing::Open(count) = &mut self.standing[*at] {
                    *count += 1;
                }
                self.tried[*at].push(worker);
            }
            let number = self.shares.len();
            let experts = experts.to_vec();
            self.actions.push(Action::Ask { number, worker, experts: experts.clone(), time });
            self.shares.push(Share {
                worker,
                experts,
                asked_at: now,
                hedge_at: fleet.hedge_time(worker, whole).filter(|_| hedge).map(|time| now + time),
                hedged: false,
                open: true,
            });
        }
    }

    /// A request is answered. Returns the places of the experts whose outputs count, and how long
    /// it took, in order of the request: not those that failed, nor those that another answer had.
    pub fn answered(
        &mut self,
        fleet: &mut Fleet,
        number: usize,
        statuses: &[Status],
        now: Instant,
    ) -> Vec<usize> {
        let Some(share) = self.shares.get_mut(number).filter(|share| share.open) else {
            return Vec::new();
        };
        share.open = false;
        let (worker, took) = (share.worker, now.duration_since(share.asked_at));
        let experts = share.experts.clone();
        let computed = |at: &usize| statuses.get(*at) == Some(&Status::Computed);
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for (place, at) in experts.iter().enumerate() {
            let is_open = matches!(self.standing[*at], Standing::Open(_));
            match (is_open, computed(&place)) {
                (true, true) => {
                    self.standing[*at] = Standing::Answered;
                    good.push(*at);
                }
                (true, false) => bad.push(*at),
                (false, _) => {}
            }
        }
        let rows = self.rows_of(&good);
        if bad.is_empty() || !good.is_empty() {
            fleet.answered(worker, experts.len(), rows, took);
        } else if fleet.strike(worker) {
            let text = statuses.first().map_or("nothing", |status| status.text());
            let why = format!("it answers without computing anything: {text}");
            self.actions.push(Action::Leave { worker, why });
        }
        for (at, status) in experts.iter().zip(statuses) {
            let expert = self.wanted[*at].expert;
            match status {
                Status::Missing | Status::Unreadable => fleet.lost(worker, self.layer, expert),
                Status::Draining => self.actions.push(Action::Draining { worker }),
                _ => {}
            }
        }
        self.elsewhere(fleet, &bad, now);
        self.cancel_idle(fleet);
        good
    }

    /// A request will not be answered.
    pub fn failed(&mut self, fleet: &Fleet, number: usize, now: Instant) {
        let Some(share) = self.shares.get_mut(number).filter(|share| share.open) else { return };
        share.open = false;
        let experts = share.experts.clone();
        self.elsewhere(fleet, &experts, now);
    }

    /// What a request did not bring is asked of others, or left over, unless another request for it
    /// is open.
    fn elsewhere(&mut self, fleet: &Fleet, experts: &[usize], now: Instant) {
        let mut others: Vec<Vec<usize>> = vec![Vec::new(); fleet.peers().len()];
        for at in experts {
            let Standing::Open(count) = &mut self.standing[*at] else { continue };
            *count = count.saturating_sub(1);
            if *count > 0 {
                continue;
            }
            self.count_failed(*at);
            let expert = self.wanted[*at].expert;
            match fleet.other_place(self.layer, expert, &self.tried[*at]) {
                Place::Worker(other) if self.fits(fleet, other, *at) => others[other].push(*at),
                _ => self.standing[*at] = Standing::LeftOver,
            }
        }
        for (worker, experts) in others.into_iter().enumerate() {
            self.ask(fleet, worker, &experts, false, now);
        }
    }

    /// Requests of which nothing is wanted any more.
    fn cancel_idle(&mut self, fleet: &mut Fleet) {
        for (number, share) in self.shares.iter_mut().enumerate().filter(|(_, share)| share.open) {
            let wanted = |at: &usize| matches!(self.standing[*at], Standing::Open(_));
            if share.experts.iter().any(wanted) {
                continue;
            }
            let worker = share.worker;
            share.open = false;
            self.actions.push(Action::Cancel { number, worker });
            if share.hedged && fleet.strike(worker) {
                let why = "it did not answer before others that were asked later".to_owned();
                self.actions.push(Action::Leave { worker, why });
            }
        }
    }

    /// A worker was left: none of its requests will be answered.
    pub fn lost(&mut self, fleet: &Fleet, worker: usize, now: Instant) {
        for number in 0..self.shares.len() {
            if self.shares[number].worker == worker {
                self.failed(fleet, number, now);
            }
        }
    }

    /// Time has passed: what is late is asked of others too.
    pub fn time_passed(&mut self, fleet: &Fleet, now: Instant) {
        for number in 0..self.shares.len() {
            let share = &mut self.shares[number];
            if share.open && share.hedge_at.is_some_and(|at| at <= now) {
                share.hedge_at = None;
                self.hedge(fleet, number, now);
            }
        }
    }

    /// Asks others for what a late request has not brought; nobody where nobody else has it.
    fn hedge(&mut self, fleet: &Fleet, number: usize, now: Instant) {
        let mut others: Vec<Vec<usize>> = vec![Vec::new(); fleet.peers().len()];
        for at in self.shares[number].experts.clone() {
            if !matches!(self.standing[at], Standing::Open(1)) {
                continue;
            }
            let expert = self.wanted[at].expert;
            if let Place::Worker(other) = fleet.other_place(self.layer, expert, &self.tried[at])
                && self.fits(fleet, other, at)
            {
                self.shares[number].hedged = true;
                self.hedged_rows += u64::from(self.wanted[at].rows);
                others[other].push(at);
            }
        }
        for (worker, experts) in others.into_iter().enumerate() {
            self.ask(fleet, worker, &experts, false, now);
        }
    }

    fn count_failed(&mut self, at: usize) {
        if !std::mem::replace(&mut self.has_failed[at], true) {
            self.failed_rows += u64::from(self.wanted[at].rows);
        }
    }

    /// Whether a request for an expert failed.
    pub fn has_failed(&self, at: usize) -> bool {
        self.has_failed[at]
    }

    /// Whether everything that an answer computed is still wanted.
    pub fn is_wanted_whole(&self, number: usize, statuses: &[Status]) -> bool {
        let share = &self.shares[number];
        let computed = share.experts.iter().zip(statuses);
        let mut computed = computed.filter(|(_, status)| **status == Status::Computed);
        share.open && computed.all(|(at, _)| matches!(self.standing[*at], Standing::Open(_)))
    }

    /// Who was asked by a request.
    pub fn worker_of(&self, number: usize) -> usize {
        self.shares[number].worker
    }

    /// Experts of a request, as places among those of the step.
    pub fn experts_of(&self, number: usize) -> &[usize] {
        &self.shares[number].experts
    }

    /// An answer is not believed: what it brought is left over.
    pub fn disbelieve(&mut self, experts: &[usize]) {
        for at in experts {
            self.count_failed(*at);
            self.standing[*at] = Standing::LeftOver;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::coordinator::Version;

    const ROW_BYTES: u64 = 1000;

    /// Three workers that are ready and answer in 50 ms.
    fn fleet() -> Fleet {
        let names = ["a:1", "b:1", "c:1"].map(str::to_owned);
        let mut fleet = Fleet::new(&names, Vec::new(), Duration::from_secs(10));
        fleet.hedges = true;
        for at in 0..3 {
            fleet.greeted(at, Version::Two, None, None, false);
            assert!(fleet.ready(at));
            fleet.answered(at, 1, 1, Duration::from_millis(50));
        }
        fleet
    }

    fn wanted(rows: u32) -> Vec<Wanted> {
        (0..12).map(|expert| Wanted { expert, rows }).collect()
    }

    fn step(fleet: &Fleet, now: Instant) -> Step {
        Step::new(fleet, 4, wanted(2), ROW_BYTES, |_| false, now)
    }

    /// Requests among what is to be done: number, worker and experts.
    fn asks(step: &mut Step) -> Vec<(usize, usize, Vec<usize>)> {
        let ask = |action| match action {
            Action::Ask { number, worker, experts, .. } => Some((number, worker, experts)),
            _ => None,
        };
        step.take_actions().into_iter().filter_map(ask).collect()
    }

    #[test]
    fn every_expert_is_asked_for_once_and_those_that_stay_are_not() {
        let (fleet, now) = (fleet(), Instant::now());
        let mut step = Step::new(&fleet, 4, wanted(2), ROW_BYTES, |expert| expert < 3, now);
        let asks = asks(&mut step);
        let mut all: Vec<usize> = asks.iter().flat_map(|(_, _, experts)| experts.clone()).collect();
        all.sort_unstable();
        assert_eq!(all, (3..12).collect::<Vec<_>>());
        assert_eq!(step.here(), [0, 1, 2]);
        assert!(!step.is_done());
    }

    #[test]
    fn what_a_worker_does_not_compute_goes_to_others_and_at_last_here() {
        let (mut fleet, now) = (fleet(), Instant::now());
        let mut step = step(&fleet, now);
        let mut left = 3;
        while !step.is_done() {
            for (number, worker, experts) in asks(&mut step) {
                let good =
                    step.answered(&mut fleet, number, &vec![Status::Busy; experts.len()], now);
                assert!(good.is_empty());
                assert!(experts.iter().all(|at| step.tried[*at].contains(&worker)));
            }
            left -= 1;
            assert!(left >= 0);
        }
        assert_eq!(step.left_over().len(), 12);
        assert_eq!(step.failed_rows, 24);
    }

    #[test]
    fn a_worker_that_answers_without_computing_is_left_after_some() {
        let (mut fleet, now) = (fleet(), Instant::now());
        let mut leaves = Vec::new();
        for _ in 0..3 {
            let mut step = step(&fleet, now);
            for (number, worker, experts) in asks(&mut step) {
                let status = if worker == 1 { Status::Memory } else { Status::Computed };
                step.answered(&mut fleet, number, &vec![status; experts.len()], now);
            }
            let left = step.take_actions().into_iter().filter_map(|action| match action {
                Action::Leave { worker, why } => Some((worker, why)),
                _ => None,
            });
            leaves.extend(left);
        }
        assert_eq!(leaves.len(), 1);
        assert!(leaves[0].0 == 1 && leaves[0].1.contains("no memory"), "{leaves:?}");
    }

    #[test]
    fn a_late_worker_is_helped_and_left_when_others_are_always_faster() {
        let (mut fleet, now) = (fleet(), Instant::now());
        let mut left = Vec::new();
        for _ in 0..3 {
            let mut step = step(&fleet, now);
            let first = asks(&mut step);
            let (late, others): (Vec<_>, Vec<_>) =
                first.into_iter().partition(|(_, worker, _)| *worker == 2);
            for (number, _, experts) in others {
                step.answered(&mut fleet, number, &vec![Status::Computed; experts.len()], now);
            }
            assert!(!step.is_done());
            let later = step.next_time().unwrap();
            assert!((100..=2000).contains(&(later - now).as_millis()));
            step.time_passed(&fleet, later);
            for (number, worker, experts) in asks(&mut step) {
                assert_ne!(worker, 2);
                step.answered(&mut fleet, number, &vec![Status::Computed; experts.len()], later);
            }
            // Both are done with; the first request is not wanted any more.
            let actions = step.take_actions();
            let cancel = Action::Cancel { number: late[0].0, worker: 2 };
            assert!(actions.contains(&cancel), "{actions:?}");
            assert!(step.is_done() && step.hedged_rows > 0 && step.failed_rows == 0);
            left.extend(actions.into_iter().filter(|action| *action != cancel));
        }
        assert!(matches!(&left[..], [Action::Leave { worker: 2, .. }]), "{left:?}");
    }

    #[test]
    fn a_request_has_no_more_than_the_worker_takes_and_a_larger_expert_stays_here() {
        let (mut fleet, now) = (fleet(), Instant::now());
        let facts = |request_bytes| {
            Some(crate::identity::Facts { request_bytes, ..crate::identity::Facts::of_observer() })
        };
        (0..3).for_each(|at| fleet.greeted(at, Version::Two, facts(5000), None, false));
        let mut step = step(&fleet, now);
        for (_, _, experts) in asks(&mut step) {
            // Two rows each.
            assert!(experts.len() <= 2, "{experts:?}");
        }
        let step = Step::new(&fleet, 4, wanted(6), ROW_BYTES, |_| false, now);
        assert_eq!((step.here().len(), step.is_done()), (12, true));
    }

    #[test]
    fn many_requests_to_one_worker_have_the_time_of_one_that_is_as_large() {
        let mut fleet = fleet();
        fleet.hedges = false;
        let facts = crate::identity::Facts {
            request_bytes: ROW_BYTES,
            ..crate::identity::Facts::of_observer()
        };
        (0..3).for_each(|at| {
            fleet.greeted(at, Version::Two, Some(facts.clone()), None, false);
        });
        let wanted: Vec<Wanted> = (0..600).map(|expert| Wanted { expert, rows: 1 }).collect();
        let mut step = Step::new(&fleet, 4, wanted, ROW_BYTES, |_| false, Instant::now());
        let times = step.take_actions().into_iter().filter_map(|action| match action {
            Action::Ask { time, .. } => Some(time),
            _ => None,
        });
        let times: Vec<Duration> = times.collect();
        assert!(times.len() > 500 && times.iter().all(|time| *time < Duration::from_secs(31)));
    }

    #[test]
    fn requests_of_a_worker_that_was_left_go_elsewhere_at_once() {
        let (mut fleet, now) = (fleet(), Instant::now());
        let mut step = step(&fleet, now);
        let first = asks(&mut step);
        fleet.failed(0, "gone", now);
        step.lost(&fleet, 0, now);
        let lost: usize =
            first.iter().filter(|(_, worker, _)| *worker == 0).map(|(_, _, e)| e.len()).sum();
        let again: usize = asks(&mut step).iter().map(|(_, _, experts)| experts.len()).sum();
        assert!(lost > 0 && lost == again && !step.is_done());
    }
}
