use cluster::identity::{Facts, Holdings, facts_of, greeting, holdings_of};
use cluster::wire::WireError;
use cluster::wire::secure::{Channel, Key, Policy};
use cluster::wire::v2::{
    Answer, Asked, Budgets, Compute, Frame, FrameReader, Kind, Load, Outputs, Status, put_frame,
};
use experts::ExpertRows;

use crate::support::{SHAPE, in_pieces, vector};

const BUDGET_BYTES: u64 = 1 << 20;
const BUDGETS: Budgets = Budgets { hello: 4096, compute: 4096, answer: 4096 };

const ONE: [f32; 4] = [1.0, -2.5, 0.0, 3.0e-5];
const TWO: [f32; 8] = [0.5, 0.25, -0.125, 1024.0, f32::MAX, -0.0, 1.5, 2.0];

fn frames(bytes: &[u8], piece: usize) -> Result<(Vec<Frame>, usize), WireError> {
    let mut reader = FrameReader::default();
    in_pieces(bytes, piece, |input| reader.take(input, &BUDGETS))
}

fn frame(name: &str) -> Frame {
    let (mut frames, unfinished) = frames(&vector(name), 7).unwrap();
    assert_eq!((frames.len(), unfinished), (1, 0));
    frames.remove(0)
}

#[test]
fn requests_are_the_bytes_of_the_vectors() {
    let rows = [&TWO[..], &ONE].concat();
    let item = |expert, rows, weights| ExpertRows { expert, rows, weights };
    // Of a batch of six rows, three are wanted.
    let batch = [&[9.0; 8][..], &rows[..4], &rows[4..8], &[8.0; 4], &rows[8..]].concat();
    let items = [item(5, &[2, 5], &[1.0; 2]), item(200, &[3], &[1.0])];
    let mut bytes = Vec::new();
    let distinct = Compute::put(&mut bytes, 9, (78, 2500, false), items.into_iter(), &batch, 4);
    assert_eq!(bytes, vector("v2-compute-rows"));
    assert_eq!(distinct, [2, 3, 5]);
    let items = [item(5, &[0, 1], &[0.25, 0.5]), item(6, &[0], &[1.5])];
    let mut bytes = Vec::new();
    Compute::put(&mut bytes, 10, (3, 0, true), items.into_iter(), &TWO, 4);
    assert_eq!(bytes, vector("v2-compute-sums"));

    let read = frame("v2-compute-rows");
    assert_eq!((read.kind, read.id), (Kind::Compute, 9));
    let request = Compute::parse(&read.body, &SHAPE, BUDGET_BYTES).unwrap();
    assert_eq!((request.layer, request.deadline_ms, request.sums), (78, 2500, false));
    assert_eq!(request.item(0), (5, &[0, 2][..], &[][..]));
    assert_eq!(request.item(1), (200, &[1][..], &[][..]));
    assert_eq!(request.values, rows);
    let request = Compute::parse(&frame("v2-compute-sums").body, &SHAPE, BUDGET_BYTES).unwrap();
    assert_eq!(request.item(0), (5, &[0, 1][..], &[0.25, 0.5][..]));
    assert_eq!(request.item(1), (6, &[0][..], &[1.5][..]));
}

#[test]
fn answers_are_the_bytes_of_the_vectors() {
    let rows = Answer {
        waited_us: 70,
        computed_us: 1234,
        statuses: vec![Status::Computed, Status::Missing],
        outputs: Outputs::Rows(TWO.to_vec()),
    };
    let sums = Answer {
        waited_us: 0,
        computed_us: 5,
        statuses: vec![Status::Computed; 2],
        outputs: Outputs::Sums(vec![-4, -3, -2, -1, 0, 1, 2, 1 << 60]),
    };
    let asked = |sums| Asked { counts: vec![2, 1], rows: if sums { 2 } else { 3 }, sums };
    for (id, name, answer, asked) in
        [(9, "v2-answer-rows", rows, asked(false)), (10, "v2-answer-sums", sums, asked(true))]
    {
        let mut bytes = Vec::new();
        answer.put(&mut bytes, id);
        assert_eq!(bytes, vector(name), "{name}");
        let read = frame(name);
        assert_eq!(Answer::parse(&read.body, &asked, 4), Ok(answer), "{name}");
        assert!(read.body.len() as u64 <= asked.answer_bytes(4), "{name}");
        // It answers for nothing else.
        let other = Asked { counts: vec![2], ..asked.clone() };
        assert!(Answer::parse(&read.body, &other, 4).is_err(), "{name}");
        let other = Asked { sums: !asked.sums, ..asked };
        assert!(Answer::parse(&read.body, &other, 4).is_err(), "{name}");
    }
}

#[test]
fn small_frames_and_prefaces_are_the_bytes_of_the_vectors() {
    let load = Load { waiting: 2, rows: 123_456, cached_bytes: 60_000_000_000 };
    for (name, kind, id, body) in [
        ("v2-cancel", Kind::Cancel, 10, Vec::new()),
        ("v2-pong", Kind::Pong, 77, load.body()),
        ("v2-drain", Kind::Drain, 0, Vec::new()),
        ("v2-refuse", Kind::Refuse, 0, b"another model".to_vec()),
    ] {
        let mut bytes = Vec::new();
        put_frame(&mut bytes, kind, id, &body);
        assert_eq!(bytes, vector(name), "{name}");
        assert_eq!(frame(name), Frame { kind, id, body }, "{name}");
    }
    assert_eq!(Load::parse(&frame("v2-pong").body), Ok(load));
    let mut channel = Channel::coordinator(Some(Key::new([5; 32])));
    assert_eq!(channel.take_outgoing(), vector("v2-preface-coordinator"));
    let mut channel = Channel::worker(Policy { key: None, plain: true });
    let mut asks = Channel::coordinator(None);
    channel.receive(&asks.take_outgoing(), &mut Vec::new()).unwrap();
    assert_eq!(channel.take_outgoing(), vector("v2-preface-worker"));
}

#[test]
fn a_greeting_is_the_bytes_of_the_vector() {
    let read = frame("v2-hello");
    assert_eq!((read.kind, read.id), (Kind::Hello, 0));
    let (facts, rest) = facts_of(&read.body).unwrap();
    let want = Facts {
        numerics: 1,
        activations: "int8".to_owned(),
        model: "00112233445566778899aabbccddeeff".to_owned(),
        hidden: 4,
        intermediate: 6,
        layers: 79,
        experts: 256,
        engine: "0.1.0".to_owned(),
        isa: "avx2".to_owned(),
        threads: 8,
        ram_bytes: 64_000_000_000,
        cache_bytes: 60_000_000_000,
        request_bytes: 67_108_864,
        observer: false,
    };
    assert_eq!(facts, want);
    let holdings = holdings_of(rest, &SHAPE).unwrap();
    let keys: Vec<_> = holdings.keys().collect();
    assert_eq!(keys, [(3, 200), (3, 201), (4, 0), (4, 1), (4, 2)]);
    assert_eq!(greeting(&facts, &holdings), read.body);
    let known = Holdings::of_keys([(3, 200)]);
    assert_eq!(known.compare(&holdings), Ok(0));
}

#[test]
fn frames_that_follow_each_other_are_read_in_pieces_of_every_size() {
    let names = ["v2-hello", "v2-compute-rows", "v2-drain", "v2-answer-sums"];
    let bytes: Vec<u8> = names.iter().flat_map(|name| vector(name)).collect();
    let want: Vec<Frame> = names.iter().map(|name| frame(name)).collect();
    for piece in 1..=bytes.len() {
        assert_eq!(frames(&bytes, piece), Ok((want.clone(), 0)), "{piece}");
    }
}

#[test]
fn frames_that_are_wrong_are_refused_before_their_body_is_kept() {
    let bytes = vector("v2-compute-rows");
    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        frames(&bytes, 16).err()
    };
    assert!(matches!(with(4, 0), Some(WireError::Range { .. })));
    assert!(matches!(with(4, 9), Some(WireError::Range { .. })));
    assert!(matches!(with(5, 1), Some(WireError::Malformed { .. })));
    let huge = with(3, 0x7f);
    assert!(matches!(huge, Some(WireError::Frame { most: 4096, .. })), "{huge:?}");
}

#[test]
fn requests_that_contradict_themselves_or_the_model_are_refused() {
    let body = frame("v2-compute-sums").body;
    let parse = |body: &[u8]| Compute::parse(body, &SHAPE, BUDGET_BYTES);
    assert!(parse(&body).is_ok());
    for cut in 0..body.len() {
        assert!(parse(&body[..cut]).is_err(), "{cut}");
    }
    assert!(parse(&[&body[..], &[0; 4]].concat()).is_err());
    // Layer, flags, rows, items, experts out of order, too many rows, rows out of order, padding.
    for (at, value) in [
        (0, 79),
        (8, 2),
        (8, 0),
        (12, 0),
        (12, 3),
        (16, 0),
        (16, 9),
        (20, 7),
        (24, 9),
        (36, 2),
        (38, 0),
    ] {
        let mut body = body.clone();
        body[at] = value;
        assert!(parse(&body).is_err(), "{value} at {at}");
    }
    let mut padded = body.clone();
    padded[42] = 1;
    assert_eq!(parse(&padded), Err(WireError::Malformed { what: "padding is not 0" }));
    // What it would cost counts before it is kept.
    let few = Compute::parse(&body, &SHAPE, 40);
    assert_eq!(few, Err(WireError::Budget { budget_bytes: 40 }));
}

#[test]
fn any_bytes_are_read_or_refused() {
    let mut state = 7u64;
    let mut noise = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let asked = Asked { counts: vec![2, 1], rows: 2, sums: true };
    for name in ["v2-compute-rows", "v2-compute-sums", "v2-answer-rows", "v2-hello", "v2-pong"] {
        let body = frame(name).body;
        for _ in 0..3000 {
            let mut body = body.clone();
            for _ in 0..1 + noise() % 4 {
                let at = usize::from(noise()) % body.len();
                body[at] = noise();
            }
            let _ = Compute::parse(&body, &SHAPE, BUDGET_BYTES);
            let _ = Answer::parse(&body, &asked, 4);
            let _ = Load::parse(&body);
            let _ = facts_of(&body).map(|(_, rest)| holdings_of(rest, &SHAPE).is_ok());
        }
    }
}
