//! In which format a matrix is stored: the one rule of the program.
//!
//! The rule works on facts alone (shape by the configuration, dtypes, byte counts, stamp) and is
//! used by the loader, by `doctor` and by the converter. Values are never looked at here.

use formats::format::{Format, Fp8Scale, INT4_GROUPS};
use formats::{Arrangement, MatrixDesc, ScaleType};

use crate::header::Dtype;
use crate::source::Layout;
use crate::stamp::{Stamp, StampFormat};

/// Dtype and bytes of one stored tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stored {
    /// Element type.
    pub dtype: Dtype,
    /// Bytes.
    pub len: u64,
}

/// Why a format is not clear, as the two facts that do not agree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Disagreement {
    /// What was wanted.
    pub expected: String,
    /// What there is.
    pub found: String,
    /// What to do.
    pub remedy: &'static str,
}

const ASK_PRODUCER: &str =
    "the container is damaged or of another model; fetch or convert it again";
/// Bytes by which a coded stream may exceed its tiles: its heads, when nothing could be saved.
const CODED_EXTRA_BYTES: u64 = 4096;
const STAMP_IT: &str =
    "state the format in the metadata key colibri.fmt (coli convert does) to make it clear";

/// Finds the format and layout of a `[rows, cols]` matrix.
///
/// `weights` is the tensor itself, `scales` its `.qs` sidecar (or the `weight_scale_inv` of an
/// original fp8 checkpoint). A stamp is verified against the bytes, never trusted alone. Without
/// one, in this order: e8 by its 4-byte tag (refused when int8 or fp8 also fit), then int8/fp8,
/// int4, int2, int3 by bytes; int4 with more than `rows` scales is grouped with the smallest
/// listed group up to `cols` that fits; int8-row when it and fp8 both fit; byte-sized scales
/// mean mxfp4 or fp8. A tensor of dtype F8_E4M3 is only ever fp8.
pub fn recognise(
    rows: usize,
    cols: usize,
    weights: Stored,
    scales: Option<Stored>,
    stamp: Option<&Stamp>,
) -> Result<(Format, Layout), Disagreement> {
    let facts = Facts { rows, cols, weights, scales };
    match stamp {
        Some(stamp) => facts.stamped(stamp),
        None => Ok((facts.unstamped()?, Layout::Canonical)),
    }
}

struct Facts {
    rows: usize,
    cols: usize,
    weights: Stored,
    scales: Option<Stored>,
}

fn plain_format(dtype: Dtype) -> Option<Format> {
    match dtype {
        Dtype::F32 => Some(Format::F32),
        Dtype::F16 => Some(Format::F16),
        Dtype::Bf16 => Some(Format::Bf16),
        _ => None,
    }
}

fn holds_codes(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::U8 | Dtype::I8 | Dtype::F8E4m3)
}

impl Facts {
    fn unstamped(&self) -> Result<Format, Disagreement> {
        if let Some(format) = plain_format(self.weights.dtype) {
            return self.verify(format, &format!("{format} (by its dtype)"));
        }
        let scales = self.sidecar()?;
        match scales.dtype {
            Dtype::F32 => self.by_f32_scales(),
            Dtype::U8 | Dtype::F8E8m0 => self.by_byte_scales(),
            _ => Err(self.disagree("scales of F32, U8 or F8_E8M0".into(), ASK_PRODUCER)),
        }
    }

    /// The scale sidecar that a tensor of codes must have.
    fn sidecar(&self) -> Result<Stored, Disagreement> {
        if !holds_codes(self.weights.dtype) {
            return Err(self.disagree(
                "F32, BF16 or F16, or codes in U8, I8 or F8_E4M3 with scales".into(),
                "convert the checkpoint with coli convert",
            ));
        }
        self.scales.ok_or_else(|| {
            self.disagree(
                "a scale tensor beside these codes (.qs, or _scale_inv of an fp8 checkpoint)"
                    .into(),
                "fetch the file that holds the scales; NVFP4 checkpoints must be converted first",
            )
        })
    }

    fn by_f32_scales(&self) -> Result<Format, Disagreement> {
        const FP8: Format = Format::Fp8B128(Fp8Scale::F32);
        if self.weights.dtype == Dtype::F8E4m3 {
            return self.verify(FP8, "fp8-e4m3-b128 (by its dtype)");
        }
        let int8 = self.fits(Format::Int8Row);
        let fp8 = self.fits(FP8);
        if self.fits(Format::E8Iq3) {
            if int8 || fp8 {
                let other = if int8 { "int8-row" } else { "fp8-e4m3-b128" };
                return Err(self.disagree(
                    format!("bytes that fit one format, but both e8-iq3 and {other} fit"),
                    STAMP_IT,
                ));
            }
            return Ok(Format::E8Iq3);
        }
        if int8 {
            return Ok(Format::Int8Row);
        }
        if fp8 {
            return Ok(FP8);
        }
        for format in [Format::Int4Row].into_iter().chain(self.grouped()) {
            if self.fits(format) {
                return Ok(format);
            }
        }
        for format in [Format::Int2Row, Format::Int3G64] {
            if self.fits(format) {
                return Ok(format);
            }
        }
        Err(self.nothing_fits())
    }

    fn by_byte_scales(&self) -> Result<Format, Disagreement> {
        const FP8: Format = Format::Fp8B128(Fp8Scale::Ue8m0);
        if self.weights.dtype == Dtype::F8E4m3 {
            return self.verify(FP8, "fp8-e4m3-b128 (by its dtype)");
        }
        [FP8, Format::Mxfp4]
            .into_iter()
            .find(|format| self.fits(*format))
            .ok_or_else(|| self.nothing_fits())
    }

    fn stamped(&self, stamp: &Stamp) -> Result<(Format, Layout), Disagreement> {
        let stated = format!("{} (stated by colibri.fmt)", stamp.text);
        let newer =
            "the container was written by a newer version; update coli, or convert it again";
        let layout = match &stamp.layout {
            None => Layout::Canonical,
            Some(name) => Layout::from_name(name).ok_or_else(|| {
                self.disagree(format!("a layout this version reads, not {stated}"), newer)
            })?,
        };
        let format = match stamp.format {
            StampFormat::Exact(format) if layout != Layout::Canonical => {
                return match self.fits_layout(format, layout) {
                    true => Ok((format, layout)),
                    false => Err(self.disagree(
                        format!("{stated} of [{}, {}]", self.rows, self.cols),
                        ASK_PRODUCER,
                    )),
                };
            }
            StampFormat::Exact(format) => self.scaled_as_stored(format),
            StampFormat::Int4Grouped if layout == Layout::Canonical => {
                let wide = INT4_GROUPS.map(|g| Format::Int4Grouped(g as u16));
                let fitting = self.grouped().chain(wide).find(|format| self.fits(*format));
                let format = fitting.ok_or_else(|| self.disagree(stated, ASK_PRODUCER))?;
                return Ok((format, layout));
            }
            StampFormat::Int4Grouped | StampFormat::Unknown => {
                return Err(
                    self.disagree(format!("a format this version knows, not {stated}"), newer)
                );
            }
        };
        Ok((self.verify(format, &stated)?, layout))
    }

    /// Whether the bytes can be a matrix in another layout than the canonical one: tiles have
    /// their scales among them, coded streams any length up to a little more than the tiles'.
    fn fits_layout(&self, format: Format, layout: Layout) -> bool {
        let Ok(desc) = MatrixDesc::for_matmul(format, self.rows, self.cols, false) else {
            return false;
        };
        let (tiles, len) = (desc.bytes() as u64, self.weights.len);
        let bytes_fit = match layout {
            Layout::Canonical => false,
            Layout::R16k4 => len == tiles,
            Layout::R16k4Rans => len > 0 && len <= tiles + CODED_EXTRA_BYTES,
        };
        desc.arrangement() == Arrangement::Tiles
            && self.weights.dtype == Dtype::U8
            && self.scales.is_none()
            && bytes_fit
    }

    /// The stamp names fp8 once; the dtype of the scales says how they are kept.
    fn scaled_as_stored(&self, format: Format) -> Format {
        match (format, self.scales.map(|s| s.dtype)) {
            (Format::Fp8B128(_), Some(Dtype::U8 | Dtype::F8E8m0)) => {
                Format::Fp8B128(Fp8Scale::Ue8m0)
            }
            (format, _) => format,
        }
    }

    /// Grouped int4 in the order in which groups are tried: ascending, up to `cols`.
    fn grouped(&self) -> impl Iterator<Item = Format> + use<> {
        let cols = self.cols;
        INT4_GROUPS.into_iter().filter(move |g| *g <= cols).map(|g| Format::Int4Grouped(g as u16))
    }

    fn verify(&self, format: Format, stated: &str) -> Result<Format, Disagreement> {
        if self.fits(format) {
            return Ok(format);
        }
        let wanted = match (
            format.weight_bytes(self.rows, self.cols),
            format.scale_count(self.rows, self.cols),
        ) {
            (Some(weights), Some(0)) => format!("{weights} bytes and no scales"),
            (Some(weights), Some(scales)) => {
                let kind = match format.scale_type() {
                    ScaleType::F32 => "F32 scales",
                    ScaleType::Ue8m0 => "UE8M0 scales",
                    ScaleType::None => "scales",
                };
                format!("{weights} bytes of codes and {scales} {kind}")
            }
            _ => "a size beyond 64 bits".to_owned(),
        };
        Err(self.disagree(
            format!("{stated} of [{}, {}] = {wanted}", self.rows, self.cols),
            ASK_PRODUCER,
        ))
    }

    /// Whether dtypes and byte counts are exactly those of a format.
    fn fits(&self, format: Format) -> bool {
        let dtype_fits = if format.is_plain() {
            plain_format(self.weights.dtype) == Some(format)
        } else {
            match self.weights.dtype {
                Dtype::U8 | Dtype::I8 => true,
                Dtype::F8E4m3 => matches!(format, Format::Fp8B128(_)),
                _ => false,
            }
        };
        let scale_dtype_fits = matches!(
            (format.scale_type(), self.scales.map(|s| s.dtype)),
            (ScaleType::None, None)
                | (ScaleType::F32, Some(Dtype::F32))
                | (ScaleType::Ue8m0, Some(Dtype::U8 | Dtype::F8E8m0))
        );
        let bytes = |n: Option<usize>| n.map(|n| n as u64);
        dtype_fits
            && scale_dtype_fits
            && bytes(format.weight_bytes(self.rows, self.cols)) == Some(self.weights.len)
            && bytes(format.scale_bytes(self.rows, self.cols))
                == Some(self.scales.map_or(0, |s| s.len))
    }

    fn nothing_fits(&self) -> Disagreement {
        self.disagree(
            format!("the byte counts of a known format for [{}, {}]", self.rows, self.cols),
            ASK_PRODUCER,
        )
    }

    fn disagree(&self, expected: String, remedy: &'static str) -> Disagreement {
        let weights = self.weights;
        let mut found = format!("{} bytes of {}", weights.len, weights.dtype);
        match self.scales {
            Some(scales) => {
                found += &format!(" with scales of {} bytes of {}", scales.len, scales.dtype)
            }
            None => found += " without scales",
        }
        Disagreement { expected, found, remedy }
    }
}
