//! Shared by the tests: noise, encoded matrices and the list of formats.

use formats::{Encoder, Format, Fp8Scale};
use numerics::{Activations, Compute, Isa, Team};

/// Every format, with several groups.
pub const FORMATS: [Format; 18] = [
    Format::F32,
    Format::Bf16,
    Format::F16,
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
    Format::Int3G64,
    Format::E8Iq3,
    Format::Mxfp4,
    Format::Fp8B128(Fp8Scale::F32),
    Format::Fp8B128(Fp8Scale::Ue8m0),
];

/// Numbers that look like trained weights: a sum of uniform ones, with some outliers.
pub fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678_9abc_def1);
    let mut uniform = move || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..len)
        .map(|i| {
            let value = uniform() + uniform() + uniform() + uniform();
            if i % 97 == 5 { value * 4.0 } else { value }
        })
        .collect()
}

/// Canonical bytes of a matrix.
pub struct Encoded {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    pub weights: Vec<u8>,
    pub scales: Vec<u8>,
}

/// Encodes a matrix.
pub fn encode(format: Format, values: &[f32], cols: usize) -> Encoded {
    let (mut weights, mut scales) = (Vec::new(), Vec::new());
    let encoder = Encoder::new(format, cols);
    encoder.encode(Isa::detect(), values, &mut weights, &mut scales).unwrap();
    encoder.finish(&mut scales);
    Encoded { format, rows: values.len() / cols, cols, weights, scales }
}

/// A context at a level.
pub fn compute(isa: Isa, threads: usize, activations: Activations) -> Compute {
    Compute::new(isa, std::sync::Arc::new(Team::new(threads).unwrap()), activations)
}
