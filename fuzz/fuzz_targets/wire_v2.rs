//! Connections of version 2: the first byte says how long the pieces are in which the rest comes,
//! the second who gets it: a worker, a coordinator, or the readers of bodies.

#![no_main]

use std::sync::Arc;

use cluster::identity::{Facts, Holdings, facts_of, greeting, holdings_of};
use cluster::session::coordinator::{CoordinatorSession, Hello, Request, Version};
use cluster::session::worker::{Welcome, WorkerSession};
use cluster::wire::Shape;
use cluster::wire::secure::{Key, Policy};
use cluster::wire::v2::{Answer, Asked, Compute, Load};
use experts::ExpertRows;
use libfuzzer_sys::fuzz_target;

const SHAPE: Shape = Shape { hidden: 4, intermediate: 6, layers: 79, experts: 256 };
const BUDGET_BYTES: u64 = 1 << 16;

fn facts() -> Facts {
    Facts {
        activations: "int8".to_owned(),
        model: "00112233445566778899aabbccddeeff".to_owned(),
        hidden: SHAPE.hidden,
        intermediate: SHAPE.intermediate,
        layers: SHAPE.layers,
        experts: SHAPE.experts,
        observer: false,
        ..Facts::of_observer()
    }
}

fn worker(bytes: &[u8], piece: usize, key: Option<Key>) {
    let facts = facts();
    let greeting = greeting(&facts, &Holdings::of_keys([(3, 1)]));
    let policy = Policy { plain: key.is_none(), key };
    let welcome = Welcome { facts, greeting, shape: SHAPE, request_bytes: BUDGET_BYTES, policy };
    let mut session = WorkerSession::new(Arc::new(welcome));
    let mut wishes = Vec::new();
    for piece in bytes.chunks(piece) {
        let received = session.receive(piece, &mut wishes);
        session.take_outgoing();
        if received.is_err() {
            return;
        }
    }
}

fn coordinator(bytes: &[u8], piece: usize) {
    let holdings = Arc::new(Holdings::of_keys([(3, 1)]));
    let hello = Hello { facts: facts(), holdings, shape: SHAPE, key: None };
    let mut session = CoordinatorSession::new(Version::Two, Arc::new(hello));
    session.take_outgoing();
    let rows = [0, 1];
    let item = ExpertRows { expert: 5, rows: &rows, weights: &[0.5, 0.25] };
    let mut events = Vec::new();
    let mut asked = false;
    for piece in bytes.chunks(piece) {
        if session.receive(piece, &mut events).is_err() {
            return;
        }
        if !events.is_empty() && !asked {
            asked = true;
            for id in [9, 10] {
                let items = std::iter::once(item);
                let request =
                    Request::new(Version::Two, &SHAPE, id, (3, 5, id == 10), items, &[0.5; 8]);
                session.ask(request).expect("an open channel");
            }
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let [piece, who, bytes @ ..] = data else { return };
    let piece = usize::from(*piece).max(1);
    match who % 4 {
        0 => worker(bytes, piece, None),
        1 => worker(bytes, piece, Some(Key::new([9; 32]))),
        2 => coordinator(bytes, piece),
        _ => {
            if let Ok(request) = Compute::parse(bytes, &SHAPE, BUDGET_BYTES) {
                // What was read names only what is there.
                for at in 0..request.experts.len() {
                    let (_, rows, weights) = request.item(at);
                    assert!(weights.is_empty() || weights.len() == rows.len());
                    let last = rows.iter().map(|row| usize::from(*row)).max();
                    assert!(last.is_some_and(|row| (row + 1) * 4 <= request.values.len()));
                }
            }
            for sums in [false, true] {
                let asked = Asked { counts: vec![2, 1], rows: 3, sums };
                let answer = Answer::parse(bytes, &asked, 4);
                assert!(answer.is_err() || bytes.len() as u64 <= asked.answer_bytes(4));
            }
            let _ = Load::parse(bytes);
            if let Ok((facts, rest)) = facts_of(bytes) {
                let _ = holdings_of(rest, &facts.shape());
                let _ = holdings_of(rest, &SHAPE);
            }
        }
    }
});
