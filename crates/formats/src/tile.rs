//! The matmul layout `r16k4`: tiles of 16 output rows, 4 consecutive inputs per 32-bit lane.
//!
//! A tile is a run of groups of inputs that share scales; a group is its scales (one per row)
//! followed by chunks of codes, whose order each format states. Rows beyond the matrix and inputs
//! beyond the row are padding: kernels multiply the latter by zero and drop the former.

use std::marker::PhantomData;

use numerics::int8;
use numerics::simd::Simd;

use crate::format::{E8_BLOCK, E8_BLOCK_BYTES, MXFP4_GROUP};
use crate::int2::Int2;
use crate::int3::Int3;
use crate::int4::Int4;
use crate::int8::Int8;
use crate::mxfp4::Mxfp4;
use crate::{Format, e8};

/// Output rows per tile.
pub const ROWS: usize = 16;
/// Inputs are padded to a multiple of it.
const INPUT_PAD: usize = 16;

/// Where a tile keeps its scales and how they are read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scaling {
    /// 16 f32 at the head of the tile, applied once per output.
    Row,
    /// 16 f32 at the head of each group.
    Group,
    /// 16 UE8M0 bytes at the head of each group, halved because codes are doubled.
    Ue8m0Half,
    /// 16 IEEE halves at the head of each group, a 4-bit factor per chunk and row.
    E8,
}

/// How a kernel reads the codes of a format.
pub trait Codes {
    /// Place and kind of scales.
    const SCALING: Scaling;
    /// Inputs per chunk: 4 per step.
    const CHUNK_INPUTS: usize;
    /// Bytes per chunk.
    const CHUNK_BYTES: usize;
    /// Inputs per activation block, where it is the same for every matrix.
    const BLOCK: Option<usize>;
    /// Whether codes are signed bytes; otherwise they are values plus [`Codes::BIAS`].
    const SIGNED: bool;
    /// What [`Codes::unsigned`] codes exceed their values by.
    const BIAS: u32;

    /// The codes of inputs `4 step ..` of a chunk: lane = row, byte = input.
    fn codes<S: Simd>(simd: S, chunk: &[u8], step: usize) -> S::I;

    /// The codes as unsigned bytes, values plus [`Codes::BIAS`].
    #[inline(always)]
    fn unsigned<S: Simd>(_simd: S, codes: S::I) -> S::I {
        codes
    }
}

/// How codes move between canonical rows and chunks.
pub trait Packing: Codes {
    /// Copies the codes of inputs `start ..` of a canonical row into its lane of a zeroed chunk.
    fn pack(row: &[u8], start: usize, lane: usize, chunk: &mut [u8]);
    /// Reads the code of one input of a chunk.
    fn get(chunk: &[u8], row: usize, input: usize) -> u8;
    /// Writes the code of one input into zeroed bits of a canonical row.
    fn store(row: &mut [u8], input: usize, code: u8);
}

/// The first 64 bytes of a chunk.
#[inline(always)]
pub fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::I {
    let (first, _) = bytes.as_chunks::<64>();
    simd.load(&first[0])
}

/// Four bytes of a row from `at` on, zeros beyond its end.
#[inline]
pub fn four_bytes(row: &[u8], at: usize) -> [u8; 4] {
    match row.get(at..at + 4).and_then(|four| four.first_chunk()) {
        Some(four) => *four,
        None => std::array::from_fn(|i| row.get(at + i).copied().unwrap_or(0)),
    }
}

/// Lengths of a tile's parts, in inputs and bytes.
#[derive(Clone, Copy, Debug)]
pub struct TileShape {
    /// Inputs per row.
    pub cols: usize,
    /// Inputs per scale group.
    pub group: usize,
    /// Inputs per activation block; divides the group.
    pub block: usize,
    /// Bytes before the first group.
    pub header_bytes: usize,
    /// Bytes of scales before each group's codes.
    pub group_header_bytes: usize,
    /// Inputs per chunk.
    chunk_inputs: usize,
    /// Bytes per chunk.
    chunk_bytes: usize,
    /// Whether the last group is stored in full.
    full_groups: bool,
}

impl TileShape {
    /// The tile of a format for rows of `cols` inputs; `None` for formats kept row by row.
    pub fn new(format: Format, cols: usize) -> Option<TileShape> {
        Some(match format {
            Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8B128(_) => return None,
            Format::Int8Row => Self::of::<Int8>(cols, cols, None),
            Format::Int4Row => Self::of::<Int4<false>>(cols, cols, None),
            Format::Int2Row => Self::of::<Int2>(cols, cols, None),
            Format::Int4Grouped(_) | Format::Int3G64 => {
                let group = format.group()?;
                if format == Format::Int3G64 {
                    Self::of::<Int3>(cols, group, Some(group))
                } else {
                    Self::of::<Int4<true>>(cols, group, Some(group))
                }
            }
            Format::E8Iq3 => Self::of::<e8::E8>(cols, E8_BLOCK, Some(e8::SUB_BLOCK)),
            Format::Mxfp4 => Self::of::<Mxfp4>(cols, MXFP4_GROUP, Some(MXFP4_GROUP)),
        })
    }

    fn of<C: Codes>(cols: usize, group: usize, scale_inputs: Option<usize>) -> TileShape {
        let header_bytes = if C::SCALING == Scaling::Row { 4 * ROWS } else { 0 };
        let group_header_bytes = group_header_bytes::<C>();
        TileShape {
            cols,
            group,
            block: int8::block_len(scale_inputs),
            header_bytes,
            group_header_bytes,
            chunk_inputs: C::CHUNK_INPUTS,
            chunk_bytes: C::CHUNK_BYTES,
            full_groups: matches!(C::SCALING, Scaling::E8),
        }
    }

    /// Bytes of codes of a group or block of `inputs` inputs.
    #[inline(always)]
    pub fn code_bytes(&self, inputs: usize) -> usize {
        inputs.next_multiple_of(INPUT_PAD.max(self.chunk_inputs)) / self.chunk_inputs
            * self.chunk_bytes
    }

    /// Bytes of a group of `inputs` inputs, its scales included.
    #[inline(always)]
    pub fn group_bytes(&self, inputs: usize) -> usize {
        let stored = if self.full_groups { self.group } else { inputs };
        self.group_header_bytes + self.code_bytes(stored)
    }

    /// The activation blocks of a tile, in order.
    #[inline(always)]
    pub fn blocks<'a, C: Codes>(&self, tile: &'a [u8]) -> Blocks<'a, C> {
        Blocks {
            rest: &tile[self.header_bytes..],
            header: &[],
            codes: &[],
            start: 0,
            group_end: 0,
            cols: self.cols,
            group: self.group,
            block: self.block,
            _codes: PhantomData,
        }
    }

    /// Bytes of a tile; `None` on overflow.
    pub fn tile_bytes(&self) -> Option<usize> {
        let full = (self.cols / self.group).checked_mul(self.group_bytes(self.group))?;
        let rest = self.cols % self.group;
        let last = if rest == 0 { 0 } else { self.group_bytes(rest) };
        full.checked_add(last)?.checked_add(self.header_bytes)
    }
}

/// One activation block of a tile.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    /// First input.
    pub start: usize,
    /// Scales of its group.
    pub header: &'a [u8],
    /// Its chunks of codes.
    pub chunks: &'a [u8],
}

/// Iterator over the blocks of a tile; see [`TileShape::blocks`].
pub struct Blocks<'a, C> {
    rest: &'a [u8],
    header: &'a [u8],
    codes: &'a [u8],
    start: usize,
    group_end: usize,
    cols: usize,
    group: usize,
    block: usize,
    _codes: PhantomData<C>,
}

/// Bytes of codes of `inputs` inputs.
#[inline(always)]
const fn code_bytes<C: Codes>(inputs: usize) -> usize {
    let unit = if C::CHUNK_INPUTS > INPUT_PAD { C::CHUNK_INPUTS } else { INPUT_PAD };
    inputs.next_multiple_of(unit) / C::CHUNK_INPUTS * C::CHUNK_BYTES
}

/// Bytes of scales before the codes of each group.
const fn group_header_bytes<C: Codes>() -> usize {
    match C::SCALING {
        Scaling::Row => 0,
        Scaling::Group => 4 * ROWS,
        Scaling::Ue8m0Half => ROWS,
        Scaling::E8 => 2 * ROWS,
    }
}

impl<'a, C: Codes> Iterator for Blocks<'a, C> {
    type Item = Block<'a>;

    #[inline(always)]
    fn next(&mut self) -> Option<Block<'a>> {
        if self.start == self.group_end {
            if self.start == self.cols {
                return None;
            }
            let inputs = self.group.min(self.cols - self.start);
            let stored = if matches!(C::SCALING, Scaling::E8) { self.group } else { inputs };
            let header_bytes = group_header_bytes::<C>();
            let (group, rest) = self.rest.split_at(header_bytes + code_bytes::<C>(stored));
            (self.header, self.codes) = group.split_at(header_bytes);
            self.rest = rest;
            self.group_end = self.start + inputs;
        }
        let inputs = self.block.min(self.group_end - self.start);
        let (chunks, codes) = self.codes.split_at(code_bytes::<C>(inputs));
        self.codes = codes;
        let block = Block { start: self.start, header: self.header, chunks };
        self.start += inputs;
        Some(block)
    }
}

/// The scales of a tile: its head's, or those of each group.
pub fn scales<'a>(shape: &TileShape, tile: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let TileShape { cols, group, header_bytes, group_header_bytes, .. } = *shape;
    let stride = shape.group_bytes(group);
    let head = (header_bytes > 0).then(|| &tile[..header_bytes]);
    let groups = if group_header_bytes > 0 { cols.div_ceil(group) } else { 0 };
    let of_group = move |at: usize| &tile[header_bytes + at * stride..][..group_header_bytes];
    head.into_iter().chain((0..groups).map(of_group))
}

/// Packs up to 16 canonical rows into a zeroed tile. `weights` and `scales` hold whole rows;
/// `scales` is empty where the format keeps none outside its weights.
pub fn pack(format: Format, shape: &TileShape, weights: &[u8], scales: &[u8], tile: &mut [u8]) {
    match format {
        Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8B128(_) => {}
        Format::Int8Row => pack_rows::<Int8>(format, shape, weights, scales, tile),
        Format::Int4Row => pack_rows::<Int4<false>>(format, shape, weights, scales, tile),
        Format::Int2Row => pack_rows::<Int2>(format, shape, weights, scales, tile),
        Format::Int4Grouped(_) => pack_rows::<Int4<true>>(format, shape, weights, scales, tile),
        Format::Int3G64 => pack_rows::<Int3>(format, shape, weights, scales, tile),
        Format::Mxfp4 => pack_rows::<Mxfp4>(format, shape, weights, scales, tile),
        Format::E8Iq3 => {
            let blocks = shape.cols.div_ceil(E8_BLOCK);
            for (at, block) in weights.chunks_exact(E8_BLOCK_BYTES).enumerate() {
                let group = &mut tile[at % blocks * shape.group_bytes(shape.group)..];
                e8::pack_block(block, at / blocks, &mut group[..shape.group_bytes(shape.group)]);
            }
        }
    }
}

fn pack_rows<P: Packing>(
    format: Format,
    shape: &TileShape,
    weights: &[u8],
    scales: &[u8],
    tile: &mut [u8],
) {
    let row_bytes = format.row_bytes(shape.cols).unwrap_or(0);
    let scale_size = format.scale_type().size();
    let scales_per_row = format.scale_count(1, shape.cols).unwrap_or(0);
    for (lane, row) in weights.chunks_exact(row_bytes).enumerate() {
        let scales = &scales[lane * scales_per_row * scale_size..][..scales_per_row * scale_size];
        let mut rest = &mut *tile;
        if P::SCALING == Scaling::Row {
            rest[lane * 4..][..4].copy_from_slice(scales);
            rest = &mut rest[shape.header_bytes..];
        }
        for (index, start) in (0..shape.cols).step_by(shape.group).enumerate() {
            let inputs = shape.group.min(shape.cols - start);
            let (group, after) = rest.split_at_mut(shape.group_bytes(inputs));
            rest = after;
            if P::SCALING != Scaling::Row {
                let scale = &scales[index * scale_size..][..scale_size];
                group[lane * scale_size..][..scale_size].copy_from_slice(scale);
            }
            let chunks = group[shape.group_header_bytes..].chunks_exact_mut(P::CHUNK_BYTES);
            for (at, chunk) in chunks.enumerate() {
                P::pack(row, start + at * P::CHUNK_INPUTS, lane, chunk);
            }
        }
    }
}

/// Restores the canonical bytes of row `lane` of a tile into zeroed `row` and `scales`.
pub fn unpack_row(
    format: Format,
    shape: &TileShape,
    tile: &[u8],
    lane: usize,
    row: &mut [u8],
    scales: &mut [u8],
) {
    match format {
        Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8B128(_) => {}
        Format::Int8Row => unpack_codes::<Int8>(format, shape, tile, lane, row, scales),
        Format::Int4Row => unpack_codes::<Int4<false>>(format, shape, tile, lane, row, scales),
        Format::Int2Row => unpack_codes::<Int2>(format, shape, tile, lane, row, scales),
        Format::Int4Grouped(_) => {
            unpack_codes::<Int4<true>>(format, shape, tile, lane, row, scales);
        }
        Format::Int3G64 => unpack_codes::<Int3>(format, shape, tile, lane, row, scales),
        Format::Mxfp4 => unpack_codes::<Mxfp4>(format, shape, tile, lane, row, scales),
        Format::E8Iq3 => {
            let groups = tile.chunks_exact(shape.group_bytes(shape.group));
            for (block, group) in row.chunks_exact_mut(E8_BLOCK_BYTES).zip(groups) {
                e8::unpack_block(group, lane, block);
            }
        }
    }
}

fn unpack_codes<P: Packing>(
    format: Format,
    shape: &TileShape,
    tile: &[u8],
    lane: usize,
    row: &mut [u8],
    scales: &mut [u8],
) {
    let scale_size = format.scale_type().size();
    if P::SCALING == Scaling::Row {
        scales.copy_from_slice(&tile[lane * 4..][..4]);
    }
    let mut rest = &tile[shape.header_bytes..];
    for (index, start) in (0..shape.cols).step_by(shape.group).enumerate() {
        let inputs = shape.group.min(shape.cols - start);
        let (group, after) = rest.split_at(shape.group_bytes(inputs));
        rest = after;
        if P::SCALING != Scaling::Row {
            let scale = &group[lane * scale_size..][..scale_size];
            scales[index * scale_size..][..scale_size].copy_from_slice(scale);
        }
        for input in 0..inputs {
            let chunk = &group[shape.group_header_bytes..]
                [input / P::CHUNK_INPUTS * P::CHUNK_BYTES..][..P::CHUNK_BYTES];
            P::store(row, start + input, P::get(chunk, lane, input % P::CHUNK_INPUTS));
        }
    }
}
