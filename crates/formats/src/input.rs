//! The rows that meet a weight matrix, in every form that formats ask for, each made once.
//!
//! Several matrices share one [`Input`]: the projections of a layer, gate and up of every expert.
//! The e8 rotation of the rows happens here and nowhere else, so no caller can leave it out.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use numerics::hadamard::Rotation;
use numerics::int8::Int8Rows;
use numerics::team::rows_mut;
use numerics::{Activations, Buf, Compute, NumericError};

use crate::{Format, MatrixDesc, tile::TileShape};

/// f32 rows are padded with zeros to a multiple of it where tiles read them.
const PAD: usize = 32;

/// Activation blocks that formats use: int8 forms are kept by (rotated, block).
const BLOCKS: [(bool, usize); 5] = [(false, 16), (false, 32), (false, 48), (false, 64), (true, 32)];

/// Rows that one task of the thread team turns into another form, at least.
const GRAIN: usize = 8;

/// The numbers of an [`Input`], its own or borrowed.
pub enum Values<'a> {
    /// Lent by the caller.
    Borrowed(&'a [f32]),
    /// Handed over.
    Owned(Buf<f32>),
}

impl<'a> From<&'a [f32]> for Values<'a> {
    fn from(values: &'a [f32]) -> Values<'a> {
        Values::Borrowed(values)
    }
}

impl From<Buf<f32>> for Values<'_> {
    fn from(values: Buf<f32>) -> Self {
        Values::Owned(values)
    }
}

impl From<Vec<f32>> for Values<'_> {
    fn from(values: Vec<f32>) -> Self {
        Values::Owned(values.into())
    }
}

impl Deref for Values<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Values::Borrowed(values) => values,
            Values::Owned(values) => values,
        }
    }
}

/// Rows of activations.
pub struct Input<'a> {
    what: &'static str,
    x: Values<'a>,
    cols: usize,
    rotated: OnceLock<Buf<f32>>,
    padded: [OnceLock<Buf<f32>>; 2],
    int8: [OnceLock<Result<Int8Rows, NumericError>>; BLOCKS.len()],
}

/// The form of the rows that a kernel reads.
#[derive(Clone, Copy)]
pub(crate) enum Operand<'a> {
    /// Rows of int8 blocks.
    Int8(&'a Int8Rows),
    /// Rows of f32, each `stride` apart.
    F32 { rows: &'a [f32], stride: usize },
}

impl<'a> Input<'a> {
    /// Rows of `cols` numbers; `what` names them in errors.
    pub fn new(what: &'static str, x: impl Into<Values<'a>>, cols: usize) -> Input<'a> {
        let x = x.into();
        assert!(cols > 0 && x.len().is_multiple_of(cols));
        Input {
            what,
            x,
            cols,
            rotated: OnceLock::new(),
            padded: Default::default(),
            int8: Default::default(),
        }
    }

    /// The name of the rows in errors.
    pub fn what(&self) -> &'static str {
        self.what
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.x.len() / self.cols
    }

    /// Numbers per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The rows as given.
    pub fn values(&self) -> &[f32] {
        &self.x
    }

    fn rotated(&self, compute: &Compute) -> &[f32] {
        self.rotated.get_or_init(|| {
            let rotation: Arc<Rotation> = Rotation::shared(self.cols);
            let mut rows = compute.scratch.copy(&self.x);
            let parts = rows_mut(&mut rows, self.cols);
            compute.team.rows(self.rows(), GRAIN, parts, |_, rows| {
                for row in rows.chunks_exact_mut(self.cols) {
                    rotation.apply(compute.isa, row);
                }
            });
            rows
        })
    }

    fn in_basis_of(&self, compute: &Compute, format: Format) -> &[f32] {
        if format.is_rotated() { self.rotated(compute) } else { &self.x }
    }

    /// The form in which `desc` takes these rows.
    pub(crate) fn operand(
        &self,
        compute: &Compute,
        desc: &MatrixDesc,
    ) -> Result<Operand<'_>, NumericError> {
        assert_eq!(self.cols, desc.cols(), "rows of another length than the matrix has inputs");
        let format = desc.format();
        let Some((shape, _)) = desc.tile() else {
            return Ok(Operand::F32 { rows: &self.x, stride: self.cols });
        };
        if compute.activations == Activations::Int8 && desc.takes_int8() {
            return self.int8(compute, format, &shape).map(Operand::Int8);
        }
        let rows = self.in_basis_of(compute, format);
        if self.cols.is_multiple_of(PAD) {
            return Ok(Operand::F32 { rows, stride: self.cols });
        }
        let stride = self.cols.next_multiple_of(PAD);
        let padded = self.padded[usize::from(format.is_rotated())].get_or_init(|| {
            let mut padded = compute.scratch.zeroed(self.rows() * stride);
            for (to, from) in padded.chunks_exact_mut(stride).zip(rows.chunks_exact(self.cols)) {
                to[..self.cols].copy_from_slice(from);
            }
            padded
        });
        Ok(Operand::F32 { rows: padded, stride })
    }

    fn int8(
        &self,
        compute: &Compute,
        format: Format,
        shape: &TileShape,
    ) -> Result<&Int8Rows, NumericError> {
        let key = (format.is_rotated(), shape.block);
        let slot = BLOCKS.iter().position(|&known| known == key);
        let slot = slot.unwrap_or_else(|| panic!("no activation form for {format}"));
        let made = self.int8[slot].get_or_init(|| {
            let rows = self.in_basis_of(compute, format);
            Int8Rows::quantise(compute, self.what, rows, self.cols, shape.block)
        });
        made.as_ref().map_err(NumericError::clone)
    }
}
