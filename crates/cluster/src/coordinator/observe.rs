//! Looking at workers: what they are and do, without a model, and how they compute, with one.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::Coordinator;
use super::core::{Reply, Unfit};
use super::fleet::State;
use super::link::{Link, LinkError, Waiting};
use super::placement::mix;
use super::threads::{Job, entropy};
use crate::identity::{Facts, Holdings};
use crate::session::coordinator::{Event, Hello, Version};
use crate::wire::secure::Key;
use crate::wire::v2::Load;

/// Experts that a worker is asked for when it is examined.
const EXAMINED_EXPERTS: usize = 4;

/// What a worker says of itself.
#[derive(Clone, Debug)]
pub struct Observed {
    /// What it is.
    pub facts: Facts,
    /// What it holds.
    pub holdings: Holdings,
    /// What it does.
    pub load: Load,
    /// Time from a question to its answer.
    pub ping: Duration,
}

/// Asks a worker at `host:port` what it is; it must speak version 2. An error says why it did not
/// answer.
pub fn observe(name: &str, key: Option<Key>, time: Duration) -> Result<Observed, Unseen> {
    let facts = Facts::of_observer();
    let (shape, holdings) = (facts.shape(), Arc::default());
    let hello = Arc::new(Hello { facts, holdings, shape, key });
    let joined = Link::connect(name, &hello, Some(Version::Two), time);
    let (link, event) = joined.map_err(|error| unseen(&error))?;
    let Event::Joined { facts: Some(facts), holdings, .. } = event else {
        return Err(Unseen { is_there: true, why: "it does not say what it is".to_owned() });
    };
    let started = Instant::now();
    let load = link.load(started + time).map_err(|error| unseen(&error))?;
    Ok(Observed { facts: *facts, holdings, load, ping: started.elapsed() })
}

/// Why nothing is known of a worker.
#[derive(Clone, Debug)]
pub struct Unseen {
    /// Whether somebody answered.
    pub is_there: bool,
    /// Why not.
    pub why: String,
}

fn unseen(error: &LinkError) -> Unseen {
    let is_there = matches!(error, LinkError::Session(_) | LinkError::Early);
    Unseen { is_there, why: error.to_string() }
}

/// How a worker computes.
#[derive(Clone, Debug)]
pub struct Examined {
    /// Its name.
    pub name: String,
    /// How it is.
    pub state: State,
    /// Experts whose outputs were compared with this machine's, all the same.
    pub compared: usize,
    /// Time of the slowest first request for an expert, which may have been read from a drive.
    pub first: Duration,
    /// Time of the fastest second request for the same expert.
    pub second: Duration,
    /// What is wrong, if anything is.
    pub problem: Option<String>,
}

impl Coordinator {
    /// Asks every worker that has joined for outputs of some experts, and compares them.
    pub fn examine(&self) -> Vec<Examined> {
        (0..self.peers().len()).map(|at| self.examine_one(at)).collect()
    }

    fn examine_one(&self, at: usize) -> Examined {
        let core = &self.shared.core;
        let peer = core.fleet().peers()[at].clone();
        let mut examined = Examined {
            name: peer.name,
            state: peer.state,
            compared: 0,
            first: Duration::ZERO,
            second: Duration::MAX,
            problem: None,
        };
        if examined.state != State::Ready {
            let why = peer.last_failure.unwrap_or_else(|| "it has not joined yet".to_owned());
            examined.problem = Some(why);
            return examined;
        }
        let version = core.fleet().version(at);
        let mut noise = entropy();
        for _ in 0..EXAMINED_EXPERTS {
            for again in [false, true] {
                // The same numbers choose the same expert.
                let mut same = noise;
                let mut again_next = || {
                    same = mix(same);
                    same
                };
                let Some((probe, request)) = core.probe(at, version, &mut again_next) else {
                    break;
                };
                let (replies, answers) = channel();
                let deadline = Instant::now() + core.probe_time(at);
                let waiting = Waiting { number: 0, replies };
                let started = Instant::now();
                // One whose thread has ended gives no answer.
                let _ = self
                    .shared
                    .send(at, Job::Ask { request: Box::new(request), waiting, deadline });
                let left = deadline.saturating_duration_since(Instant::now());
                let answer = match answers.recv_timeout(left) {
                    Ok(Reply { answer: Some(answer), .. }) => answer,
                    _ => {
                        examined.problem = Some("it did not answer in time".to_owned());
                        return examined;
                    }
                };
                let took = started.elapsed();
                if let Err(Unfit::Wrong(why) | Unfit::Failed(why)) =
                    core.check_probe(&probe, &answer)
                {
                    examined.problem = Some(why);
                    return examined;
                }
                match again {
                    false => examined.first = examined.first.max(took),
                    true => examined.second = examined.second.min(took),
                }
                examined.compared += usize::from(!again);
            }
            noise = mix(!noise);
        }
        if examined.compared == 0 {
            examined.problem = Some("it holds no expert of this model".to_owned());
        }
        examined
    }
}
