//! A machine that keeps itself on the list of a registry.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use experts::Notice;
use serde_json::{Map, Value};

use super::{Client, ClientError};

/// First rest after a registry did not answer, doubled up to that between two signs of life.
const PAUSE_FIRST: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Stop {
    stopping: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    /// Rests; true when it is time to end.
    fn rest(&self, time: Duration) -> bool {
        let stopping = self.stopping.lock().unwrap_or_else(PoisonError::into_inner);
        let rested = self.changed.wait_timeout_while(stopping, time, |stopping| !*stopping);
        *rested.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A place on the list, until it is dropped.
pub struct Registration {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl Registration {
    /// Registers `record`, and says after every rest of `every` that this machine is there and what
    /// `status` says of it. A registry that does not answer or has forgotten it is no reason to
    /// end.
    pub fn start(
        client: Client,
        every: Duration,
        record: Map<String, Value>,
        status: impl Fn() -> Map<String, Value> + Send + 'static,
        notice: Notice,
    ) -> std::io::Result<Registration> {
        let stop = Arc::new(Stop::default());
        let there = stop.clone();
        let thread = thread::Builder::new()
            .name("coli-registration".to_owned())
            .spawn(move || keep(&client, every, &record, &status, &notice, &there))?;
        Ok(Registration { stop, thread: Some(thread) })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        *self.stop.stopping.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.changed.notify_all();
        // One that panicked has said so already.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn keep(
    client: &Client,
    every: Duration,
    record: &Map<String, Value>,
    status: &impl Fn() -> Map<String, Value>,
    notice: &Notice,
    stop: &Stop,
) {
    let id = record.get("node_id").cloned().unwrap_or_default();
    let (mut registered, mut said_failing, mut pause) = (false, false, PAUSE_FIRST);
    loop {
        let said = if registered {
            let mut beat = status();
            beat.insert("node_id".to_owned(), id.clone());
            client.heartbeat(&Value::Object(beat))
        } else {
            let mut whole = record.clone();
            whole.extend(status());
            client.register(&Value::Object(whole))
        };
        let rest = match said {
            Ok(()) => {
                if !registered {
                    notice(&format!("registered with {}", client.url()));
                }
                (registered, said_failing, pause) = (true, false, PAUSE_FIRST);
                every
            }
            // It was restarted, or has not heard of this machine for too long.
            Err(ClientError::Unknown { .. }) => {
                registered = false;
                Duration::ZERO
            }
            Err(error) => {
                if !said_failing {
                    notice(&format!("{error}; it is tried again"));
                }
                said_failing = true;
                let rest = pause.min(every);
                pause = (pause * 2).min(every);
                rest
            }
        };
        if stop.rest(rest) {
            break;
        }
    }
    if registered {
        // One that cannot take that finds out.
        let _ = client.deregister(id.as_str().unwrap_or_default());
    }
}
