//! A cluster in one thread: workers, connections and time as events drawn from a seed. Sessions,
//! fleet, steps and the arithmetic are those of the program.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cluster::coordinator::core::{Core, Peers, Probe, Reply, Unfit};
use cluster::session::coordinator::{CoordinatorSession, Event as Said, Request, Version};
use cluster::session::worker::{Welcome, Wish, WorkerSession};
use cluster::wire::secure::Policy;
use cluster::wire::v2::{Answer, Outputs, Status};
use cluster::worker::Worker;

/// Numbers from a seed.
#[derive(Clone)]
pub struct Noise(u64);

impl Noise {
    pub fn new(seed: u64) -> Noise {
        Noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// True once in so many times.
    pub fn once_in(&mut self, times: u64) -> bool {
        times > 0 && self.below(times) == 0
    }
}

/// What may happen, once in so many times each; 0 for never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// A connection breaks when bytes arrive.
    pub cut: u64,
    /// A bit of the bytes that arrive is wrong; of encrypted ones only.
    pub damage: u64,
    /// A worker dies when it has been asked, computes or answers.
    pub crash: u64,
    /// It answers nothing for seconds.
    pub hang: u64,
    /// An expert fails.
    pub item: u64,
    /// A request takes seconds.
    pub slow: u64,
    /// It ends in order.
    pub drain: u64,
}

/// One worker and its connection.
pub struct Node {
    pub name: String,
    /// What it may come up with, the first at first.
    pub models: Vec<Arc<Worker>>,
    pub policy: Policy,
    pub version: Version,
    /// After so many answers one bit of each is wrong.
    pub honest: Option<u64>,
    pub model: usize,
    pub is_up: bool,
    hung_until: Duration,
    busy_until: Duration,
    /// Number of the connection.
    connection: u64,
    client: Option<CoordinatorSession>,
    server: Option<WorkerSession>,
    /// When the last bytes arrive, to the worker and back: they stay in order.
    arrive: [Duration; 2],
    probes_left: u32,
    probe: Option<(u64, Probe)>,
    is_ready: bool,
    waiting: BTreeMap<u64, usize>,
}

impl Node {
    pub fn new(name: String, models: Vec<Arc<Worker>>, policy: Policy, version: Version) -> Node {
        Node {
            name,
            models,
            policy,
            version,
            honest: None,
            model: 0,
            is_up: true,
            hung_until: Duration::ZERO,
            busy_until: Duration::ZERO,
            connection: 0,
            client: None,
            server: None,
            arrive: [Duration::ZERO; 2],
            probes_left: 0,
            probe: None,
            is_ready: false,
            waiting: BTreeMap::new(),
        }
    }
}

enum Event {
    Connect,
    JoinDeadline,
    ToWorker(Vec<u8>),
    ToCoordinator(Vec<u8>),
    Computed(u64, Box<Answer>),
    Replied(Vec<u8>),
    Cut,
    Restart,
    /// The registry lists it.
    Listed,
}

/// What happened, in numbers; also shows that a seed does the same each time.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub struct Happened {
    pub events: u64,
    pub crashes: u64,
    pub cuts: u64,
    pub hangs: u64,
    pub refused: u64,
    pub lies: u64,
    pub micros: u128,
}

struct State {
    now: Duration,
    noise: Noise,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    events: HashMap<u64, (usize, u64, Event)>,
    numbers: u64,
    nodes: Vec<Node>,
    replies: VecDeque<Reply>,
    happened: Happened,
}

/// The cluster.
pub struct World {
    core: Core,
    base: Instant,
    faults: Faults,
    state: Mutex<State>,
}

/// Time for joining.
const JOIN_TIME: Duration = Duration::from_secs(10);

impl World {
    pub fn new(core: Core, nodes: Vec<Node>, faults: Faults, noise: Noise) -> World {
        let state = State {
            now: Duration::ZERO,
            noise,
            queue: BinaryHeap::new(),
            events: HashMap::new(),
            numbers: 0,
            nodes,
            replies: VecDeque::new(),
            happened: Happened::default(),
        };
        let world = World { core, base: Instant::now(), faults, state: Mutex::new(state) };
        {
            let state = &mut *world.state.lock().unwrap();
            let known = world.core.fleet().peers().len();
            let mut at = Duration::ZERO;
            for node in 0..state.nodes.len() {
                // Those that nobody named are listed later, one after another.
                if node < known {
                    state.later(Duration::ZERO, node, 0, Event::Connect);
                } else {
                    at += Duration::from_micros(state.noise.below(1_500_000));
                    state.later(at, node, 0, Event::Listed);
                }
            }
        }
        // As the program waits for its workers.
        world.pass(Duration::from_secs(1));
        world
    }

    pub fn core(&self) -> &Core {
        &self.core
    }

    pub fn happened(&self) -> Happened {
        let state = self.state.lock().unwrap();
        Happened { micros: state.now.as_micros(), ..state.happened.clone() }
    }

    /// Lets some time go by.
    pub fn pass(&self, time: Duration) {
        let state = &mut *self.state.lock().unwrap();
        let until = state.now + time;
        while state.happen(&self.core, self.base, self.faults, until) {}
        state.now = until;
    }

    /// Time between two layers, after which nobody waits for what an earlier one asked.
    pub fn think(&self) {
        let time = self.state.lock().unwrap().noise.below(30_000);
        self.pass(Duration::from_micros(time));
        let state = &mut *self.state.lock().unwrap();
        state.nodes.iter_mut().for_each(|node| node.waiting.clear());
        state.replies.clear();
    }
}

impl State {
    fn later(&mut self, at: Duration, node: usize, connection: u64, event: Event) {
        self.numbers += 1;
        self.queue.push(Reverse((at.max(self.now), self.numbers)));
        self.events.insert(self.numbers, (node, connection, event));
    }

    /// Lets the next thing happen if it is before `until`.
    fn happen(&mut self, core: &Core, base: Instant, faults: Faults, until: Duration) -> bool {
        let Some(Reverse((at, number))) = self.queue.peek().copied() else { return false };
        if at > until {
            return false;
        }
        self.queue.pop();
        let (node, connection, event) = self.events.remove(&number).unwrap();
        self.now = at;
        let current = self.nodes[node].connection;
        let is_of_node = matches!(event, Event::Connect | Event::Restart | Event::Listed);
        if connection != current && !is_of_node {
            return true;
        }
        self.happened.events += 1;
        let mut world = Turn { state: self, core, base, faults, node };
        match event {
            Event::Connect => world.connect(),
            Event::Restart => world.restart(),
            Event::Listed => {
                let name = world.node().name.clone();
                assert_eq!(core.fleet().add(&name), node);
                world.connect();
            }
            Event::Cut => world.cut("the connection broke"),
            Event::JoinDeadline => {
                if !world.node().is_ready {
                    world.cut("it does not greet in time");
                }
            }
            Event::ToWorker(bytes) => world.arrive_at_worker(bytes),
            Event::ToCoordinator(bytes) => world.arrive_at_coordinator(bytes),
            Event::Computed(id, answer) => world.computed(id, &answer),
            Event::Replied(reply) => {
                if let Some(server) = &mut world.node().server {
                    server.reply_v1(&reply);
                }
                world.send_of_worker();
            }
        }
        true
    }
}

/// The moment of one event at one worker.
struct Turn<'a> {
    state: &'a mut State,
    core: &'a Core,
    base: Instant,
    faults: Faults,
    node: usize,
}

impl Turn<'_> {
    fn node(&mut self) -> &mut Node {
        &mut self.state.nodes[self.node]
    }

    fn now(&self) -> Instant {
        self.base + self.state.now
    }

    fn after(&mut self, micros: u64, event: Event) {
        let at = self.state.now + Duration::from_micros(micros);
        let (node, connection) = (self.node, self.state.nodes[self.node].connection);
        self.state.later(at, node, connection, event);
    }

    fn leave(&mut self, why: &str) {
        let retry_at = self.core.ended(self.node, why, self.now());
        let at = retry_at - self.base;
        let node = self.node;
        self.state.later(at, node, 0, Event::Connect);
    }

    /// Nothing of the connection is left.
    fn forget(&mut self) {
        let node = self.node();
        node.connection += 1;
        (node.client, node.server, node.probe, node.is_ready) = (None, None, None, false);
        let waiting = std::mem::take(&mut node.waiting);
        for number in waiting.into_values() {
            self.state.replies.push_back(Reply { number, answer: None });
        }
    }

    fn cut(&mut self, why: &str) {
        self.state.happened.cuts += 1;
        self.forget();
        self.leave(why);
    }

    fn crash(&mut self) {
        self.state.happened.crashes += 1;
        let had_connection = self.node().client.is_some();
        self.node().is_up = false;
        let micros = self.state.noise.below(20_000_000);
        let (at, node) = (self.state.now + Duration::from_micros(micros), self.node);
        self.state.later(at, node, 0, Event::Restart);
        if had_connection {
            self.cut("it died");
        }
    }

    fn restart(&mut self) {
        let models = self.node().models.len() as u64;
        let model = self.state.noise.below(models) as usize;
        let node = self.node();
        (node.is_up, node.model) = (true, model);
        (node.hung_until, node.busy_until) = (Duration::ZERO, Duration::ZERO);
    }

    fn connect(&mut self) {
        use cluster::coordinator::State as PeerState;
        if self.core.fleet().peers()[self.node].state == PeerState::Quarantined {
            return;
        }
        if self.node().client.is_some() {
            return;
        }
        if !self.node().is_up {
            let retry_at = self.core.leave(self.node, "it cannot be reached", self.now());
            let (at, node) = (retry_at - self.base, self.node);
            self.state.later(at, node, 0, Event::Connect);
            return;
        }
        let hello = self.core.hello().clone();
        let now = self.state.now;
        let node = self.node();
        node.connection += 1;
        node.arrive = [now; 2];
        node.probes_left = 2;
        let worker = &node.models[node.model];
        let welcome = Welcome { policy: node.policy.clone(), ..worker.welcome().clone() };
        node.server = Some(WorkerSession::new(Arc::new(welcome)));
        node.client = Some(CoordinatorSession::new(node.version, hello));
        let version = node.version;
        self.after(JOIN_TIME.as_micros() as u64, Event::JoinDeadline);
        if version == Version::One {
            let holdings = Default::default();
            self.said(Said::Joined { facts: None, holdings, compared: 0 });
        }
        self.send_of_coordinator();
    }

    /// Sends bytes in pieces that arrive one after another.
    fn send(&mut self, mut bytes: Vec<u8>, to_worker: bool) {
        if bytes.is_empty() {
            return;
        }
        let is_sealed = self.node().policy.key.is_some();
        if is_sealed && self.state.noise.once_in(self.faults.damage) {
            let at = self.state.noise.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << self.state.noise.below(8);
        }
        while !bytes.is_empty() {
            let length = match self.state.noise.below(4) {
                0 => 1 + self.state.noise.below(40) as usize,
                _ => bytes.len(),
            };
            let rest = bytes.split_off(length.min(bytes.len()));
            let piece = std::mem::replace(&mut bytes, rest);
            let delay = match self.state.noise.below(16) {
                0 => self.state.noise.below(400_000),
                _ => 20 + self.state.noise.below(800),
            };
            let way = usize::from(to_worker);
            let at = (self.state.now + Duration::from_micros(delay)).max(self.node().arrive[way]);
            self.node().arrive[way] = at;
            let (node, connection) = (self.node, self.node().connection);
            let cuts = self.state.noise.once_in(self.faults.cut);
            let event = match (cuts, to_worker) {
                (true, _) => Event::Cut,
                (false, true) => Event::ToWorker(piece),
                (false, false) => Event::ToCoordinator(piece),
            };
            self.state.later(at, node, connection, event);
        }
    }

    fn send_of_coordinator(&mut self) {
        let bytes = self.node().client.as_mut().map(CoordinatorSession::take_outgoing);
        self.send(bytes.unwrap_or_default(), true);
    }

    fn send_of_worker(&mut self) {
        let bytes = self.node().server.as_mut().map(WorkerSession::take_outgoing);
        self.send(bytes.unwrap_or_default(), false);
    }

    fn arrive_at_worker(&mut self, bytes: Vec<u8>) {
        let now = self.state.now;
        let hung_until = self.node().hung_until;
        if hung_until > now {
            // Nobody reads before.
            let micros = (hung_until - now).as_micros() as u64 + 1;
            self.after(micros, Event::ToWorker(bytes));
            return;
        }
        if self.state.noise.once_in(self.faults.hang) {
            self.state.happened.hangs += 1;
            let micros = self.state.noise.below(40_000_000);
            self.node().hung_until = now + Duration::from_micros(micros);
        }
        if self.state.noise.once_in(self.faults.crash) {
            return self.crash();
        }
        let mut wishes = Vec::new();
        let Some(server) = &mut self.node().server else { return };
        let received = server.receive(&bytes, &mut wishes);
        self.send_of_worker();
        if received.is_err() {
            // What it says arrives before the end of the connection.
            self.state.happened.refused += 1;
            let at = self.node().arrive[0] + Duration::from_micros(1);
            let (node, connection) = (self.node, self.node().connection);
            self.node().server = None;
            self.state.later(at, node, connection, Event::Cut);
            return;
        }
        for wish in wishes {
            self.grant(wish);
        }
        if self.state.noise.once_in(self.faults.drain) {
            if let Some(server) = &mut self.node().server {
                server.drain().unwrap();
            }
            self.send_of_worker();
        }
    }

    /// When a request of the worker is done: one after another.
    fn done_at(&mut self) -> Duration {
        let slow = self.state.noise.once_in(self.faults.slow);
        let micros = 50 + self.state.noise.below(if slow { 15_000_000 } else { 3_000 });
        let now = self.state.now;
        let node = self.node();
        node.busy_until = node.busy_until.max(now) + Duration::from_micros(micros);
        node.busy_until
    }

    fn grant(&mut self, wish: Wish) {
        let node = self.node;
        let worker = {
            let node = self.node();
            node.models[node.model].clone()
        };
        match wish {
            Wish::Greeted(_) | Wish::Cancel(_) => {}
            Wish::Ping(id) => {
                if let Some(server) = &mut self.node().server {
                    server.pong(id, &Default::default()).unwrap();
                }
                self.send_of_worker();
            }
            Wish::V1(request) => {
                let (mut reply, _) = worker.reply(request);
                if self.lies() {
                    // A bit of the last number.
                    let last = reply.len() - 4;
                    reply[last] ^= 1;
                }
                let (at, connection) = (self.done_at(), self.node().connection);
                self.state.later(at, node, connection, Event::Replied(reply));
            }
            Wish::Compute { id, request } => {
                let mut answer = worker.answer(&request, Instant::now(), || true, &mut |_| {});
                // Real times must not be part of what a seed does.
                (answer.waited_us, answer.computed_us) = (0, 0);
                if self.state.noise.once_in(self.faults.item) && !request.sums {
                    let count = answer.statuses.len() as u64;
                    let at = self.state.noise.below(count) as usize;
                    self.fail_item(&request, &mut answer, at);
                }
                if self.lies() {
                    match &mut answer.outputs {
                        Outputs::Rows(rows) => {
                            if let Some(last) = rows.last_mut() {
                                *last = f32::from_bits(last.to_bits() ^ 1);
                            }
                        }
                        Outputs::Sums(sums) => sums.iter_mut().for_each(|sum| *sum ^= 1),
                    }
                }
                let (at, connection) = (self.done_at(), self.node().connection);
                self.state.later(at, node, connection, Event::Computed(id, Box::new(answer)));
            }
        }
    }

    /// Takes an expert out of an answer.
    fn fail_item(&mut self, request: &cluster::wire::v2::Compute, answer: &mut Answer, at: usize) {
        if answer.statuses[at] != Status::Computed {
            return;
        }
        let Outputs::Rows(rows) = &mut answer.outputs else { return };
        let hidden = self.core.hello().shape.hidden as usize;
        let computed = |other: &usize| answer.statuses[*other] == Status::Computed;
        let rows_of = |other: usize| request.item(other).1.len();
        let start: usize = (0..at).filter(computed).map(rows_of).sum();
        rows.drain(start * hidden..(start + rows_of(at)) * hidden);
        let kinds = [
            Status::Missing,
            Status::Memory,
            Status::Busy,
            Status::Deadline,
            Status::Unreadable,
            Status::Draining,
        ];
        answer.statuses[at] = kinds[self.state.noise.below(kinds.len() as u64) as usize];
    }

    fn lies(&mut self) -> bool {
        match &mut self.node().honest {
            None => false,
            Some(0) => {
                self.state.happened.lies += 1;
                true
            }
            Some(left) => {
                *left -= 1;
                false
            }
        }
    }

    fn computed(&mut self, id: u64, answer: &Answer) {
        // Before the reply, inside it, or after it.
        if self.state.noise.once_in(self.faults.crash) {
            return self.crash();
        }
        if let Some(server) = &mut self.node().server {
            server.answer(id, answer).unwrap();
        }
        self.send_of_worker();
        if self.state.noise.once_in(self.faults.crash) {
            let micros = self.state.noise.below(1_000);
            self.after(micros, Event::Cut);
        }
    }

    fn arrive_at_coordinator(&mut self, bytes: Vec<u8>) {
        let mut said = Vec::new();
        let Some(client) = &mut self.node().client else { return };
        let received = client.receive(&bytes, &mut said);
        for said in said {
            self.said(said);
        }
        self.send_of_coordinator();
        if let Err(error) = received {
            self.state.happened.refused += 1;
            self.cut(&error.to_string());
        }
    }

    fn said(&mut self, said: Said) {
        match said {
            Said::Joined { .. } => {
                let version = self.node().version;
                self.core.greeted(self.node, version, said);
                self.next_probe();
            }
            Said::Answer { id, answer } => {
                self.core.closed(self.node, id);
                if self.node().probe.as_ref().is_some_and(|(probe, _)| *probe == id) {
                    let probe = self.node().probe.take().unwrap().1;
                    match self.core.check_probe(&probe, &answer) {
                        Ok(()) => self.next_probe(),
                        Err(Unfit::Failed(why)) => self.cut(&why),
                        Err(Unfit::Wrong(why)) => {
                            self.core.quarantine(self.node, &why);
                            self.forget();
                        }
                    }
                } else if let Some(number) = self.node().waiting.remove(&id) {
                    self.state.replies.push_back(Reply { number, answer: Some(answer) });
                }
            }
            Said::Draining => self.core.draining(self.node),
            Said::Pong { .. } => {}
        }
    }

    /// Tries a worker once more, or uses it.
    fn next_probe(&mut self) {
        let version = self.node().version;
        let mut noise = self.state.noise.clone();
        let mut next = || noise.next();
        let probe = match self.node().probes_left {
            0 => None,
            _ => self.core.probe(self.node, version, &mut next),
        };
        self.state.noise.next();
        let node = self.node;
        let Some((probe, request)) = probe else {
            self.node().is_ready = true;
            if !self.core.fleet().ready(node) {
                self.forget();
            }
            return;
        };
        self.node().probes_left -= 1;
        self.node().probe = Some((request.id, probe));
        if let Some(client) = &mut self.node().client {
            client.ask(request).unwrap();
        }
        self.send_of_coordinator();
    }
}

impl Peers for World {
    fn now(&self) -> Instant {
        self.base + self.state.lock().unwrap().now
    }

    fn ask(&self, worker: usize, number: usize, request: Request, _deadline: Instant) {
        let state = &mut *self.state.lock().unwrap();
        let (core, base, faults) = (&self.core, self.base, self.faults);
        let mut turn = Turn { state, core, base, faults, node: worker };
        let id = request.id;
        let node = turn.node();
        let sent = match (&mut node.client, node.is_ready) {
            (Some(client), true) => client.ask(request).unwrap(),
            _ => false,
        };
        if sent {
            node.waiting.insert(id, number);
            turn.send_of_coordinator();
        } else {
            turn.state.replies.push_back(Reply { number, answer: None });
        }
    }

    fn cancel(&self, worker: usize, id: u64) {
        let state = &mut *self.state.lock().unwrap();
        let (core, base, faults) = (&self.core, self.base, self.faults);
        let mut turn = Turn { state, core, base, faults, node: worker };
        turn.node().waiting.remove(&id);
        if let Some(client) = &mut turn.node().client {
            client.cancel(id).unwrap();
        }
        turn.send_of_coordinator();
    }

    fn close(&self, worker: usize) {
        let state = &mut *self.state.lock().unwrap();
        let (core, base, faults) = (&self.core, self.base, self.faults);
        Turn { state, core, base, faults, node: worker }.cut("it was left");
    }

    fn wait(&self, until: Instant) -> Option<Reply> {
        let state = &mut *self.state.lock().unwrap();
        let until = until.saturating_duration_since(self.base);
        loop {
            if let Some(reply) = state.replies.pop_front() {
                return Some(reply);
            }
            if !state.happen(&self.core, self.base, self.faults, until) {
                state.now = state.now.max(until);
                return None;
            }
        }
    }
}
