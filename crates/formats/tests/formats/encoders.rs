use formats::{Format, FormatError, Fp8Scale, MatrixDesc, QTensor};
use numerics::Isa;
use numerics::hadamard::Rotation;

use crate::support::{FORMATS, encode, noise};

/// Root of the mean squared error of decoding what was encoded, relative to the weights'.
fn relative_error(format: Format, rows: usize, cols: usize) -> f64 {
    let values = noise(rows * cols, 7);
    let encoded = encode(format, &values, cols);
    let desc = MatrixDesc::for_rows(format, rows, cols).unwrap();
    let tensor = QTensor::from_canonical(desc, &encoded.weights, &encoded.scales).unwrap();
    let (mut error, mut energy) = (0.0, 0.0);
    let mut row = vec![0.0; cols];
    for (r, want) in values.chunks_exact(cols).enumerate() {
        tensor.view().decode_row(Isa::detect(), r, &mut row);
        if format.is_rotated() {
            Rotation::new(cols).invert(Isa::detect(), &mut row);
        }
        for (got, want) in row.iter().zip(want) {
            error += f64::from(got - want).powi(2);
            energy += f64::from(*want).powi(2);
        }
    }
    (error / energy).sqrt()
}

#[test]
fn round_trip_error_is_within_what_each_format_can_do() {
    let bounds = [
        (Format::F32, 0.0),
        (Format::F16, 3e-4),
        (Format::Bf16, 2e-3),
        (Format::Int8Row, 0.015),
        (Format::Int4Row, 0.21),
        (Format::Int2Row, 0.57),
        (Format::Int4Grouped(16), 0.08),
        (Format::Int4Grouped(32), 0.10),
        (Format::Int4Grouped(64), 0.12),
        (Format::Int4Grouped(128), 0.145),
        (Format::Int3G64, 0.23),
        (Format::E8Iq3, 0.19),
        (Format::Mxfp4, 0.12),
        (Format::Fp8B128(Fp8Scale::F32), 0.028),
        (Format::Fp8B128(Fp8Scale::Ue8m0), 0.028),
    ];
    for (format, bound) in bounds {
        let error = relative_error(format, 48, 512);
        assert!(error <= bound, "{format}: {error:.4} above {bound}");
    }
}

#[test]
fn finer_groups_never_encode_worse() {
    let errors: Vec<f64> =
        [16, 32, 64, 128].map(|g| relative_error(Format::Int4Grouped(g), 32, 512)).to_vec();
    assert!(errors.is_sorted(), "{errors:?}");
    assert!(relative_error(Format::Int4Row, 32, 512) > errors[3]);
}

#[test]
fn zeros_encode_to_zeros_and_tiny_values_stay_finite() {
    for format in FORMATS {
        for value in [0.0f32, 1e-45, -1e-39, 1e-37] {
            let values = vec![value; 16 * 96];
            let encoded = encode(format, &values, 96);
            let desc = MatrixDesc::for_rows(format, 16, 96).unwrap();
            let tensor = QTensor::from_canonical(desc, &encoded.weights, &encoded.scales).unwrap();
            let mut row = vec![1.0; 96];
            tensor.view().decode_row(Isa::detect(), 3, &mut row);
            let exact = value != 0.0 || row.iter().all(|v| *v == 0.0);
            assert!(exact && row.iter().all(|v| v.abs() < 1e-34), "{format} {value:e}: {row:?}");
        }
    }
}

#[test]
fn a_value_that_is_not_a_number_is_refused_with_its_place() {
    for format in FORMATS {
        let mut values = noise(3 * 64, 1);
        values[64 + 9] = f32::NAN;
        let encoder = formats::Encoder::new(format, 64);
        let got = encoder.encode(Isa::SCALAR, &values, &mut Vec::new(), &mut Vec::new());
        assert_eq!(got, Err(FormatError::NonFinite { format, row: 1, col: 9 }));
    }
}

#[test]
fn row_blocks_encode_to_the_bytes_of_the_whole() {
    for format in FORMATS {
        let values = noise(300 * 72, 3);
        let whole = encode(format, &values, 72);
        let encoder = formats::Encoder::new(format, 72);
        let (mut weights, mut scales) = (Vec::new(), Vec::new());
        for block in values.chunks(encoder.row_granule() * 72) {
            encoder.encode(Isa::SCALAR, block, &mut weights, &mut scales).unwrap();
        }
        encoder.finish(&mut scales);
        assert_eq!((weights, scales), (whole.weights, whole.scales), "{format}");
    }
}
