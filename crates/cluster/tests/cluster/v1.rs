use cluster::wire::WireError;
use cluster::wire::v1::{
    FAILED, Item, OK, Reply, ReplyReader, Request, RequestReader, put_item, put_reply, put_request,
};

use crate::support::{SHAPE, in_pieces, vector};

const BUDGET_BYTES: u64 = 1 << 20;

const ONE: [f32; 4] = [1.0, -2.5, 0.0, 3.0e-5];
const TWO: [f32; 8] = [0.5, 0.25, -0.125, 1024.0, f32::MAX, -0.0, 1.5, 2.0];

fn items() -> Vec<Item> {
    vec![Item { expert: 200, rows: TWO.to_vec() }, Item { expert: 5, rows: ONE.to_vec() }]
}

/// The bytes of a list of items after `head`.
fn with_items(mut head: Vec<u8>, items: &[Item]) -> Vec<u8> {
    for item in items {
        put_item(&mut head, item.expert, item.rows.chunks_exact(SHAPE.hidden as usize));
    }
    head
}

fn request_bytes(layer: u32, items: &[Item]) -> Vec<u8> {
    let mut head = Vec::new();
    put_request(&mut head, &SHAPE, layer, items.len());
    with_items(head, items)
}

fn requests(bytes: &[u8], piece: usize) -> Result<(Vec<Request>, usize), WireError> {
    let mut reader = RequestReader::new(SHAPE, BUDGET_BYTES);
    in_pieces(bytes, piece, |input| reader.take(input))
}

fn reply(bytes: &[u8], asked: &[(u32, u32)]) -> Result<(Vec<Reply>, usize), WireError> {
    let mut reader = ReplyReader::new(SHAPE.hidden, asked.to_vec());
    in_pieces(bytes, 11, |input| reader.take(input))
}

#[test]
fn messages_are_the_bytes_of_the_vectors() {
    let one = [Item { expert: 7, rows: ONE.to_vec() }];
    assert_eq!(request_bytes(3, &one), vector("v1-request-one"));
    assert_eq!(request_bytes(78, &items()), vector("v1-request-two"));
    let mut head = Vec::new();
    put_reply(&mut head, OK, 2);
    assert_eq!(with_items(head, &items()), vector("v1-reply-two"));
    let mut failed = Vec::new();
    put_reply(&mut failed, FAILED, 0);
    assert_eq!(failed, vector("v1-reply-failed"));
}

#[test]
fn requests_that_follow_each_other_are_read_in_pieces_of_every_size() {
    let bytes = [vector("v1-request-two"), vector("v1-request-one")].concat();
    let want = [
        Request { layer: 78, items: items() },
        Request { layer: 3, items: vec![Item { expert: 7, rows: ONE.to_vec() }] },
    ];
    for piece in 1..=bytes.len() {
        assert_eq!(requests(&bytes, piece), Ok((want.to_vec(), 0)), "pieces of {piece}");
    }
    // A cut message is none.
    for cut in 1..vector("v1-request-two").len() {
        let (whole, unfinished) = requests(&bytes[..cut], 7).unwrap();
        assert_eq!((whole.len(), unfinished), (0, cut));
    }
}

#[test]
fn a_reply_must_answer_what_was_asked() {
    let bytes = vector("v1-reply-two");
    let want = Reply { status: OK, items: items() };
    assert_eq!(reply(&bytes, &[(200, 2), (5, 1)]), Ok((vec![want.clone()], 0)));
    // Every call takes bytes, whatever was returned before.
    let twice = [&bytes[..], &bytes].concat();
    assert_eq!(reply(&twice, &[(200, 2), (5, 1)]), Ok((vec![want.clone(), want], 0)));
    for (asked, what) in [
        (&[(200, 2), (6, 1)][..], "item 1 answers for expert 5, asked was 6"),
        (&[(200, 1), (5, 1)], "item 0 answers for a number of rows of 2, asked was 1"),
        (&[(200, 2)], "the number of experts answered for is 2, allowed are 1 to 1"),
    ] {
        assert_eq!(reply(&bytes, asked).unwrap_err().to_string(), what);
    }
    let failed = reply(&vector("v1-reply-failed"), &[(200, 2)]).unwrap().0;
    assert_eq!(failed, [Reply { status: FAILED, items: vec![] }]);
}

#[test]
fn every_field_of_a_request_is_checked_before_what_follows_is_read() {
    let whole = vector("v1-request-two");
    // Offset of a big-endian number, what is written there, and the complaint.
    for (at, number, what) in [
        (0, 0x4745_5420, "does not speak this protocol"),
        (8, 2, "protocol version 2; this connection takes 1"),
        (12, 79, "the layer is 79, allowed are 0 to 78"),
        (16, 5, "the peer's hidden size is 5, this model's 4"),
        (20, 0, "the peer's expert width is 0, this model's 6"),
        (24, 0, "the number of experts is 0, allowed are 1 to 64"),
        (24, 65, "the number of experts is 65, allowed are 1 to 64"),
        (28, 256, "the expert is 256, allowed are 0 to 255"),
        (32, 0, "the number of rows is 0, allowed are 1 to 65536"),
        (32, u32::MAX, "the number of rows is 4294967295, allowed are 1 to 65536"),
    ] {
        let mut bytes = whole.clone();
        bytes[at..at + 4].copy_from_slice(&u32::to_be_bytes(number));
        // Nothing beyond the head that has the field is needed to refuse it.
        let head = if at < 28 { 28 } else { 36 };
        let error = requests(&bytes[..head], 1).unwrap_err().to_string();
        assert!(error.contains(what), "{at}: {error}");
    }
}

#[test]
fn a_request_beyond_the_budget_is_refused_by_its_heads() {
    let row_bytes = u64::from(SHAPE.hidden) * 4;
    let bytes = vector("v1-request-two");
    for (rows, fits) in [(2, false), (3, true)] {
        let mut reader = RequestReader::new(SHAPE, rows * row_bytes);
        let read = in_pieces(&bytes, 5, |input| reader.take(input));
        let budget_bytes = rows * row_bytes;
        match fits {
            true => assert_eq!(read.unwrap().0.len(), 1),
            false => assert_eq!(read, Err(WireError::Budget { budget_bytes })),
        }
    }
}

#[test]
fn as_many_experts_and_rows_as_are_allowed_survive() {
    let rows = |count: usize| (0..count * 4).map(|at| at as f32).collect::<Vec<f32>>();
    let many: Vec<Item> =
        (0..64).map(|expert| Item { expert, rows: rows(1 + expert as usize) }).collect();
    let bytes = request_bytes(0, &many);
    let want = Request { layer: 0, items: many };
    assert_eq!(requests(&bytes, 4096), Ok((vec![want], 0)));
}
