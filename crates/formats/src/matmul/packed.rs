//! Selected int8 rows in the order in which the many-rows kernels read them.

use numerics::Compute;
use numerics::int8::Int8Rows;
use numerics::scratch::Buf;
use numerics::simd::MatrixTiles;
use numerics::team::rows_mut;

use super::Rows;

/// Rows whose sums one pass over a tile serves: their codes of one block, beside their sums, stay
/// in the nearest cache.
pub const CHUNK_ROWS: usize = 64;

/// Bytes that one task of the thread team packs, at least.
const GRAIN_BYTES: usize = 64 << 10;

/// What a kernel wants of its packed rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packing {
    /// Weight codes exceed their values by it.
    pub bias: i32,
    /// Rows are padded with zeros to a multiple of it.
    pub row_unit: usize,
    /// The matrix tiles that multiply them, if any.
    pub matrix_tiles: Option<MatrixTiles>,
}

/// Int8 rows, cut in chunks of equal length: per chunk and block, the codes of all its rows.
pub struct PackedRows {
    source: *const Int8Rows,
    packing: Packing,
    rows: usize,
    chunk_rows: usize,
    blocks: usize,
    block: usize,
    codes: Buf<i8>,
    scales: Buf<f32>,
    corrections: Buf<i32>,
}

// SAFETY: `source` is only compared, never followed.
unsafe impl Sync for PackedRows {}

/// One chunk of [`PackedRows`].
#[derive(Clone, Copy)]
pub struct PackedChunk<'a> {
    /// First row.
    pub first: usize,
    /// Rows that count.
    pub rows: usize,
    /// Rows with padding.
    padded: usize,
    /// Rows in memory from block to block.
    stride: usize,
    block: usize,
    codes: &'a [i8],
    scales: &'a [f32],
    corrections: &'a [i32],
}

/// One block of a chunk.
pub struct PackedBlock<'a> {
    /// Codes of all rows of the chunk, with padding.
    pub codes: &'a [i8],
    /// Scale of each row.
    pub scales: &'a [f32],
    /// What to add to each row's sum of products so that the codes' bias drops out.
    pub corrections: &'a [i32],
}

impl PackedRows {
    /// Packs the rows that take part.
    pub fn new(compute: &Compute, x: &Int8Rows, rows: &Rows<'_>, packing: Packing) -> PackedRows {
        let count = rows.count.max(1);
        let chunks = count.div_ceil(CHUNK_ROWS);
        let chunk_rows = count.div_ceil(chunks).next_multiple_of(packing.row_unit);
        let chunks = count.div_ceil(chunk_rows);
        let (block, blocks) = (x.block(), x.cols().div_ceil(x.block()));
        let per_chunk = blocks * chunk_rows;
        let mut codes = compute.scratch.filled_later(chunks * per_chunk * block);
        let mut scales = compute.scratch.filled_later(chunks * per_chunk);
        let mut corrections = compute.scratch.filled_later(chunks * per_chunk);
        let parts = (
            rows_mut(&mut codes, chunk_rows * block),
            rows_mut(&mut scales, chunk_rows),
            rows_mut(&mut corrections, chunk_rows),
        );
        let grain = GRAIN_BYTES.div_ceil(chunk_rows * block);
        compute.team.rows(chunks * blocks, grain, parts, |range, (codes, scales, corrections)| {
            let codes = codes.chunks_exact_mut(chunk_rows * block);
            let factors =
                scales.chunks_exact_mut(chunk_rows).zip(corrections.chunks_exact_mut(chunk_rows));
            for (at, (codes, (scales, corrections))) in range.zip(codes.zip(factors)) {
                let (chunk, index) = (at / blocks, at % blocks);
                let in_chunk = chunk_rows.min(rows.count - chunk * chunk_rows);
                for (r, to) in codes.chunks_exact_mut(block).enumerate().take(in_chunk) {
                    let row = x.row(rows.get(chunk * chunk_rows + r));
                    let from = &row.codes[index * block..];
                    match (to.first_chunk_mut::<64>(), from.first_chunk::<64>()) {
                        // Most blocks: a copy of known length.
                        (Some(to), Some(from)) => *to = *from,
                        _ => {
                            let len = block.min(from.len());
                            to[..len].copy_from_slice(&from[..len]);
                            to[len..].fill(0);
                        }
                    }
                    scales[r] = row.scales[index];
                    corrections[r] = -packing.bias * row.sums[index];
                }
                codes[in_chunk * block..].fill(0);
                scales[in_chunk..].fill(0.0);
                corrections[in_chunk..].fill(0);
            }
        });
        let (source, rows) = (std::ptr::from_ref(x), rows.count);
        PackedRows { source, packing, rows, chunk_rows, blocks, block, codes, scales, corrections }
    }

    /// Whether these are the given rows in the given packing.
    pub fn is_of(&self, x: &Int8Rows, packing: Packing) -> bool {
        std::ptr::eq(self.source, x) && self.packing == packing
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The matrix tiles that are to multiply these rows.
    pub fn matrix_tiles(&self) -> Option<MatrixTiles> {
        self.packing.matrix_tiles
    }

    /// The chunks in order.
    pub fn chunks(&self) -> impl Iterator<Item = PackedChunk<'_>> {
        (0..self.rows.div_ceil(self.chunk_rows)).map(|chunk| {
            let first = chunk * self.chunk_rows;
            let per_chunk = self.blocks * self.chunk_rows;
            let rows = self.chunk_rows.min(self.rows - first);
            PackedChunk {
                first,
                rows,
                padded: rows.next_multiple_of(self.packing.row_unit),
                stride: self.chunk_rows,
                block: self.block,
                codes: &self.codes[chunk * per_chunk * self.block..][..per_chunk * self.block],
                scales: &self.scales[chunk * per_chunk..][..per_chunk],
                corrections: &self.corrections[chunk * per_chunk..][..per_chunk],
            }
        })
    }
}

impl<'a> PackedChunk<'a> {
    /// Block `index`.
    #[inline(always)]
    pub fn block(&self, index: usize) -> PackedBlock<'a> {
        let at = index * self.stride;
        PackedBlock {
            codes: &self.codes[at * self.block..][..self.padded * self.block],
            scales: &self.scales[at..][..self.padded],
            corrections: &self.corrections[at..][..self.padded],
        }
    }
}
