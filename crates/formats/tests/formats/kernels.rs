use formats::{
    Arrangement, Buffer, ExpertDesc, Format, FormatError, Input, MatrixDesc, QTensor, decode_row,
    expert_ffn, matmul, matmul_each, matmul_in_emulated_tiles, tile::TileShape,
};
use numerics::hadamard::Rotation;
use numerics::int8::Int8Rows;
use numerics::{Activations, Isa, NumericError};

use crate::support::{Encoded, FORMATS, compute, encode, noise};

/// Rows of activations: the few that stay in registers, and more than fit one vector's sums.
const COUNTS: [usize; 11] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 35];

/// Shapes with odd sizes: rows beyond a tile, inputs that end inside groups, blocks and bytes.
const SHAPES: [(usize, usize); 6] = [(16, 256), (1, 1), (17, 33), (40, 72), (5, 300), (130, 528)];

fn tensor(encoded: &Encoded) -> QTensor {
    let desc = MatrixDesc::for_matmul(encoded.format, encoded.rows, encoded.cols, true).unwrap();
    QTensor::from_canonical(desc, &encoded.weights, &encoded.scales).unwrap()
}

/// Decoded weights of a row arrangement, the reference for both rules.
fn decoded(encoded: &Encoded) -> Vec<f32> {
    let desc = MatrixDesc::for_rows(encoded.format, encoded.rows, encoded.cols).unwrap();
    let rows = QTensor::from_canonical(desc, &encoded.weights, &encoded.scales).unwrap();
    let mut out = vec![0.0; encoded.rows * encoded.cols];
    for (row, out) in out.chunks_exact_mut(encoded.cols).enumerate() {
        rows.view().decode_row(Isa::detect(), row, out);
    }
    out
}

/// Rule 4: formats with tiles one accumulator per output, ascending, over the padded row; the
/// others the 32 lanes.
fn reference_f32(encoded: &Encoded, x: &[f32]) -> Vec<f32> {
    let tiled = TileShape::new(encoded.format, encoded.cols).is_some();
    let weights = decoded(encoded);
    let rows = weights.chunks_exact(encoded.cols);
    rows.map(|weights| {
        if !tiled {
            let mut lanes = [0.0f32; 32];
            for i in 0..encoded.cols.next_multiple_of(32) {
                let (w, x) = (weights.get(i).unwrap_or(&0.0), x.get(i).unwrap_or(&0.0));
                lanes[i % 32] = w.mul_add(*x, lanes[i % 32]);
            }
            for half in [16, 8, 4, 2, 1] {
                for j in 0..half {
                    lanes[j] += lanes[j + half];
                }
            }
            return lanes[0];
        }
        weights.iter().zip(x).fold(0.0, |acc, (w, x)| w.mul_add(*x, acc))
    })
    .collect()
}

/// Rule 3, from decoded weights: integers are weights over their scale.
fn reference_int8(encoded: &Encoded, x: &[f32]) -> Vec<f32> {
    let shape = TileShape::new(encoded.format, encoded.cols).unwrap();
    let scalar = compute(Isa::SCALAR, 1, Activations::Int8);
    let x = Int8Rows::quantise(&scalar, "x", x, encoded.cols, shape.block).unwrap();
    let (codes, scales) = integers(encoded);
    let row_scaled = matches!(encoded.format, Format::Int8Row | Format::Int4Row | Format::Int2Row);
    let x = x.row(0);
    let blocks = encoded.cols.div_ceil(shape.block);
    (0..encoded.rows)
        .map(|row| {
            let mut acc = 0.0f32;
            for block in 0..blocks {
                let inputs = block * shape.block..((block + 1) * shape.block).min(encoded.cols);
                let sum: i32 = inputs
                    .clone()
                    .map(|i| codes[row * encoded.cols + i] * i32::from(x.codes[i]))
                    .sum();
                let scale = scales[row * encoded.cols + inputs.start];
                let scale = if row_scaled { x.scales[block] } else { scale * x.scales[block] };
                acc = (sum as f32).mul_add(scale, acc);
            }
            if row_scaled { acc * scales[row * encoded.cols] } else { acc }
        })
        .collect()
}

/// Integer codes and the scale of every weight, read from the canonical bytes.
fn integers(encoded: &Encoded) -> (Vec<i32>, Vec<f32>) {
    let (rows, cols) = (encoded.rows, encoded.cols);
    let weights = decoded(encoded);
    let f32_scale =
        |index: usize| f32::from_le_bytes(encoded.scales[index * 4..][..4].try_into().unwrap());
    let mut scales = vec![0.0; rows * cols];
    for row in 0..rows {
        for i in 0..cols {
            let at = row * cols + i;
            scales[at] = match encoded.format {
                Format::Int8Row | Format::Int4Row | Format::Int2Row => f32_scale(row),
                Format::Int4Grouped(g) => {
                    f32_scale(row * cols.div_ceil(g.into()) + i / usize::from(g))
                }
                Format::Int3G64 => f32_scale(row * cols.div_ceil(64) + i / 64),
                // Doubled codes: half the scale.
                Format::Mxfp4 => {
                    let byte = encoded.scales[row * cols.div_ceil(32) + i / 32];
                    formats::mxfp4::ue8m0(byte) * 0.5
                }
                Format::E8Iq3 => {
                    let block = &encoded.weights[(row * cols.div_ceil(256) + i / 256) * 98..][..98];
                    let d = formats::plain::from_f16(u16::from_le_bytes([block[96], block[97]]));
                    let word = &block[64 + i % 256 / 32 * 4..][..4];
                    let word = u32::from_le_bytes(word.try_into().unwrap());
                    d * (0.5 + (word >> 28) as f32) * 0.25
                }
                other => panic!("{other} has no integer codes"),
            };
        }
    }
    let codes = weights
        .iter()
        .zip(&scales)
        .map(|(w, s)| if *s == 0.0 { 0 } else { (f64::from(*w) / f64::from(*s)).round() as i32 });
    (codes.collect(), scales)
}

#[test]
fn canonical_bytes_survive_the_tile_layout() {
    for format in FORMATS {
        for (rows, cols) in SHAPES {
            let encoded = encode(format, &noise(rows * cols, 11), cols);
            let tiles = tensor(&encoded);
            let (want, mut got) = (decoded(&encoded), vec![0.0; cols]);
            for (row, want) in want.chunks_exact(cols).enumerate() {
                tiles.view().decode_row(Isa::detect(), row, &mut got);
                let same = got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{format} [{rows}, {cols}] row {row}");
            }
        }
    }
}

#[test]
fn every_kernel_at_every_level_follows_the_rules_bit_for_bit() {
    for level in numerics::Level::ALL {
        if Isa::at(level).is_none() {
            println!("SKIPPED: this CPU has no {level}");
        }
    }
    for format in FORMATS {
        for (rows, cols) in SHAPES {
            let encoded = encode(format, &noise(rows * cols, 5), cols);
            let tensor = tensor(&encoded);
            let mut batch: Vec<f32> = noise(COUNTS[COUNTS.len() - 1] * cols, 23);
            batch[..cols].fill(0.0); // a row of zeros
            for (i, v) in batch[cols..2 * cols].iter_mut().enumerate() {
                *v *= if i % 2 == 0 { 1e20 } else { 1e-20 }; // extreme magnitudes
            }
            for activations in [Activations::F32, Activations::Int8] {
                let int8 = activations == Activations::Int8 && format.takes_int8_activations();
                let want: Vec<f32> = batch
                    .chunks_exact(cols)
                    .flat_map(|x| {
                        let mut x = x.to_vec();
                        if format.is_rotated() {
                            Rotation::new(cols).apply(Isa::SCALAR, &mut x);
                        }
                        if int8 {
                            reference_int8(&encoded, &x)
                        } else {
                            reference_f32(&encoded, &x)
                        }
                    })
                    .collect();
                for isa in Isa::available() {
                    let compute = compute(isa, 2, activations);
                    for count in COUNTS {
                        let input = Input::new("x", &batch[..count * cols], cols);
                        let mut got = vec![f32::NAN; count * rows];
                        matmul(&compute, tensor.view(), &input, None, &mut got).unwrap();
                        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                            let (row, out) = (i / rows, i % rows);
                            let case = format!("{format} [{rows}, {cols}] {activations} {isa:?}");
                            assert_eq!(
                                got.to_bits(),
                                want.to_bits(),
                                "{case} row {row} of {count}, output {out}: {got}, not {want}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_rows_beside_it() {
    for format in FORMATS {
        let (rows, cols) = (33, 200);
        let encoded = encode(format, &noise(rows * cols, 2), cols);
        let tensor = tensor(&encoded);
        let batch = noise(300 * cols, 3);
        for activations in [Activations::F32, Activations::Int8] {
            let compute = compute(Isa::detect(), 2, activations);
            let input = Input::new("x", &batch[..], cols);
            let mut all = vec![0.0; 300 * rows];
            matmul(&compute, tensor.view(), &input, None, &mut all).unwrap();
            for count in [1, 2, 3, 8, 63, 290] {
                let picked: Vec<u32> = (0..count).map(|i| (i * 37 + 5) as u32 % 300).collect();
                let mut some = vec![0.0; count * rows];
                matmul(&compute, tensor.view(), &input, Some(&picked), &mut some).unwrap();
                for (row, got) in picked.iter().zip(some.chunks_exact(rows)) {
                    assert_eq!(got, &all[*row as usize * rows..][..rows], "{format}");
                }
            }
        }
    }
}

#[test]
fn the_way_through_matrix_tiles_gives_the_same_bits() {
    let tiled = FORMATS.into_iter().filter(|format| TileShape::new(*format, 64).is_some());
    for format in tiled {
        for (rows, cols, count) in [(40, 200, 5), (16, 64, 16), (33, 528, 47), (70, 96, 140)] {
            let tensor = tensor(&encode(format, &noise(rows * cols, 5), cols));
            let compute = compute(Isa::SCALAR, 1, Activations::Int8);
            let x = noise(count * cols, 6);
            let input = Input::new("x", &x[..], cols);
            let (mut want, mut got) = (vec![0.0; count * rows], vec![f32::NAN; count * rows]);
            matmul(&compute, tensor.view(), &input, None, &mut want).unwrap();
            matmul_in_emulated_tiles(&compute, tensor.view(), &input, &mut got).unwrap();
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&got), bits(&want), "{format} [{rows}, {cols}] of {count} rows");
        }
    }
}

#[test]
fn several_matrices_in_one_job_give_what_each_gives_alone() {
    let cols = 96;
    let formats = [Format::Int4Grouped(32), Format::Int8Row, Format::Mxfp4];
    let tensors: Vec<QTensor> = formats
        .iter()
        .enumerate()
        .map(|(i, format)| tensor(&encode(*format, &noise((20 + 30 * i) * cols, 7), cols)))
        .collect();
    let batch = noise(11 * cols, 3);
    for count in [1, 3, 11] {
        let compute = compute(Isa::detect(), 3, Activations::Int8);
        let input = Input::new("x", &batch[..count * cols], cols);
        let alone: Vec<Vec<f32>> = tensors
            .iter()
            .map(|tensor| {
                let mut out = vec![0.0; count * tensor.desc().rows()];
                matmul(&compute, tensor.view(), &input, None, &mut out).unwrap();
                out
            })
            .collect();
        let mut together: Vec<Vec<f32>> = alone.iter().map(|out| vec![9.0; out.len()]).collect();
        let [a, b, c] = &mut together[..] else { panic!("three") };
        let matrices = [tensors[0].view(), tensors[1].view(), tensors[2].view()];
        matmul_each(&compute, matrices, &input, None, [a, b, c]).unwrap();
        assert_eq!(together, alone);
    }
}

#[test]
fn an_expert_meets_rotated_weights_with_rotated_inputs() {
    let (hidden, intermediate) = (512, 256);
    let weights = [
        noise(intermediate * hidden, 1),
        noise(intermediate * hidden, 2),
        noise(hidden * intermediate, 3),
    ];
    let x = noise(3 * hidden, 4);
    let run = |format: Format| {
        let desc = |rows, cols| MatrixDesc::for_matmul(format, rows, cols, true).unwrap();
        let desc = ExpertDesc {
            gate: desc(intermediate, hidden),
            up: desc(intermediate, hidden),
            down: desc(hidden, intermediate),
        };
        let mut data = Buffer::zeroed(desc.bytes());
        for (matrix, (values, cols)) in
            weights.iter().zip([hidden, hidden, intermediate]).enumerate()
        {
            let encoded = encode(format, values, cols);
            desc.store(matrix, &encoded.weights, &encoded.scales, &mut data).unwrap();
        }
        let mut out = vec![0.0; 3 * hidden];
        let compute = compute(Isa::detect(), 1, Activations::F32);
        let input = Input::new("x", &x[..], hidden);
        expert_ffn(&compute, desc.view(&data), &input, None, &mut out).unwrap();
        out
    };
    let exact = run(Format::F32);
    for format in FORMATS {
        let got = run(format);
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        };
        let cosine = dot(&got, &exact) / (dot(&got, &got) * dot(&exact, &exact)).sqrt();
        let floor = if format == Format::Int2Row { 0.5 } else { 0.9 };
        assert!(cosine > floor, "{format}: cosine {cosine:.3} with the unquantised expert");
    }
}

#[test]
fn a_non_finite_activation_is_named() {
    let encoded = encode(Format::Int4Grouped(64), &noise(16 * 64, 1), 64);
    let tensor = tensor(&encoded);
    let mut x = noise(128, 2);
    x[64 + 3] = f32::INFINITY;
    let compute = compute(Isa::detect(), 1, Activations::Int8);
    let input = Input::new("router input", &x[..], 64);
    let got = matmul(&compute, tensor.view(), &input, None, &mut [0.0; 32]).unwrap_err();
    assert_eq!(got, NumericError::NonFinite { what: "router input", row: 1, element: 3 });
}

#[test]
fn scales_that_are_not_numbers_and_nan_weights_are_refused() {
    for format in FORMATS {
        let mut encoded = encode(format, &noise(32 * 256, 1), 256);
        match format {
            Format::F32 | Format::Bf16 | Format::F16 => continue,
            Format::E8Iq3 => encoded.weights[96..98].copy_from_slice(&0x7e00u16.to_le_bytes()),
            Format::Mxfp4 | Format::Fp8B128(formats::Fp8Scale::Ue8m0) => encoded.scales[1] = 255,
            _ => encoded.scales[4..8].copy_from_slice(&f32::NAN.to_le_bytes()),
        }
        let desc = MatrixDesc::for_matmul(format, 32, 256, true).unwrap();
        let got = QTensor::from_canonical(desc, &encoded.weights, &encoded.scales).unwrap_err();
        let index = if format == Format::E8Iq3 { 0 } else { 1 };
        assert_eq!(got, FormatError::Scale { format, index });
    }
    let format = Format::Fp8B128(formats::Fp8Scale::F32);
    let mut encoded = encode(format, &noise(4 * 64, 1), 64);
    encoded.weights[70] = 0xff;
    let desc = MatrixDesc::for_matmul(format, 4, 64, true).unwrap();
    let got = QTensor::from_canonical(desc, &encoded.weights, &encoded.scales).unwrap_err();
    assert_eq!(got, FormatError::NanCode { format, index: 70 });
}

#[test]
fn lengths_that_disagree_with_the_shape_are_refused() {
    for format in FORMATS {
        let encoded = encode(format, &noise(16 * 64, 1), 64);
        let desc = MatrixDesc::for_matmul(format, 16, 64, true).unwrap();
        let short = &encoded.weights[1..];
        let got = QTensor::from_canonical(desc, short, &encoded.scales);
        assert!(matches!(got, Err(FormatError::Length { what: "weights", .. })), "{format}");
        if desc.arrangement() == Arrangement::Tiles && format != Format::E8Iq3 {
            let got = QTensor::from_canonical(desc, &encoded.weights, &encoded.scales[1..]);
            assert!(matches!(got, Err(FormatError::Length { what: "scales", .. })), "{format}");
        }
    }
    let huge = MatrixDesc::for_matmul(Format::F32, usize::MAX / 2, 16, true);
    assert!(matches!(huge, Err(FormatError::TooLarge { .. })));
}

#[test]
fn the_public_row_decoder_agrees_with_the_stored_matrix() {
    let encoded = encode(Format::Int3G64, &noise(2 * 130, 8), 130);
    let mut row = vec![0.0; 130];
    let (row_bytes, scale_bytes) = (3 * 24, 3 * 4);
    decode_row(
        encoded.format,
        &encoded.weights[row_bytes..],
        &encoded.scales[scale_bytes..],
        &mut row,
    );
    assert_eq!(row, decoded(&encoded)[130..]);
}

#[test]
fn a_row_of_several_experts_is_found_with_its_expert() {
    let find = |row| formats::expert_of_row([2, 1, 3].into_iter(), row);
    assert_eq!([0, 1, 2, 3, 5, 7].map(find), [(0, 0), (0, 1), (1, 0), (2, 0), (2, 2), (2, 4)]);
}
