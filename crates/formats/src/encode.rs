//! Encoding f32 rows into canonical bytes of any format.

use numerics::Isa;
use numerics::hadamard::Rotation;

use crate::format::{FP8_BLOCK, INT3_GROUP, MXFP4_GROUP};
use crate::{Format, FormatError, Fp8Scale, e8, fp8, int2, int3, int4, int8, mxfp4, plain};

/// Encodes rows of a matrix with `cols` inputs, block by block in bounded memory.
pub struct Encoder {
    format: Format,
    cols: usize,
    rotation: Option<Rotation>,
}

impl Encoder {
    /// An encoder for rows of `cols` inputs.
    pub fn new(format: Format, cols: usize) -> Encoder {
        let rotation = format.is_rotated().then(|| Rotation::new(cols));
        Encoder { format, cols, rotation }
    }

    /// Rows per call must be a multiple of this, but for the last call.
    pub fn row_granule(&self) -> usize {
        if matches!(self.format, Format::Fp8B128(_)) { FP8_BLOCK } else { 1 }
    }

    /// Encodes whole rows, appending canonical weights and scales. The e8 tag is appended by
    /// [`Encoder::finish`].
    pub fn encode(
        &self,
        isa: Isa,
        values: &[f32],
        weights: &mut Vec<u8>,
        scales: &mut Vec<u8>,
    ) -> Result<(), FormatError> {
        let (format, cols) = (self.format, self.cols);
        if let Some(at) = values.iter().position(|v| !v.is_finite()) {
            return Err(FormatError::NonFinite { format, row: at / cols, col: at % cols });
        }
        if let Format::Fp8B128(kind) = format {
            for block in values.chunks(cols * FP8_BLOCK) {
                encode_fp8(kind, cols, block, weights, scales);
            }
            return Ok(());
        }
        // Rounding to a narrower float must not make a number infinite.
        let limit = match format {
            Format::F16 => plain::F16_LIMIT,
            Format::Bf16 => plain::BF16_LIMIT,
            _ => f32::INFINITY,
        };
        if let Some(at) = values.iter().position(|v| v.abs() >= limit) {
            let (row, col) = (at / cols, at % cols);
            return Err(FormatError::Range { format, row, col, value: values[at] });
        }
        let row_bytes = format.row_bytes(cols).unwrap_or(0);
        let mut rotated = Vec::new();
        for row in values.chunks_exact(cols) {
            let start = weights.len();
            weights.resize(start + row_bytes, 0);
            let bytes = &mut weights[start..];
            let row = match &self.rotation {
                None => row,
                Some(rotation) => {
                    rotated.clear();
                    rotated.extend_from_slice(row);
                    rotation.apply(isa, &mut rotated);
                    &rotated
                }
            };
            encode_row(format, row, bytes, scales);
        }
        Ok(())
    }

    /// Appends what follows the last row.
    pub fn finish(&self, scales: &mut Vec<u8>) {
        if self.format == Format::E8Iq3 {
            scales.extend_from_slice(&e8::TAG.to_le_bytes());
        }
    }
}

fn encode_row(format: Format, row: &[f32], bytes: &mut [u8], scales: &mut Vec<u8>) {
    let mut put = |scale: f32| scales.extend_from_slice(&scale.to_le_bytes());
    match format {
        Format::F32 => {
            for (to, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(row) {
                *to = value.to_le_bytes();
            }
        }
        Format::Bf16 => {
            for (to, value) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(row) {
                *to = plain::to_bf16(*value).to_le_bytes();
            }
        }
        Format::F16 => {
            for (to, value) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(row) {
                *to = plain::to_f16(*value).to_le_bytes();
            }
        }
        Format::Int8Row => put(int8::encode_row(row, bytes)),
        Format::Int4Row => put(int4::encode_group(row, bytes, 0)),
        Format::Int2Row => put(int2::encode_row(row, bytes)),
        Format::Int4Grouped(group) => {
            for (index, values) in row.chunks(usize::from(group)).enumerate() {
                put(int4::encode_group(values, bytes, index * usize::from(group)));
            }
        }
        Format::Int3G64 => {
            for (index, values) in row.chunks(INT3_GROUP).enumerate() {
                put(int3::encode_group(values, bytes, index * INT3_GROUP));
            }
        }
        Format::E8Iq3 => e8::encode_row(row, bytes),
        Format::Mxfp4 => {
            for (index, values) in row.chunks(MXFP4_GROUP).enumerate() {
                scales.push(mxfp4::encode_group(values, bytes, index * MXFP4_GROUP));
            }
        }
        // Its scales span 128 rows; `encode` takes them together.
        Format::Fp8B128(_) => {}
    }
}

/// Encodes up to 128 rows that share block scales.
fn encode_fp8(
    kind: Fp8Scale,
    cols: usize,
    block: &[f32],
    weights: &mut Vec<u8>,
    scales: &mut Vec<u8>,
) {
    let columns = cols.div_ceil(FP8_BLOCK);
    let mut absmax = vec![0.0f32; columns];
    for row in block.chunks_exact(cols) {
        for (max, part) in absmax.iter_mut().zip(row.chunks(FP8_BLOCK)) {
            *max = part.iter().fold(*max, |m, v| m.max(v.abs()));
        }
    }
    let mut decoded = Vec::with_capacity(columns);
    for max in absmax {
        match kind {
            Fp8Scale::F32 => {
                let scale = fp8::f32_scale(max);
                scales.extend_from_slice(&scale.to_le_bytes());
                decoded.push(scale);
            }
            Fp8Scale::Ue8m0 => {
                let byte = fp8::ue8m0_scale(max);
                scales.push(byte);
                decoded.push(mxfp4::ue8m0(byte));
            }
        }
    }
    for row in block.chunks_exact(cols) {
        for (part, scale) in row.chunks(FP8_BLOCK).zip(&decoded) {
            let start = weights.len();
            weights.resize(start + part.len(), 0);
            fp8::encode(part, *scale, &mut weights[start..]);
        }
    }
}
