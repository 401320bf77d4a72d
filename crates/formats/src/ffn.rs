//! The one expert FFN of the program: `down(silu(gate(x)) * up(x))`, used by the local store, by
//! shared experts, by dense layers and by workers.

use std::ops::Range;

use numerics::{Compute, NumericError};

use crate::matmul::{self, Rows};
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

/// Most experts of one call of [`expert_ffns`].
pub const EXPERTS_MAX: usize = 8;

/// Matrices of an expert start at multiples of it within its bytes.
const ALIGN: usize = 64;

impl ExpertDesc {
    /// Where gate, up and down lie within the expert's bytes.
    pub fn ranges(&self) -> [Range<usize>; 3] {
        let mut at = 0;
        self.matrices().map(|desc| {
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
        self.matrices()[matrix].format()
    }

    /// The matrices: gate, up, down.
    pub fn matrices(&self) -> [&MatrixDesc; 3] {
        [&self.gate, &self.up, &self.down]
    }

    /// Checks an expert's bytes that are in place already; on error names the matrix too.
    pub fn check(&self, data: &[u8]) -> Result<(), (usize, FormatError)> {
        for (at, (desc, range)) in self.matrices().into_iter().zip(self.ranges()).enumerate() {
            desc.check(&data[range]).map_err(|error| (at, error))?;
        }
        Ok(())
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
        let desc = self.matrices()[matrix];
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

impl ExpertRef<'_> {
    /// Whether the matrices have the shapes of another expert's.
    pub fn has_shape_of(&self, other: &ExpertRef<'_>) -> bool {
        let shape = |expert: &ExpertRef<'_>| {
            [expert.gate, expert.up, expert.down].map(|m| (m.desc.rows(), m.desc.cols()))
        };
        shape(self) == shape(other)
    }
}

/// An expert and the rows of a layer's input that it serves, all of them for `None`.
#[derive(Clone, Copy)]
pub struct ExpertWork<'a> {
    /// The expert.
    pub expert: ExpertRef<'a>,
    /// Its rows.
    pub rows: Option<&'a [u32]>,
}

impl<'a> ExpertWork<'a> {
    pub(crate) fn rows_of(&self, input: &Input<'_>) -> Rows<'a> {
        Rows::select(input, self.rows)
    }
}

/// Why experts could not be computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum FfnError {
    /// The layer's input; the row is the input's.
    #[error("{0}")]
    Input(NumericError),
    /// What expert `at` of the call made of it; the row counts the expert's own.
    #[error("expert {at} of the call: {error}")]
    Expert {
        /// Index among the experts of the call.
        at: usize,
        /// What happened.
        error: NumericError,
    },
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
    expert_ffns(compute, &[ExpertWork { expert, rows }], input, out).map_err(|error| match error {
        FfnError::Input(error) | FfnError::Expert { error, .. } => error,
    })
}

/// Computes up to [`EXPERTS_MAX`] experts of one shape, each for its rows, as shared parallel work;
/// `out` gets the rows of one after the other, unweighted.
pub fn expert_ffns(
    compute: &Compute,
    experts: &[ExpertWork<'_>],
    input: &Input<'_>,
    out: &mut [f32],
) -> Result<(), FfnError> {
    let Some(first) = experts.first() else { return Ok(()) };
    assert!(experts.len() <= EXPERTS_MAX, "too many experts in one call");
    let same = |work: &ExpertWork<'_>| work.expert.has_shape_of(&first.expert);
    assert!(experts.iter().all(same), "experts of different shapes in one call");
    let mut counts = [0; EXPERTS_MAX];
    for (count, work) in counts.iter_mut().zip(experts) {
        *count = work.rows_of(input).count();
    }
    let counts = &counts[..experts.len()];
    let total: usize = counts.iter().sum();
    let intermediate = first.expert.gate.desc.rows();
    let mut hidden = compute.scratch.filled_later(total * intermediate);
    matmul::gated(compute, experts, input, &mut hidden).map_err(FfnError::Input)?;
    let hidden = Input::new("expert intermediate", hidden, intermediate);
    matmul::projected(compute, experts, counts, &hidden, out).map_err(|error| {
        let (at, row) = expert_of_row(counts.iter().copied(), error.row());
        FfnError::Expert { at, error: error.in_row(row) }
    })
}

/// The expert that a row belongs to, and the row among the expert's own, where the rows of one
/// expert follow those of another; `counts` are their numbers of rows. A row beyond them counts
/// as the last one's.
pub fn expert_of_row(counts: impl Iterator<Item = usize>, row: usize) -> (usize, usize) {
    let (mut at, mut first, mut end) = (0, 0, 0);
    for (expert, count) in counts.enumerate() {
        if row < end && expert > 0 {
            break;
        }
        (at, first, end) = (expert, end, end + count);
    }
    (at, row - first)
}
