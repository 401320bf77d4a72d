//! Recognising formats: the order of the rule, the ambiguous sizes, stamps against bytes.

use container::recognise::{Disagreement, Stored, recognise};
use container::{Dtype, Layout, Shards};
use formats::{Format, Fp8Scale};
use tempfile::TempDir;

use crate::common::*;

const FP8: Format = Format::Fp8B128(Fp8Scale::F32);
const FP8_UE8M0: Format = Format::Fp8B128(Fp8Scale::Ue8m0);

fn weights(len: usize) -> Stored {
    Stored { dtype: Dtype::U8, len: len as u64 }
}

fn scales(dtype: Dtype, count: usize) -> Option<Stored> {
    Some(Stored { dtype, len: (count * dtype.size().unwrap()) as u64 })
}

/// The format of a matrix that must be in its canonical layout.
fn canonical(found: Result<(Format, Layout), Disagreement>) -> Result<Format, Disagreement> {
    found.map(|(format, layout)| {
        assert_eq!(layout, Layout::Canonical);
        format
    })
}

/// Unstamped, F32 scales.
fn guess(rows: usize, cols: usize, bytes: usize, count: usize) -> Result<Format, Disagreement> {
    canonical(recognise(rows, cols, weights(bytes), scales(Dtype::F32, count), None))
}

/// A stamp as it is read from a file.
fn stamped(
    text: &str,
    rows: usize,
    cols: usize,
    w: Stored,
    s: Option<Stored>,
) -> Result<Format, Disagreement> {
    let dir = TempDir::new().unwrap();
    let stamp = format!("{{\"x\":\"{text}\"}}");
    write(dir.path(), "a.safetensors", &[zeros("x", "U8", &[1])], &[("colibri.fmt", &stamp)]);
    let shards = Shards::open(&[dir.path().to_owned()]).unwrap();
    canonical(recognise(rows, cols, w, s, shards.stamp("x")))
}

const EVERY: [Format; 19] = [
    Format::Int8Row,
    Format::Int4Row,
    Format::Int2Row,
    Format::Int4Grouped(16),
    Format::Int4Grouped(32),
    Format::Int4Grouped(48),
    Format::Int4Grouped(64),
    Format::Int4Grouped(96),
    Format::Int4Grouped(128),
    Format::Int4Grouped(192),
    Format::Int4Grouped(256),
    Format::Int3G64,
    Format::E8Iq3,
    Format::Mxfp4,
    FP8,
    FP8_UE8M0,
    Format::F32,
    Format::Bf16,
    Format::F16,
];

fn stored_as(format: Format, rows: usize, cols: usize) -> (Stored, Option<Stored>) {
    let dtype = match format {
        Format::F32 => Dtype::F32,
        Format::Bf16 => Dtype::Bf16,
        Format::F16 => Dtype::F16,
        _ => Dtype::U8,
    };
    let w = Stored { dtype, len: format.weight_bytes(rows, cols).unwrap() as u64 };
    let s = match format.scale_type() {
        formats::ScaleType::None => None,
        formats::ScaleType::F32 => scales(Dtype::F32, format.scale_count(rows, cols).unwrap()),
        formats::ScaleType::Ue8m0 => scales(Dtype::U8, format.scale_count(rows, cols).unwrap()),
    };
    (w, s)
}

#[test]
fn every_format_is_found_by_its_bytes_and_by_its_stamp() {
    // 6144 inputs tell all groups apart; 2048 rows are no special number for any format.
    for format in EVERY {
        let (w, s) = stored_as(format, 2048, 6144);
        assert_eq!(canonical(recognise(2048, 6144, w, s, None)), Ok(format));
        assert_eq!(stamped(&format.to_string(), 2048, 6144, w, s), Ok(format));
        let (w, s) = stored_as(format, 33, 100);
        assert_eq!(stamped(&format.to_string(), 33, 100, w, s), Ok(format));
    }
}

/// A stamp of any other format must not be believed unless the bytes allow it.
#[test]
fn a_wrong_stamp_is_refused_with_both_facts() {
    for stored in EVERY {
        let (w, s) = stored_as(stored, 2048, 6144);
        for stated in EVERY {
            let same = stated == stored || (stated.to_string() == stored.to_string());
            let result = stamped(&stated.to_string(), 2048, 6144, w, s);
            if same {
                assert_eq!(result, Ok(stored));
            } else {
                let error = result.unwrap_err();
                assert!(error.expected.contains(&stated.to_string()), "{error:?}");
                assert!(error.found.contains(&w.len.to_string()), "{error:?}");
            }
        }
    }
}

#[test]
fn one_row_of_384_to_512_inputs() {
    // int8-row has 4 bytes of F32 scale; fp8 with UE8M0 has 3 or 4 bytes of scales; fp8 with F32
    // scales has 12 or 16: only the scale tensor tells.
    for cols in 384..=512 {
        assert_eq!(guess(1, cols, cols, 1), Ok(Format::Int8Row));
        let blocks = cols.div_ceil(128);
        assert_eq!(guess(1, cols, cols, blocks), Ok(FP8));
        let ue8m0 =
            |dtype| canonical(recognise(1, cols, weights(cols), scales(dtype, blocks), None));
        assert_eq!(ue8m0(Dtype::U8), Ok(FP8_UE8M0));
        assert_eq!(ue8m0(Dtype::F8E8m0), Ok(FP8_UE8M0));
        assert_eq!(
            stamped("int8-row", 1, cols, weights(cols), scales(Dtype::F32, 1)),
            Ok(Format::Int8Row)
        );
        assert!(stamped("fp8-e4m3-b128", 1, cols, weights(cols), scales(Dtype::F32, 1)).is_err());
        assert_eq!(
            stamped("fp8-e4m3-b128", 1, cols, weights(cols), scales(Dtype::F32, blocks)),
            Ok(FP8)
        );
    }
    // Up to 128 inputs both fit: int8-row unless stamped, and a real fp8 dtype is never int8.
    assert_eq!(guess(1, 128, 128, 1), Ok(Format::Int8Row));
    assert_eq!(stamped("fp8-e4m3-b128", 1, 128, weights(128), scales(Dtype::F32, 1)), Ok(FP8));
    let e4m3 = Stored { dtype: Dtype::F8E4m3, len: 128 };
    assert_eq!(canonical(recognise(1, 128, e4m3, scales(Dtype::F32, 1), None)), Ok(FP8));
    let e4m3 = Stored { dtype: Dtype::F8E4m3, len: 256 * 512 };
    let error = recognise(256, 512, e4m3, scales(Dtype::F32, 256), None).unwrap_err();
    assert!(error.expected.contains("fp8"), "{error:?}");
}

#[test]
fn ninety_eight_inputs_collide_with_e8() {
    // One row of 98 inputs: 98 bytes and 4 bytes of scale are int8, fp8 and one e8 block.
    let error = guess(1, 98, 98, 1).unwrap_err();
    assert!(error.expected.contains("e8-iq3") && error.expected.contains("int8-row"), "{error:?}");
    assert!(error.remedy.contains("colibri.fmt"), "{error:?}");
    let (w, s) = (weights(98), scales(Dtype::F32, 1));
    assert_eq!(stamped("e8-iq3", 1, 98, w, s), Ok(Format::E8Iq3));
    assert_eq!(stamped("e8-iq3-lattice", 1, 98, w, s), Ok(Format::E8Iq3));
    assert_eq!(stamped("int8-row", 1, 98, w, s), Ok(Format::Int8Row));
    assert_eq!(stamped("fp8-e4m3-b128", 1, 98, w, s), Ok(FP8));
    // Up to 128 rows one fp8 block scale has the size of the tag.
    let error = guess(100, 98, 9800, 1).unwrap_err();
    assert!(error.expected.contains("fp8"), "{error:?}");
    assert_eq!(guess(100, 98, 9800, 100), Ok(Format::Int8Row));
    // Other widths are clear.
    assert_eq!(guess(100, 256, 9800, 1), Ok(Format::E8Iq3));
    assert_eq!(guess(1, 256, 98, 1), Ok(Format::E8Iq3));
}

#[test]
fn groups_are_the_smallest_that_fits() {
    let grouped = |cols: usize, per_row: usize| guess(8, cols, 8 * cols.div_ceil(2), 8 * per_row);
    assert_eq!(grouped(64, 1), Ok(Format::Int4Row));
    assert_eq!(grouped(64, 2), Ok(Format::Int4Grouped(32)));
    assert_eq!(grouped(64, 4), Ok(Format::Int4Grouped(16)));
    // Two scales for 96 inputs: 48 and 64 both give two; 48 is smaller.
    assert_eq!(grouped(96, 2), Ok(Format::Int4Grouped(48)));
    assert_eq!(grouped(100, 2), Ok(Format::Int4Grouped(64)));
    assert_eq!(grouped(20, 2), Ok(Format::Int4Grouped(16)));
    assert!(grouped(64, 3).is_err());
    assert!(grouped(64, 5).is_err());
    let (w, s) = (weights(8 * 48), scales(Dtype::F32, 16));
    assert_eq!(stamped("int4-g64", 8, 96, w, s), Ok(Format::Int4Grouped(64)));
    assert_eq!(stamped("int4-grouped", 8, 96, w, s), Ok(Format::Int4Grouped(48)));
    assert!(stamped("int4-g32", 8, 96, w, s).is_err());
    // A group as wide as the row has as many scales as int4-row: only the stamp tells.
    let (w, s) = (weights(8 * 32), scales(Dtype::F32, 8));
    assert_eq!(stamped("int4-g64", 8, 64, w, s), Ok(Format::Int4Grouped(64)));
    assert_eq!(stamped("int4-row", 8, 64, w, s), Ok(Format::Int4Row));
    assert_eq!(
        stamped("int4-grouped", 8, 20, weights(80), scales(Dtype::F32, 8)),
        Ok(Format::Int4Grouped(32))
    );
}

#[test]
fn order_where_byte_counts_coincide() {
    // 24 inputs: int8 and int3 have 24 bytes and one scale.
    assert_eq!(guess(8, 24, 192, 8), Ok(Format::Int8Row));
    // 96 inputs: int4 and int3 have 48 bytes; two scales also fit groups of 48.
    assert_eq!(guess(8, 96, 384, 16), Ok(Format::Int4Grouped(48)));
    assert_eq!(
        stamped("int3-g64", 8, 96, weights(384), scales(Dtype::F32, 16)),
        Ok(Format::Int3G64)
    );
    assert_eq!(guess(8, 128, 384, 16), Ok(Format::Int3G64));
    assert_eq!(guess(8, 128, 256, 8), Ok(Format::Int2Row));
}

#[test]
fn dtypes_that_do_not_belong() {
    let codes = weights(64);
    assert!(recognise(8, 8, codes, None, None).unwrap_err().expected.contains(".qs"));
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::I32, Dtype::I8, Dtype::F8E4m3, Dtype::F64] {
        let error = recognise(8, 8, codes, scales(dtype, 8), None).unwrap_err();
        assert!(error.found.contains(&dtype.to_string()), "{error:?}");
        assert!(stamped("int8-row", 8, 8, codes, scales(dtype, 8)).is_err());
    }
    for dtype in [Dtype::I32, Dtype::I64, Dtype::F64, Dtype::Bool, Dtype::U16, Dtype::Other(4)] {
        let w = Stored { dtype, len: 64 };
        assert!(recognise(8, 8, w, scales(Dtype::F32, 8), None).is_err());
        assert!(recognise(8, 8, w, None, None).is_err());
    }
    let bf16 = Stored { dtype: Dtype::Bf16, len: 128 };
    assert_eq!(canonical(recognise(8, 8, bf16, None, None)), Ok(Format::Bf16));
    assert!(recognise(8, 8, bf16, scales(Dtype::F32, 8), None).is_err());
    assert!(recognise(8, 9, bf16, None, None).is_err());
    assert!(stamped("f16", 8, 8, bf16, None).is_err());
    // Byte scales are never those of an integer format.
    assert!(recognise(8, 64, weights(512), scales(Dtype::U8, 8), None).is_err());
    let mxfp4 = recognise(8, 64, weights(256), scales(Dtype::U8, 16), None);
    assert_eq!(canonical(mxfp4), Ok(Format::Mxfp4));
    let signed = Stored { dtype: Dtype::I8, len: 64 };
    let int8 = recognise(8, 8, signed, scales(Dtype::F32, 8), None);
    assert_eq!(canonical(int8), Ok(Format::Int8Row));
}

#[test]
fn stamps_of_newer_versions() {
    for (text, word) in [("int4-g64+zz", "layout"), ("int5-row", "int5-row"), ("", "format")] {
        let error = stamped(text, 8, 64, weights(256), scales(Dtype::F32, 8)).unwrap_err();
        assert!(error.expected.contains(word), "{error:?}");
        assert!(error.remedy.contains("newer version"), "{error:?}");
    }
}

#[test]
fn tiles_need_their_exact_bytes_and_have_no_scales_of_their_own() {
    let laid_out = |text: &str, bytes: usize, scales: Option<Stored>| {
        let dir = TempDir::new().unwrap();
        let stamp = format!("{{\"x\":\"{text}\"}}");
        write(dir.path(), "a.safetensors", &[zeros("x", "U8", &[1])], &[("colibri.fmt", &stamp)]);
        let shards = Shards::open(&[dir.path().to_owned()]).unwrap();
        recognise(20, 64, weights(bytes), scales, shards.stamp("x"))
    };
    // Two tiles of 16 rows: 16 scales and 16 x 32 bytes of codes each.
    let tiles = 2 * (64 + 16 * 32);
    let int4 = Format::Int4Grouped(64);
    assert_eq!(laid_out("int4-g64+r16k4", tiles, None), Ok((int4, Layout::R16k4)));
    assert_eq!(laid_out("int4-g64+r16k4-rans", 700, None), Ok((int4, Layout::R16k4Rans)));
    assert!(laid_out("int4-g64+r16k4-rans", tiles + 100_000, None).is_err());
    for bytes in [tiles - 1, tiles + 1, 20 * 32] {
        let error = laid_out("int4-g64+r16k4", bytes, None).unwrap_err();
        assert!(error.expected.contains("int4-g64+r16k4"), "{error:?}");
    }
    assert!(laid_out("int4-g64+r16k4", tiles, super::recognise::scales(Dtype::F32, 20)).is_err());
    // Formats that are multiplied row by row have no tiles.
    assert!(laid_out("bf16+r16k4", 20 * 64 * 2, None).is_err());
}

#[test]
fn impossible_sizes_do_not_overflow() {
    for (rows, cols) in
        [(usize::MAX, usize::MAX), (usize::MAX, 1), (1, usize::MAX), (0, 0), (0, 5), (5, 0)]
    {
        for format in EVERY {
            for count in [0, 1, 4] {
                let _ = recognise(rows, cols, weights(count), scales(Dtype::F32, count), None);
                let _ = stamped(
                    &format.to_string(),
                    rows,
                    cols,
                    weights(count),
                    scales(Dtype::U8, count),
                );
            }
        }
    }
}
