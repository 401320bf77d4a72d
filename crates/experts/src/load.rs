//! From files to matrices: dense tensors by row blocks, experts matrix by matrix.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use container::{ByteRange, ContainerError, LayerKind, Model, QSource};
use formats::{ExpertDesc, Format, FormatError, MatrixDesc, QTensor};
use numerics::Isa;

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

/// Where the three matrices of an expert lie, and what they are.
#[derive(Clone, Debug)]
pub struct ExpertSource {
    /// Formats and shapes, shared by experts of the same kind.
    pub desc: Arc<ExpertDesc>,
    /// Gate, up, down: weights and, where the format keeps them apart, scales.
    parts: [(ByteRange, Option<ByteRange>); 3],
}

impl ExpertSource {
    /// Bytes read to load the expert.
    pub fn file_bytes(&self) -> u64 {
        self.parts.iter().map(|(weights, scales)| weights.len + scales.map_or(0, |s| s.len)).sum()
    }

    /// Largest read buffer its loading needs: one matrix with its scales.
    pub fn buffer_bytes(&self) -> u64 {
        let part = |(weights, scales): &(ByteRange, Option<ByteRange>)| {
            weights.len + scales.map_or(0, |s| s.len)
        };
        self.parts.iter().map(part).max().unwrap_or(0)
    }
}

/// The experts of a model, by layer.
#[derive(Debug, Default)]
pub struct ExpertTable {
    layers: Vec<Vec<ExpertSource>>,
}

impl ExpertTable {
    /// Resolves the experts of `layers` (empty entries for layers without any). `int8` says
    /// whether int8 activations may meet routed experts.
    pub fn new(
        model: &Model,
        layers: impl Iterator<Item = (usize, usize)>,
        int8: bool,
    ) -> Result<ExpertTable, ContainerError> {
        let mut descs: HashMap<[(Format, usize, usize); 3], Arc<ExpertDesc>> = HashMap::new();
        let mut table = ExpertTable::default();
        for (layer, experts) in layers {
            table.layers.resize_with(table.layers.len().max(layer + 1), Vec::new);
            table.layers[layer].reserve_exact(experts);
            for expert in 0..experts {
                let sources = model.expert_sources(layer, expert)?;
                let key = sources.each_ref().map(|s| (s.format, s.rows, s.cols));
                let desc = match descs.get(&key) {
                    Some(desc) => desc.clone(),
                    None => {
                        let desc = Arc::new(expert_desc(&sources, int8)?);
                        descs.insert(key, desc.clone());
                        desc
                    }
                };
                let parts = sources.map(|source| (source.weights, source.scales));
                table.layers[layer].push(ExpertSource { desc, parts });
            }
        }
        Ok(table)
    }

    /// The experts of every sparse decoder layer of a model.
    pub fn of(model: &Model, int8: bool) -> Result<ExpertTable, ContainerError> {
        let config = &model.config;
        let layers = (0..config.layers)
            .filter(|layer| config.layer_kind(*layer) == Some(LayerKind::Sparse))
            .map(|layer| (layer, config.moe.experts));
        ExpertTable::new(model, layers, int8)
    }

    /// Number of layers, those without experts included.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The experts of a layer.
    pub fn layer(&self, layer: usize) -> &[ExpertSource] {
        self.layers.get(layer).map_or(&[], Vec::as_slice)
    }

    /// Every expert.
    pub fn iter(&self) -> impl Iterator<Item = &ExpertSource> {
        self.layers.iter().flatten()
    }

    /// Bytes of the largest expert in memory; 0 without experts.
    pub fn slot_bytes_max(&self) -> u64 {
        self.iter().map(|source| source.desc.bytes() as u64).max().unwrap_or(0)
    }

    /// Bytes of all experts in memory.
    pub fn total_bytes(&self) -> u64 {
        self.iter().map(|source| source.desc.bytes() as u64).sum()
    }
}

fn expert_desc(sources: &[QSource; 3], int8: bool) -> Result<ExpertDesc, ContainerError> {
    let desc = |source: &QSource| {
        MatrixDesc::for_matmul(source.format, source.rows, source.cols, int8).map_err(|error| {
            ContainerError::Config {
                source_name: source.name.clone(),
                field: "shape".to_owned(),
                problem: error.to_string(),
            }
        })
    };
    Ok(ExpertDesc { gate: desc(&sources[0])?, up: desc(&sources[1])?, down: desc(&sources[2])? })
}

/// Reads an expert and stores it in `slot`, zeroed and of its descriptor's bytes. `buffer` is
/// reused between calls. `name` names the expert in errors.
pub fn load_expert(
    reader: &Reader,
    name: &str,
    source: &ExpertSource,
    buffer: &mut Vec<u8>,
    slot: &mut [u8],
) -> Result<(), LoadError> {
    for (matrix, (weights, scales)) in source.parts.iter().enumerate() {
        let (weight_bytes, scale_bytes) =
            (weights.len as usize, scales.map_or(0, |s| s.len as usize));
        if buffer.len() < weight_bytes + scale_bytes {
            // Exactly what the ledger was told, for the largest matrix at once.
            let largest = source.buffer_bytes() as usize;
            buffer.reserve_exact(largest - buffer.len());
            buffer.resize(largest, 0);
        }
        let (weight_buffer, rest) = buffer.split_at_mut(weight_bytes);
        let scale_buffer = &mut rest[..scale_bytes];
        let read = |range: &ByteRange, buffer: &mut [u8]| {
            reader
                .read_exact(range.file, range.offset, buffer)
                .map_err(|source| LoadError::Read { tensor: name.to_owned(), source })
        };
        read(weights, weight_buffer)?;
        if let Some(scales) = scales {
            read(scales, scale_buffer)?;
        }
        let is_e8 = source.desc.format(matrix) == Format::E8Iq3;
        let checked = if is_e8 { check_tag(scale_buffer) } else { Ok(()) };
        let stored =
            checked.and_then(|()| source.desc.store(matrix, weight_buffer, scale_buffer, slot));
        stored.map_err(|error| LoadError::Format {
            tensor: format!("{name} {}", ["gate", "up", "down"][matrix]),
            path: reader.path(weights.file).to_owned(),
            row: 0,
            offset: weights.offset,
            source: error,
        })?;
    }
    Ok(())
}
