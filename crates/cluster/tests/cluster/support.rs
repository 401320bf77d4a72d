use std::path::{Path, PathBuf};

use cluster::wire::Shape;

/// The shape of the vectors.
pub const SHAPE: Shape = Shape { hidden: 4, intermediate: 6, layers: 79, experts: 256 };

/// The bytes of a vector.
pub fn vector(name: &str) -> Vec<u8> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wire");
    let text = std::fs::read_to_string(dir.join(format!("{name}.hex"))).unwrap();
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let byte = |two: &[u8]| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

/// Gives bytes to a reader in pieces of a size; returns every message, and the bytes of the
/// unfinished one.
pub fn in_pieces<T, E>(
    bytes: &[u8],
    piece: usize,
    mut take: impl FnMut(&mut &[u8]) -> Result<Option<T>, E>,
) -> Result<(Vec<T>, usize), E> {
    let (mut messages, mut unfinished) = (Vec::new(), 0);
    for piece in bytes.chunks(piece.max(1)) {
        let mut left = piece;
        while !left.is_empty() {
            let before = left.len();
            let message = take(&mut left)?;
            unfinished += before - left.len();
            if let Some(message) = message {
                messages.push(message);
                unfinished = 0;
            }
        }
    }
    Ok((messages, unfinished))
}

/// A model among the fixtures.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle").join(name)
}
