use std::sync::Arc;

use cluster::identity::{Facts, Holdings, greeting};
use cluster::session::SessionError;
use cluster::session::coordinator::{CoordinatorSession, Event, Hello, Request, Version};
use cluster::session::worker::{Welcome, Wish, WorkerSession};
use cluster::wire::WireError;
use cluster::wire::secure::{ChannelError, Key, Policy};
use cluster::wire::v2::{Answer, Kind, Outputs, Status, put_frame};
use experts::ExpertRows;

use crate::support::SHAPE;

fn facts() -> Facts {
    Facts {
        numerics: 1,
        activations: "int8".to_owned(),
        model: "0f".repeat(16),
        hidden: SHAPE.hidden,
        intermediate: SHAPE.intermediate,
        layers: SHAPE.layers,
        experts: SHAPE.experts,
        engine: "0.1.0".to_owned(),
        isa: "scalar".to_owned(),
        threads: 1,
        ram_bytes: 1 << 30,
        cache_bytes: 1 << 29,
        request_bytes: 1 << 20,
        observer: false,
    }
}

fn key(byte: u8) -> Key {
    let mut bytes = [byte; 32];
    bytes[0] = !byte;
    Key::new(bytes)
}

fn hello(facts: Facts, key: Option<Key>) -> Arc<Hello> {
    let holdings = Arc::new(Holdings::of_keys([(3, 1), (3, 2)]));
    Arc::new(Hello { facts, holdings, shape: SHAPE, key })
}

fn welcome(facts: Facts, key: Option<Key>, plain: bool) -> Arc<Welcome> {
    let greeting = greeting(&facts, &Holdings::of_keys([(3, 1), (3, 2)]));
    let policy = Policy { key, plain };
    Arc::new(Welcome { facts, greeting, shape: SHAPE, request_bytes: 1 << 20, policy })
}

/// What each side gets of the other, in pieces of a size, until nothing is left to send.
struct Pair {
    coordinator: CoordinatorSession,
    worker: WorkerSession,
    said: Vec<Event>,
    wishes: Vec<Wish>,
    /// First error of each side.
    errors: (Option<SessionError>, Option<SessionError>),
    bytes: usize,
}

impl Pair {
    fn new(version: Version, hello: Arc<Hello>, welcome: Arc<Welcome>) -> Pair {
        Pair {
            coordinator: CoordinatorSession::new(version, hello),
            worker: WorkerSession::new(welcome),
            said: Vec::new(),
            wishes: Vec::new(),
            errors: (None, None),
            bytes: 0,
        }
    }

    fn run(&mut self, piece: usize) {
        loop {
            let (to_worker, to_coordinator) =
                (self.coordinator.take_outgoing(), self.worker.take_outgoing());
            if to_worker.is_empty() && to_coordinator.is_empty() {
                return;
            }
            self.bytes += to_worker.len() + to_coordinator.len();
            for piece in to_worker.chunks(piece) {
                if self.errors.1.is_none() {
                    self.errors.1 = self.worker.receive(piece, &mut self.wishes).err();
                }
            }
            for piece in to_coordinator.chunks(piece) {
                if self.errors.0.is_none() {
                    self.errors.0 = self.coordinator.receive(piece, &mut self.said).err();
                }
            }
        }
    }
}

fn request(version: Version, id: u64) -> Request {
    let rows = [0, 2];
    let item = ExpertRows { expert: 5, rows: &rows, weights: &[0.5, 0.25] };
    let values: Vec<f32> = (0..12).map(|at| at as f32).collect();
    Request::new(version, &SHAPE, id, (3, 1000, false), std::iter::once(item), &values)
}

fn answer() -> Answer {
    Answer {
        waited_us: 1,
        computed_us: 2,
        statuses: vec![Status::Computed],
        outputs: Outputs::Rows((0..8).map(|at| at as f32 * 0.5).collect()),
    }
}

#[test]
fn several_requests_are_on_their_way_and_answered_in_any_order_encrypted_or_not() {
    for key in [None, Some(key(9))] {
        for piece in [1, 3, 16, 1 << 20] {
            let plain = key.is_none();
            let (hello, welcome) =
                (hello(facts(), key.clone()), welcome(facts(), key.clone(), plain));
            let mut pair = Pair::new(Version::Two, hello, welcome);
            pair.run(piece);
            let joined = pair.said.remove(0);
            let Event::Joined { facts: Some(theirs), holdings, compared: 0 } = joined else {
                panic!("{joined:?}")
            };
            assert_eq!((*theirs, holdings.len()), (facts(), 2));
            assert_eq!(pair.wishes.remove(0), Wish::Greeted(Box::new(facts())));
            for id in [11, 12, 13] {
                assert_eq!(pair.coordinator.ask(request(Version::Two, id)), Ok(true));
            }
            assert_eq!(pair.coordinator.ask(request(Version::One, 14)), Ok(false));
            pair.coordinator.cancel(12).unwrap();
            pair.coordinator.ping(99).unwrap();
            pair.run(piece);
            let ids: Vec<u64> = pair
                .wishes
                .drain(..)
                .map(|wish| match wish {
                    Wish::Compute { id, .. } | Wish::Cancel(id) | Wish::Ping(id) => id,
                    other => panic!("{other:?}"),
                })
                .collect();
            assert_eq!(ids, [11, 12, 13, 12, 99]);
            for id in [13, 11] {
                pair.worker.answer(id, &answer()).unwrap();
            }
            pair.worker.pong(99, &Default::default()).unwrap();
            pair.worker.drain().unwrap();
            pair.run(piece);
            let answer = |id| Event::Answer { id, answer: Box::new(answer()) };
            let pong = Event::Pong { id: 99, load: Default::default() };
            assert_eq!(pair.said, [answer(13), answer(11), pong, Event::Draining]);
            assert_eq!(pair.errors, (None, None));
        }
    }
}

#[test]
fn version_1_answers_one_request_before_the_next_is_sent() {
    let mut pair = Pair::new(Version::One, hello(facts(), None), welcome(facts(), None, true));
    for id in [1, 2] {
        assert_eq!(pair.coordinator.ask(request(Version::One, id)), Ok(true));
    }
    for id in [1, 2] {
        pair.run(5);
        let wish = pair.wishes.remove(0);
        let Wish::V1(asked) = wish else { panic!("{wish:?}") };
        assert_eq!((asked.layer, asked.items.len(), pair.wishes.len()), (3, 1, 0));
        let mut reply = Vec::new();
        cluster::wire::v1::put_reply(&mut reply, 0, 1);
        let rows: Vec<f32> = vec![id as f32; 8];
        cluster::wire::v1::put_item(&mut reply, 5, rows.chunks_exact(4));
        pair.worker.reply_v1(&reply);
    }
    pair.run(1 << 20);
    let answered = pair.said.iter().map(|said| match said {
        Event::Answer { id, answer } => (*id, answer.outputs.clone()),
        other => panic!("{other:?}"),
    });
    let want = |id: u64| (id, Outputs::Rows(vec![id as f32; 8]));
    assert_eq!(answered.collect::<Vec<_>>(), [want(1), want(2)]);
    assert_eq!(pair.errors, (None, None));
}

#[test]
fn a_wrong_or_missing_key_is_named_on_both_sides_before_anything_else_passes() {
    let channel = |error| Some(SessionError::Channel(error));
    for (ours, theirs, plain, want) in [
        (Some(key(1)), Some(key(2)), false, (ChannelError::OtherKey, ChannelError::OtherKey)),
        (None, Some(key(2)), false, (ChannelError::KeyNeeded, ChannelError::PlainRefused)),
        (Some(key(1)), None, true, (ChannelError::NoKeyThere, ChannelError::NoKeyHere)),
    ] {
        let (hello, welcome) = (hello(facts(), ours), welcome(facts(), theirs, plain));
        let mut pair = Pair::new(Version::Two, hello, welcome.clone());
        pair.run(7);
        assert_eq!(pair.errors, (channel(want.0), channel(want.1)));
        assert!(pair.said.is_empty() && pair.wishes.is_empty());
        assert!(pair.bytes < 200, "{}", pair.bytes);
        // Nor by the version that has no keys.
        let mut old = Pair::new(Version::One, hello_plain(), welcome);
        old.coordinator.ask(request(Version::One, 1)).unwrap();
        old.run(64);
        assert_eq!(old.wishes.is_empty(), !plain);
    }
}

fn hello_plain() -> Arc<Hello> {
    hello(facts(), None)
}

#[test]
fn every_fact_that_must_agree_is_named_on_both_sides_when_it_does_not() {
    type Change = fn(&mut Facts);
    let changes: [(&str, Change); 7] = [
        ("numerics version", |facts| facts.numerics = 2),
        ("activations", |facts| facts.activations = "f32".to_owned()),
        ("config.json", |facts| facts.model = "0e".repeat(16)),
        ("hidden size", |facts| facts.hidden = 8),
        ("expert width", |facts| facts.intermediate = 8),
        ("layers", |facts| facts.layers = 80),
        ("experts", |facts| facts.experts = 8),
    ];
    for (what, change) in changes {
        let mut theirs = facts();
        change(&mut theirs);
        let mut pair = Pair::new(Version::Two, hello_plain(), welcome(theirs, None, true));
        pair.run(13);
        let (Some(here), Some(there)) = pair.errors else { panic!("{what}: {:?}", pair.errors) };
        assert!(here.to_string().contains(what), "{here}");
        assert!(there.to_string().contains(what), "{there}");
        assert!(pair.said.is_empty(), "{what}");
    }
    // What says nothing about results may differ.
    let mut theirs = facts();
    (theirs.engine, theirs.isa, theirs.threads) = ("9.9.9".to_owned(), "amx".to_owned(), 64);
    let mut pair = Pair::new(Version::Two, hello_plain(), welcome(theirs, None, true));
    pair.run(13);
    assert!(matches!(pair.said[..], [Event::Joined { .. }]), "{:?}", pair.errors);
}

#[test]
fn an_observer_sees_what_a_worker_is_and_may_ask_for_nothing() {
    let mut pair =
        Pair::new(Version::Two, hello(Facts::of_observer(), None), welcome(facts(), None, true));
    pair.run(17);
    let joined = pair.said.remove(0);
    let Event::Joined { facts: Some(theirs), holdings, .. } = joined else { panic!("{joined:?}") };
    assert_eq!((*theirs, holdings.len()), (facts(), 2));
    pair.coordinator.ping(4).unwrap();
    pair.run(17);
    assert_eq!(pair.wishes.pop(), Some(Wish::Ping(4)));
    pair.coordinator.ask(request(Version::Two, 1)).unwrap();
    pair.run(17);
    assert!(pair.errors.1.is_some() && !matches!(pair.wishes.last(), Some(Wish::Compute { .. })));
}

#[test]
fn one_changed_bit_of_an_encrypted_connection_ends_it() {
    let mut changed = 0;
    for at in 0..1000 {
        let (hello, welcome) =
            (hello(facts(), Some(key(3))), welcome(facts(), Some(key(3)), false));
        let mut pair = Pair::new(Version::Two, hello, welcome);
        let mut passed = 0;
        loop {
            let mut bytes = pair.coordinator.take_outgoing();
            if let Some(byte) = bytes.get_mut(at - passed.min(at)).filter(|_| at >= passed) {
                *byte ^= 4;
                changed += 1;
            }
            passed += bytes.len();
            let received = pair.worker.receive(&bytes, &mut pair.wishes);
            let back = pair.worker.take_outgoing();
            let back = pair.coordinator.receive(&back, &mut pair.said);
            if received.is_err() || back.is_err() {
                assert!(pair.wishes.is_empty());
                break;
            }
            if bytes.is_empty() {
                break;
            }
        }
        if passed > at {
            assert!(pair.said.is_empty() || !pair.wishes.is_empty(), "byte {at}");
        }
    }
    assert!(changed > 300, "{changed}");
}

#[test]
fn frames_at_the_wrong_time_are_refused() {
    let out_of_order = |kind| Some(SessionError::Wire(WireError::Order { kind }));
    for kind in [Kind::Answer, Kind::Pong, Kind::Drain, Kind::Cancel] {
        // Before the greeting.
        let mut pair = Pair::new(Version::Two, hello_plain(), welcome(facts(), None, true));
        let preface = pair.coordinator.take_outgoing();
        pair.worker.receive(&preface, &mut pair.wishes).unwrap();
        let mut bytes = Vec::new();
        put_frame(&mut bytes, kind, 0, &[]);
        let refused = pair.worker.receive(&bytes, &mut pair.wishes).err();
        assert_eq!(refused, out_of_order(kind));
        assert!(pair.wishes.is_empty());
    }
    // An answer that nobody asked for.
    let mut pair = Pair::new(Version::Two, hello_plain(), welcome(facts(), None, true));
    pair.run(64);
    pair.worker.answer(5, &answer()).unwrap();
    pair.run(64);
    let refused = pair.errors.0.unwrap();
    assert!(matches!(refused, SessionError::Wire(WireError::Frame { most: 0, .. })), "{refused}");
}

/// Bytes that a batch of eight rows with eight experts each costs over two workers.
fn bytes_of(version: Version, sums: bool) -> u64 {
    let shape = cluster::wire::Shape { hidden: 6144, intermediate: 2048, layers: 79, experts: 256 };
    let values = vec![0.5; 8 * shape.hidden as usize];
    let routes = |worker: u32| {
        // Every row has eight of 64 experts, half of them at each worker.
        (0..64u32).filter(move |expert| expert % 2 == worker).map(|expert| {
            let rows: Vec<u32> =
                (0..8).filter(|row| (0..8).any(|k| (row * 9 + k * 7) % 64 == expert)).collect();
            (expert, rows)
        })
    };
    let mut bytes = 0;
    for worker in 0..2 {
        let items: Vec<(u32, Vec<u32>)> =
            routes(worker).filter(|(_, rows)| !rows.is_empty()).collect();
        let weights = [0.1; 8];
        let item = |(expert, rows): &(u32, Vec<u32>)| (*expert, rows.clone());
        let items: Vec<(u32, Vec<u32>)> = items.iter().map(item).collect();
        let items = items.iter().map(|(expert, rows)| ExpertRows {
            expert: *expert,
            rows,
            weights: &weights[..rows.len()],
        });
        let request = Request::new(version, &shape, 1, (3, 1000, sums), items, &values);
        bytes += request.bytes() + request.answer_bytes(shape.hidden);
    }
    bytes
}

#[test]
fn rows_once_and_sums_are_fewer_bytes_than_version_1() {
    let (old, new, sums) = (
        bytes_of(Version::One, false),
        bytes_of(Version::Two, false),
        bytes_of(Version::Two, true),
    );
    println!("version 1 {old} bytes, version 2 {new}, with sums {sums}");
    assert!(new * 100 <= old * 65, "{new} of {old}");
    assert!(sums < new, "{sums} of {new}");
}
