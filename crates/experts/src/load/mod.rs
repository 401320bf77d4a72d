//! From files to matrices: dense tensors by row blocks, experts as whole records.

mod expert;

use std::path::PathBuf;

use container::{ByteRange, Layout, QSource};
use formats::{Format, FormatError, MatrixDesc, MatrixRef, QTensor, rans};
use numerics::Isa;

pub(crate) use expert::name_of;
pub use expert::{ExpertSource, ExpertTable, LoadMemory, check_crc, load_expert, verify};

use crate::reader::{ReadError, Reader};

/// Bytes of weights read at once into a dense tensor.
const BLOCK_BYTES: usize = 4 << 20;

/// Bytes that could not be read or are not what they should be.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Reading failed.
    #[error("{tensor}: {source}")]
    Read {
        /// The tensor.
        tensor: String,
        /// What happened.
        #[source]
        source: ReadError,
    },
    /// The bytes are not a matrix of their format.
    #[error(
        "{}: tensor {tensor} (rows from {row}, at byte {offset}): {source}; \
         the file is damaged or not of this format, fetch or convert it again", path.display()
    )]
    Format {
        /// The tensor.
        tensor: String,
        /// The file.
        path: PathBuf,
        /// First row of the block that was refused.
        row: usize,
        /// Offset of the block in the file.
        offset: u64,
        /// What is wrong.
        #[source]
        source: FormatError,
    },
    /// The bytes of an expert are not those that were written.
    #[error(
        "{}: {expert} (record at byte {offset}): CRC-32C is {found:08x}, {recorded:08x} was \
         recorded; the drive or the file is damaged, check it with coli doctor --deep and fetch \
         or convert it again", path.display()
    )]
    Checksum {
        /// The expert.
        expert: String,
        /// The file.
        path: PathBuf,
        /// First byte of the record.
        offset: u64,
        /// What the container states.
        recorded: u32,
        /// What was read.
        found: u32,
    },
    /// The loader has a bug.
    #[error("{tensor}: its loader panicked; this is a bug, please report it")]
    Panicked {
        /// The tensor.
        tensor: String,
    },
}

fn read_range(reader: &Reader, name: &str, range: &ByteRange) -> Result<Vec<u8>, LoadError> {
    let mut bytes = vec![0; range.len as usize];
    reader
        .read_exact(range.file, range.offset, &mut bytes)
        .map_err(|source| LoadError::Read { tensor: name.to_owned(), source })?;
    Ok(bytes)
}

/// Loads a matrix in the arrangement of `desc`, block by block; the memory held beside it is
/// bounded by a few blocks.
pub fn load_matrix(
    reader: &Reader,
    source: &QSource,
    desc: MatrixDesc,
) -> Result<QTensor, LoadError> {
    let mut tensor = QTensor::zeroed(desc);
    for_each_block(reader, source, desc, desc.row_granule(), |rows, weights, scales| {
        tensor.store(rows, weights, scales)
    })?;
    Ok(tensor)
}

/// Reads a matrix by blocks of canonical rows and hands each to `take` with its scales. Blocks
/// start at multiples of `granule` rows, itself a multiple of the matrix's own.
pub fn for_each_block(
    reader: &Reader,
    source: &QSource,
    desc: MatrixDesc,
    granule: usize,
    mut take: impl FnMut(std::ops::Range<usize>, &[u8], &[u8]) -> Result<(), FormatError>,
) -> Result<(), LoadError> {
    if source.layout != Layout::Canonical {
        return for_each_tile_block(reader, source, granule, take);
    }
    if source.format == Format::E8Iq3
        && let Some(range) = &source.scales
    {
        let tag = read_range(reader, &source.name, range)?;
        check_tag(&tag).map_err(|error| LoadError::Format {
            tensor: source.name.clone(),
            path: reader.path(range.file).to_owned(),
            row: 0,
            offset: range.offset,
            source: error,
        })?;
    }
    let mut scales = Vec::new();
    let row_bytes = desc.format().row_bytes(desc.cols()).unwrap_or(0);
    assert!(granule.is_multiple_of(desc.row_granule()));
    let rows = (BLOCK_BYTES / row_bytes.max(1)).next_multiple_of(granule).max(granule);
    let mut buffer = vec![0; rows.min(desc.rows()) * row_bytes];
    for start in (0..desc.rows()).step_by(rows) {
        let end = (start + rows).min(desc.rows());
        let bytes = &mut buffer[..(end - start) * row_bytes];
        let offset = source.weights.offset + (start * row_bytes) as u64;
        reader
            .read_exact(source.weights.file, offset, bytes)
            .map_err(|error| LoadError::Read { tensor: source.name.clone(), source: error })?;
        let of_rows = desc.scale_range(start..end);
        scales.resize(of_rows.len(), 0);
        if let Some(range) = source.scales.as_ref().filter(|_| !of_rows.is_empty()) {
            let offset = range.offset + of_rows.start as u64;
            reader
                .read_exact(range.file, offset, &mut scales)
                .map_err(|error| LoadError::Read { tensor: source.name.clone(), source: error })?;
        }
        take(start..end, bytes, &scales).map_err(|error| LoadError::Format {
            tensor: source.name.clone(),
            path: reader.path(source.weights.file).to_owned(),
            row: start,
            offset,
            source: error,
        })?;
    }
    Ok(())
}

/// [`for_each_block`] of a matrix that is stored in tiles, as they are or coded.
fn for_each_tile_block(
    reader: &Reader,
    source: &QSource,
    granule: usize,
    mut take: impl FnMut(std::ops::Range<usize>, &[u8], &[u8]) -> Result<(), FormatError>,
) -> Result<(), LoadError> {
    let failed = |error| LoadError::Format {
        tensor: source.name.clone(),
        path: reader.path(source.weights.file).to_owned(),
        row: 0,
        offset: source.weights.offset,
        source: error,
    };
    let desc = MatrixDesc::for_matmul(source.format, source.rows, source.cols, false);
    let desc = desc.map_err(failed)?;
    let stored = read_range(reader, &source.name, &source.weights)?;
    let tiles = match source.layout {
        Layout::R16k4Rans => {
            let mut tiles = vec![0; desc.bytes()];
            let memory = &mut rans::Workspace::default();
            rans::decode(Isa::detect(), &desc, &stored, &mut tiles, memory).map_err(failed)?;
            tiles
        }
        Layout::Canonical | Layout::R16k4 => stored,
    };
    desc.check(&tiles).map_err(failed)?;
    let matrix = MatrixRef { desc, data: &tiles };
    let step = granule.next_multiple_of(desc.row_granule());
    let row_bytes = source.format.row_bytes(source.cols).unwrap_or(0).max(1);
    let rows = (BLOCK_BYTES / row_bytes).next_multiple_of(step).max(step);
    let (mut weights, mut scales) = (Vec::new(), Vec::new());
    for start in (0..source.rows).step_by(rows) {
        let block = start..(start + rows).min(source.rows);
        weights.clear();
        scales.clear();
        matrix.append_canonical(block.clone(), &mut weights, &mut scales);
        take(block, &weights, &scales).map_err(failed)?;
    }
    Ok(())
}

/// Refuses an e8 tag that is not a number; its value is free.
fn check_tag(tag: &[u8]) -> Result<(), FormatError> {
    let finite = tag.first_chunk().is_some_and(|four| f32::from_le_bytes(*four).is_finite());
    if finite { Ok(()) } else { Err(FormatError::Scale { format: Format::E8Iq3, index: 0 }) }
}

/// Loads a vector or small matrix as f32, row by row.
pub fn load_f32(reader: &Reader, source: &QSource) -> Result<Vec<f32>, LoadError> {
    let desc = row_desc(reader, source)?;
    let (format, cols) = (source.format, source.cols);
    let mut out = vec![0.0; source.rows * cols];
    for_each_block(reader, source, desc, desc.row_granule(), |rows, weights, scales| {
        // Stored once to have the values checked as every other matrix's.
        let mut checked = QTensor::zeroed(MatrixDesc::for_rows(format, rows.len(), cols)?);
        checked.store(0..rows.len(), weights, scales)?;
        for (at, row) in rows.clone().enumerate() {
            let values = &mut out[row * cols..][..cols];
            checked.view().decode_row(Isa::detect(), at, values);
        }
        Ok(())
    })?;
    Ok(out)
}

fn row_desc(reader: &Reader, source: &QSource) -> Result<MatrixDesc, LoadError> {
    let desc = MatrixDesc::for_rows(source.format, source.rows, source.cols);
    desc.map_err(|error| LoadError::Format {
        tensor: source.name.clone(),
        path: reader.path(source.weights.file).to_owned(),
        row: 0,
        offset: source.weights.offset,
        source: error,
    })
}
