//! Coded int4 matrices, without loss: an entropy coder (rANS) over the bytes of the layout
//! `r16k4`. `docs/formats.md` describes the stream byte by byte.
//!
//! 32 or 64 states take turns, in vectors of 16 lanes: byte `4 l + k` of a chunk, two codes, comes
//! from lane `l` of vector `k` modulo their number. Scales share the first vector: their high bits
//! are coded, their low bits stored plainly.

mod encode;

use numerics::simd::{SLOTS, Simd, WINDOW};
use numerics::{Isa, fill, multiversion};

use crate::error::CodedFault;
use crate::tile::ROWS;
use crate::{Format, FormatError, MatrixDesc};

pub use encode::{Entropy, encode, entropy};

/// Bytes of a chunk of codes and of the scales before them.
const CHUNK: usize = 64;
/// Bytes of a lane of a chunk, and most vectors of states.
const VECTORS: usize = 4;
/// Vectors of states of a small matrix: fewer states take fewer bytes, and more time.
const FEW_VECTORS: usize = 2;
/// The state that a coder begins with; a decoder ends there. No state is less between symbols.
const START: u32 = 1 << 16;
/// Bits of a slot's number.
const SLOT_BITS: u32 = SLOTS.trailing_zeros();
/// Codes of four bits.
const CODES: usize = 16;
/// Bytes of the shares of the codes.
const CODE_SHARES_BYTES: usize = 24;
/// Plain bits of a scale of which none are coded.
const PLAIN: u8 = 32;
/// Most plain bits of a scale whose other bits are coded.
const LOW_BITS_MAX: u8 = 24;
/// Most distinct values of coded bits; [`share`] needs half of the slots free.
const VALUES_MAX: usize = SLOTS / 2;
/// Largest sum that [`share`] divides exactly.
const COUNTS_MAX: u64 = 1 << (2 * SLOT_BITS);

/// A slot of a table: the share of its symbol in bits 20 to 31, the slot's number within the share
/// in bits 8 to 19, a byte in bits 0 to 7.
type Table = [u32; SLOTS];

/// Working memory of [`decode`]: tables of 48 KiB, whatever the matrix.
pub struct Workspace {
    codes: Box<Table>,
    scale_shares: Box<Table>,
    /// High bits of a scale, in place, by slot.
    scale_values: Box<[u32; SLOTS]>,
}

impl Default for Workspace {
    fn default() -> Workspace {
        Workspace {
            codes: Box::new([0; SLOTS]),
            scale_shares: Box::new([0; SLOTS]),
            scale_values: Box::new([0; SLOTS]),
        }
    }
}

/// Whether matrices of this description can be coded: int4 in tiles.
pub fn applies(desc: &MatrixDesc) -> bool {
    Segments::of(desc).is_some()
}

/// The parts of a matrix's bytes, in order: 16 scales (64 bytes), then chunks of codes.
#[derive(Clone, Copy)]
struct Segments {
    tiles: usize,
    /// Segments of a tile.
    groups: usize,
    /// Chunks of every segment of a tile but the last.
    chunks: usize,
    /// Chunks of the last one.
    last_chunks: usize,
}

impl Segments {
    /// The segments of a matrix; `None` where it cannot be coded.
    fn of(desc: &MatrixDesc) -> Option<Segments> {
        match desc.format() {
            Format::Int4Row | Format::Int4Grouped(_) => {}
            Format::F32
            | Format::Bf16
            | Format::F16
            | Format::Int8Row
            | Format::Int2Row
            | Format::Int3G64
            | Format::E8Iq3
            | Format::Mxfp4
            | Format::Fp8B128(_) => return None,
        }
        let (shape, _) = desc.tile()?;
        let groups = desc.cols().div_ceil(shape.group);
        let last = desc.cols() - groups.saturating_sub(1) * shape.group;
        Some(Segments {
            tiles: desc.rows().div_ceil(ROWS),
            groups,
            chunks: shape.code_bytes(shape.group) / CHUNK,
            last_chunks: shape.code_bytes(last) / CHUNK,
        })
    }

    fn count(&self) -> usize {
        self.tiles * self.groups
    }

    /// Chunks of codes of all segments.
    fn all_chunks(&self) -> usize {
        self.tiles * (self.groups.saturating_sub(1) * self.chunks + self.last_chunks)
    }

    /// Chunks of codes of segment `index`.
    #[inline(always)]
    fn chunks_of(&self, index: usize) -> usize {
        if index % self.groups + 1 == self.groups { self.last_chunks } else { self.chunks }
    }
}

/// Shares the slots among symbols by their counts: none for a count of zero, one for a symbol that
/// would have less than two. The others share the rest: each ends where the sum of their counts up
/// to it, times the rest, over the sum of all of theirs, does, rounded down.
///
/// The sum of the counts must be in `1 ..= COUNTS_MAX`, at most [`VALUES_MAX`] of them not zero.
fn share(counts: &[u32], shares: &mut [u16]) {
    /// Fraction bits of the rest over the sum; at least twice those of the sum, so that rounding
    /// the quotient up moves no result.
    const FRACTION: u32 = 4 * SLOT_BITS;
    let total: u64 = counts.iter().map(|&count| u64::from(count)).sum();
    debug_assert!((1..=COUNTS_MAX).contains(&total));
    let is_small = |count: u64| count * (SLOTS as u64) < 2 * total;
    let (mut rest, mut sum) = (SLOTS as u64, 0);
    for &count in counts {
        let count = u64::from(count);
        let small = is_small(count);
        rest -= u64::from(small && count > 0);
        sum += if small { 0 } else { count };
    }
    let quotient = (rest << FRACTION).div_ceil(sum.max(1));
    let (mut counted, mut start) = (0, 0);
    for (&count, to) in counts.iter().zip(shares) {
        let count = u64::from(count);
        *to = if is_small(count) {
            u16::from(count > 0)
        } else {
            counted += count;
            let end = (counted * quotient) >> FRACTION;
            let slots = (end - start) as u16;
            start = end;
            slots
        };
    }
}

/// The shares of bytes of two codes, from those of the codes.
fn pair_shares(codes: &[u16; CODES]) -> [u16; 256] {
    let mut counts = [0; 256];
    for (row, &high) in counts.chunks_exact_mut(CODES).zip(codes) {
        for (count, &low) in row.iter_mut().zip(codes) {
            *count = u32::from(low) * u32::from(high);
        }
    }
    let mut shares = [0; 256];
    share(&counts, &mut shares);
    shares
}

/// Writes the slots of a symbol.
#[inline(always)]
fn put_share(table: &mut [u32], share: u16, symbol: u8) {
    let first = u32::from(share) << (SLOT_BITS + 8) | u32::from(symbol);
    for (number, slot) in table.iter_mut().enumerate() {
        *slot = first + ((number as u32) << 8);
    }
}

/// What has not been read of a stream.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], CodedFault> {
        let (taken, rest) = self.rest.split_at_checked(bytes).ok_or(CodedFault::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], CodedFault> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(CodedFault::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, CodedFault> {
        let [byte] = self.array()?;
        Ok(*byte)
    }

    /// A number in groups of seven bits, the lowest first, all but the last with bit 7 set.
    fn number(&mut self) -> Result<u32, CodedFault> {
        let mut number = 0u64;
        for shift in [0, 7, 14, 21, 28] {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return u32::try_from(number).map_err(|_| CodedFault::ScaleTable);
            }
        }
        Err(CodedFault::ScaleTable)
    }
}

/// Fills the tables of scales whose low bits are plain.
fn read_scale_table(
    reader: &mut Reader<'_>,
    low_bits: u8,
    workspace: &mut Workspace,
) -> Result<(), CodedFault> {
    let values = usize::from(u16::from_le_bytes(*reader.array()?));
    if values > VALUES_MAX {
        return Err(CodedFault::ScaleTable);
    }
    let (mut value, mut start) = (0u32, 0);
    for index in 0..values {
        let step = reader.number()?;
        value = value.checked_add(step).ok_or(CodedFault::ScaleTable)?;
        let share = reader.number()?;
        // A share of all slots does not fit a slot.
        let fits = (1..SLOTS as u32).contains(&share)
            && (step > 0 || index == 0)
            && value <= u32::MAX >> low_bits;
        let end = start + share as usize;
        if !fits || end > SLOTS {
            return Err(CodedFault::ScaleTable);
        }
        put_share(&mut workspace.scale_shares[start..end], share as u16, 0);
        workspace.scale_values[start..end].fill(value << low_bits);
        start = end;
    }
    if start == SLOTS { Ok(()) } else { Err(CodedFault::ScaleTable) }
}

/// Fills the table of codes.
fn read_code_table(reader: &mut Reader<'_>, table: &mut Table) -> Result<(), CodedFault> {
    let bytes: &[u8; CODE_SHARES_BYTES] = reader.array()?;
    let mut codes = [0; CODES];
    for (two, three) in codes.as_chunks_mut::<2>().0.iter_mut().zip(bytes.as_chunks::<3>().0) {
        let [a, b, c] = three.map(u16::from);
        *two = [a | (b & 15) << 8, b >> 4 | c << 4];
    }
    if codes.iter().map(|&share| usize::from(share)).sum::<usize>() != SLOTS {
        return Err(CodedFault::CodeTable);
    }
    let mut start = 0;
    for (symbol, share) in pair_shares(&codes).into_iter().enumerate() {
        let end = start + usize::from(share);
        put_share(&mut table[start..end], share, symbol as u8);
        start = end;
    }
    Ok(())
}

/// A stream cut into its parts; the tables are in the workspace.
struct Parts<'a> {
    /// Vectors of states that decode codes; none where codes are plain.
    vectors: usize,
    /// Plain bits of a scale.
    low_bits: u8,
    states: [[u8; CHUNK]; VECTORS],
    /// Plain bits of scales, `2 low_bits` bytes per segment.
    low: &'a [u8],
    /// Codes that are not coded.
    plain_codes: &'a [[u8; CHUNK]],
    words: &'a [u8],
}

impl<'a> Parts<'a> {
    fn read(
        stream: &'a [u8],
        segments: &Segments,
        workspace: &mut Workspace,
    ) -> Result<Parts<'a>, CodedFault> {
        let mut reader = Reader { rest: stream };
        let [mode, low_bits] = *reader.array()?;
        let vectors = usize::from(mode);
        if ![0, FEW_VECTORS, VECTORS].contains(&vectors) {
            return Err(CodedFault::Mode(mode));
        }
        let scales_coded = low_bits != PLAIN;
        if scales_coded {
            if low_bits > LOW_BITS_MAX {
                return Err(CodedFault::ScaleBits(low_bits));
            }
            read_scale_table(&mut reader, low_bits, workspace)?;
        }
        if vectors > 0 {
            read_code_table(&mut reader, &mut workspace.codes)?;
        }
        let mut states = [[0; CHUNK]; VECTORS];
        for (vector, state) in states.iter_mut().enumerate() {
            if vector < vectors.max(usize::from(scales_coded)) {
                *state = *reader.array()?;
            } else {
                state.as_chunks_mut::<4>().0.fill(START.to_le_bytes());
            }
        }
        let lanes = states.as_flattened().as_chunks::<4>().0;
        if lanes.iter().any(|lane| u32::from_le_bytes(*lane) < START) {
            return Err(CodedFault::State);
        }
        let low = reader.take(segments.count() * 2 * usize::from(low_bits))?;
        let plain = if vectors > 0 { 0 } else { segments.all_chunks() };
        let plain_codes = reader.take(plain * CHUNK)?.as_chunks().0;
        Ok(Parts { vectors, low_bits, states, low, plain_codes, words: reader.rest })
    }
}

/// The words of a stream, shown in windows, with zeros beyond their end.
struct Words<'a> {
    all: &'a [u8],
    /// Where the last window inside the words begins.
    split: usize,
    /// The words from there on.
    tail: [u8; 2 * WINDOW],
}

impl<'a> Words<'a> {
    fn new(all: &'a [u8]) -> Words<'a> {
        let split = all.len().saturating_sub(WINDOW);
        let mut tail = [0; 2 * WINDOW];
        tail[..all.len() - split].copy_from_slice(&all[split..]);
        Words { all, split, tail }
    }

    /// The bytes from `at` on; `None` when that is beyond the end.
    #[inline(always)]
    fn window(&self, at: usize) -> Option<&[u8; WINDOW]> {
        match self.all.get(at..).and_then(<[u8]>::first_chunk) {
            Some(window) => Some(window),
            None => self.tail.get(at.checked_sub(self.split)?..)?.first_chunk(),
        }
    }
}

/// The 16 numbers of `bits` bits, at most [`LOW_BITS_MAX`], that follow each other in `packed`.
#[inline(always)]
fn unpack_bits(packed: &[u8], bits: usize) -> [u8; CHUNK] {
    let mut padded = [0; CHUNK];
    let bytes = match packed.first_chunk() {
        Some(bytes) => bytes,
        None => {
            padded[..packed.len()].copy_from_slice(packed);
            &padded
        }
    };
    let mask = (1u64 << bits) - 1;
    let mut out = [0; CHUNK];
    for (lane, to) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let at = lane * bits;
        let eight = bytes[at / 8..].first_chunk().copied().unwrap_or_default();
        *to = ((u64::from_le_bytes(eight) >> (at % 8) & mask) as u32).to_le_bytes();
    }
    out
}

/// Decodes chunks of codes with `N` vectors of states; returns where the words of the next symbol
/// begin.
#[inline(always)]
fn decode_chunks<S: Simd, const N: usize>(
    simd: S,
    table: &Table,
    words: &Words<'_>,
    mut at: usize,
    states: &mut [S::I; VECTORS],
    chunks: &mut [[u8; CHUNK]],
) -> Result<usize, CodedFault> {
    let byte = simd.splat(0xff);
    let mut now: [S::I; N] = fill!(byte; |k| states[k]);
    for chunk in chunks {
        let window = words.window(at).ok_or(CodedFault::Truncated)?;
        let mut used = 0;
        let slots: [S::I; VECTORS] = fill!(byte; |k| {
            let (state, slot, taken) = simd.rans_step(table, now[k % N], window, used);
            now[k % N] = state;
            used += taken;
            slot
        });
        at += used;
        let low = simd.or(simd.and(slots[0], byte), simd.shl(simd.and(slots[1], byte), 8));
        let high = simd.or(simd.shl(simd.and(slots[2], byte), 16), simd.shl(slots[3], 24));
        simd.store(simd.or(low, high), chunk);
    }
    states[..N].copy_from_slice(&now);
    Ok(at)
}

#[inline(always)]
fn decode_kernel<S: Simd>(
    simd: S,
    parts: &Parts<'_>,
    segments: &Segments,
    tables: &Workspace,
    image: &mut [[u8; CHUNK]],
) -> Result<(), CodedFault> {
    let words = Words::new(parts.words);
    let mut at = 0;
    let mut states: [S::I; VECTORS] = fill!(simd.splat(0); |k| simd.load(&parts.states[k]));
    let low_bits = usize::from(parts.low_bits);
    let (mut low, mut plain_codes) = (parts.low, parts.plain_codes);
    let mut rest = image;
    for index in 0..segments.count() {
        let (segment, after) = rest.split_at_mut(1 + segments.chunks_of(index));
        rest = after;
        let (scales, chunks) = segment.split_at_mut(1);
        let (packed, low_after) = low.split_at(2 * low_bits);
        if parts.low_bits == PLAIN {
            scales[0].copy_from_slice(packed);
        } else {
            let window = words.window(at).ok_or(CodedFault::Truncated)?;
            let high = simd.gather_slots(&tables.scale_values, states[0]);
            let (state, _, taken) = simd.rans_step(&tables.scale_shares, states[0], window, 0);
            states[0] = state;
            at += taken;
            let plain = simd.load(&unpack_bits(low, low_bits));
            simd.store(simd.or(high, plain), &mut scales[0]);
        }
        low = low_after;
        let (table, states) = (&tables.codes, &mut states);
        at = match parts.vectors {
            0 => {
                let (plain, plain_after) = plain_codes.split_at(chunks.len());
                plain_codes = plain_after;
                chunks.copy_from_slice(plain);
                at
            }
            FEW_VECTORS => {
                decode_chunks::<S, FEW_VECTORS>(simd, table, &words, at, states, chunks)?
            }
            _ => decode_chunks::<S, VECTORS>(simd, table, &words, at, states, chunks)?,
        };
    }
    match at.cmp(&parts.words.len()) {
        std::cmp::Ordering::Less => return Err(CodedFault::Trailing),
        std::cmp::Ordering::Greater => return Err(CodedFault::Truncated),
        std::cmp::Ordering::Equal => {}
    }
    let mut moved = simd.splat(0);
    for state in states {
        moved = simd.or(moved, simd.xor(state, simd.splat(START)));
    }
    if simd.fold_max_u32(moved) == 0 { Ok(()) } else { Err(CodedFault::FinalState) }
}

multiversion! {
    /// [`decode_kernel`] compiled for a level; the same bytes and the same result at each.
    fn decode_at(
        isa,
        parts: &Parts<'_>,
        segments: &Segments,
        tables: &Workspace,
        image: &mut [[u8; CHUNK]],
    ) -> Result<(), CodedFault> => decode_kernel;
}

/// Restores the bytes of a matrix, [`MatrixDesc::bytes`] of them, from its coded stream. After an
/// error the bytes of `image` are unspecified.
pub fn decode(
    isa: Isa,
    desc: &MatrixDesc,
    stream: &[u8],
    image: &mut [u8],
    workspace: &mut Workspace,
) -> Result<(), FormatError> {
    let (format, rows, cols) = (desc.format(), desc.rows(), desc.cols());
    let coded = |fault| FormatError::Coded { format, rows, cols, fault };
    let segments = Segments::of(desc).ok_or(coded(CodedFault::NotCoded))?;
    let (want, got) = (desc.bytes(), image.len());
    if want != got {
        return Err(FormatError::Length { format, rows, cols, what: "the image", want, got });
    }
    let parts = Parts::read(stream, &segments, workspace).map_err(coded)?;
    let chunks = image.as_chunks_mut().0;
    decode_at(isa, &parts, &segments, workspace, chunks).map_err(coded)
}
