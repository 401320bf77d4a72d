//! From files to matrices: dense tensors by row blocks, experts as whole records.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use container::{ByteRange, ContainerError, LayerKind, Layout, Model, QSource, Record};
use formats::{Arrangement, ExpertDesc, Format, FormatError, MatrixDesc, MatrixRef, QTensor, rans};
use numerics::Isa;
use smallvec::SmallVec;

use crate::cache::Key;
use crate::reader::{PAGE_BYTES, Pace, PageBuffer, ReadError, Reader};

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

/// Bytes between two parts of an expert that are read with them rather than apart.
const GAP_BYTES: u64 = 64 << 10;

/// Bytes within one of an expert's reads.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// Which read.
    read: usize,
    /// First byte of it.
    at: usize,
    len: usize,
}

/// How a matrix is stored.
#[derive(Clone, Copy, Debug)]
enum Stored {
    /// Row by row, scales apart where the format has any.
    Canonical { weights: Part, scales: Option<Part> },
    /// As in memory.
    Tiles(Part),
    /// Entropy-coded.
    Coded(Part),
}

/// Where an expert's bytes lie and what they are.
#[derive(Clone, Debug)]
pub struct ExpertSource {
    /// Formats and shapes, shared by experts of the same kind.
    pub desc: Arc<ExpertDesc>,
    /// Runs of bytes to read, ascending by file and offset.
    reads: SmallVec<[ByteRange; 1]>,
    /// Gate, up, down.
    matrices: [Stored; 3],
    /// Of the one read's bytes.
    crc32c: Option<u32>,
    /// Whether the one read is the expert as it lies in memory.
    in_place: bool,
}

impl ExpertSource {
    /// Finds the reads of an expert: its record where it has one, else its tensors, those that lie
    /// close together as one.
    pub fn new(
        desc: Arc<ExpertDesc>,
        sources: &[QSource; 3],
        record: Option<&Record>,
    ) -> ExpertSource {
        let mut reads: SmallVec<[ByteRange; 1]> = SmallVec::new();
        match record {
            Some(record) => {
                let Record { file, offset, len, .. } = *record;
                reads.push(ByteRange { file, offset, len });
            }
            None => {
                let ranges = sources.iter().flat_map(|s| [Some(s.weights), s.scales]).flatten();
                let mut ranges: SmallVec<[ByteRange; 6]> = ranges.collect();
                ranges.sort_by_key(|range| (range.file, range.offset));
                for range in ranges {
                    let end = range.offset + range.len;
                    match reads.last_mut() {
                        Some(last)
                            if last.file == range.file
                                && range.offset <= last.offset + last.len + GAP_BYTES =>
                        {
                            last.len = last.len.max(end - last.offset);
                        }
                        _ => reads.push(range),
                    }
                }
            }
        }
        let part = |range: &ByteRange| {
            let holds = |read: &ByteRange| {
                read.file == range.file
                    && read.offset <= range.offset
                    && range.offset + range.len <= read.offset + read.len
            };
            let read = reads.iter().position(holds).unwrap_or(0);
            let at = range.offset.saturating_sub(reads[read].offset) as usize;
            Part { read, at, len: range.len as usize }
        };
        let matrices = sources.each_ref().map(|source| match source.layout {
            Layout::Canonical => Stored::Canonical {
                weights: part(&source.weights),
                scales: source.scales.as_ref().map(part),
            },
            Layout::R16k4 => Stored::Tiles(part(&source.weights)),
            Layout::R16k4Rans => Stored::Coded(part(&source.weights)),
        });
        let crc32c = record.map(|record| record.crc32c);
        // A record's matrices lie as in memory; only formats that are kept row by row have that
        // order in the canonical layout.
        let as_in_memory = |(stored, desc): (&Stored, &MatrixDesc)| match stored {
            Stored::Tiles(_) => true,
            Stored::Coded(_) => false,
            Stored::Canonical { .. } => desc.arrangement() == Arrangement::Rows,
        };
        let in_place = crc32c.is_some() && matrices.iter().zip(desc.matrices()).all(as_in_memory);
        ExpertSource { desc, reads, matrices, crc32c, in_place }
    }

    /// Bytes read to load the expert.
    pub fn file_bytes(&self) -> u64 {
        self.reads.iter().map(|read| read.len).sum()
    }

    /// The expert's bytes in its file, where they lie as in memory.
    pub fn in_place(&self) -> Option<ByteRange> {
        self.in_place.then(|| self.reads[0])
    }

    /// Whether `reader` can put the one read where the expert is computed: records start on pages.
    fn reads_in_place(&self, reader: &Reader) -> bool {
        self.in_place && reader.alignment() <= PAGE_BYTES
    }

    /// Bytes of working memory that loading through `reader` needs beside the expert's own.
    pub fn buffer_bytes(&self, reader: &Reader) -> u64 {
        if self.reads_in_place(reader) {
            return 0;
        }
        let spans = self.reads.iter().map(|read| reader.span_bytes(read.len as usize));
        spans.map(|span| PageBuffer::bytes_for(span) as u64).sum()
    }

    /// Bytes of memory of the expert.
    pub fn slot_bytes(&self) -> u64 {
        PageBuffer::bytes_for(self.desc.bytes()) as u64
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
                let record = model.expert_record(layer, expert);
                table.layers[layer].push(ExpertSource::new(desc, &sources, record));
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

    /// An expert, which the model has.
    pub fn expert(&self, (layer, expert): Key) -> &ExpertSource {
        &self.layers[layer as usize][expert as usize]
    }

    /// The places of all experts, layer by layer.
    pub fn keys(&self) -> impl Iterator<Item = Key> + use<'_> {
        let layers = self.layers.iter().enumerate();
        layers
            .flat_map(|(layer, experts)| (0..experts.len()).map(move |e| (layer as u32, e as u32)))
    }

    /// Every expert.
    pub fn iter(&self) -> impl Iterator<Item = &ExpertSource> {
        self.layers.iter().flatten()
    }

    /// Bytes of the largest expert in memory; 0 without experts.
    pub fn slot_bytes_max(&self) -> u64 {
        self.iter().map(ExpertSource::slot_bytes).max().unwrap_or(0)
    }

    /// Bytes of all experts in memory.
    pub fn total_bytes(&self) -> u64 {
        self.iter().map(ExpertSource::slot_bytes).sum()
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

/// Working memory of loads, used again from one to the next.
#[derive(Default)]
pub struct LoadMemory {
    buffer: PageBuffer,
    /// Made when the first coded expert comes.
    coded: Option<rans::Workspace>,
}

/// Name of an expert in messages.
pub(crate) fn name_of((layer, expert): Key) -> String {
    format!("layer {layer} expert {expert}")
}

/// Reads an expert into `slot`, of at least [`ExpertSource::slot_bytes`], whatever was in it
/// before. `key` names the expert in errors.
pub fn load_expert(
    reader: &Reader,
    key: Key,
    source: &ExpertSource,
    memory: &mut LoadMemory,
    slot: &mut PageBuffer,
    pace: &mut dyn Pace,
) -> Result<(), LoadError> {
    let desc = &*source.desc;
    let failed = |error| LoadError::Read { tensor: name_of(key), source: error };
    if source.reads_in_place(reader) {
        let ByteRange { file, offset, len } = source.reads[0];
        let skip = reader.read_span(file, offset, len as usize, slot, pace).map_err(failed)?;
        debug_assert_eq!(skip, 0, "records start on pages");
        return verify(reader, key, source, &slot[..len as usize]);
    }
    memory.buffer.grow_to(source.buffer_bytes(reader) as usize);
    // Where in the buffer each read's own bytes begin.
    let mut starts: SmallVec<[usize; 6]> = SmallVec::new();
    let mut at = 0;
    for read in &source.reads {
        let len = read.len as usize;
        let room = PageBuffer::bytes_for(reader.span_bytes(len));
        let span = &mut memory.buffer[at..at + room];
        let skip = reader.read_span(read.file, read.offset, len, span, pace).map_err(failed)?;
        starts.push(at + skip);
        at += room;
    }
    let buffer = &memory.buffer;
    let bytes = |part: &Part| &buffer[starts[part.read] + part.at..][..part.len];
    if let Some(crc) = source.crc32c {
        let read = &buffer[starts[0]..][..source.reads[0].len as usize];
        check_crc(reader, key, &source.reads[0], read, crc)?;
    }
    slot.fill(0);
    for (matrix, (stored, range)) in source.matrices.iter().zip(desc.ranges()).enumerate() {
        let of_matrix = desc.matrices()[matrix];
        let (part, result) = match stored {
            Stored::Canonical { weights, scales } => {
                let scale_bytes = scales.as_ref().map_or(&[][..], bytes);
                let is_e8 = of_matrix.format() == Format::E8Iq3;
                let checked = if is_e8 { check_tag(scale_bytes) } else { Ok(()) };
                let stored =
                    checked.and_then(|()| desc.store(matrix, bytes(weights), scale_bytes, slot));
                (weights, stored)
            }
            Stored::Tiles(part) => {
                let tiles = &mut slot[range];
                tiles.copy_from_slice(bytes(part));
                (part, of_matrix.check(tiles))
            }
            Stored::Coded(part) => {
                let tiles = &mut slot[range];
                let decoded = rans::decode(
                    Isa::detect(),
                    of_matrix,
                    bytes(part),
                    tiles,
                    memory.coded.get_or_insert_default(),
                );
                (part, decoded.and_then(|()| of_matrix.check(tiles)))
            }
        };
        result.map_err(|error| format_error(reader, key, source, matrix, part, error))?;
    }
    Ok(())
}

/// Checks bytes that lie as in memory: that they are those that were written, and a matrix each.
pub fn verify(
    reader: &Reader,
    key: Key,
    source: &ExpertSource,
    bytes: &[u8],
) -> Result<(), LoadError> {
    if let Some(crc) = source.crc32c {
        check_crc(reader, key, &source.reads[0], bytes, crc)?;
    }
    source.desc.check(bytes).map_err(|(matrix, error)| {
        let (Stored::Tiles(part) | Stored::Coded(part) | Stored::Canonical { weights: part, .. }) =
            &source.matrices[matrix];
        format_error(reader, key, source, matrix, part, error)
    })
}

fn format_error(
    reader: &Reader,
    key: Key,
    source: &ExpertSource,
    matrix: usize,
    part: &Part,
    error: FormatError,
) -> LoadError {
    let read = &source.reads[part.read];
    LoadError::Format {
        tensor: format!("{} {}", name_of(key), ["gate", "up", "down"][matrix]),
        path: reader.path(read.file).to_owned(),
        row: 0,
        offset: read.offset + part.at as u64,
        source: error,
    }
}

/// Refuses bytes of a record that are not those that were written.
pub fn check_crc(
    reader: &Reader,
    key: Key,
    read: &ByteRange,
    bytes: &[u8],
    recorded: u32,
) -> Result<(), LoadError> {
    let found = crc32c::crc32c(bytes);
    if found == recorded {
        return Ok(());
    }
    let path = reader.path(read.file).to_owned();
    Err(LoadError::Checksum { expert: name_of(key), path, offset: read.offset, recorded, found })
}
