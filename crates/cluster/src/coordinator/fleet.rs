//! What is known of the workers, and what follows from it: whom to ask, how long to wait, whom to
//! leave alone and until when. No sockets, no clocks: time is an argument.

use std::time::{Duration, Instant};

use super::placement::{Place, Rule, owner};

/// Share of the time for a request to an unknown worker that every request has, and the factor over
/// what late ones took: experts that are not in a worker's memory take far longer than others.
const LEAST_SHARE: u32 = 5;
/// Longest time for a request, over that for one to an unknown worker.
const MOST_SHARE: u32 = 3;
const DEADLINE_FACTOR: f64 = 10.0;
/// First and longest pause before a worker that failed is tried again.
const PAUSE_FIRST: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Share of the old value in the mean of times.
const OLD_SHARE: f64 = 0.8;

/// How a worker is.
#[derive(Clone, PartialEq, Debug)]
pub enum State {
    /// Not connected yet, or connecting.
    Joining,
    /// Connected, and its outputs are right.
    Ready,
    /// It failed, and is tried again.
    Sick {
        /// From then on.
        retry_at: Instant,
    },
    /// Its outputs are wrong: it is never asked again.
    Quarantined,
}

/// A worker as the fleet sees it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its name: the address, as the user wrote it.
    pub name: String,
    /// How it is.
    pub state: State,
    /// Rows that it computed.
    pub rows: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Failures since the last answer.
    in_a_row: u32,
    /// Mean seconds of late requests.
    request_s: Option<f64>,
    /// Whether rules say what it gets.
    by_rules: bool,
    /// Its draws in the placement.
    id: u64,
}

/// The workers.
#[derive(Clone, Debug)]
pub struct Fleet {
    peers: Vec<Peer>,
    rules: Vec<(Rule, Place)>,
    request_time: Duration,
}

/// A rule names nobody.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("--place names {name:?}, which is no worker; workers are {known}")]
pub struct UnknownPlace {
    /// The name.
    pub name: String,
    /// Names that there are.
    pub known: String,
}

impl Fleet {
    /// Workers of these names. Of several rules for an expert the first one counts; a worker that a
    /// rule names gets nothing but what rules give it.
    pub fn new(
        names: &[String],
        rules: Vec<Rule>,
        request_time: Duration,
    ) -> Result<Fleet, UnknownPlace> {
        let place_of = |rule: &Rule| match names.iter().position(|name| *name == rule.place) {
            Some(at) => Ok(Place::Worker(at)),
            None if rule.place == "local" => Ok(Place::Local),
            None => Err(UnknownPlace { name: rule.place.clone(), known: names.join(", ") }),
        };
        let rules = rules.into_iter().map(|rule| Ok((place_of(&rule)?, rule)));
        let rules: Vec<_> =
            rules.map(|both| both.map(|(place, rule)| (rule, place))).collect::<Result<_, _>>()?;
        let peer = |(at, name): (usize, &String)| Peer {
            name: name.clone(),
            state: State::Joining,
            rows: 0,
            failures: 0,
            in_a_row: 0,
            request_s: None,
            by_rules: rules.iter().any(|(_, place)| *place == Place::Worker(at)),
            // By the name, so that a list in another order places experts alike.
            id: name.bytes().fold(0, |id, byte| super::placement::mix(id ^ u64::from(byte))),
        };
        let peers = names.iter().enumerate().map(peer).collect();
        Ok(Fleet { peers, rules, request_time })
    }

    /// The workers.
    pub fn peers(&self) -> &[Peer] {
        &self.peers
    }

    /// Where an expert belongs while all workers are well.
    fn home(&self, layer: usize, expert: u32, among: impl Fn(&Peer) -> bool) -> Place {
        if let Some((_, place)) = self.rules.iter().find(|(rule, _)| rule.covers(layer, expert)) {
            return match place {
                Place::Worker(at) if !among(&self.peers[*at]) => Place::Local,
                place => *place,
            };
        }
        let free = self.peers.iter().enumerate().filter(|(_, peer)| !peer.by_rules && among(peer));
        let owner = owner(layer, expert, free.map(|(at, peer)| (at, peer.id, 1.0)));
        owner.map_or(Place::Local, Place::Worker)
    }

    /// Where to compute an expert now.
    pub fn place(&self, layer: usize, expert: u32) -> Place {
        self.home(layer, expert, |peer| peer.state == State::Ready)
    }

    /// Another worker for an expert after some have failed; the coordinator where there is none.
    pub fn other_place(&self, layer: usize, expert: u32, failed: &[usize]) -> Place {
        let well = |peer: &Peer| {
            peer.state == State::Ready
                && !failed.iter().any(|at| std::ptr::eq(&self.peers[*at], peer))
        };
        self.home(layer, expert, well)
    }

    /// Whether an expert is a worker's while all are well.
    pub fn belongs(&self, at: usize, layer: usize, expert: u32) -> bool {
        let well = |peer: &Peer| peer.state != State::Quarantined;
        self.home(layer, expert, well) == Place::Worker(at)
    }

    /// How long to wait for a worker's answer.
    pub fn deadline(&self, at: usize) -> Duration {
        match self.peers[at].request_s {
            None => self.request_time,
            Some(mean) => {
                let least = self.request_time / LEAST_SHARE;
                let most = self.request_time * MOST_SHARE;
                Duration::from_secs_f64(mean * DEADLINE_FACTOR).clamp(least, most)
            }
        }
    }

    /// Mean seconds of a worker's late requests; those of which nothing is known count as slow.
    pub fn request_s(&self, at: usize) -> f64 {
        self.peers[at].request_s.unwrap_or(f64::INFINITY)
    }

    /// A worker is connected and its outputs are right. False when it was found wrong before.
    /// Only an answer shortens the pause after its next failure.
    pub fn ready(&mut self, at: usize) -> bool {
        let peer = &mut self.peers[at];
        if peer.state == State::Quarantined {
            return false;
        }
        peer.state = State::Ready;
        true
    }

    /// A worker has answered for so many rows.
    pub fn answered(&mut self, at: usize, rows: u64, took: Duration) {
        let peer = &mut self.peers[at];
        let took_s = took.as_secs_f64();
        // A slow one counts at once, fast ones slowly.
        peer.request_s = Some(match peer.request_s {
            Some(mean) if took_s < mean => OLD_SHARE * mean + (1.0 - OLD_SHARE) * took_s,
            _ => took_s,
        });
        peer.rows += rows;
        peer.in_a_row = 0;
    }

    /// A worker failed. Returns when to try it again, and whether that is news.
    pub fn failed(&mut self, at: usize, now: Instant) -> (Instant, bool) {
        let peer = &mut self.peers[at];
        peer.failures += 1;
        let doubled = PAUSE_FIRST.saturating_mul(1 << peer.in_a_row.min(16));
        peer.in_a_row += 1;
        let retry_at = now + doubled.min(PAUSE_MAX);
        if peer.state == State::Quarantined {
            return (retry_at, false);
        }
        let before = std::mem::replace(&mut peer.state, State::Sick { retry_at });
        (retry_at, !matches!(before, State::Sick { .. }))
    }

    /// A worker's outputs are wrong. True when that is news.
    pub fn quarantine(&mut self, at: usize) -> bool {
        let state = &mut self.peers[at].state;
        std::mem::replace(state, State::Quarantined) != State::Quarantined
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(rules: &[&str]) -> Fleet {
        let names = ["a:1", "b:1", "c:1"].map(str::to_owned);
        let rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let mut fleet = Fleet::new(&names, rules, Duration::from_secs(10)).unwrap();
        (0..3).for_each(|at| assert!(fleet.ready(at)));
        fleet
    }

    #[test]
    fn a_worker_that_fails_is_left_alone_longer_each_time_until_it_answers() {
        let mut fleet = fleet(&[]);
        let now = Instant::now();
        let mut pauses = Vec::new();
        for time in 0..10 {
            let (retry_at, news) = fleet.failed(1, now);
            assert_eq!(news, time == 0);
            pauses.push(retry_at - now);
        }
        assert_eq!(pauses[..3], [500, 1000, 2000].map(Duration::from_millis));
        assert_eq!(pauses[9], PAUSE_MAX);
        // Being connected is no answer.
        assert!(fleet.ready(1));
        assert_eq!(fleet.failed(1, now).0 - now, PAUSE_MAX);
        fleet.answered(1, 1, Duration::ZERO);
        assert_eq!(fleet.failed(1, now).0 - now, PAUSE_FIRST);
    }

    #[test]
    fn a_worker_that_was_wrong_is_never_asked_again() {
        let mut fleet = fleet(&[]);
        assert!(fleet.quarantine(0));
        assert!(!fleet.failed(0, Instant::now()).1 && !fleet.ready(0));
        assert_eq!(fleet.peers()[0].state, State::Quarantined);
        assert!(!fleet.quarantine(0));
    }

    #[test]
    fn experts_of_a_sick_worker_go_to_the_others_and_come_back() {
        let mut fleet = fleet(&[]);
        let places = |fleet: &Fleet| -> Vec<Place> {
            (0..300).map(|at| fleet.place(at / 30, at as u32 % 30)).collect()
        };
        let before = places(&fleet);
        fleet.failed(2, Instant::now());
        let during = places(&fleet);
        for (before, during) in before.iter().zip(&during) {
            assert!(before == during || *before == Place::Worker(2));
            assert!(!matches!(during, Place::Local | Place::Worker(2)));
        }
        fleet.ready(2);
        assert_eq!(places(&fleet), before);
        (0..3).for_each(|at| assert!(fleet.quarantine(at)));
        assert!(places(&fleet).iter().all(|place| *place == Place::Local));
    }

    #[test]
    fn another_place_is_none_that_has_failed() {
        let fleet = fleet(&[]);
        for expert in 0..50 {
            let Place::Worker(first) = fleet.place(1, expert) else { panic!() };
            let Place::Worker(second) = fleet.other_place(1, expert, &[first]) else { panic!() };
            assert_ne!(first, second);
            assert_eq!(fleet.other_place(1, expert, &[0, 1, 2]), Place::Local);
        }
    }

    #[test]
    fn rules_come_first_and_a_worker_that_they_name_gets_nothing_else() {
        let mut fleet = fleet(&["layers 0-1=local", "layers 2-3,experts 0-9=b:1"]);
        assert_eq!(fleet.place(1, 5), Place::Local);
        assert_eq!(fleet.place(2, 9), Place::Worker(1));
        for expert in 10..200 {
            assert!(matches!(fleet.place(2, expert), Place::Worker(0 | 2)));
        }
        fleet.failed(1, Instant::now());
        assert_eq!(fleet.place(2, 9), Place::Local);
        let rules = vec!["layers 1=x".parse().unwrap()];
        let unknown = Fleet::new(&["a:1".to_owned()], rules, Duration::from_secs(10));
        assert!(unknown.unwrap_err().to_string().contains("\"x\""));
    }

    #[test]
    fn deadlines_follow_what_requests_took() {
        let mut fleet = fleet(&[]);
        assert_eq!(fleet.deadline(0), Duration::from_secs(10));
        fleet.answered(0, 1, Duration::from_millis(1));
        assert_eq!(fleet.deadline(0), Duration::from_secs(2));
        fleet.answered(0, 1, Duration::from_secs(2));
        assert_eq!(fleet.deadline(0), Duration::from_secs(20));
        fleet.answered(0, 1, Duration::from_secs(9));
        assert_eq!(fleet.deadline(0), Duration::from_secs(30));
        assert_eq!(fleet.peers()[0].rows, 3);
    }
}
