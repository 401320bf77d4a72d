//! Decoders, tile layout and rotation against vectors of an independent implementation,
//! `fixtures/formats` and `fixtures/hadamard.json` (made by `tools/oracle/format_vectors.py`).

use std::path::{Path, PathBuf};

use formats::{Format, FormatError, Fp8Scale, Input, MatrixDesc, QTensor, matmul};
use numerics::hadamard::Rotation;
use numerics::{Activations, Isa};
use serde_json::Value;

use crate::support::compute;

/// Cases in all and how many of them must be refused, so that none is lost unnoticed.
const CASES: (usize, usize) = (68, 16);

/// Bytes of a matrix and what they must decode to.
struct Case {
    name: String,
    format: Format,
    rows: usize,
    cols: usize,
    weights: Vec<u8>,
    scales: Vec<u8>,
    /// Bits of the values row by row; `None` where the bytes must be refused.
    values: Option<Vec<u32>>,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn read_json(path: &Path) -> Value {
    let text =
        std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

fn hex_bytes(text: &str) -> Vec<u8> {
    assert!(text.len().is_multiple_of(2), "hex of an odd length");
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

impl Case {
    fn parse(file: &str, entry: &Value) -> Case {
        let text = |key: &str| entry[key].as_str().unwrap();
        let count = |key: &str| entry[key].as_u64().unwrap() as usize;
        let name = format!("{file}: {}", text("name"));
        // The vectors name fp8 once; the dtype of the scales says how they are kept.
        let format = match (Format::from_name(text("format")), text("scales_dtype")) {
            (Some(Format::Fp8B128(_)), "U8" | "F8_E8M0") => Format::Fp8B128(Fp8Scale::Ue8m0),
            (Some(format), _) => format,
            (None, _) => panic!("{name}: unknown format {}", text("format")),
        };
        let bits = |word: &str| u32::from_str_radix(word, 16).unwrap();
        let values: Option<Vec<u32>> =
            entry["values"].as_str().map(|words| words.split(' ').map(bits).collect());
        assert_ne!(values.is_some(), entry["error"].is_string(), "{name}: values or an error");
        let case = Case {
            format,
            rows: count("outputs"),
            cols: count("inputs"),
            weights: hex_bytes(text("weight")),
            scales: hex_bytes(text("scales")),
            values,
            name,
        };
        let expected = case.values.as_ref().map_or(case.rows * case.cols, Vec::len);
        assert_eq!(expected, case.rows * case.cols, "{}: number of values", case.name);
        case
    }

    /// The matrix in both arrangements: canonical rows, and as kernels read it.
    fn tensors(&self) -> [Result<QTensor, FormatError>; 2] {
        let (format, rows, cols) = (self.format, self.rows, self.cols);
        let descs = [
            MatrixDesc::for_rows(format, rows, cols).unwrap(),
            MatrixDesc::for_matmul(format, rows, cols, true).unwrap(),
        ];
        descs.map(|desc| QTensor::from_canonical(desc, &self.weights, &self.scales))
    }
}

fn cases() -> Vec<Case> {
    let dir = fixtures().join("formats");
    let mut files: Vec<PathBuf> = std::fs::read_dir(&dir)
        .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "json"))
        .collect();
    files.sort();
    let mut cases = Vec::new();
    for file in files {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let json = read_json(&file);
        let entries = json["cases"].as_array().unwrap();
        cases.extend(entries.iter().map(|entry| Case::parse(&name, entry)));
    }
    let refused = cases.iter().filter(|case| case.values.is_none()).count();
    assert_eq!((cases.len(), refused), CASES, "cases, and those that must be refused");
    cases
}

#[test]
fn every_vector_decodes_to_the_bits_of_the_independent_decoder() {
    for case in cases() {
        let Some(values) = &case.values else { continue };
        for tensor in case.tensors() {
            let tensor = tensor.unwrap_or_else(|error| panic!("{}: {error}", case.name));
            let arrangement = tensor.desc().arrangement();
            let mut row = vec![f32::NAN; case.cols];
            for (at, want) in values.chunks_exact(case.cols).enumerate() {
                tensor.view().decode_row(Isa::detect(), at, &mut row);
                for (input, (got, want)) in row.iter().zip(want).enumerate() {
                    assert_eq!(
                        got.to_bits(),
                        *want,
                        "{} {arrangement:?} row {at} input {input}: {got} and {}",
                        case.name,
                        f32::from_bits(*want)
                    );
                }
            }
        }
    }
}

#[test]
fn every_faulty_vector_is_refused_in_both_arrangements() {
    for case in cases().into_iter().filter(|case| case.values.is_none()) {
        for tensor in case.tensors() {
            let Err(error) = tensor else { panic!("{} is accepted", case.name) };
            let fits = match &error {
                FormatError::Length { .. } => {
                    case.name.contains("too few")
                        || case.name.contains("too many")
                        || case.name.contains("short")
                }
                FormatError::Scale { .. } => {
                    ["infinite", "NaN", "255"].iter().any(|word| case.name.contains(word))
                }
                _ => false,
            };
            assert!(fits, "{}: refused for another reason: {error}", case.name);
        }
    }
}

/// A unit vector picks one column of the matrix out of a kernel, at every level.
#[test]
fn kernels_read_the_same_values_out_of_the_tiles() {
    for case in cases() {
        let Some(values) = &case.values else { continue };
        // Rotated weights meet rotated inputs: a column cannot be picked out.
        if case.format.is_rotated() {
            continue;
        }
        let [_, tensor] = case.tensors();
        let tensor = tensor.unwrap();
        let mut units = vec![0.0; case.cols * case.cols];
        for column in 0..case.cols {
            units[column * case.cols + column] = 1.0;
        }
        for isa in Isa::available() {
            let compute = compute(isa, 1, Activations::F32);
            let input = Input::new("unit vectors", &units[..], case.cols);
            let mut out = vec![f32::NAN; case.cols * case.rows];
            matmul(&compute, tensor.view(), &input, None, &mut out).unwrap();
            for (column, got) in out.chunks_exact(case.rows).enumerate() {
                for (row, got) in got.iter().enumerate() {
                    // Equal as numbers: a sum with zeros turns -0 into 0.
                    let want = f32::from_bits(values[row * case.cols + column]);
                    assert_eq!(*got, want, "{} {isa:?} row {row} input {column}", case.name);
                }
            }
        }
    }
}

/// The rotation of `len` elements undone on a unit vector: the signs of its tile over √n there,
/// zero elsewhere.
fn signs_over_root(len: usize, at: usize) -> Vec<f32> {
    let mut unit = vec![0.0; len];
    unit[at] = 1.0;
    Rotation::new(len).invert(Isa::detect(), &mut unit);
    unit
}

#[test]
fn sign_vectors_are_those_of_the_independent_generator() {
    let json = read_json(&fixtures().join("hadamard.json"));
    let vectors = json["signs_packed_low_bit_first"].as_object().unwrap();
    assert!(vectors.len() >= 9);
    for (size, packed) in vectors {
        let size: usize = size.parse().unwrap();
        let packed = hex_bytes(packed.as_str().unwrap());
        let magnitude = (1.0 / (size as f64).sqrt()) as f32;
        for (at, got) in signs_over_root(size, 0).into_iter().enumerate() {
            let negative = packed[at / 8] >> (at % 8) & 1 == 1;
            let want = if negative { -magnitude } else { magnitude };
            assert_eq!(got, want, "size {size}, element {at}");
        }
    }
}

#[test]
fn tilings_are_those_of_the_independent_implementation() {
    let json = read_json(&fixtures().join("hadamard.json"));
    let tilings = json["tilings"].as_object().unwrap();
    assert!(tilings.len() >= 7);
    for (len, tiles) in tilings {
        let len: usize = len.parse().unwrap();
        let mut start = 0;
        for tile in tiles.as_array().unwrap() {
            let end = start + tile.as_u64().unwrap() as usize;
            let spread = signs_over_root(len, start);
            let inside = |at: usize| (start..end).contains(&at);
            assert!(
                spread.iter().enumerate().all(|(at, value)| (*value != 0.0) == inside(at)),
                "{len}: the tile from {start} does not end at {end}"
            );
            start = end;
        }
        assert_eq!(start, len);
    }
}

#[test]
fn rotated_vectors_are_those_of_the_independent_implementation() {
    let json = read_json(&fixtures().join("hadamard.json"));
    let close = |got: f32, want: f64, what: String| {
        // Each of the log2(n) butterfly stages rounds once; inputs are of unit size.
        assert!((f64::from(got) - want).abs() < 4e-6, "{what}: {got} and {want}");
    };
    let vectors = json["vectors"].as_array().unwrap();
    assert!(vectors.len() >= 6);
    for isa in Isa::available() {
        for vector in vectors {
            let mut row: Vec<f32> = numbers(&vector["input"]).iter().map(|v| *v as f32).collect();
            let want = numbers(&vector["rotated"]);
            assert_eq!(row.len(), want.len());
            Rotation::new(row.len()).apply(isa, &mut row);
            let len = row.len();
            for (at, (got, want)) in row.iter().zip(want).enumerate() {
                close(*got, want, format!("{isa:?} length {len} element {at}"));
            }
        }
        let mut sine: Vec<f32> = (0..6144).map(|i| (0.1 * f64::from(i)).sin() as f32).collect();
        Rotation::new(sine.len()).apply(isa, &mut sine);
        let want = numbers(&json["sine_6144"]["every_64th_rotated"]);
        assert_eq!(want.len(), 96);
        for (at, want) in want.into_iter().enumerate() {
            close(sine[64 * at], want, format!("{isa:?} sine, element {}", 64 * at));
        }
    }
}

#[test]
fn bytes_in_place_are_checked_as_canonical_ones_are() {
    use formats::{MatrixDesc, MatrixRef, QTensor};
    for format in crate::support::FORMATS {
        let (rows, cols) = (37, 320);
        let values = crate::support::noise(rows * cols, 5);
        let encoded = crate::support::encode(format, &values, cols);
        let desc = MatrixDesc::for_matmul(format, rows, cols, false).unwrap();
        let tensor = QTensor::from_canonical(desc, &encoded.weights, &encoded.scales).unwrap();
        let image = tensor.view().data.to_vec();
        desc.check(&image).unwrap();
        assert!(desc.check(&image[1..]).is_err());
        // What is stored gives back what it was made of.
        let (mut weights, mut scales) = (Vec::new(), Vec::new());
        let matrix = MatrixRef { desc, data: &image };
        matrix.append_canonical(0..rows, &mut weights, &mut scales);
        assert_eq!(weights, encoded.weights, "{format}");
        let of_rows = desc.scale_range(0..rows).len();
        assert_eq!(scales, encoded.scales[..of_rows], "{format}");
        // A scale, or a plain weight, that is no number is found wherever it is, and as the
        // canonical bytes would be refused.
        let mut found = 0;
        for at in (0..image.len() - 4).step_by(52) {
            let mut bad = image.clone();
            bad[at..at + 4].copy_from_slice(&[0xff; 4]);
            let (mut weights, mut scales) = (Vec::new(), Vec::new());
            let matrix = MatrixRef { desc, data: &bad };
            matrix.append_canonical(0..rows, &mut weights, &mut scales);
            let canonical = QTensor::zeroed(desc).store(0..rows, &weights, &scales);
            assert_eq!(desc.check(&bad).is_err(), canonical.is_err(), "{format} byte {at}");
            found += usize::from(canonical.is_err());
        }
        assert!(found > 0, "{format}");
    }
}
