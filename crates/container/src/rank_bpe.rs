//! Rank files (`*.tiktoken`): byte-pair encoding that always merges the pair whose joined bytes
//! have the lowest rank.
//!
//! A rank file has no list of merges, and none can be rebuilt from it that gives the same ids for
//! every text, so this is a model of its own behind the `tokenizers` machinery, which still finds
//! added tokens, splits the text and decodes.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::path::{Path, PathBuf};

use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{Model, Token};

use crate::config::MAX_VOCAB;

/// Largest rank file read; 200,000 tokens take about 4 MB.
pub const MAX_RANK_FILE_BYTES: u64 = 256 << 20;
/// Longest token in bytes; real ones stay below 1,000.
pub const MAX_TOKEN_BYTES: usize = 4096;

/// Bytes of every token by rank, special tokens apart.
#[derive(Clone, Debug, Default)]
pub(crate) struct RankBpe {
    ranks: HashMap<Box<[u8]>, u32>,
    tokens: HashMap<u32, Box<[u8]>>,
    special_ids: HashMap<String, u32>,
    special_texts: HashMap<u32, String>,
    longest: usize,
}

impl RankBpe {
    /// Parses a rank file: one token a line, its bytes in base64, a space, its rank.
    pub(crate) fn parse(text: &[u8]) -> Result<RankBpe, String> {
        let mut model = RankBpe::default();
        for (i, line) in text.split(|b| *b == b'\n').enumerate() {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.is_empty() {
                continue;
            }
            model.add_line(line).map_err(|problem| format!("line {}: {problem}", i + 1))?;
        }
        let absent = (0..=u8::MAX).filter(|b| !model.ranks.contains_key([*b].as_slice())).count();
        if absent > 0 {
            return Err(format!("{absent} of the 256 single bytes have no rank"));
        }
        Ok(model)
    }

    fn add_line(&mut self, line: &[u8]) -> Result<(), String> {
        let space = line.iter().position(|b| *b == b' ').ok_or("no rank after the token")?;
        let (token, rank) = (&line[..space], &line[space + 1..]);
        let token = decode_base64(token).ok_or("the token is not base64")?;
        let rank: u32 = std::str::from_utf8(rank)
            .ok()
            .and_then(|rank| rank.parse().ok())
            .filter(|rank| (*rank as usize) < MAX_VOCAB)
            .ok_or("the rank is not a token id")?;
        if token.is_empty() || token.len() > MAX_TOKEN_BYTES {
            return Err(format!(
                "a token of {} bytes, 1 to {MAX_TOKEN_BYTES} expected",
                token.len()
            ));
        }
        self.longest = self.longest.max(token.len());
        let token = token.into_boxed_slice();
        if self.ranks.insert(token.clone(), rank).is_some() {
            return Err("the token is listed twice".to_owned());
        }
        if self.tokens.insert(rank, token).is_some() {
            return Err(format!("rank {rank} is listed twice"));
        }
        Ok(())
    }

    /// Gives a special token its id.
    pub(crate) fn add_special(&mut self, id: u32, text: &str) -> Result<(), String> {
        if self.tokens.contains_key(&id) {
            return Err(format!("special token {text:?} has id {id}, which is a rank"));
        }
        let other = self.special_ids.insert(text.to_owned(), id);
        if other.is_some_and(|other| other != id) {
            return Err(format!("special token {text:?} has two ids"));
        }
        self.special_texts.insert(id, text.to_owned());
        Ok(())
    }

    /// The largest id, special tokens included.
    pub(crate) fn max_id(&self) -> u32 {
        self.tokens.keys().chain(self.special_texts.keys()).copied().max().unwrap_or(0)
    }

    fn rank(&self, bytes: &[u8]) -> Option<u32> {
        if bytes.len() > self.longest { None } else { self.ranks.get(bytes).copied() }
    }

    /// Token ids of one piece, with the piece's bytes that each covers.
    ///
    /// Among all adjacent pairs the one whose joined bytes have the lowest rank is merged, the
    /// leftmost of equals, until no joined pair has a rank.
    pub(crate) fn encode_piece(&self, piece: &[u8]) -> Vec<(u32, usize, usize)> {
        if let Some(rank) = self.rank(piece) {
            return vec![(rank, 0, piece.len())];
        }
        // Part i starts at byte i; `end[i]` is where it ends, 0 once it was merged away.
        let n = piece.len();
        let mut end: Vec<usize> = (1..=n).collect();
        let mut start_of_previous: Vec<Option<usize>> =
            (0..n).map(|i: usize| i.checked_sub(1)).collect();
        let mut heap = BinaryHeap::new();
        let push = |heap: &mut BinaryHeap<_>, left: usize, to: usize| {
            if let Some(rank) = self.rank(&piece[left..to]) {
                heap.push(Reverse((rank, left, to)));
            }
        };
        for left in 0..n.saturating_sub(1) {
            push(&mut heap, left, left + 2);
        }
        while let Some(Reverse((_, left, to))) = heap.pop() {
            let middle = end[left];
            // Stale unless `left` is still a part and the part after it still ends at `to`.
            if middle == 0 || middle >= n || end[middle] != to {
                continue;
            }
            end[left] = to;
            end[middle] = 0;
            if to < n {
                start_of_previous[to] = Some(left);
                push(&mut heap, left, end[to]);
            }
            if let Some(previous) = start_of_previous[left] {
                push(&mut heap, previous, to);
            }
        }
        let mut ids = Vec::new();
        let mut at = 0;
        while at < n {
            // Every single byte has a rank, and so has every merged part.
            if let Some(rank) = self.rank(&piece[at..end[at]]) {
                ids.push((rank, at, end[at]));
            }
            at = end[at];
        }
        ids
    }

    /// The bytes of a token.
    #[cfg(test)]
    fn bytes(&self, id: u32) -> Option<&[u8]> {
        self.tokens.get(&id).map(|bytes| &**bytes)
    }
}

impl Model for RankBpe {
    type Trainer = BpeTrainer;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        let tokens = self.encode_piece(sequence.as_bytes()).into_iter();
        Ok(tokens
            .map(|(id, from, to)| {
                Token::new(id, byte_level_text(&sequence.as_bytes()[from..to]), (from, to))
            })
            .collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        if let Some(id) = self.special_ids.get(token) {
            return Some(*id);
        }
        self.rank(&byte_level_bytes(token)?)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        if let Some(text) = self.special_texts.get(&id) {
            return Some(text.clone());
        }
        self.tokens.get(&id).map(|bytes| byte_level_text(bytes))
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        let ranks = self.ranks.iter().map(|(bytes, rank)| (byte_level_text(bytes), *rank));
        ranks.chain(self.special_ids.iter().map(|(text, id)| (text.clone(), *id))).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.ranks.len() + self.special_ids.len()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("rank files are only read".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

/// The character that stands for a byte in byte-level vocabularies: printable Latin-1 bytes
/// stand for themselves, the 68 others are numbered from U+0100 upwards.
pub(crate) fn byte_char(byte: u8) -> char {
    match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        0..=b' ' => shifted(u32::from(byte)),
        0x7F..=0xA0 => shifted(33 + u32::from(byte - 0x7F)),
        0xAD => shifted(67),
    }
}

fn shifted(n: u32) -> char {
    char::from_u32(0x100 + n).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The inverse of [`byte_char`].
pub(crate) fn char_byte(c: char) -> Option<u8> {
    let code = u32::from(c);
    let byte = match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => 0x7F + (code - 0x121),
        0x143 => 0xAD,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Bytes as text of a byte-level vocabulary.
pub(crate) fn byte_level_text(bytes: &[u8]) -> String {
    bytes.iter().map(|b| byte_char(*b)).collect()
}

/// The bytes behind a text of a byte-level vocabulary; `None` when a character stands for none.
pub(crate) fn byte_level_bytes(text: &str) -> Option<Vec<u8>> {
    text.chars().map(char_byte).collect()
}

/// Standard base64 with padding.
fn decode_base64(text: &[u8]) -> Option<Vec<u8>> {
    let digit = |c: u8| {
        Some(u32::from(match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        }))
    };
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let body = text.strip_suffix(b"==").or_else(|| text.strip_suffix(b"=")).unwrap_or(text);
    let mut bytes = Vec::with_capacity(body.len() / 4 * 3 + 2);
    for group in body.chunks(4) {
        if group.len() == 1 {
            return None;
        }
        let mut bits = 0;
        for (i, c) in group.iter().enumerate() {
            bits |= digit(*c)? << (18 - 6 * i);
        }
        let [_, a, b, c] = bits.to_be_bytes();
        bytes.extend([a, b, c].into_iter().take(group.len() - 1));
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_characters_are_a_bijection() {
        for byte in 0..=u8::MAX {
            assert_eq!(char_byte(byte_char(byte)), Some(byte));
        }
        assert_eq!(byte_char(b' '), 'Ġ');
        assert_eq!(byte_char(b'\n'), 'Ċ');
        assert_eq!(char_byte('語'), None);
    }

    #[test]
    fn base64_lines() {
        assert_eq!(decode_base64(b"aGVsbG8=").as_deref(), Some(&b"hello"[..]));
        assert_eq!(decode_base64(b"IQ==").as_deref(), Some(&b"!"[..]));
        assert_eq!(decode_base64(b"").as_deref(), Some(&b""[..]));
        for bad in [&b"a"[..], b"ab=c", b"====", b"a===", b"\xff\xff\xff\xff"] {
            assert_eq!(decode_base64(bad), None, "{bad:?}");
        }
    }

    /// The definition, word by word: scan all pairs, merge the lowest, repeat.
    fn reference(model: &RankBpe, piece: &[u8]) -> Vec<u32> {
        if let Some(rank) = model.rank(piece) {
            return vec![rank];
        }
        let mut parts: Vec<Vec<u8>> = piece.iter().map(|b| vec![*b]).collect();
        loop {
            let joined = |pair: &[Vec<u8>]| model.rank(&pair.concat());
            let best =
                parts.windows(2).enumerate().filter_map(|(i, p)| Some((joined(p)?, i))).min();
            let Some((_, i)) = best else { break };
            let next = parts.remove(i + 1);
            parts[i].extend(next);
        }
        parts.iter().map(|part| model.rank(part).unwrap()).collect()
    }

    #[test]
    fn heap_merging_equals_the_definition() {
        let mut model = RankBpe::default();
        let mut add = |token: &[u8]| {
            if model.ranks.contains_key(token) {
                return;
            }
            let rank = model.ranks.len() as u32;
            model.ranks.insert(token.into(), rank);
            model.tokens.insert(rank, token.into());
            model.longest = model.longest.max(token.len());
        };
        for byte in 0..=u8::MAX {
            add(&[byte]);
        }
        // A fixed pseudo-random vocabulary over three letters makes many overlapping choices.
        let mut state = 7u64;
        let mut next = |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        for _ in 0..120 {
            let len = 2 + next(5) as usize;
            let token: Vec<u8> = (0..len).map(|_| b'a' + next(3) as u8).collect();
            add(&token);
        }
        for _ in 0..2000 {
            let len = 1 + next(40) as usize;
            let piece: Vec<u8> = (0..len).map(|_| b'a' + next(3) as u8).collect();
            let ids: Vec<u32> = model.encode_piece(&piece).iter().map(|t| t.0).collect();
            assert_eq!(ids, reference(&model, &piece), "{:?}", String::from_utf8_lossy(&piece));
            let bytes: Vec<u8> =
                ids.iter().flat_map(|id| model.bytes(*id).unwrap().to_vec()).collect();
            assert_eq!(bytes, piece);
        }
        assert!(model.encode_piece(b"").is_empty());
    }
}
