//! What a weight format is, in numbers: its name, how many bytes a matrix takes and how its
//! scales are stored. No bytes are read here; the modules beside this one do that.

use std::fmt;

/// Inputs per group that grouped int4 may use, in ascending order.
pub const INT4_GROUPS: [usize; 8] = [16, 32, 48, 64, 96, 128, 192, 256];
/// Inputs per e8 block; the input dimension is padded to a multiple of it.
pub const E8_BLOCK: usize = 256;
/// Bytes of one e8 block.
pub const E8_BLOCK_BYTES: usize = 98;
/// Inputs per int3 group.
pub const INT3_GROUP: usize = 64;
/// Bytes of one int3 group: 16 of low bits, 8 of high bits.
pub const INT3_GROUP_BYTES: usize = 24;
/// Inputs per mxfp4 scale.
pub const MXFP4_GROUP: usize = 32;
/// Rows and columns of one fp8 scale block.
pub const FP8_BLOCK: usize = 128;

/// A weight format of `docs/formats.md`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Format {
    /// Plain f32.
    F32,
    /// Plain bfloat16.
    Bf16,
    /// Plain IEEE half.
    F16,
    /// Signed bytes, one f32 scale per row.
    Int8Row,
    /// Nibbles, one f32 scale per row.
    Int4Row,
    /// Two-bit codes, one f32 scale per row.
    Int2Row,
    /// Nibbles, one f32 scale per row and group of this many inputs (one of [`INT4_GROUPS`]).
    Int4Grouped(u16),
    /// Three-bit codes in groups of 64 inputs, one f32 scale each.
    Int3G64,
    /// E8 lattice codes in blocks of 256 rotated inputs; scales are inside the block.
    E8Iq3,
    /// e2m1 nibbles, one power-of-two scale per 32 inputs.
    Mxfp4,
    /// e4m3 bytes, one scale per 128 x 128 block.
    Fp8B128(Fp8Scale),
}

/// How the block scales of [`Format::Fp8B128`] are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fp8Scale {
    /// IEEE f32.
    F32,
    /// A power of two: 2^(byte - 127), 255 invalid.
    Ue8m0,
}

/// Element type of a scale tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScaleType {
    /// The format keeps no separate scales.
    None,
    /// Little-endian f32.
    F32,
    /// UE8M0 bytes.
    Ue8m0,
}

impl ScaleType {
    /// Bytes of one scale.
    pub const fn size(self) -> usize {
        match self {
            ScaleType::None => 0,
            ScaleType::F32 => 4,
            ScaleType::Ue8m0 => 1,
        }
    }
}

impl Format {
    /// Whether values are stored as plain floating-point numbers without scales.
    pub const fn is_plain(self) -> bool {
        matches!(self, Format::F32 | Format::Bf16 | Format::F16)
    }

    /// Whether int8 activations apply (rule 3 of the numerics contract); the others always
    /// multiply in f32.
    pub const fn takes_int8_activations(self) -> bool {
        match self {
            Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8B128(_) => false,
            Format::Int8Row
            | Format::Int4Row
            | Format::Int2Row
            | Format::Int4Grouped(_)
            | Format::Int3G64
            | Format::E8Iq3
            | Format::Mxfp4 => true,
        }
    }

    /// Whether inputs must be rotated before they meet the stored weights.
    pub const fn is_rotated(self) -> bool {
        matches!(self, Format::E8Iq3)
    }

    /// Bytes of one row of `cols` inputs; `None` on overflow.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        match self {
            Format::F32 => cols.checked_mul(4),
            Format::Bf16 | Format::F16 => cols.checked_mul(2),
            Format::Int8Row | Format::Fp8B128(_) => Some(cols),
            Format::Int4Row | Format::Int4Grouped(_) | Format::Mxfp4 => Some(cols.div_ceil(2)),
            Format::Int2Row => Some(cols.div_ceil(4)),
            Format::Int3G64 => cols.div_ceil(INT3_GROUP).checked_mul(INT3_GROUP_BYTES),
            Format::E8Iq3 => cols.div_ceil(E8_BLOCK).checked_mul(E8_BLOCK_BYTES),
        }
    }

    /// Bytes of the weights of a `[rows, cols]` matrix; `None` on overflow.
    pub fn weight_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        self.row_bytes(cols)?.checked_mul(rows)
    }

    /// Element type of the scale tensor.
    pub const fn scale_type(self) -> ScaleType {
        match self {
            Format::F32 | Format::Bf16 | Format::F16 => ScaleType::None,
            Format::Int8Row
            | Format::Int4Row
            | Format::Int2Row
            | Format::Int4Grouped(_)
            | Format::Int3G64
            | Format::E8Iq3
            | Format::Fp8B128(Fp8Scale::F32) => ScaleType::F32,
            Format::Mxfp4 | Format::Fp8B128(Fp8Scale::Ue8m0) => ScaleType::Ue8m0,
        }
    }

    /// Number of scales of a `[rows, cols]` matrix (the e8 tag counts as one); `None` on overflow.
    pub fn scale_count(self, rows: usize, cols: usize) -> Option<usize> {
        match self {
            Format::F32 | Format::Bf16 | Format::F16 => Some(0),
            Format::Int8Row | Format::Int4Row | Format::Int2Row => Some(rows),
            Format::Int4Grouped(group) => cols.div_ceil(usize::from(group)).checked_mul(rows),
            Format::Int3G64 => cols.div_ceil(INT3_GROUP).checked_mul(rows),
            Format::E8Iq3 => Some(1),
            Format::Mxfp4 => cols.div_ceil(MXFP4_GROUP).checked_mul(rows),
            Format::Fp8B128(_) => cols.div_ceil(FP8_BLOCK).checked_mul(rows.div_ceil(FP8_BLOCK)),
        }
    }

    /// Bytes of the scale tensor of a `[rows, cols]` matrix; `None` on overflow.
    pub fn scale_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        self.scale_count(rows, cols)?.checked_mul(self.scale_type().size())
    }

    /// Inputs that share one scale along a row, when a row has several scales.
    pub const fn group(self) -> Option<usize> {
        match self {
            Format::F32
            | Format::Bf16
            | Format::F16
            | Format::Int8Row
            | Format::Int4Row
            | Format::Int2Row => None,
            Format::Int4Grouped(group) => Some(group as usize),
            Format::Int3G64 => Some(INT3_GROUP),
            Format::E8Iq3 => Some(32),
            Format::Mxfp4 => Some(MXFP4_GROUP),
            Format::Fp8B128(_) => Some(FP8_BLOCK),
        }
    }

    /// Parses a stamp name. `int4-grouped` carries no group and is not accepted here; the
    /// container resolves it by counts. A `+layout` suffix must be cut off before.
    pub fn from_name(name: &str) -> Option<Format> {
        Some(match name {
            "f32" => Format::F32,
            "bf16" => Format::Bf16,
            "f16" => Format::F16,
            "int8-row" | "int8" => Format::Int8Row,
            "int4-row" | "int4" => Format::Int4Row,
            "int2-row" | "int2" => Format::Int2Row,
            "int3-g64" | "int3" => Format::Int3G64,
            "e8-iq3" | "e8-iq3-lattice" | "e8" => Format::E8Iq3,
            "mxfp4" => Format::Mxfp4,
            "fp8-e4m3-b128" | "fp8" => Format::Fp8B128(Fp8Scale::F32),
            "fp8-e4m3-b128-ue8m0" => Format::Fp8B128(Fp8Scale::Ue8m0),
            other => {
                let group: u16 = other.strip_prefix("int4-g")?.parse().ok()?;
                if !INT4_GROUPS.contains(&usize::from(group)) {
                    return None;
                }
                Format::Int4Grouped(group)
            }
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::F32 => f.write_str("f32"),
            Format::Bf16 => f.write_str("bf16"),
            Format::F16 => f.write_str("f16"),
            Format::Int8Row => f.write_str("int8-row"),
            Format::Int4Row => f.write_str("int4-row"),
            Format::Int2Row => f.write_str("int2-row"),
            Format::Int4Grouped(group) => write!(f, "int4-g{group}"),
            Format::Int3G64 => f.write_str("int3-g64"),
            Format::E8Iq3 => f.write_str("e8-iq3"),
            Format::Mxfp4 => f.write_str("mxfp4"),
            // The stamp names the format; the dtype of the scale tensor says how scales are kept.
            Format::Fp8B128(_) => f.write_str("fp8-e4m3-b128"),
        }
    }
}
