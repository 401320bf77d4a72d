//! What is known of the workers, and what follows from it: whom to ask, how long to wait, whom to
//! leave alone and until when. No sockets, no clocks: time is an argument.

use std::time::{Duration, Instant};

use experts::cache::Key;

use super::placement::{Place, Rule, owner};
use super::step::RequestLimits;
use crate::identity::{Facts, Holdings};
use crate::session::coordinator::Version;
use crate::wire::v1;

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
/// Bytes of rows of one request.
const REQUEST_BYTES: u64 = 16 << 20;
/// Factor over what late requests took after which another worker is asked too, and the least time
/// before that: less would ask twice because a machine did something else for a moment.
const HEDGE_FACTOR: f64 = 4.0;
const HEDGE_LEAST: Duration = Duration::from_millis(100);
/// Most time before another worker is asked too, and how much slower than the fastest a worker may
/// count for that.
const HEDGE_MOST: Duration = Duration::from_secs(2);
const HEDGE_SLOWER: f64 = 2.0;
/// Answers in a row that brought nothing, or came after another worker's, after which a worker is
/// left.
const STRIKES: u32 = 3;
/// Share of the old value in the mean of seconds per expert, and the experts after which it counts.
const OLD_SHARE_OF_EXPERT: f64 = 0.98;
const EXPERTS_MEASURED: u64 = 256;
/// Weights of workers are powers of it, and change when one is wrong by more than one and a half of
/// them: experts that move are cold where they come to.
const WEIGHT_STEP: f64 = std::f64::consts::SQRT_2;

/// Least rate at which a worker may read experts that are not in its memory, and pass rows on,
/// before it counts as too slow.
const READ_BYTES_PER_S: f64 = 100e6;
const ROW_BYTES_PER_S: f64 = 10e6;
/// Most rows of a request, counted per expert that gets them, for which others are asked too:
/// larger ones keep every worker busy.
const HEDGED_ROWS: u64 = 64;

/// How much a request asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Size {
    /// Experts.
    pub experts: usize,
    /// Rows, counted per expert that gets them.
    pub rows: u64,
    /// Bytes of those.
    pub row_bytes: u64,
}

/// How a worker is.
#[derive(Clone, PartialEq, Debug)]
pub enum State {
    /// Not connected yet, or connecting.
    Joining,
    /// Connected, and its outputs are right.
    Ready,
    /// It takes no further requests; it is tried again when its connection has ended.
    Draining,
    /// It failed, and is tried again.
    Sick {
        /// From then on.
        retry_at: Instant,
    },
    /// Its outputs are wrong: it is never asked again.
    Quarantined,
}

/// A request that is not answered.
#[derive(Clone, Copy, Debug)]
struct Open {
    id: u64,
    experts: usize,
    /// Until when it must be answered, and how long that was.
    deadline: Instant,
    time: Duration,
}

/// A worker as the fleet sees it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its name: the address, as the user wrote it.
    pub name: String,
    /// How it is.
    pub state: State,
    /// What it is, if it says so.
    pub facts: Option<Facts>,
    /// Rows that it computed.
    pub rows: u64,
    /// Requests that it answered.
    pub requests: u64,
    /// Seconds for them.
    pub answered_s: f64,
    /// Requests that failed.
    pub failures: u64,
    /// Why the last one did.
    pub last_failure: Option<String>,
    /// Failures since the last answer.
    in_a_row: u32,
    /// Answers since the last useful one that brought nothing, or that others were faster with.
    strikes: u32,
    /// Requests that are not answered, also those whose answer is not wanted any more.
    open: Vec<Open>,
    /// Seconds per expert of late requests; what was slow counts at once.
    late_s: Option<f64>,
    /// Mean seconds per expert, and experts that were computed.
    expert_s: f64,
    experts: u64,
    /// Its share of experts, against those of the others.
    weight: f64,
    /// Protocol version of its connection.
    version: Option<Version>,
    /// What it holds, if it says so.
    holdings: Option<Holdings>,
    /// Whether all of that was compared by hashes.
    verified: bool,
    /// Whether rules say what it gets.
    by_rules: bool,
    /// Its draws in the placement.
    id: u64,
}

impl Peer {
    /// Mean seconds of its answers; 0 before there was any.
    pub fn mean_s(&self) -> f64 {
        if self.requests == 0 { 0.0 } else { self.answered_s / self.requests as f64 }
    }

    fn has(&self, key: Key) -> bool {
        self.holdings.as_ref().is_none_or(|holdings| holdings.has(key))
    }
}

/// The workers.
#[derive(Clone, Debug)]
pub struct Fleet {
    peers: Vec<Peer>,
    /// Rules and whom each names; nobody yet where workers come later.
    rules: Vec<(Rule, Option<Place>)>,
    request_time: Duration,
    /// Bytes of the largest expert.
    pub expert_bytes: u64,
    /// Whether late answers are asked of others too.
    pub hedges: bool,
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
    /// Workers of these names; others may be added. Of several rules for an expert the first one
    /// counts; a worker that a rule names gets nothing but what rules give it.
    pub fn new(names: &[String], rules: Vec<Rule>, request_time: Duration) -> Fleet {
        let rules = rules.into_iter().map(|rule| {
            let is_local = rule.place == "local";
            (rule, is_local.then_some(Place::Local))
        });
        let rules = rules.collect();
        let mut fleet =
            Fleet { peers: Vec::new(), rules, request_time, expert_bytes: 0, hedges: false };
        names.iter().for_each(|name| {
            fleet.add(name);
        });
        fleet
    }

    /// Adds a worker; a name that is there already is the same worker. Returns its number.
    pub fn add(&mut self, name: &str) -> usize {
        if let Some(at) = self.peers.iter().position(|peer| peer.name == name) {
            return at;
        }
        let at = self.peers.len();
        let mut by_rules = false;
        for (rule, place) in self.rules.iter_mut().filter(|(rule, _)| rule.place == name) {
            debug_assert!(rule.place != "local");
            (*place, by_rules) = (Some(Place::Worker(at)), true);
        }
        self.peers.push(Peer {
            name: name.to_owned(),
            state: State::Joining,
            rows: 0,
            requests: 0,
            answered_s: 0.0,
            failures: 0,
            last_failure: None,
            facts: None,
            in_a_row: 0,
            strikes: 0,
            open: Vec::new(),
            late_s: None,
            expert_s: 0.0,
            experts: 0,
            weight: 1.0,
            version: None,
            holdings: None,
            verified: false,
            by_rules,
            // By the name, so that a list in another order places experts alike.
            id: name.bytes().fold(0, |id, byte| super::placement::mix(id ^ u64::from(byte))),
        });
        at
    }

    /// The first rule that names nobody who is known.
    pub fn unknown_place(&self) -> Option<UnknownPlace> {
        let (rule, _) = self.rules.iter().find(|(_, place)| place.is_none())?;
        let known: Vec<&str> = self.peers.iter().map(|peer| &peer.name[..]).collect();
        Some(UnknownPlace { name: rule.place.clone(), known: known.join(", ") })
    }

    /// The workers.
    pub fn peers(&self) -> &[Peer] {
        &self.peers
    }

    /// Where an expert belongs while all workers of those that hold it are well.
    fn home(&self, layer: usize, expert: u32, well: impl Fn(&Peer) -> bool) -> Place {
        let among = |peer: &Peer| well(peer) && peer.has((layer as u32, expert));
        if let Some((_, place)) = self.rules.iter().find(|(rule, _)| rule.covers(layer, expert)) {
            return match place {
                Some(Place::Worker(at)) if among(&self.peers[*at]) => Place::Worker(*at),
                _ => Place::Local,
            };
        }
        let free = self.peers.iter().enumerate().filter(|(_, peer)| !peer.by_rules && among(peer));
        let owner = owner(layer, expert, free.map(|(at, peer)| (at, peer.id, peer.weight)));
        owner.map_or(Place::Local, Place::Worker)
    }

    /// Where to compute an expert now.
    pub fn place(&self, layer: usize, expert: u32) -> Place {
        self.home(layer, expert, |peer| peer.state == State::Ready)
    }

    /// Whether a rule says where an expert belongs.
    pub fn is_ruled(&self, layer: usize, expert: u32) -> bool {
        self.rules.iter().any(|(rule, _)| rule.covers(layer, expert))
    }

    /// Whether a worker of this name is known.
    pub fn knows(&self, name: &str) -> bool {
        self.peers.iter().any(|peer| peer.name == name)
    }

    /// Another worker for an expert after some have failed; the coordinator where there is none.
    pub fn other_place(&self, layer: usize, expert: u32, failed: &[usize]) -> Place {
        let well = |peer: &Peer| {
            peer.state == State::Ready
                && !failed.iter().any(|at| std::ptr::eq(&self.peers[*at], peer))
        };
        self.home(layer, expert, well)
    }

    /// Whether a worker holds an expert, as far as is known.
    pub fn has(&self, at: usize, key: Key) -> bool {
        self.peers[at].has(key)
    }

    /// Whether an expert is a worker's while all are well.
    pub fn belongs(&self, at: usize, layer: usize, expert: u32) -> bool {
        let well = |peer: &Peer| peer.state != State::Quarantined;
        self.home(layer, expert, well) == Place::Worker(at)
    }

    /// How long to wait for a worker's answer to requests of this size.
    pub fn deadline(&self, at: usize, size: Size) -> Duration {
        // A slow drive and a slow network are no failures.
        let read_s = size.experts as f64 * self.expert_bytes as f64 / READ_BYTES_PER_S;
        let allowed = Duration::from_secs_f64(read_s + size.row_bytes as f64 / ROW_BYTES_PER_S);
        let time = match self.peers[at].late_s {
            None => self.request_time,
            Some(late_s) => {
                let least = self.request_time / LEAST_SHARE;
                let most = self.request_time * MOST_SHARE;
                let expected_s = late_s * size.experts as f64;
                Duration::from_secs_f64(expected_s * DEADLINE_FACTOR).clamp(least, most)
            }
        };
        time + allowed
    }

    /// Seconds per expert of a worker's late requests; those of which nothing is known count as
    /// slow.
    pub fn late_s(&self, at: usize) -> f64 {
        self.peers[at].late_s.unwrap_or(f64::INFINITY)
    }

    /// A worker is connected and its outputs are right. False when it was found wrong before.
    /// Only an answer shortens the pause after its next failure.
    pub fn ready(&mut self, at: usize) -> bool {
        let peer = &mut self.peers[at];
        if peer.state == State::Quarantined {
            return false;
        }
        peer.state = State::Ready;
        peer.open.clear();
        true
    }

    /// A worker says what it is and what it holds; one of version 1 says nothing.
    pub fn greeted(
        &mut self,
        at: usize,
        version: Version,
        facts: Option<Facts>,
        holdings: Option<Holdings>,
        verified: bool,
    ) {
        let peer = &mut self.peers[at];
        (peer.version, peer.facts, peer.holdings) = (Some(version), facts, holdings);
        peer.verified = verified;
    }

    /// Whether every expert of a worker was compared by its hash.
    pub fn is_verified(&self, at: usize) -> bool {
        self.peers[at].verified
    }

    /// Experts that rules give a worker and that it does not hold.
    pub fn is_given_what_it_lacks(&self, at: usize, keys: impl Iterator<Item = Key>) -> bool {
        let peer = &self.peers[at];
        let mut given = keys.filter(|(layer, expert)| {
            let rule = self.rules.iter().find(|(rule, _)| rule.covers(*layer as usize, *expert));
            rule.is_some_and(|(_, place)| *place == Some(Place::Worker(at)))
        });
        peer.by_rules && given.any(|key| !peer.has(key))
    }

    /// Protocol version of a worker's connection.
    pub fn version(&self, at: usize) -> Version {
        self.peers[at].version.unwrap_or(Version::Two)
    }

    /// What limits a request to a worker.
    pub fn limits(&self, at: usize) -> RequestLimits {
        let peer = &self.peers[at];
        let most = peer.facts.as_ref().map(|facts| facts.request_bytes).filter(|most| *most > 0);
        let experts = match peer.version {
            Some(Version::Two) => usize::MAX,
            Some(Version::One) | None => v1::ITEMS_MAX,
        };
        RequestLimits { experts, bytes: most.map_or(REQUEST_BYTES, |most| most.min(REQUEST_BYTES)) }
    }

    /// Time after which another worker is asked too, if that is wanted and anything is known.
    pub fn hedge_time(&self, at: usize, size: Size) -> Option<Duration> {
        let late_s = self.peers[at].late_s.filter(|_| self.hedges && size.rows <= HEDGED_ROWS)?;
        let well = self.peers.iter().filter(|peer| peer.state == State::Ready);
        let fastest = well.filter_map(|peer| peer.late_s).fold(late_s, f64::min);
        // A worker that was slow once must not make others wait for it from then on.
        let usual_s = late_s.min(HEDGE_SLOWER * fastest) * size.experts as f64;
        Some(Duration::from_secs_f64(usual_s * HEDGE_FACTOR).clamp(HEDGE_LEAST, HEDGE_MOST))
    }

    /// A request for so many experts was sent to a worker, which has `time` until `deadline`.
    pub fn asked(&mut self, at: usize, id: u64, experts: usize, deadline: Instant, time: Duration) {
        self.peers[at].open.push(Open { id, experts, deadline, time });
    }

    /// A request was answered, whether or not that was still wanted.
    pub fn closed(&mut self, at: usize, id: u64) {
        self.peers[at].open.retain(|open| open.id != id);
    }

    /// A worker that has not answered a request by its deadline, and the time that it had, if there
    /// is one. It counts as so slow from then on.
    pub fn overdue(&mut self, now: Instant) -> Option<(usize, Duration)> {
        for (at, peer) in self.peers.iter_mut().enumerate() {
            let late = peer.open.iter().find(|open| open.deadline <= now);
            if let Some(late) = late.copied().filter(|_| peer.state == State::Ready) {
                let least_s = late.time.as_secs_f64() / late.experts.max(1) as f64;
                peer.late_s = Some(peer.late_s.map_or(least_s, |late_s| late_s.max(least_s)));
                return Some((at, late.time));
            }
        }
        None
    }

    /// When the next request must be answered.
    pub fn next_deadline(&self) -> Option<Instant> {
        let well = self.peers.iter().filter(|peer| peer.state == State::Ready);
        well.flat_map(|peer| peer.open.iter().map(|open| open.deadline)).min()
    }

    /// A worker's answer brought nothing, or others were faster. True when it should be left.
    pub fn strike(&mut self, at: usize) -> bool {
        let peer = &mut self.peers[at];
        peer.strikes += 1;
        peer.strikes >= STRIKES && peer.state == State::Ready
    }

    /// A worker does not have an expert after all.
    pub fn lost(&mut self, at: usize, layer: usize, expert: u32) {
        if let Some(holdings) = &mut self.peers[at].holdings {
            holdings.remove((layer as u32, expert));
        }
    }

    /// A worker takes no further requests. True when that is news.
    pub fn draining(&mut self, at: usize) -> bool {
        let state = &mut self.peers[at].state;
        let is_news = *state == State::Ready;
        if is_news {
            *state = State::Draining;
        }
        is_news
    }

    /// A worker has answered for so many experts and rows.
    pub fn answered(&mut self, at: usize, experts: usize, rows: u64, took: Duration) {
        let peer = &mut self.peers[at];
        let took_s = took.as_secs_f64();
        let expert_s = took_s / experts.max(1) as f64;
        // A slow one counts at once, fast ones slowly.
        peer.late_s = Some(match peer.late_s {
            Some(mean) if expert_s < mean => OLD_SHARE * mean + (1.0 - OLD_SHARE) * expert_s,
            _ => expert_s,
        });
        peer.expert_s = match peer.experts {
            0 => expert_s,
            _ => OLD_SHARE_OF_EXPERT * peer.expert_s + (1.0 - OLD_SHARE_OF_EXPERT) * expert_s,
        };
        peer.experts += experts as u64;
        peer.rows += rows;
        peer.requests += 1;
        peer.answered_s += took_s;
        (peer.in_a_row, peer.strikes) = (0, 0);
    }

    /// Gives faster workers more experts once the shares are clearly wrong. True when they changed.
    pub fn reweigh(&mut self) -> bool {
        let measured = |peer: &Peer| peer.experts >= EXPERTS_MEASURED && peer.expert_s > 0.0;
        let is_used = |peer: &Peer| peer.state == State::Ready && !peer.by_rules && measured(peer);
        let used: Vec<usize> =
            (0..self.peers.len()).filter(|at| is_used(&self.peers[*at])).collect();
        if used.len() < 2 {
            return false;
        }
        let speed = |at: usize| self.peers[at].expert_s.recip().log(WEIGHT_STEP);
        let mean = |of: &dyn Fn(usize) -> f64| {
            used.iter().map(|at| of(*at)).sum::<f64>() / used.len() as f64
        };
        let middle = mean(&speed);
        let now = |at: usize| self.peers[at].weight.log(WEIGHT_STEP);
        let middle_now = mean(&now);
        let wrong = |at: &usize| ((speed(*at) - middle) - (now(*at) - middle_now)).abs() > 1.5;
        if !used.iter().any(wrong) {
            return false;
        }
        let weights: Vec<f64> =
            used.iter().map(|at| WEIGHT_STEP.powf((speed(*at) - middle).round())).collect();
        for (at, weight) in used.into_iter().zip(weights) {
            self.peers[at].weight = weight;
            // What it takes with other experts is yet to be seen.
            self.peers[at].experts = 0;
        }
        true
    }

    /// A worker failed. Returns when to try it again, and whether that is news.
    pub fn failed(&mut self, at: usize, why: &str, now: Instant) -> (Instant, bool) {
        let peer = &mut self.peers[at];
        peer.failures += 1;
        peer.last_failure = Some(why.to_owned());
        peer.strikes = 0;
        peer.open.clear();
        let doubled = PAUSE_FIRST.saturating_mul(1 << peer.in_a_row.min(16));
        peer.in_a_row += 1;
        let retry_at = now + doubled.min(PAUSE_MAX);
        if peer.state == State::Quarantined {
            return (retry_at, false);
        }
        let before = std::mem::replace(&mut peer.state, State::Sick { retry_at });
        (retry_at, !matches!(before, State::Sick { .. } | State::Draining))
    }

    /// A worker's outputs are wrong. True when that is news.
    pub fn quarantine(&mut self, at: usize, why: &str) -> bool {
        self.peers[at].last_failure = Some(why.to_owned());
        let state = &mut self.peers[at].state;
        std::mem::replace(state, State::Quarantined) != State::Quarantined
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Size = Size { experts: 1, rows: 1, row_bytes: 0 };

    fn fleet(rules: &[&str]) -> Fleet {
        let names = ["a:1", "b:1", "c:1"].map(str::to_owned);
        let rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let mut fleet = Fleet::new(&names, rules, Duration::from_secs(10));
        (0..3).for_each(|at| assert!(fleet.ready(at)));
        fleet
    }

    #[test]
    fn a_worker_that_fails_is_left_alone_longer_each_time_until_it_answers() {
        let mut fleet = fleet(&[]);
        let now = Instant::now();
        let mut pauses = Vec::new();
        for time in 0..10 {
            let (retry_at, news) = fleet.failed(1, "", now);
            assert_eq!(news, time == 0);
            pauses.push(retry_at - now);
        }
        assert_eq!(pauses[..3], [500, 1000, 2000].map(Duration::from_millis));
        assert_eq!(pauses[9], PAUSE_MAX);
        // Being connected is no answer.
        assert!(fleet.ready(1));
        assert_eq!(fleet.failed(1, "", now).0 - now, PAUSE_MAX);
        fleet.answered(1, 1, 1, Duration::ZERO);
        assert_eq!(fleet.failed(1, "", now).0 - now, PAUSE_FIRST);
    }

    #[test]
    fn a_worker_that_was_wrong_is_never_asked_again() {
        let mut fleet = fleet(&[]);
        assert!(fleet.quarantine(0, ""));
        assert!(!fleet.failed(0, "", Instant::now()).1 && !fleet.ready(0));
        assert_eq!(fleet.peers()[0].state, State::Quarantined);
        assert!(!fleet.quarantine(0, ""));
    }

    #[test]
    fn experts_of_a_sick_worker_go_to_the_others_and_come_back() {
        let mut fleet = fleet(&[]);
        let places = |fleet: &Fleet| -> Vec<Place> {
            (0..300).map(|at| fleet.place(at / 30, at as u32 % 30)).collect()
        };
        let before = places(&fleet);
        fleet.failed(2, "", Instant::now());
        let during = places(&fleet);
        for (before, during) in before.iter().zip(&during) {
            assert!(before == during || *before == Place::Worker(2));
            assert!(!matches!(during, Place::Local | Place::Worker(2)));
        }
        fleet.ready(2);
        assert_eq!(places(&fleet), before);
        (0..3).for_each(|at| assert!(fleet.quarantine(at, "")));
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
        fleet.failed(1, "", Instant::now());
        assert_eq!(fleet.place(2, 9), Place::Local);
        assert!(fleet.unknown_place().is_none());
        let rules = vec!["layers 1=x:1".parse().unwrap()];
        let mut fleet = Fleet::new(&["a:1".to_owned()], rules, Duration::from_secs(10));
        assert!(fleet.ready(0));
        assert!(fleet.unknown_place().unwrap().to_string().contains("\"x:1\""));
        assert_eq!(fleet.place(1, 0), Place::Local);
        // Until it comes.
        let added = fleet.add("x:1");
        assert!(fleet.ready(added) && fleet.unknown_place().is_none());
        assert_eq!(fleet.place(1, 0), Place::Worker(added));
        assert_eq!((fleet.place(2, 0), fleet.add("a:1")), (Place::Worker(0), 0));
    }

    #[test]
    fn a_worker_gets_only_what_it_holds_and_loses_what_it_cannot_read() {
        let mut fleet = fleet(&[]);
        let holdings = Holdings::of_keys([(1, 3), (1, 4)]);
        fleet.greeted(0, Version::Two, None, Some(holdings), false);
        for expert in 0..100 {
            let is_first = fleet.place(1, expert) == Place::Worker(0);
            assert!(!is_first || [3, 4].contains(&expert));
        }
        (1..3).for_each(|at| assert!(fleet.quarantine(at, "")));
        assert_eq!(fleet.place(1, 3), Place::Worker(0));
        assert_eq!(fleet.place(1, 5), Place::Local);
        fleet.lost(0, 1, 3);
        assert_eq!(fleet.place(1, 3), Place::Local);
        fleet.draining(0);
        assert_eq!(fleet.place(1, 4), Place::Local);
        // Ending is no failure that anybody must hear of.
        assert!(!fleet.failed(0, "", Instant::now()).1);
    }

    #[test]
    fn a_worker_must_answer_what_nobody_waits_for_any_more_too() {
        let mut fleet = fleet(&[]);
        let (now, later) = (Instant::now(), |seconds| Duration::from_secs(seconds));
        fleet.asked(1, 7, 1, now + later(3), later(3));
        fleet.asked(1, 8, 2, now + later(5), later(5));
        assert_eq!((fleet.overdue(now), fleet.next_deadline()), (None, Some(now + later(3))));
        fleet.closed(1, 7);
        assert_eq!(fleet.overdue(now + later(4)), None);
        assert_eq!(fleet.overdue(now + later(5)), Some((1, later(5))));
        // It is that slow, as far as is known.
        assert_eq!(fleet.late_s(1), 2.5);
        fleet.failed(1, "", now);
        assert_eq!((fleet.overdue(now + later(9)), fleet.next_deadline()), (None, None));
    }

    #[test]
    fn a_worker_that_was_slow_once_is_not_waited_for_longer_than_others() {
        let mut fleet = fleet(&[]);
        fleet.hedges = true;
        assert_eq!(fleet.hedge_time(0, ONE), None);
        (0..3).for_each(|at| fleet.answered(at, 1, 1, Duration::from_millis(50)));
        assert_eq!(fleet.hedge_time(0, ONE), Some(Duration::from_millis(200)));
        fleet.answered(0, 1, 1, Duration::from_secs(7));
        assert_eq!(fleet.hedge_time(0, ONE), Some(Duration::from_millis(400)));
        (1..3).for_each(|at| fleet.answered(at, 1, 1, Duration::from_secs(7)));
        assert_eq!(fleet.hedge_time(0, ONE), Some(HEDGE_MOST));
        // Large requests keep everybody busy.
        assert_eq!(fleet.hedge_time(0, Size { rows: HEDGED_ROWS + 1, ..ONE }), None);
    }

    #[test]
    fn answers_that_bring_nothing_are_failures_after_some() {
        let mut fleet = fleet(&[]);
        assert_eq!([0; 3].map(|at| fleet.strike(at)), [false, false, true]);
        fleet.answered(0, 1, 1, Duration::ZERO);
        assert!(!fleet.strike(0));
    }

    #[test]
    fn faster_workers_get_more_once_that_is_clear() {
        let mut fleet = fleet(&[]);
        let share = |fleet: &Fleet, at: usize| {
            (0..3000).filter(|e| fleet.place(1, *e) == Place::Worker(at)).count()
        };
        let before = [0, 1, 2].map(|at| share(&fleet, at));
        assert!(before.iter().all(|share| (900..1100).contains(share)), "{before:?}");
        for (at, millis) in [(0, 10), (1, 11), (2, 40)] {
            (0..200).for_each(|_| fleet.answered(at, 1, 1, Duration::from_millis(millis)));
            assert!(!fleet.reweigh());
        }
        for (at, millis) in [(0, 10), (1, 11), (2, 40)] {
            (0..200).for_each(|_| fleet.answered(at, 1, 1, Duration::from_millis(millis)));
        }
        assert!(fleet.reweigh());
        let after = [0, 1, 2].map(|at| share(&fleet, at));
        assert!(after[2] < 450 && after[0] > 1200 && after[1] > 1200, "{after:?}");
        // Small differences move nothing.
        for (at, millis) in [(0, 10), (1, 13), (2, 36)] {
            (0..400).for_each(|_| fleet.answered(at, 1, 1, Duration::from_millis(millis)));
        }
        assert!(!fleet.reweigh());
    }

    #[test]
    fn deadlines_follow_what_requests_took() {
        let mut fleet = fleet(&[]);
        assert_eq!(fleet.deadline(0, ONE), Duration::from_secs(10));
        fleet.answered(0, 1, 1, Duration::from_millis(1));
        assert_eq!(fleet.deadline(0, ONE), Duration::from_secs(2));
        fleet.answered(0, 1, 1, Duration::from_secs(2));
        assert_eq!(fleet.deadline(0, ONE), Duration::from_secs(20));
        fleet.answered(0, 1, 1, Duration::from_secs(9));
        assert_eq!(fleet.deadline(0, ONE), Duration::from_secs(30));
        // Time to read what was asked for, and to pass its rows on, is allowed for whatever is
        // known.
        fleet.expert_bytes = 20_000_000;
        let large = Size { experts: 85, rows: 4000, row_bytes: 100_000_000 };
        assert_eq!(fleet.deadline(0, large), Duration::from_secs(30 + 17 + 10));
        fleet.answered(1, 4, 4, Duration::from_millis(4));
        assert_eq!(fleet.deadline(1, large), Duration::from_secs(2 + 17 + 10));
        assert_eq!(fleet.peers()[0].rows, 3);
    }
}
