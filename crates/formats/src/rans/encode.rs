//! The coder, and what order-0 entropy promises of it.

use super::{
    CHUNK, CODE_SHARES_BYTES, CODES, COUNTS_MAX, FEW_VECTORS, LOW_BITS_MAX, PLAIN, SLOT_BITS,
    SLOTS, START, Segments, VALUES_MAX, VECTORS, pair_shares, share,
};
use crate::MatrixDesc;
use crate::tile::ROWS;

/// Bytes of a matrix from which on the fewer bytes of fewer states are not worth their time.
const LARGE: usize = 1 << 18;

/// What order-0 entropy predicts of a coded matrix, in bytes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Entropy {
    /// The codes, as independent draws from the 16 codes.
    pub codes_bytes: f64,
    /// The scales as [`encode`] models them: independent draws of their high bits, plain low bits,
    /// and the table of values and shares.
    pub scales_bytes: f64,
}

/// Part of the slots of a table.
#[derive(Clone, Copy, Default)]
struct Share {
    start: u32,
    slots: u32,
}

impl Share {
    /// Gives each symbol its slots, one after the other.
    fn place(shares: &[u16]) -> Vec<Share> {
        let mut start = 0;
        let place = |&slots: &u16| {
            let share = Share { start, slots: u32::from(slots) };
            start += share.slots;
            share
        };
        shares.iter().map(place).collect()
    }
}

/// Shares for counts of any size, at most [`VALUES_MAX`] of them not zero, and at least two; none
/// is the whole.
fn shares_of(counts: &[u64]) -> Vec<u16> {
    let total: u64 = counts.iter().sum();
    let mut shares = vec![0; counts.len()];
    if let Some(only) = counts.iter().position(|&count| count == total) {
        // A share of all slots cannot be written.
        shares[(only + 1) % counts.len()] = 1;
        shares[only] = SLOTS as u16 - 1;
        return shares;
    }
    let small = |count: u64| {
        let scaled = u128::from(count) * u128::from(COUNTS_MAX / 2) / u128::from(total);
        (scaled as u32).max(u32::from(count > 0))
    };
    let small: Vec<u32> = counts.iter().map(|&count| small(count)).collect();
    share(&small, &mut shares);
    shares
}

/// Bits that `count` symbols with these shares take.
fn coded_bits(counts: &[u64], shares: &[u16]) -> f64 {
    let bits = |(&count, &slots): (&u64, &u16)| {
        if count == 0 { 0.0 } else { count as f64 * (SLOTS as f64 / f64::from(slots)).log2() }
    };
    counts.iter().zip(shares).map(bits).sum()
}

/// Order-0 entropy of symbols with these counts, in bits.
fn entropy_bits(counts: &[u64]) -> f64 {
    let total = counts.iter().sum::<u64>() as f64;
    let bits = |&count: &u64| {
        if count == 0 { 0.0 } else { count as f64 * (total / count as f64).log2() }
    };
    counts.iter().map(bits).sum()
}

/// How scales are coded.
struct ScaleModel {
    low_bits: u8,
    /// Distinct high bits in ascending order, how often each is there, and its share.
    values: Vec<u32>,
    counts: Vec<u64>,
    shares: Vec<u16>,
}

impl ScaleModel {
    /// The model with `low_bits` plain bits of scales in ascending order; `None` where there are
    /// no or too many values.
    fn new(sorted: &[u32], low_bits: u8) -> Option<ScaleModel> {
        if sorted.is_empty() {
            return None;
        }
        let (mut values, mut counts) = (Vec::new(), Vec::new());
        for same in sorted.chunk_by(|a, b| a >> low_bits == b >> low_bits) {
            if values.len() == VALUES_MAX {
                return None;
            }
            values.push(same[0] >> low_bits);
            counts.push(same.len() as u64);
        }
        if let [only] = values[..] {
            // Of two values, one of which never occurs, neither has all slots.
            if only == u32::MAX >> low_bits {
                values.insert(0, only - 1);
                counts.insert(0, 0);
            } else {
                values.push(only + 1);
                counts.push(0);
            }
        }
        let shares = shares_of(&counts);
        Some(ScaleModel { low_bits, values, counts, shares })
    }

    /// The model of fewest bytes; `None` where plain scales take no more.
    fn best(scales: &[u32]) -> Option<ScaleModel> {
        let mut sorted = scales.to_vec();
        sorted.sort_unstable();
        let models = (0..=LOW_BITS_MAX).filter_map(|bits| ScaleModel::new(&sorted, bits));
        let (bytes, model) = models
            .map(|model| (model.bytes(coded_bits(&model.counts, &model.shares)), model))
            .min_by(|(a, _), (b, _)| a.total_cmp(b))?;
        (bytes < size_of_val(scales) as f64).then_some(model)
    }

    /// Bytes of scales whose high bits take `high_bits`, with those of the table.
    fn bytes(&self, high_bits: f64) -> f64 {
        let plain = self.counts.iter().sum::<u64>() as f64 * f64::from(self.low_bits);
        (high_bits + plain) / 8.0 + self.table().len() as f64
    }

    /// The table as stored.
    fn table(&self) -> Vec<u8> {
        let mut out = (self.values.len() as u16).to_le_bytes().to_vec();
        let mut before = 0;
        for (&value, &slots) in self.values.iter().zip(&self.shares) {
            push_number(&mut out, value - before);
            push_number(&mut out, u32::from(slots));
            before = value;
        }
        out
    }
}

/// Appends a number in groups of seven bits, the lowest first.
fn push_number(out: &mut Vec<u8>, mut number: u32) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// The segments of an image: scales and chunks of codes.
fn segments_of<'a>(
    segments: &Segments,
    image: &'a [u8],
) -> Vec<(&'a [u8; CHUNK], &'a [[u8; CHUNK]])> {
    let mut rest = image.as_chunks().0;
    let mut out = Vec::with_capacity(segments.count());
    for index in 0..segments.count() {
        let (segment, after) = rest.split_at(1 + segments.chunks_of(index));
        rest = after;
        out.extend(segment.split_first());
    }
    out
}

/// The scales of a segment, as bits.
fn lanes(scales: &[u8; CHUNK]) -> impl DoubleEndedIterator<Item = u32> + ExactSizeIterator {
    scales.as_chunks::<4>().0.iter().map(|four| u32::from_le_bytes(*four))
}

/// What is coded of an image, and how.
struct Plan<'a> {
    segments: Vec<(&'a [u8; CHUNK], &'a [[u8; CHUNK]])>,
    scales: Option<ScaleModel>,
    /// How often each code is there.
    code_counts: [u64; CODES],
}

impl<'a> Plan<'a> {
    fn new(segments: &Segments, image: &'a [u8]) -> Plan<'a> {
        let segments = segments_of(segments, image);
        let scales: Vec<u32> = segments.iter().flat_map(|(scales, _)| lanes(scales)).collect();
        let mut bytes = [0u64; 256];
        for byte in segments.iter().flat_map(|(_, chunks)| chunks.as_flattened()) {
            bytes[usize::from(*byte)] += 1;
        }
        let mut code_counts = [0; CODES];
        for (byte, count) in bytes.into_iter().enumerate() {
            code_counts[byte % CODES] += count;
            code_counts[byte / CODES] += count;
        }
        Plan { segments, scales: ScaleModel::best(&scales), code_counts }
    }

    /// How codes are coded; `None` where that does not make them smaller.
    fn code_model(&self) -> Option<CodeModel> {
        let codes = self.code_counts.iter().sum::<u64>();
        if codes == 0 {
            return None;
        }
        let shares: [u16; CODES] = shares_of(&self.code_counts).try_into().ok()?;
        let vectors = if codes / 2 < LARGE as u64 { FEW_VECTORS } else { VECTORS };
        let overhead = CODE_SHARES_BYTES + vectors * CHUNK;
        let bytes = coded_bits(&self.code_counts, &shares) / 8.0 + overhead as f64;
        (bytes < codes as f64 / 2.0).then_some(CodeModel { shares, vectors })
    }
}

/// How codes are coded.
struct CodeModel {
    shares: [u16; CODES],
    /// Vectors of states.
    vectors: usize,
}

/// The coder: symbols go in from the last to the first.
struct Coder {
    states: [u32; CHUNK],
    words: Vec<u16>,
}

impl Coder {
    #[inline]
    fn put(&mut self, state: usize, share: Share) {
        let state = &mut self.states[state];
        if *state >= share.slots << (32 - SLOT_BITS) {
            self.words.push(*state as u16);
            *state >>= 16;
        }
        *state = (*state / share.slots) << SLOT_BITS | (*state % share.slots + share.start);
    }
}

/// The coded stream of a matrix's bytes, at most 64 bytes longer than they; `None` where
/// [`applies`](super::applies) says no.
///
/// # Panics
/// When `image` has not [`MatrixDesc::bytes`] bytes.
pub fn encode(desc: &MatrixDesc, image: &[u8]) -> Option<Vec<u8>> {
    let segments = Segments::of(desc)?;
    assert_eq!(image.len(), desc.bytes(), "bytes of the matrix");
    let mut plan = Plan::new(&segments, image);
    let stream = write(&plan, plan.code_model().as_ref());
    if stream.len() <= image.len() {
        return Some(stream);
    }
    plan.scales = None;
    Some(write(&plan, None))
}

fn write(plan: &Plan<'_>, codes: Option<&CodeModel>) -> Vec<u8> {
    let vectors = codes.map_or(0, |model| model.vectors);
    let mut out = vec![vectors as u8, plan.scales.as_ref().map_or(PLAIN, |model| model.low_bits)];
    if let Some(model) = &plan.scales {
        out.extend(model.table());
    }
    if let Some(model) = codes {
        for &[a, b] in model.shares.as_chunks::<2>().0 {
            out.extend([a as u8, (a >> 8 | b << 4) as u8, (b >> 4) as u8]);
        }
    }
    let coder = code(plan, codes);
    let states = ROWS * vectors.max(usize::from(plan.scales.is_some()));
    out.extend(coder.states[..states].iter().flat_map(|state| state.to_le_bytes()));
    for (scales, _) in &plan.segments {
        match &plan.scales {
            None => out.extend_from_slice(*scales),
            Some(model) => push_low_bits(&mut out, scales, u32::from(model.low_bits)),
        }
    }
    if codes.is_none() {
        out.extend(plan.segments.iter().flat_map(|(_, chunks)| chunks.as_flattened()));
    }
    out.extend(coder.words.iter().rev().flat_map(|word| word.to_le_bytes()));
    out
}

/// Codes what is to be coded, in the opposite of the decoder's order.
fn code(plan: &Plan<'_>, codes: Option<&CodeModel>) -> Coder {
    let mut coder = Coder { states: [START; CHUNK], words: Vec::new() };
    let codes = codes.map(|model| (Share::place(&pair_shares(&model.shares)), model.vectors));
    let high = plan.scales.as_ref().map(|model| (Share::place(&model.shares), model));
    for (scales, chunks) in plan.segments.iter().rev() {
        if let Some((pairs, vectors)) = &codes {
            for chunk in chunks.iter().rev() {
                for at in (0..CHUNK).rev() {
                    let (lane, byte) = (at % ROWS, at / ROWS);
                    let state = byte % vectors * ROWS + lane;
                    coder.put(state, pairs[usize::from(chunk[lane * VECTORS + byte])]);
                }
            }
        }
        if let Some((shares, model)) = &high {
            for (lane, scale) in lanes(scales).enumerate().rev() {
                // Every value of the image is in the model.
                let value = scale >> model.low_bits;
                coder.put(lane, shares[model.values.partition_point(|&v| v < value)]);
            }
        }
    }
    coder
}

/// Appends the low bits of 16 scales, one after the other from bit 0 on.
fn push_low_bits(out: &mut Vec<u8>, scales: &[u8; CHUNK], bits: u32) {
    let (mut waiting, mut held) = (0u64, 0);
    for scale in lanes(scales) {
        waiting |= (u64::from(scale) & ((1 << bits) - 1)) << held;
        held += bits;
        while held >= 8 {
            out.push(waiting as u8);
            waiting >>= 8;
            held -= 8;
        }
    }
}

/// What order-0 entropy predicts of [`encode`]'s stream; zero where
/// [`applies`](super::applies) says no.
///
/// # Panics
/// When `image` has not [`MatrixDesc::bytes`] bytes.
pub fn entropy(desc: &MatrixDesc, image: &[u8]) -> Entropy {
    let Some(segments) = Segments::of(desc) else {
        return Entropy { codes_bytes: 0.0, scales_bytes: 0.0 };
    };
    assert_eq!(image.len(), desc.bytes(), "bytes of the matrix");
    let plan = Plan::new(&segments, image);
    let scales_bytes = match &plan.scales {
        Some(model) => model.bytes(entropy_bits(&model.counts)),
        None => (plan.segments.len() * CHUNK) as f64,
    };
    Entropy { codes_bytes: entropy_bits(&plan.code_counts) / 8.0, scales_bytes }
}
