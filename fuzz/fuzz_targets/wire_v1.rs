//! Messages of version 1: the first byte says how long the pieces are in which the rest comes to
//! the readers of requests and replies.

#![no_main]

use cluster::wire::Shape;
use cluster::wire::v1::{ReplyReader, RequestReader, put_item, put_request};
use libfuzzer_sys::fuzz_target;

const SHAPE: Shape = Shape { hidden: 4, intermediate: 6, layers: 79, experts: 256 };
const BUDGET_BYTES: u64 = 1 << 16;

/// All messages of a kind in bytes that come in pieces.
fn read<T, E>(
    bytes: &[u8],
    piece: usize,
    mut take: impl FnMut(&mut &[u8]) -> Result<Option<T>, E>,
) -> (Vec<T>, bool) {
    let mut messages = Vec::new();
    for piece in bytes.chunks(piece) {
        let mut left = piece;
        while !left.is_empty() {
            match take(&mut left) {
                Ok(message) => messages.extend(message),
                Err(_) => return (messages, false),
            }
        }
    }
    (messages, true)
}

fuzz_target!(|data: &[u8]| {
    let Some((piece, bytes)) = data.split_first() else { return };
    let read_requests = |piece| {
        let mut reader = RequestReader::new(SHAPE, BUDGET_BYTES);
        read(bytes, piece, |input| reader.take(input))
    };
    let (requests, whole) = read_requests(usize::from(*piece).max(1));
    let (at_once, whole_at_once) = read_requests(usize::MAX);
    assert_eq!((requests.len(), whole), (at_once.len(), whole_at_once));
    // What was read is what would be written.
    let mut written = Vec::new();
    for request in &requests {
        put_request(&mut written, &SHAPE, request.layer, request.items.len());
        for item in &request.items {
            put_item(&mut written, item.expert, item.rows.chunks_exact(SHAPE.hidden as usize));
        }
    }
    assert!(bytes.starts_with(&written));
    let asked = vec![(200, 2), (5, 1)];
    let mut reader = ReplyReader::new(SHAPE.hidden, asked);
    read(bytes, usize::from(*piece).max(1), |input| reader.take(input));
});
