//! Matrix products: rows of activations with stored matrices, at every level.
//!
//! Tiles give 16 outputs at once, one lane each. With int8 activations a block of products is an
//! exact integer, then one fused multiply-add per block, ascending (rule 3). With f32 activations
//! one accumulator per output takes the inputs in ascending order, one fused multiply-add each.
//! Formats without tiles use the 32 lanes of rule 2. A row's result never depends on the others:
//! rows are only grouped to decode weights once for several of them: a [`few`], and up to eight
//! packed ones, in registers, [`many`] through a decoded panel.

mod few;
mod many;
mod packed;
mod plain;

use numerics::multiversion;
use numerics::simd::{MatrixTiles, Portable, Simd};
use numerics::team::{Columns, Target};
use numerics::{Compute, NumericError, function};

use crate::ffn::{EXPERTS_MAX, ExpertWork};
use crate::input::{Input, Operand};
use crate::int2::Int2;
use crate::int3::Int3;
use crate::int4::Int4;
use crate::int8::Int8;
use crate::matmul::packed::{PackedRows, Packing};
use crate::mxfp4::Mxfp4;
use crate::tile::{Codes, ROWS, Scaling};
use crate::{Format, MatrixRef, e8};

/// Calls `$call` with the code type of a tiled format; `$plain` for the others.
macro_rules! for_codes {
    ($format:expr, |$codes:ident| $call:expr, $plain:expr) => {
        match $format {
            Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8B128(_) => $plain,
            Format::Int8Row => {
                type $codes = Int8;
                $call
            }
            Format::Int4Row => {
                type $codes = Int4<false>;
                $call
            }
            Format::Int2Row => {
                type $codes = Int2;
                $call
            }
            Format::Int4Grouped(_) => {
                type $codes = Int4<true>;
                $call
            }
            Format::Int3G64 => {
                type $codes = Int3;
                $call
            }
            Format::E8Iq3 => {
                type $codes = e8::E8;
                $call
            }
            Format::Mxfp4 => {
                type $codes = Mxfp4;
                $call
            }
        }
    };
}

/// Rows that are multiplied as they are, not packed, and without matrix tiles at every level.
pub const FEW_ROWS_MAX: usize = few::ROWS_MAX;
/// Output rows per unit of parallel work: two pairs of tiles.
const GRAIN: usize = 64;
/// Rows from which one unit is work enough for a task. With more tasks than needed, a thread that
/// is slower than others holds them up less.
const BUSY_ROWS: usize = 16;

/// Output rows per task of a product of `rows` rows.
fn task_columns(compute: &Compute, width: usize, rows: usize) -> usize {
    if rows >= BUSY_ROWS { GRAIN } else { compute.team.step(width, GRAIN) }
}

/// `out[i, o]` = activations row `rows[i]` (or row `i` where `rows` is `None`) times matrix row
/// `o`. `out` is `[rows, desc.rows()]`.
pub fn matmul(
    compute: &Compute,
    matrix: MatrixRef<'_>,
    input: &Input<'_>,
    rows: Option<&[u32]>,
    out: &mut [f32],
) -> Result<(), NumericError> {
    matmul_each(compute, [matrix], input, rows, [out])
}

/// The products of the same rows with several matrices, as one piece of parallel work.
pub fn matmul_each<const N: usize>(
    compute: &Compute,
    matrices: [MatrixRef<'_>; N],
    input: &Input<'_>,
    rows: Option<&[u32]>,
    outs: [&mut [f32]; N],
) -> Result<(), NumericError> {
    let rows = Rows::select(input, rows);
    let prepared = Prepared::new(compute, &of_level(compute), matrices, input, rows)?;
    let mut at = 0;
    let mut targets = outs.map(|out| {
        let width = matrices[at].desc.rows();
        at += 1;
        assert_eq!(out.len(), rows.count * width);
        Target::new(out, width, task_columns(compute, width, rows.count))
    });
    let run = |matrix: usize, out: &mut Columns<'_>| run(compute.isa, &prepared.job(matrix), out);
    compute.team.columns_of(&mut targets, run);
    Ok(())
}

/// [`matmul`] of many int8 rows, on one thread, by the way of levels that have matrix tiles, with
/// products emulated: all of it but the instructions themselves. For tests.
#[doc(hidden)]
pub fn matmul_in_emulated_tiles(
    compute: &Compute,
    matrix: MatrixRef<'_>,
    input: &Input<'_>,
    out: &mut [f32],
) -> Result<(), NumericError> {
    let tiles = Portable::<true>;
    let packing = |format| packing_kernel(tiles, format, Some(MatrixTiles::Emulated));
    let rows = Rows::select(input, None);
    let prepared = Prepared::new(compute, &packing, [matrix], input, rows)?;
    let (job, mut out) = (prepared.job(0), Columns::of(out, 0..matrix.desc.rows()));
    if let Some(packed) = job.packed {
        let format = matrix.desc.format();
        for_codes!(format, |C| many::int8_tiles::<_, C>(tiles, &job, packed, &mut out), {});
    }
    Ok(())
}

/// Fills an array of [`EXPERTS_MAX`] for each item of a slice.
fn group<T, R>(
    items: &[T],
    mut make: impl FnMut(&T) -> Result<R, NumericError>,
) -> Result<[Option<R>; EXPERTS_MAX], NumericError> {
    let mut made = [const { None }; EXPERTS_MAX];
    for (made, item) in made.iter_mut().zip(items) {
        *made = Some(make(item)?);
    }
    Ok(made)
}

/// For each of up to [`EXPERTS_MAX`] experts and its rows of the input: silu of the product with
/// its gate, times the product with its up matrix, one expert after the other in `out`. One piece
/// of parallel work.
pub(crate) fn gated(
    compute: &Compute,
    experts: &[ExpertWork<'_>],
    input: &Input<'_>,
    out: &mut [f32],
) -> Result<(), NumericError> {
    let prepared = group(experts, |work| {
        let (matrices, rows) = ([work.expert.gate, work.expert.up], work.rows_of(input));
        Prepared::new(compute, &of_level(compute), matrices, input, rows)
    })?;
    let width = experts[0].expert.gate.desc.rows();
    let mut targets = targets_of(compute, &prepared, width, out);
    compute.team.columns_of(&mut targets[..experts.len()], |expert, out| {
        let Some(prepared) = &prepared[expert] else { return };
        run(compute.isa, &prepared.job(0), out);
        let mut ups = compute.scratch.filled_later(out.rows() * out.range().len());
        let mut ups = Columns::of(&mut ups, out.range());
        run(compute.isa, &prepared.job(1), &mut ups);
        for row in 0..out.rows() {
            function::silu_mul(compute.isa, out.row(row), ups.row(row));
        }
    });
    Ok(())
}

/// The product of each expert's down matrix with its rows of `hidden`, which follow each other as
/// those of `out` do. One piece of parallel work.
pub(crate) fn projected(
    compute: &Compute,
    experts: &[ExpertWork<'_>],
    counts: &[usize],
    hidden: &Input<'_>,
    out: &mut [f32],
) -> Result<(), NumericError> {
    let mut first = 0;
    let mut at = 0;
    let prepared = group(experts, |work| {
        let rows = Rows { selected: None, first, count: counts[at] };
        first += counts[at];
        at += 1;
        Prepared::new(compute, &of_level(compute), [work.expert.down], hidden, rows)
    })?;
    let width = experts[0].expert.down.desc.rows();
    let mut targets = targets_of(compute, &prepared, width, out);
    compute.team.columns_of(&mut targets[..experts.len()], |expert, out| {
        if let Some(prepared) = &prepared[expert] {
            run(compute.isa, &prepared.job(0), out);
        }
    });
    Ok(())
}

/// A target for the rows of each of a group, `width` outputs wide and one after the other in `out`;
/// empty ones for the rest.
fn targets_of<'a, const N: usize>(
    compute: &Compute,
    prepared: &[Option<Prepared<'_, N>>; EXPERTS_MAX],
    width: usize,
    out: &'a mut [f32],
) -> [Target<'a>; EXPERTS_MAX] {
    let mut rest = out;
    prepared.each_ref().map(|prepared| {
        let rows = prepared.as_ref().map_or(0, |prepared| prepared.rows.count);
        let (mine, others) = std::mem::take(&mut rest).split_at_mut(rows * width);
        rest = others;
        Target::new(mine, width, task_columns(compute, width, rows))
    })
}

/// How the level of a computation wants its rows packed.
fn of_level(compute: &Compute) -> impl Fn(Format) -> Packing {
    let isa = compute.isa;
    move |format| packing(isa, format, isa.matrix_tiles())
}

/// Which activation rows take part.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    selected: Option<&'a [u32]>,
    /// First row where none are selected.
    first: usize,
    count: usize,
}

impl<'a> Rows<'a> {
    /// The selected rows of an input, or all of them.
    pub(crate) fn select(input: &Input<'_>, selected: Option<&'a [u32]>) -> Rows<'a> {
        let count = selected.map_or(input.rows(), <[u32]>::len);
        Rows { selected, first: 0, count }
    }

    /// Number of rows.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    #[inline(always)]
    fn get(&self, index: usize) -> usize {
        self.selected.map_or(self.first + index, |rows| rows[index] as usize)
    }
}

/// The activations in the forms that some matrices take.
struct Prepared<'a, const N: usize> {
    matrices: [MatrixRef<'a>; N],
    operands: [Operand<'a>; N],
    rows: Rows<'a>,
    /// Rows packed for the many-rows kernels, and which of them each matrix takes.
    packed: Vec<PackedRows>,
    packed_of: [Option<usize>; N],
}

impl<'a, const N: usize> Prepared<'a, N> {
    fn new(
        compute: &Compute,
        packing: &dyn Fn(Format) -> Packing,
        matrices: [MatrixRef<'a>; N],
        input: &'a Input<'_>,
        rows: Rows<'a>,
    ) -> Result<Prepared<'a, N>, NumericError> {
        let count = rows.count;
        let mut operands = [Operand::F32 { rows: &[], stride: 0 }; N];
        let (mut packed, mut packed_of) = (Vec::<PackedRows>::new(), [None; N]);
        for (at, matrix) in matrices.iter().enumerate() {
            operands[at] = input.operand(compute, &matrix.desc)?;
            let Operand::Int8(x) = operands[at] else { continue };
            if count <= few::ROWS_MAX {
                continue;
            }
            let packing = packing(matrix.desc.format());
            let found = packed.iter().position(|known| known.is_of(x, packing));
            packed_of[at] = Some(found.unwrap_or(packed.len()));
            if found.is_none() {
                packed.push(PackedRows::new(compute, x, &rows, packing));
            }
        }
        Ok(Prepared { matrices, operands, rows, packed, packed_of })
    }

    fn job(&self, at: usize) -> Job<'_> {
        Job {
            matrix: self.matrices[at],
            operand: self.operands[at],
            packed: self.packed_of[at].map(|index| &self.packed[index]),
            rows: self.rows,
        }
    }
}

struct Job<'a> {
    matrix: MatrixRef<'a>,
    operand: Operand<'a>,
    /// The int8 operand, packed, where there are many rows.
    packed: Option<&'a PackedRows>,
    rows: Rows<'a>,
}

multiversion! {
    /// Computes the columns of `out` (from a multiple of 16 on) for all rows.
    fn run(isa, job: &Job<'_>, out: &mut Columns<'_>) => run_kernel;
    /// How a format's many-rows kernel wants int8 activations at a level.
    fn packing(isa, format: Format, matrix_tiles: Option<MatrixTiles>) -> Packing => packing_kernel;
}

#[inline(always)]
fn run_kernel<S: Simd>(simd: S, job: &Job<'_>, out: &mut Columns<'_>) {
    for_codes!(
        job.matrix.desc.format(),
        |C| if few::takes::<S, C>(job) {
            few::tiles::<S, C>(simd, job, out)
        } else {
            many::tiles::<S, C>(simd, job, out)
        },
        plain::rows(simd, job, out)
    )
}

#[inline(always)]
fn packing_kernel<S: Simd>(_simd: S, format: Format, matrix_tiles: Option<MatrixTiles>) -> Packing {
    let plain = Packing { bias: 0, row_unit: 1, matrix_tiles: None };
    for_codes!(format, |C| many::packing::<S, C>(matrix_tiles), plain)
}

impl<'a> Job<'a> {
    /// The tile that holds output `column`, of a matrix that has tiles.
    #[inline(always)]
    fn tile(&self, column: usize) -> &'a [u8] {
        let Some((_, tile_bytes)) = self.matrix.desc.tile() else {
            // A matrix of these formats kept row by row is only ever decoded.
            panic!("a {} matrix stored by rows cannot be multiplied", self.matrix.desc.format());
        };
        &self.matrix.data[column / ROWS * tile_bytes..][..tile_bytes]
    }
}

/// The 16 f32 at the start of `bytes`.
#[inline(always)]
fn load_f32<S: Simd>(simd: S, bytes: &[u8]) -> S::F {
    simd.load_f32_le(&bytes.as_chunks::<64>().0[0])
}

/// Writes the outputs of one tile for a row, as many as there are columns.
#[inline(always)]
fn put_tile(
    out: &mut Columns<'_>,
    row: usize,
    columns: std::ops::Range<usize>,
    values: &[f32; ROWS],
) {
    if columns.len() >= ROWS {
        out.put_array(row, columns.start, values);
    } else {
        out.put(row, columns.start, &values[..columns.len()]);
    }
}

/// Bytes ahead of the codes being multiplied that are asked for: far enough for memory to answer,
/// near enough to be used before they are replaced.
const PREFETCH_BYTES: usize = 4096;

/// Asks for what lies [`PREFETCH_BYTES`] behind some bytes of weights, as many lines as they have.
#[inline(always)]
fn prefetch<S: Simd>(simd: S, chunks: &[u8]) {
    for line in (0..chunks.len()).step_by(64) {
        simd.prefetch(chunks.as_ptr().wrapping_add(line + PREFETCH_BYTES));
    }
}

/// Four int8 activations as one word.
#[inline(always)]
fn x_word(four: [i8; 4]) -> u32 {
    let [a, b, c, d] = four;
    u32::from_le_bytes([a as u8, b as u8, c as u8, d as u8])
}

/// Scales of a block for 16 rows: `header` is its group's, `chunk` its first chunk.
#[inline(always)]
fn block_scales<S: Simd, C: Codes>(simd: S, header: &[u8], chunk: &[u8]) -> S::F {
    match C::SCALING {
        Scaling::Row => simd.splat_f32(1.0),
        Scaling::Group => load_f32(simd, header),
        Scaling::Ue8m0Half => {
            let scales = simd.load_ue8m0(&header.as_chunks::<16>().0[0]);
            simd.mul_f32(scales, simd.splat_f32(0.5))
        }
        Scaling::E8 => {
            let d = simd.load_f16(&header.as_chunks::<32>().0[0]);
            let words = crate::tile::load(simd, &chunk[C::CHUNK_BYTES - 4 * ROWS..]);
            let code = simd.to_f32(simd.shr(words, 28));
            let code = simd.add_f32(code, simd.splat_f32(0.5));
            // Both products are exact: 11 bits of d, 5 of the code, a power of two.
            simd.mul_f32(d, simd.mul_f32(code, simd.splat_f32(0.25)))
        }
    }
}

/// `sums · (scales · x_scale) + acc`, as rule 3 says, for exact integer sums.
#[inline(always)]
fn add_block<S: Simd, C: Codes>(
    simd: S,
    sums: S::I,
    scales: S::F,
    x_scale: f32,
    acc: S::F,
) -> S::F {
    let x_scale = simd.splat_f32(x_scale);
    let scale = match C::SCALING {
        Scaling::Row => x_scale,
        Scaling::Group | Scaling::Ue8m0Half | Scaling::E8 => simd.mul_f32(scales, x_scale),
    };
    simd.fma(simd.to_f32(sums), scale, acc)
}
