//! Routed experts computed by workers, with the experts of this machine for whatever they do not.
//!
//! All requests of a layer leave before the first answer is awaited. Whatever a worker does (wrong,
//! late, nothing), the sum is that of this machine's own experts: outputs are the same bits
//! wherever they are computed, and the sum is one of integers.

pub mod core;
mod difference;
mod discovery;
pub mod fleet;
mod hot;
mod link;
mod observe;
mod outputs;
pub mod placement;
pub mod step;
mod threads;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use container::Config;
use experts::{ExpertBackend, ExpertError, ExpertStats, LocalExperts, RoutedBatch};
use numerics::Compute;

pub use self::core::{Audit, CoordinatorOptions, RowCounts};
use self::core::{Core, Peers, Reply};
pub use self::discovery::{Discovery, LOOK_EVERY};
pub use self::fleet::{Peer, State, UnknownPlace};
pub use self::hot::WINDOW_CALLS as HOT_WINDOW_CALLS;
use self::link::Waiting;
pub use self::observe::{Examined, Observed, Unseen, observe};
use self::threads::{Job, Shared, entropy};
use crate::session::coordinator::Request;

/// Time that opening waits for workers to join.
const JOIN_TIME: Duration = Duration::from_secs(10);
/// Time for which ending waits for the threads of the workers.
const THREAD_TIME: Duration = Duration::from_secs(5);
/// Usual time for a request to a worker of which nothing is known yet.
pub const REQUEST_TIME: Duration = Duration::from_secs(10);

/// The experts of a cluster.
pub struct Coordinator {
    shared: Arc<Shared>,
}

impl Coordinator {
    /// Bytes of requests and answers that a step of so many rows holds, at most.
    pub fn held_bytes(config: &Config, rows: usize) -> u64 {
        let row_bytes = (config.hidden_size * size_of::<f32>()) as u64;
        // Encoded once, answered once, a copy of each at most.
        4 * rows as u64 * config.moe.top_k as u64 * row_bytes
    }

    /// Connects to workers and compares some outputs of each with those of `local`, which holds all
    /// experts of the model. Waits until each that is known at first has joined or failed to, some
    /// seconds at most; `discovery` finds others from then on.
    pub fn new(
        config: &Config,
        local: Arc<LocalExperts>,
        compute: &Compute,
        options: CoordinatorOptions,
        discovery: Option<Discovery>,
    ) -> Result<Coordinator, UnknownPlace> {
        let discovery = discovery.map(|discovery| (discovery, options.notice.clone()));
        let core = Core::new(config, local, compute, options, entropy());
        let unknown = core.fleet().unknown_place();
        match (unknown, &discovery) {
            (Some(unknown), None) => return Err(unknown),
            (Some(unknown), Some((_, notice))) => notice(&format!(
                "--place names {:?}, which is not there yet; until it is, its experts are \
                 computed here",
                unknown.name
            )),
            (None, _) => {}
        }
        let shared = Shared::new(core);
        if let Some((discovery, notice)) = discovery {
            discovery.start(&shared, notice);
        }
        let coordinator = Coordinator { shared };
        coordinator.wait_joined();
        Ok(coordinator)
    }

    fn wait_joined(&self) {
        let deadline = Instant::now() + JOIN_TIME;
        let mut fleet = self.shared.core.fleet();
        while fleet.peers().iter().any(|peer| peer.state == State::Joining) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.shared.joined.wait_timeout(fleet, left);
            fleet = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The workers now.
    pub fn peers(&self) -> Vec<Peer> {
        self.shared.core.fleet().peers().to_vec()
    }

    /// What was computed where.
    pub fn rows(&self) -> RowCounts {
        self.shared.core.rows()
    }

    /// Whether results may depend on who computed them.
    pub fn is_inexact(&self) -> bool {
        self.shared.core.is_inexact()
    }

    /// Experts that stay here because they are chosen most often.
    pub fn kept_here(&self) -> usize {
        self.shared.core.kept_here()
    }

    /// Bytes of requests and answers so far, encryption not counted.
    pub fn wire_bytes(&self) -> u64 {
        self.shared.core.wire_bytes()
    }
}

/// The threads of the workers, for one step.
struct StepPeers<'a> {
    coordinator: &'a Coordinator,
    sender: Sender<Reply>,
    replies: Receiver<Reply>,
}

impl Peers for StepPeers<'_> {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn ask(&self, worker: usize, number: usize, request: Request, deadline: Instant) {
        let waiting = Waiting { number, replies: self.sender.clone() };
        let job = Job::Ask { request: Box::new(request), waiting, deadline };
        if let Err(Job::Ask { waiting, .. }) = self.coordinator.shared.send(worker, job) {
            waiting.tell(None);
        }
    }

    fn cancel(&self, worker: usize, id: u64) {
        // Whoever has ended answers nothing in any case.
        let _ = self.coordinator.shared.send(worker, Job::Cancel(id));
    }

    fn close(&self, worker: usize) {
        self.coordinator.shared.close(worker);
    }

    fn wait(&self, until: Instant) -> Option<Reply> {
        self.replies.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }
}

impl ExpertBackend for Coordinator {
    fn compute(
        &self,
        compute: &Compute,
        layer: usize,
        batch: &RoutedBatch<'_>,
        sum: &mut [i64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExpertError> {
        let (sender, replies) = channel();
        let peers = StepPeers { coordinator: self, sender, replies };
        self.shared.core.compute(&peers, compute, layer, batch, sum, meanwhile)
    }

    fn wants_guesses(&self) -> bool {
        // Guesses would fill this machine's memory with what workers compute.
        false
    }

    fn stats(&self) -> ExpertStats {
        let core = &self.shared.core;
        ExpertStats { remote_s: core.waited_s(), ..core.local().stats() }
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.shared.stop();
        let threads = {
            let mut threads = self.shared.threads.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *threads)
        };
        let deadline = Instant::now() + THREAD_TIME;
        for thread in threads {
            // One that waits for a worker's answer is not waited for.
            while !thread.is_finished() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}
