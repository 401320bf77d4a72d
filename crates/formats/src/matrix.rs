//! Matrices in memory: how the canonical bytes of a file are stored, and single rows of them.

use std::ops::Range;

use numerics::simd::Simd;
use numerics::{Isa, multiversion};

use crate::format::{E8_BLOCK, FP8_BLOCK, MXFP4_GROUP};
use crate::tile::{self, ROWS, TileShape};
use crate::{Buffer, Format, FormatError, Fp8Scale, e8, fp8, int2, int3, int4, int8, mxfp4, plain};

/// Arrangement of a matrix in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrangement {
    /// Canonical rows, then canonical scales: single rows can be decoded.
    Rows,
    /// Tiles of 16 rows in kernel order.
    Tiles,
}

/// Format, shape and arrangement of a matrix; says how its bytes lie, holds none.
#[derive(Clone, Copy, Debug)]
pub struct MatrixDesc {
    format: Format,
    rows: usize,
    cols: usize,
    tile: Option<(TileShape, usize)>,
    int8: bool,
}

/// Scales follow the weights of a row arrangement at a multiple of it.
const SCALE_ALIGN: usize = 8;

impl MatrixDesc {
    /// A matrix of `[rows, cols]` to multiply with: tiles where the format has them. `int8` says
    /// whether int8 activations may meet it; formats that never take them ignore it.
    pub fn for_matmul(
        format: Format,
        rows: usize,
        cols: usize,
        int8: bool,
    ) -> Result<MatrixDesc, FormatError> {
        let too_large = FormatError::TooLarge { format, rows, cols };
        let tile = match TileShape::new(format, cols) {
            None => None,
            Some(shape) => Some((shape, shape.tile_bytes().ok_or(too_large.clone())?)),
        };
        let int8 = int8 && format.takes_int8_activations();
        let desc = MatrixDesc { format, rows, cols, tile, int8 };
        desc.checked_bytes().ok_or(too_large)?;
        Ok(desc)
    }

    /// A matrix whose single rows are decoded, such as an embedding.
    pub fn for_rows(format: Format, rows: usize, cols: usize) -> Result<MatrixDesc, FormatError> {
        let desc = MatrixDesc { format, rows, cols, tile: None, int8: false };
        desc.checked_bytes().ok_or(FormatError::TooLarge { format, rows, cols })?;
        Ok(desc)
    }

    /// The weight format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Output rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Whether int8 activations may meet this matrix.
    pub fn takes_int8(&self) -> bool {
        self.int8
    }

    /// The arrangement of the stored bytes.
    pub fn arrangement(&self) -> Arrangement {
        if self.tile.is_some() { Arrangement::Tiles } else { Arrangement::Rows }
    }

    /// Shape and bytes of a tile.
    pub(crate) fn tile(&self) -> Option<(TileShape, usize)> {
        self.tile
    }

    fn checked_bytes(&self) -> Option<usize> {
        match self.tile {
            Some((_, tile_bytes)) => self.rows.div_ceil(ROWS).checked_mul(tile_bytes),
            None => {
                let weights = self.format.weight_bytes(self.rows, self.cols)?;
                let scales = self.format.scale_bytes(self.rows, self.cols)?;
                weights.checked_next_multiple_of(SCALE_ALIGN)?.checked_add(scales)
            }
        }
    }

    /// Bytes of the stored matrix.
    pub fn bytes(&self) -> usize {
        self.checked_bytes().unwrap_or(usize::MAX)
    }

    /// Rows that must be stored together: a tile or an fp8 block. Row blocks given to
    /// [`MatrixDesc::store`] start at its multiples.
    pub fn row_granule(&self) -> usize {
        match self.format {
            Format::Fp8B128(_) => FP8_BLOCK,
            Format::F32 | Format::Bf16 | Format::F16 => 1,
            Format::Int8Row
            | Format::Int4Row
            | Format::Int2Row
            | Format::Int4Grouped(_)
            | Format::Int3G64
            | Format::E8Iq3
            | Format::Mxfp4 => ROWS,
        }
    }

    /// Bytes of the scale tensor that belong to the rows of `rows`, whose start is a multiple of
    /// [`MatrixDesc::row_granule`].
    pub fn scale_range(&self, rows: Range<usize>) -> Range<usize> {
        match self.format {
            Format::E8Iq3 | Format::F32 | Format::Bf16 | Format::F16 => 0..0,
            Format::Fp8B128(_) => {
                let row = self.cols.div_ceil(FP8_BLOCK) * self.format.scale_type().size();
                rows.start / FP8_BLOCK * row..rows.end.div_ceil(FP8_BLOCK) * row
            }
            Format::Int8Row
            | Format::Int4Row
            | Format::Int2Row
            | Format::Int4Grouped(_)
            | Format::Int3G64
            | Format::Mxfp4 => {
                let row = self.format.scale_bytes(1, self.cols).unwrap_or(0);
                rows.start * row..rows.end * row
            }
        }
    }

    /// Checks canonical bytes of some rows and stores them in `out`, the matrix's zeroed bytes.
    /// `scales` is the part of the scale tensor that [`MatrixDesc::scale_range`] names.
    pub fn store(
        &self,
        rows: Range<usize>,
        weights: &[u8],
        scales: &[u8],
        out: &mut [u8],
    ) -> Result<(), FormatError> {
        assert!(rows.start.is_multiple_of(self.row_granule()) && rows.end <= self.rows);
        let (format, cols) = (self.format, self.cols);
        let row_bytes = format.row_bytes(cols).unwrap_or(usize::MAX);
        let length = |what, want: usize, got: usize| {
            let error = FormatError::Length { format, rows: rows.len(), cols, what, want, got };
            if want == got { Ok(()) } else { Err(error) }
        };
        length("weights", rows.len() * row_bytes, weights.len())?;
        length("scales", self.scale_range(rows.clone()).len(), scales.len())?;
        check_values(format, cols, weights, scales)?;
        match self.tile() {
            Some((shape, tile_bytes)) => {
                let scale_row = format.scale_bytes(1, cols).unwrap_or(0);
                let scale_row = if scales.is_empty() { 0 } else { scale_row };
                let tiles = out[rows.start / ROWS * tile_bytes..].chunks_exact_mut(tile_bytes);
                let weights = weights.chunks(ROWS * row_bytes);
                for (at, (tile, weights)) in tiles.zip(weights).enumerate() {
                    let first = at * ROWS;
                    let last = (first + ROWS).min(rows.len());
                    let scales = &scales[first * scale_row..last * scale_row];
                    tile::pack(format, &shape, weights, scales, tile);
                }
            }
            None => {
                out[rows.start * row_bytes..][..weights.len()].copy_from_slice(weights);
                let at = self.scales_at() + self.scale_range(rows).start;
                out[at..][..scales.len()].copy_from_slice(scales);
            }
        }
        Ok(())
    }

    /// Checks bytes that lie in this arrangement already, as [`MatrixDesc::store`] checks canonical
    /// ones.
    pub fn check(&self, data: &[u8]) -> Result<(), FormatError> {
        let (format, rows, cols) = (self.format, self.rows, self.cols);
        let (want, got) = (self.bytes(), data.len());
        if want != got {
            return Err(FormatError::Length { format, rows, cols, what: "tiles", want, got });
        }
        let Some((shape, tile_bytes)) = self.tile() else {
            let weights = format.weight_bytes(rows, cols).unwrap_or(0);
            return check_values(format, cols, &data[..weights], &data[self.scales_at()..]);
        };
        for (at, tile) in data.chunks_exact(tile_bytes).enumerate() {
            if has_plain_scales(format, &shape, tile) {
                continue;
            }
            // Something unusual: the rules for canonical rows decide, and name the scale.
            let tile_rows = at * ROWS..((at + 1) * ROWS).min(rows);
            let (mut weights, mut scales) = (Vec::new(), Vec::new());
            let matrix = MatrixRef { desc: *self, data };
            matrix.append_canonical(tile_rows.clone(), &mut weights, &mut scales);
            check_values(format, cols, &weights, &scales).map_err(|error| match error {
                FormatError::Scale { format, index } => {
                    // e8 counts its blocks: the scale tensor holds the tag only.
                    let per_row = match format {
                        Format::E8Iq3 => cols.div_ceil(E8_BLOCK),
                        other => other.scale_count(1, cols).unwrap_or(0),
                    };
                    FormatError::Scale { format, index: index + tile_rows.start * per_row }
                }
                other => other,
            })?;
        }
        Ok(())
    }

    /// Where the scales of a row arrangement begin.
    pub fn scales_at(&self) -> usize {
        let weights = self.format.weight_bytes(self.rows, self.cols).unwrap_or(0);
        weights.next_multiple_of(SCALE_ALIGN)
    }
}

/// Index of the first plain number that is infinite or NaN: its exponent bits are all ones.
fn first_non_finite_weight(format: Format, weights: &[u8]) -> Option<usize> {
    let halves = |exponent: u16| {
        let bad = |two: &[u8; 2]| u16::from_le_bytes(*two) & exponent == exponent;
        let numbers = weights.as_chunks::<2>().0;
        // Counted first, because that vectorises and nothing is found as a rule.
        let any = numbers.iter().fold(false, |any, two| any | bad(two));
        if any { numbers.iter().position(bad) } else { None }
    };
    match format {
        Format::Bf16 => halves(0x7f80),
        Format::F16 => halves(0x7c00),
        Format::F32 => {
            let bad = |four: &[u8; 4]| u32::from_le_bytes(*four) & 0x7f80_0000 == 0x7f80_0000;
            let numbers = weights.as_chunks::<4>().0;
            let any = numbers.iter().fold(false, |any, four| any | bad(four));
            if any { numbers.iter().position(bad) } else { None }
        }
        Format::Int8Row
        | Format::Int4Row
        | Format::Int2Row
        | Format::Int4Grouped(_)
        | Format::Int3G64
        | Format::E8Iq3
        | Format::Mxfp4
        | Format::Fp8B128(_) => None,
    }
}

/// Largest magnitude of a code that an f32 scale multiplies.
fn largest_code(format: Format) -> f32 {
    match format {
        Format::Int8Row => 128.0,
        Format::Int4Row | Format::Int4Grouped(_) => 8.0,
        Format::Int3G64 => 4.0,
        Format::Int2Row => 2.0,
        Format::Fp8B128(_) => fp8::MAX,
        Format::F32 | Format::Bf16 | Format::F16 | Format::E8Iq3 | Format::Mxfp4 => 1.0,
    }
}

/// Least UE8M0 byte with which the largest e2m1 magnitude overflows: 6·2^126 is infinite.
const MXFP4_OVERFLOW: u8 = 253;

/// Index of the first mxfp4 scale that makes one of its weights infinite.
fn overflowing_mxfp4(weights: &[u8], scales: &[u8], cols: usize) -> Option<usize> {
    let (row_bytes, groups) = (cols.div_ceil(2), cols.div_ceil(MXFP4_GROUP));
    let overflows = |(index, byte): (usize, u8)| {
        let first = index % groups * MXFP4_GROUP;
        let row = &weights[index / groups * row_bytes..][..row_bytes];
        byte >= MXFP4_OVERFLOW
            && (first..cols.min(first + MXFP4_GROUP)).any(|input| {
                let value = mxfp4::e2m1(int4::nibble(row, input)) * mxfp4::ue8m0(byte);
                !value.is_finite()
            })
    };
    scales.iter().copied().enumerate().find(|&at| overflows(at)).map(|(index, _)| index)
}

/// Refuses scales that are not numbers or make infinite weights, and fp8 NaN codes.
fn check_values(
    format: Format,
    cols: usize,
    weights: &[u8],
    scales: &[u8],
) -> Result<(), FormatError> {
    let bad_f32 = |scales: &[u8]| {
        let values = scales.as_chunks::<4>().0;
        values.iter().position(|four| {
            // The largest code times the scale must be a number too.
            !(f32::from_le_bytes(*four) * largest_code(format)).is_finite()
        })
    };
    let bad_scale = match format {
        Format::F32 | Format::Bf16 | Format::F16 => None,
        Format::E8Iq3 => e8::first_bad_scale(weights),
        Format::Mxfp4 | Format::Fp8B128(Fp8Scale::Ue8m0) => scales.iter().position(|&b| b == 255),
        Format::Int8Row
        | Format::Int4Row
        | Format::Int2Row
        | Format::Int4Grouped(_)
        | Format::Int3G64
        | Format::Fp8B128(Fp8Scale::F32) => bad_f32(scales),
    };
    let bad_scale = bad_scale.or_else(|| match format {
        Format::Mxfp4 => overflowing_mxfp4(weights, scales, cols),
        _ => None,
    });
    if let Some(index) = bad_scale {
        return Err(FormatError::Scale { format, index });
    }
    if let Some(index) = first_non_finite_weight(format, weights) {
        return Err(FormatError::NonFiniteWeight { format, index });
    }
    if matches!(format, Format::Fp8B128(_))
        && let Some(index) = weights.iter().position(|&byte| fp8::is_nan(byte))
    {
        return Err(FormatError::NanCode { format, index });
    }
    Ok(())
}

/// Whether the scales of a tile are all numbers that need no second look.
fn has_plain_scales(format: Format, shape: &TileShape, tile: &[u8]) -> bool {
    match format {
        Format::Int8Row
        | Format::Int4Row
        | Format::Int2Row
        | Format::Int4Grouped(_)
        | Format::Int3G64 => {
            // The largest magnitude as bits, which vectorises. Codes reach powers of two, so the
            // limit is exact.
            let limit = (f32::MAX / largest_code(format)).to_bits();
            let mut largest = [0; ROWS];
            for scales in tile::scales(shape, tile) {
                for (largest, four) in largest.iter_mut().zip(scales.as_chunks::<4>().0) {
                    *largest = (*largest).max(u32::from_le_bytes(*four) & i32::MAX as u32);
                }
            }
            largest.iter().all(|bits| *bits <= limit)
        }
        Format::E8Iq3 => tile::scales(shape, tile).all(|scales| {
            let finite = |two: &[u8; 2]| u16::from_le_bytes(*two) & 0x7c00 != 0x7c00;
            scales.as_chunks::<2>().0.iter().all(finite)
        }),
        Format::Mxfp4 => {
            tile::scales(shape, tile).all(|scales| scales.iter().all(|byte| *byte < MXFP4_OVERFLOW))
        }
        // Kept row by row.
        Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8B128(_) => false,
    }
}

/// A matrix and its bytes.
#[derive(Clone, Copy)]
pub struct MatrixRef<'a> {
    /// What the bytes are.
    pub desc: MatrixDesc,
    /// Exactly [`MatrixDesc::bytes`] bytes.
    pub data: &'a [u8],
}

impl<'a> MatrixRef<'a> {
    /// Scale bytes of a row arrangement.
    pub(crate) fn scales(&self) -> &'a [u8] {
        &self.data[self.desc.scales_at()..]
    }

    /// Appends the canonical bytes of some rows and of their scales; the rows start at a multiple
    /// of [`MatrixDesc::row_granule`].
    pub fn append_canonical(
        &self,
        rows: Range<usize>,
        weights: &mut Vec<u8>,
        scales: &mut Vec<u8>,
    ) {
        let desc = &self.desc;
        let row_bytes = desc.format.row_bytes(desc.cols).unwrap_or(0);
        let Some((shape, tile_bytes)) = desc.tile() else {
            weights.extend_from_slice(&self.data[rows.start * row_bytes..rows.end * row_bytes]);
            scales.extend_from_slice(&self.scales()[desc.scale_range(rows)]);
            return;
        };
        let scale_bytes = desc.scale_range(0..1).len();
        for row in rows {
            let (weights_at, scales_at) = (weights.len(), scales.len());
            weights.resize(weights_at + row_bytes, 0);
            scales.resize(scales_at + scale_bytes, 0);
            let tile = &self.data[row / ROWS * tile_bytes..][..tile_bytes];
            let (weights, scales) = (&mut weights[weights_at..], &mut scales[scales_at..]);
            tile::unpack_row(desc.format, &shape, tile, row % ROWS, weights, scales);
        }
    }

    /// Decodes row `row` to f32, as stored: e8 rows stay rotated.
    pub fn decode_row(&self, isa: Isa, row: usize, out: &mut [f32]) {
        let desc = &self.desc;
        assert!(row < desc.rows && out.len() == desc.cols);
        let row_bytes = desc.format.row_bytes(desc.cols).unwrap_or(0);
        match desc.tile() {
            None => {
                let weights = &self.data[row * row_bytes..][..row_bytes];
                let granule = if matches!(desc.format, Format::Fp8B128(_)) { FP8_BLOCK } else { 1 };
                let start = row / granule * granule;
                let scales = &self.scales()[desc.scale_range(start..start + 1)];
                decode_row_at(isa, desc.format, weights, scales, out);
            }
            Some((shape, tile_bytes)) => {
                let mut weights = vec![0; row_bytes];
                let mut scales = vec![0; desc.scale_range(0..1).len()];
                let tile = &self.data[row / ROWS * tile_bytes..][..tile_bytes];
                let (format, lane) = (desc.format, row % ROWS);
                tile::unpack_row(format, &shape, tile, lane, &mut weights, &mut scales);
                decode_row_at(isa, desc.format, &weights, &scales, out);
            }
        }
    }
}

#[inline(always)]
fn decode_row_kernel<S: Simd>(
    _simd: S,
    format: Format,
    weights: &[u8],
    scales: &[u8],
    out: &mut [f32],
) {
    decode_row(format, weights, scales, out);
}

multiversion! {
    /// [`decode_row`] compiled for a level; the same bits at each.
    fn decode_row_at(isa, format: Format, weights: &[u8], scales: &[u8], out: &mut [f32])
        => decode_row_kernel;
}

#[inline(always)]
fn f32_at(bytes: &[u8], index: usize) -> f32 {
    bytes.as_chunks::<4>().0.get(index).map_or(0.0, |four| f32::from_le_bytes(*four))
}

/// Decodes one canonical row. `scales` are the scales of the row (for fp8 of its block row);
/// lengths must fit the format. Stored e8 rows are rotated and stay so.
#[inline(always)]
pub fn decode_row(format: Format, weights: &[u8], scales: &[u8], out: &mut [f32]) {
    let halves = || weights.as_chunks::<2>().0.iter().map(|two| u16::from_le_bytes(*two));
    match format {
        Format::F32 => {
            for (i, out) in out.iter_mut().enumerate() {
                *out = f32_at(weights, i);
            }
        }
        Format::Bf16 => {
            for (out, half) in out.iter_mut().zip(halves()) {
                *out = plain::from_bf16(half);
            }
        }
        Format::F16 => {
            for (out, half) in out.iter_mut().zip(halves()) {
                *out = plain::from_f16(half);
            }
        }
        Format::Int8Row => int8::decode_row(weights, f32_at(scales, 0), out),
        Format::Int4Row => int4::decode_group(weights, 0, f32_at(scales, 0), out),
        Format::Int2Row => int2::decode_row(weights, f32_at(scales, 0), out),
        Format::Int4Grouped(group) => {
            let group = usize::from(group);
            for (index, out) in out.chunks_mut(group).enumerate() {
                int4::decode_group(weights, index * group, f32_at(scales, index), out);
            }
        }
        Format::Int3G64 => {
            let group = crate::format::INT3_GROUP;
            for (index, out) in out.chunks_mut(group).enumerate() {
                int3::decode_group(weights, index * group, f32_at(scales, index), out);
            }
        }
        Format::E8Iq3 => e8::decode_row(weights, out),
        Format::Mxfp4 => {
            let group = MXFP4_GROUP;
            for (index, out) in out.chunks_mut(group).enumerate() {
                mxfp4::decode_group(weights, index * group, mxfp4::ue8m0(scales[index]), out);
            }
        }
        Format::Fp8B128(kind) => {
            let parts = weights.chunks(FP8_BLOCK).zip(out.chunks_mut(FP8_BLOCK));
            for (index, (weights, out)) in parts.enumerate() {
                fp8::decode(weights, fp8_scale(kind, scales, index), out);
            }
        }
    }
}

/// Scale `index` of a row of fp8 block scales.
pub(crate) fn fp8_scale(kind: Fp8Scale, scales: &[u8], index: usize) -> f32 {
    match kind {
        Fp8Scale::F32 => f32_at(scales, index),
        Fp8Scale::Ue8m0 => mxfp4::ue8m0(scales[index]),
    }
}

/// A matrix that owns its bytes.
#[derive(Clone, Debug)]
pub struct QTensor {
    desc: MatrixDesc,
    data: Buffer,
}

impl QTensor {
    /// A matrix of zero bytes, to be filled row block by row block.
    pub fn zeroed(desc: MatrixDesc) -> QTensor {
        QTensor { desc, data: Buffer::zeroed(desc.bytes()) }
    }

    /// A matrix from its canonical bytes.
    pub fn from_canonical(
        desc: MatrixDesc,
        weights: &[u8],
        scales: &[u8],
    ) -> Result<QTensor, FormatError> {
        let mut tensor = QTensor::zeroed(desc);
        // The e8 tag is a scale tensor by count, but belongs to no row.
        let scales = if desc.format == Format::E8Iq3 { &[] } else { scales };
        tensor.store(0..desc.rows, weights, scales)?;
        Ok(tensor)
    }

    /// Stores some rows; see [`MatrixDesc::store`].
    pub fn store(
        &mut self,
        rows: Range<usize>,
        weights: &[u8],
        scales: &[u8],
    ) -> Result<(), FormatError> {
        self.desc.store(rows, weights, scales, &mut self.data)
    }

    /// What the matrix is.
    pub fn desc(&self) -> &MatrixDesc {
        &self.desc
    }

    /// The matrix for kernels.
    pub fn view(&self) -> MatrixRef<'_> {
        MatrixRef { desc: self.desc, data: &self.data }
    }

    /// Bytes of memory held.
    pub fn memory_bytes(&self) -> usize {
        self.data.capacity_bytes()
    }
}
