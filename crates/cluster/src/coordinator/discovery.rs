//! Workers that come and go while a coordinator runs, by the list of a registry.

use std::collections::HashSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use experts::Notice;

use super::threads::Shared;
use crate::registry::{Client, ClientError};

/// Usual rest between two looks at the list.
pub const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Rest between two looks at whether the coordinator ends.
const TURN: Duration = Duration::from_millis(100);
/// Most workers that a list may bring.
const WORKERS_MAX: usize = 256;

/// Whether a worker at an address may be used; an error says why not.
type Allow = Arc<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// Where workers are found.
#[derive(Clone)]
pub struct Discovery {
    registry: Client,
    every: Duration,
    allow: Allow,
}

impl Discovery {
    /// Workers of a registry, those that `allow` says may be used; the list is looked at after
    /// every rest of `every`.
    pub fn new(
        registry: Client,
        every: Duration,
        allow: impl Fn(&str) -> Result<(), String> + Send + Sync + 'static,
    ) -> Discovery {
        Discovery { registry, every, allow: Arc::new(allow) }
    }

    /// Whether the registry answers.
    pub fn check(&self) -> Result<(), ClientError> {
        self.registry.topology().map(|_| ())
    }

    /// Adds what is listed now, and from then on what is listed later.
    pub(super) fn start(self, shared: &Arc<Shared>, notice: Notice) {
        let every = self.every;
        let mut look = Look { discovery: self, notice, refused: HashSet::new(), failing: false };
        look.once(shared);
        let there = shared.clone();
        let thread = thread::Builder::new().name("coli-discovery".to_owned()).spawn(move || {
            let mut next = Instant::now() + every;
            while !there.is_stopping() {
                if Instant::now() >= next {
                    look.once(&there);
                    next = Instant::now() + every;
                }
                thread::sleep(TURN.min(every));
            }
        });
        match thread {
            Ok(thread) => shared.keep(thread),
            Err(error) => (shared.core.options.notice)(&format!(
                "workers that come later are not found: {error}"
            )),
        }
    }
}

/// Looking at the list.
struct Look {
    discovery: Discovery,
    notice: Notice,
    /// Workers of which was said that they are not used.
    refused: HashSet<String>,
    /// Whether the registry did not answer the last time.
    failing: bool,
}

impl Look {
    fn once(&mut self, shared: &Arc<Shared>) {
        let members = match self.discovery.registry.topology() {
            Ok(members) => members,
            Err(error) => {
                if !self.failing {
                    (self.notice)(&format!(
                        "{error}; workers that are known stay, and it is asked again"
                    ));
                }
                self.failing = true;
                return;
            }
        };
        if std::mem::take(&mut self.failing) {
            (self.notice)(&format!("the registry {} is back", self.discovery.registry.url()));
        }
        for member in members {
            let is_ready = member.record["state"].as_str().is_none_or(|state| state == "ready");
            if member.role != "expert" || !is_ready {
                continue;
            }
            let (is_known, known) = {
                let fleet = shared.core.fleet();
                (fleet.knows(&member.address), fleet.peers().len())
            };
            if is_known {
                continue;
            }
            let allowed = match known < WORKERS_MAX {
                true => (self.discovery.allow)(&member.address),
                false => Err(format!("{WORKERS_MAX} workers are known already")),
            };
            match allowed {
                Ok(()) => shared.add(&member.address),
                Err(why) => {
                    if self.refused.len() < WORKERS_MAX
                        && self.refused.insert(member.address.clone())
                    {
                        (self.notice)(&format!("worker {} is not used: {why}", member.address));
                    }
                }
            }
        }
    }
}
