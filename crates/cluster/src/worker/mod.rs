//! A machine that computes routed experts for others.

mod limits;
mod open;
mod server;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use container::Config;
use experts::{ExpertBackend, ExpertError, ExpertRows, LocalExperts, RoutedBatch};
use formats::Input;
use numerics::function;
use smallvec::SmallVec;

pub use limits::Limits;
pub use open::{OpenError, Opened, WorkerOptions, open};
pub use server::{Server, Status as ServerStatus, Stop};

use crate::items::compute_items;
use crate::session::worker::Welcome;
use crate::wire::v1::{self, Request};
use crate::wire::v2::{Answer, Compute, Outputs, Status};
use crate::wire::{Shape, put_floats_at};

/// What a worker did so far.
#[derive(Debug, Default)]
pub struct Counters {
    connections: AtomicU64,
    requests: AtomicU64,
    rows: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
    /// Experts computed, and time for them.
    experts: AtomicU64,
    computed_us: AtomicU64,
}

/// The values of [`Counters`] at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Connections accepted.
    pub connections: u64,
    /// Requests computed.
    pub requests: u64,
    /// Rows computed, per expert that served them.
    pub rows: u64,
    /// Requests that could not be computed.
    pub failed: u64,
    /// Connections ended because of what came, or because too many were open.
    pub refused: u64,
    /// Experts computed, once per request.
    pub experts: u64,
    /// Microseconds that requests took once it was their turn.
    pub computed_us: u64,
}

impl Counts {
    /// Mean microseconds per expert, reads included; 0 before there was any.
    pub fn us_per_expert(&self) -> u64 {
        self.computed_us.checked_div(self.experts).unwrap_or(0)
    }
}

/// Computes routed experts, one request at a time, in the order in which they came.
pub struct Worker {
    experts: LocalExperts,
    compute: numerics::Compute,
    shape: Shape,
    welcome: Welcome,
    turns: Turns,
    counters: Counters,
}

impl Worker {
    /// A worker with the experts that `experts` holds, which tells its peers `welcome`.
    pub fn new(experts: LocalExperts, compute: numerics::Compute, welcome: Welcome) -> Worker {
        let shape = welcome.shape;
        let (turns, counters) = Default::default();
        Worker { experts, compute, shape, welcome, turns, counters }
    }

    /// What it tells its peers.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// The shape of messages.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The experts.
    pub fn experts(&self) -> &LocalExperts {
        &self.experts
    }

    /// What was done so far.
    pub fn counts(&self) -> Counts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        Counts {
            connections: load(&counters.connections),
            requests: load(&counters.requests),
            rows: load(&counters.rows),
            failed: load(&counters.failed),
            refused: load(&counters.refused),
            experts: load(&counters.experts),
            computed_us: load(&counters.computed_us),
        }
    }

    /// Bytes of activations that computing a request of `rows_bytes` needs beside the request.
    pub fn scratch_bytes(config: &Config, rows_bytes: u64) -> u64 {
        let (hidden, width) = (config.hidden_size as u64, config.moe.expert_intermediate as u64);
        // Rows put together, outputs, the reply; rotated and int8 forms; gate and up of all rows,
        // and their int8 forms.
        let of_hidden = 5 * rows_bytes;
        let of_width = 3 * rows_bytes / hidden.max(1) * width;
        // Kept for the next request.
        (of_hidden + of_width) / 4 * 5
    }

    /// Computes a request of version 1: the bytes of its reply, also where it fails; then with the
    /// reason.
    pub fn reply(&self, request: Request) -> (Vec<u8>, Result<(), ExpertError>) {
        let _turn = self.turns.take();
        #[cfg(feature = "mutations")]
        let request = self.mutated_v1(request);
        let mut reply = Vec::new();
        let computed = self.compute_into(&request, &mut reply);
        match &computed {
            Ok(rows) => {
                self.counters.requests.fetch_add(1, Ordering::Relaxed);
                self.counters.rows.fetch_add(*rows, Ordering::Relaxed);
            }
            Err(_) => {
                self.counters.failed.fetch_add(1, Ordering::Relaxed);
                reply.clear();
                v1::put_reply(&mut reply, v1::FAILED, 0);
            }
        }
        (reply, computed.map(|_| ()))
    }

    /// Computes a request of version 2 that came at `arrived`, as far as it can be; nothing of it
    /// unless `is_wanted` still says so when its turn comes. `failed` is told which experts could
    /// not be computed.
    pub fn answer(
        &self,
        request: &Compute,
        arrived: Instant,
        is_wanted: impl Fn() -> bool,
        failed: &mut dyn FnMut(&ExpertError),
    ) -> Answer {
        let _turn = self.turns.take();
        #[cfg(feature = "mutations")]
        let request = &self.mutated(request);
        let begun = Instant::now();
        let waited = begun.duration_since(arrived);
        let late = request.deadline_ms > 0 && waited.as_millis() > request.deadline_ms.into();
        let table = self.experts.table();
        let status = |(expert, _): &(u32, u32)| match table.get((request.layer, *expert)) {
            _ if !is_wanted() => Status::Cancelled,
            _ if late => Status::Deadline,
            None => Status::Missing,
            Some(_) => Status::Computed,
        };
        let mut statuses: Vec<Status> = request.experts.iter().map(status).collect();
        let usable;
        let request = match self.refuse_non_finite(request, &mut statuses) {
            Some(without) => {
                usable = without;
                &usable
            }
            None => request,
        };
        let outputs = match self.outputs(request, &statuses) {
            Ok(outputs) => outputs,
            // The others are computed without those that fail.
            Err(_) => self.outputs_one_by_one(request, &mut statuses, failed),
        };
        let rows = (0..statuses.len()).filter(|at| statuses[*at] == Status::Computed);
        let rows: usize = rows.map(|at| request.item(at).1.len()).sum();
        let failed = statuses.iter().any(|status| *status != Status::Computed);
        let counter = if failed { &self.counters.failed } else { &self.counters.requests };
        counter.fetch_add(1, Ordering::Relaxed);
        self.counters.rows.fetch_add(rows as u64, Ordering::Relaxed);
        let micros = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        let (waited_us, computed_us) = (micros(waited), micros(begun.elapsed()));
        let computed = statuses.iter().filter(|status| **status == Status::Computed).count();
        self.counters.experts.fetch_add(computed as u64, Ordering::Relaxed);
        self.counters.computed_us.fetch_add(computed_us.into(), Ordering::Relaxed);
        Answer { waited_us, computed_us, statuses, outputs }
    }

    /// Marks experts that get a row that is not finite; returns the request with such rows as
    /// zeros, if there are any.
    fn refuse_non_finite(&self, request: &Compute, statuses: &mut [Status]) -> Option<Compute> {
        let (isa, hidden) = (self.compute.isa, self.shape.hidden as usize);
        function::first_non_finite(isa, &request.values)?;
        let mut without = request.clone();
        let mut bad = vec![false; request.values.len() / hidden];
        for (row, bad) in without.values.chunks_exact_mut(hidden).zip(&mut bad) {
            if function::first_non_finite(isa, row).is_some() {
                *bad = true;
                row.fill(0.0);
            }
        }
        for (at, status) in statuses.iter_mut().enumerate() {
            let is_bad = request.item(at).1.iter().any(|row| bad[usize::from(*row)]);
            if is_bad && *status == Status::Computed {
                *status = Status::Numeric;
            }
        }
        Some(without)
    }

    /// The same as [`Worker::outputs`], each expert apart; those that fail are marked.
    fn outputs_one_by_one(
        &self,
        request: &Compute,
        statuses: &mut [Status],
        failed: &mut dyn FnMut(&ExpertError),
    ) -> Outputs {
        let (mut rows, mut sums) = (Vec::new(), vec![0i64; 0]);
        for at in
            (0..statuses.len()).filter(|at| statuses[*at] == Status::Computed).collect::<Vec<_>>()
        {
            let mut alone = vec![Status::Missing; statuses.len()];
            alone[at] = Status::Computed;
            match self.outputs(request, &alone) {
                Ok(Outputs::Rows(more)) => rows.extend(more),
                Ok(Outputs::Sums(more)) => {
                    sums.resize(more.len(), 0);
                    sums.iter_mut().zip(more).for_each(|(sum, more)| *sum = sum.wrapping_add(more));
                }
                Err(error) => {
                    failed(&error);
                    statuses[at] = status_of(&error);
                }
            }
        }
        if request.sums { Outputs::Sums(sums) } else { Outputs::Rows(rows) }
    }

    /// Outputs of those experts of a request whose status says that they are to be computed, or the
    /// first that cannot be.
    fn outputs(&self, request: &Compute, statuses: &[Status]) -> Result<Outputs, ExpertError> {
        let Worker { experts, compute, shape, .. } = self;
        let (hidden, layer) = (shape.hidden as usize, request.layer as usize);
        let wanted = (0..statuses.len()).filter(|at| statuses[*at] == Status::Computed);
        let input = Input::new("rows of the request", &request.values[..], hidden);
        let items = wanted.map(|at| request.item(at));
        let batch = RoutedBatch::of(&compute.scratch, &input, items.clone());
        if request.sums {
            let any = !batch.experts().is_empty();
            let mut sums = vec![0; if any { request.values.len() } else { 0 }];
            let computed = experts.compute(compute, layer, &batch, &mut sums, &mut || {});
            return computed.map(|()| Outputs::Sums(sums));
        }
        let total: usize = items.clone().map(|(_, rows, _)| rows.len()).sum();
        let mut outputs = vec![0.0; total * hidden];
        // Where each expert's outputs go.
        let mut starts: SmallVec<[(u32, usize); 16]> = SmallVec::new();
        let mut end = 0;
        for (expert, rows, _) in items {
            starts.push((expert, end));
            end += rows.len() * hidden;
        }
        let deliver = &mut |rows: &ExpertRows<'_>, of_expert: &[f32]| {
            let at = starts.partition_point(|(expert, _)| *expert < rows.expert);
            outputs[starts[at].1..][..of_expert.len()].copy_from_slice(of_expert);
        };
        experts.outputs(compute, layer, &batch, deliver)?;
        Ok(Outputs::Rows(outputs))
    }

    fn compute_into(&self, request: &Request, reply: &mut Vec<u8>) -> Result<u64, ExpertError> {
        let row_bytes = self.shape.hidden as usize * size_of::<f32>();
        // Where in the reply each row's output goes.
        let mut places: SmallVec<[usize; 64]> = SmallVec::new();
        let bytes: usize = request.items.iter().map(|item| size_of_val(&item.rows[..])).sum();
        reply.reserve_exact(bytes + 64 * (request.items.len() + 1));
        v1::put_reply(reply, v1::OK, request.items.len());
        for item in &request.items {
            let rows = size_of_val(&item.rows[..]) / row_bytes;
            v1::put_item_head(reply, item.expert, rows as u32);
            places.extend((0..rows).map(|row| reply.len() + row * row_bytes));
            reply.resize(reply.len() + rows * row_bytes, 0);
        }
        let (layer, shape) = (request.layer as usize, self.shape);
        let deliver = &mut |row: usize, output: &[f32]| {
            put_floats_at(&mut reply[places[row]..], output);
        };
        compute_items(&self.experts, &self.compute, shape, layer, &request.items, deliver)?;
        Ok(places.len() as u64)
    }
}

#[cfg(feature = "mutations")]
impl Worker {
    fn mutated(&self, request: &Compute) -> Compute {
        let mut request = request.clone();
        let key = (request.layer, request.experts[0].0);
        crate::mutation::rotate_back(self.experts.table(), key, &self.compute, &mut request.values);
        request
    }

    fn mutated_v1(&self, mut request: Request) -> Request {
        for item in &mut request.items {
            let key = (request.layer, item.expert);
            crate::mutation::rotate_back(self.experts.table(), key, &self.compute, &mut item.rows);
        }
        request
    }
}

/// What an error says of its expert.
fn status_of(error: &ExpertError) -> Status {
    match error {
        ExpertError::Load { .. } => Status::Unreadable,
        ExpertError::NotHeld { .. } => Status::Missing,
        ExpertError::Numeric { .. } => Status::Numeric,
    }
}

/// Turns in the order in which they were asked for.
#[derive(Debug, Default)]
struct Turns {
    state: Mutex<Tickets>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Tickets {
    given: u64,
    served: u64,
}

/// A turn, until it is dropped.
struct Turn<'a>(&'a Turns);

impl Turns {
    /// Waits for a turn.
    fn take(&self) -> Turn<'_> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = state.given;
        state.given += 1;
        while state.served != ticket {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).served += 1;
        self.0.changed.notify_all();
    }
}
