//! The experts of one layer that workers compute: whom to ask, what to do when an answer fails, is
//! late or never comes. No sockets, no clocks: time is an argument, and what is to be done comes out
//! as actions.

use std::time::{Duration, Instant};

use super::fleet::Fleet;
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
    /// A worker did not answer in time.
    Leave {
        /// Which.
        worker: usize,
        /// The time that it had.
        time: Duration,
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
    time: Duration,
    deadline: Instant,
    /// When another worker is asked too.
    hedge_at: Option<Instant>,
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
    /// Rows whose first request failed.
    pub failed_rows: u64,
}

impl Step {
    /// Begins a layer: every expert that belongs to a worker and does not stay here is asked for, the
    /// slowest worker's first.
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
        };
        let mut parts: Vec<Vec<usize>> = vec![Vec::new(); fleet.peers().len()];
        for at in 0..count {
            let expert = step.wanted[at].expert;
            if let Place::Worker(worker) = fleet.place(layer, expert)
                && !stays(expert)
            {
                step.standing[at] = Standing::Open(0);
                parts[worker].push(at);
            }
        }
        let mut order: Vec<usize> = (0..parts.len()).collect();
        order.sort_by(|a, b| fleet.request_s(*b).total_cmp(&fleet.request_s(*a)));
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
        let open = self.shares.iter().filter(|share| share.open);
        open.map(|share| share.hedge_at.map_or(share.deadline, |at| at.min(share.deadline))).min()
    }

    fn rows_of(&self, experts: &[usize]) -> u64 {
        experts.iter().map(|at| u64::from(self.wanted[*at].rows)).sum()
    }

    /// Asks a worker for experts, in as many requests as it takes.
    fn ask(&mut self, fleet: &Fleet, worker: usize, experts: &[usize], hedge: bool, now: Instant) {
        let limits = fleet.limits(worker);
        let time = fleet.deadline(worker);
        // Requests to one worker follow each other.
        let mut whole = Duration::ZERO;
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
            whole += time;
            for at in experts {
                if let Standing::Open(count) = &mut self.standing[*at] {
                    *count += 1;
                }
                self.tried[*at].push(worker);
            }
            let number = self.shares.len();
            let experts = experts.to_vec();
            self.actions.push(Action::Ask {
                number,
                worker,
                experts: experts.clone(),
                time: whole,
            });
            self.shares.push(Share {
                worker,
                experts,
                asked_at: now,
                time: whole,
                deadline: now + whole,
                hedge_at: fleet.hedge_time(worker).filter(|_| hedge).map(|time| now + time),
                open: true,
            });
        }
    }

    /// A request is answered. Returns the places of the experts whose outputs count, and how long it
    /// took, in order of the request: not those that failed, nor those that another answer had.
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
        }
        for (at, status) in experts.iter().zip(statuses) {
            let expert = self.wanted[*at].expert;
            match status {
                Status::Missing | Status::Unreadable => fleet.lost(worker, self.layer, expert),
                Status::Draining => fleet.draining(worker),
                _ => {}
            }
        }
        self.elsewhere(fleet, &bad, now);
        self.cancel_idle();
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
            self.failed_rows += u64::from(self.wanted[*at].rows);
            let expert = self.wanted[*at].expert;
            match fleet.other_place(self.layer, expert, &self.tried[*at]) {
                Place::Local => self.standing[*at] = Standing::LeftOver,
                Place::Worker(other) => others[other].push(*at),
            }
        }
        for (worker, experts) in others.into_iter().enumerate() {
            self.ask(fleet, worker, &experts, false, now);
        }
    }

    /// Requests of which nothing is wanted any more.
    fn cancel_idle(&mut self) {
        for (number, share) in self.shares.iter_mut().enumerate().filter(|(_, share)| share.open) {
            let wanted = |at: &usize| matches!(self.standing[*at], Standing::Open(_));
            if !share.experts.iter().any(wanted) {
                share.open = false;
                self.actions.push(Action::Cancel { number, worker: share.worker });
            }
        }
    }

    /// Time has passed: late answers are asked of others too, and those that are too late given up.
    /// Their workers are left; `fleet` must hear of it before the next step.
    pub fn time_passed(&mut self, fleet: &Fleet, now: Instant) {
        for number in 0..self.shares.len() {
            let Share { open: true, worker, deadline, hedge_at, time, .. } = self.shares[number]
            else {
                continue;
            };
            if deadline <= now {
                self.actions.push(Action::Leave { worker, time });
                self.failed(fleet, number, now);
            } else if hedge_at.is_some_and(|at| at <= now) {
                self.shares[number].hedge_at = None;
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
            if let Place::Worker(other) = fleet.other_place(self.layer, expert, &self.tried[at]) {
                self.hedged_rows += u64::from(self.wanted[at].rows);
                others[other].push(at);
            }
        }
        for (worker, experts) in others.into_iter().enumerate() {
            self.ask(fleet, worker, &experts, false, now);
        }
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
            self.failed_rows += u64::from(self.wanted[*at].rows);
            self.standing[*at] = Standing::LeftOver;
        }
    }
}
