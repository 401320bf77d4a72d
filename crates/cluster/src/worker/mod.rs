//! A machine that computes routed experts for others.

mod limits;
mod open;
mod server;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use container::{Config, Model};
use experts::{ExpertError, LocalExperts};
use numerics::Compute;
use smallvec::SmallVec;

pub use limits::Limits;
pub use open::{OpenError, Opened, WorkerOptions, open};
pub use server::{Server, Stop};

use crate::items::compute_items;
use crate::wire::v1::{self, Request};
use crate::wire::{Shape, put_floats_at};

/// The shape that messages about a model must have.
pub fn shape_of(config: &Config) -> Shape {
    Shape {
        hidden: config.hidden_size as u32,
        intermediate: config.moe.expert_intermediate as u32,
        layers: config.all_layers() as u32,
        experts: config.moe.experts as u32,
    }
}

/// What a worker did so far.
#[derive(Debug, Default)]
pub struct Counters {
    connections: AtomicU64,
    requests: AtomicU64,
    rows: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
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
}

/// Computes routed experts, one request at a time, in the order in which they came.
pub struct Worker {
    experts: LocalExperts,
    compute: Compute,
    shape: Shape,
    turns: Turns,
    counters: Counters,
}

impl Worker {
    /// A worker for a model, with those of its experts that `experts` holds.
    pub fn new(model: &Model, experts: LocalExperts, compute: Compute) -> Worker {
        let shape = shape_of(&model.config);
        Worker { experts, compute, shape, turns: Turns::default(), counters: Counters::default() }
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
        let Counters { connections, requests, rows, failed, refused } = &self.counters;
        let [connections, requests, rows, failed, refused] =
            [connections, requests, rows, failed, refused].map(|n| n.load(Ordering::Relaxed));
        Counts { connections, requests, rows, failed, refused }
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
