//! The one expert FFN of the program: `down(silu(gate(x)) * up(x))`, used by the local store, by
//! shared experts, by dense layers and by workers.

use std::ops::Range;

use numerics::{Compute, NumericError};

use crate::matmul::{matmul, matmul_gated};
use crate::{Format, FormatError, Input, MatrixDesc, MatrixRef};

/// Formats and shapes of an expert's matrices: gate and up `[intermediate, hidden]`, down
/// `[hidden, intermediate]`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertDesc {
    /// Gate projection.
    pub gate: MatrixDesc,
    /// Up projection.
    pub up: MatrixDesc,
    /// Down projection.
    pub down: MatrixDesc,
}

/// Matrices of an expert start at multiples of it within its bytes.
const ALIGN: usize = 64;

impl ExpertDesc {
    /// Where gate, up and down lie within the expert's bytes.
    pub fn ranges(&self) -> [Range<usize>; 3] {
        let mut at = 0;
        [&self.gate, &self.up, &self.down].map(|desc| {
            let start = at;
            at = (start + desc.bytes()).next_multiple_of(ALIGN);
            start..start + desc.bytes()
        })
    }

    /// Bytes of an expert in memory.
    pub fn bytes(&self) -> usize {
        self.ranges()[2].end
    }

    /// The matrices within `data`, of [`ExpertDesc::bytes`] bytes.
    pub fn view<'a>(&self, data: &'a [u8]) -> ExpertRef<'a> {
        let [gate, up, down] = self.ranges();
        ExpertRef {
            gate: MatrixRef { desc: self.gate, data: &data[gate] },
            up: MatrixRef { desc: self.up, data: &data[up] },
            down: MatrixRef { desc: self.down, data: &data[down] },
        }
    }

    /// Format of one matrix (0 gate, 1 up, 2 down).
    pub fn format(&self, matrix: usize) -> Format {
        [&self.gate, &self.up, &self.down][matrix].format()
    }

    /// Checks the canonical bytes of one matrix (0 gate, 1 up, 2 down) and stores it in the
    /// expert's zeroed bytes.
    pub fn store(
        &self,
        matrix: usize,
        weights: &[u8],
        scales: &[u8],
        data: &mut [u8],
    ) -> Result<(), FormatError> {
        let desc = [&self.gate, &self.up, &self.down][matrix];
        let range = self.ranges()[matrix].clone();
        // The e8 tag is a scale tensor by count, but belongs to no row.
        let scales = &scales[..desc.scale_range(0..desc.rows()).len().min(scales.len())];
        desc.store(0..desc.rows(), weights, scales, &mut data[range])
    }
}

/// An expert's matrices in memory.
#[derive(Clone, Copy)]
pub struct ExpertRef<'a> {
    /// Gate projection.
    pub gate: MatrixRef<'a>,
    /// Up projection.
    pub up: MatrixRef<'a>,
    /// Down projection.
    pub down: MatrixRef<'a>,
}

/// Computes the expert for rows `rows` of the layer's input (all of them for `None`) into `out`,
/// `[rows, hidden]`, unweighted.
pub fn expert_ffn(
    compute: &Compute,
    expert: ExpertRef<'_>,
    input: &Input<'_>,
    rows: Option<&[u32]>,
    out: &mut [f32],
) -> Result<(), NumericError> {
    let count = rows.map_or(input.rows(), <[u32]>::len);
    let intermediate = expert.gate.desc.rows();
    let mut gated = compute.scratch.filled_later(count * intermediate);
    matmul_gated(compute, [expert.gate, expert.up], input, rows, &mut gated)?;
    let hidden = Input::new("expert intermediate", gated, intermediate);
    matmul(compute, expert.down, &hidden, None, out)
}
