//! Coded matrices: the first three bytes say format, rows and inputs; the rest is a stream, and the
//! bytes of a matrix.

#![no_main]

use formats::rans::{Workspace, applies, decode, encode, entropy};
use formats::{Format, MatrixDesc};
use libfuzzer_sys::fuzz_target;
use numerics::Isa;

const FORMATS: [Format; 6] = [
    Format::Int4Row,
    Format::Int4Grouped(16),
    Format::Int4Grouped(64),
    Format::Int4Grouped(192),
    Format::Int8Row,
    Format::Mxfp4,
];

fuzz_target!(|data: &[u8]| {
    let Some((&[format, rows, cols], rest)) = data.split_first_chunk() else { return };
    let format = FORMATS[usize::from(format) % FORMATS.len()];
    let (rows, cols) = (usize::from(rows % 64), 1 + usize::from(cols));
    let Ok(desc) = MatrixDesc::for_matmul(format, rows, cols, true) else { return };
    let mut workspace = Workspace::default();

    let mut restore = |stream: &[u8]| {
        let mut results = Isa::available().map(|isa| {
            let mut image = vec![0; desc.bytes()];
            decode(isa, &desc, stream, &mut image, &mut workspace).map(|()| image)
        });
        let first = results.next().unwrap();
        assert!(results.all(|other| other == first));
        first
    };
    match restore(rest) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(_) => assert!(applies(&desc)),
    }

    let image: Vec<u8> = rest.iter().copied().cycle().take(desc.bytes()).collect();
    if image.len() != desc.bytes() {
        return;
    }
    let Some(stream) = encode(&desc, &image) else {
        assert!(!applies(&desc));
        return;
    };
    assert!(stream.len() <= image.len() + 64);
    let predicted = entropy(&desc, &image);
    assert!(predicted.codes_bytes + predicted.scales_bytes <= image.len() as f64 + 1.0);
    assert!(restore(&stream) == Ok(image));
});
