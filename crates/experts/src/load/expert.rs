//! Experts: where their bytes lie, and how they come into memory.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use container::config::half_hash;
use container::{ByteRange, ContainerError, LayerKind, Layout, Model, QSource, Record};
use formats::{Arrangement, ExpertDesc, Format, FormatError, MatrixDesc, rans};
use numerics::Isa;
use smallvec::SmallVec;

use super::{LoadError, check_tag};
use crate::cache::Key;
use crate::reader::{AtOnce, FileSet, IoMode, PAGE_BYTES, Pace, PageBuffer, Reader};

/// Bytes of a matrix that a sample of an expert has.
const SAMPLE_BYTES: usize = 256;
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
    /// Runs of bytes to read, ascending by file and offset; those of a record are all of it.
    reads: SmallVec<[ByteRange; 1]>,
    /// Gate, up, down.
    matrices: [Stored; 3],
    /// Of the record.
    crc32c: Option<u32>,
    /// Hash of the canonical bytes, of the record.
    blake3: Option<[u8; 16]>,
    /// Whether the one read is the expert as it lies in memory.
    in_place: bool,
    /// Whether each matrix has a read of its own: one is decoded while the drive reads for others.
    by_matrix: bool,
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
        let is_coded = sources.iter().any(|source| source.layout == Layout::R16k4Rans);
        let pieces = record.filter(|_| is_coded).and_then(|record| pieces(record, sources));
        let by_matrix = pieces.is_some();
        match (pieces, record) {
            (Some(pieces), _) => reads.extend(pieces),
            (None, Some(record)) => {
                let Record { file, offset, len, .. } = *record;
                reads.push(ByteRange { file, offset, len });
            }
            (None, None) => {
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
            // The container refuses a record that does not hold its expert.
            let read = reads.iter().position(holds);
            let read = read.unwrap_or_else(|| panic!("a matrix lies in none of the reads"));
            let at = (range.offset - reads[read].offset) as usize;
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
        let blake3 = record.map(|record| record.blake3);
        // A record's matrices lie as in memory; only formats that are kept row by row have that
        // order in the canonical layout.
        let as_in_memory = |(stored, desc): (&Stored, &MatrixDesc)| match stored {
            Stored::Tiles(_) => true,
            Stored::Coded(_) => false,
            Stored::Canonical { .. } => desc.arrangement() == Arrangement::Rows,
        };
        let in_place = crc32c.is_some() && matrices.iter().zip(desc.matrices()).all(as_in_memory);
        ExpertSource { desc, reads, matrices, crc32c, blake3, in_place, by_matrix }
    }

    /// What the expert is, whatever its layout: the first half of the BLAKE3 of formats, shapes and
    /// the hash of its canonical bytes. `None` where the container has no such hash.
    pub fn identity(&self) -> Option<[u8; 16]> {
        let blake3 = self.blake3?;
        let mut text = Vec::with_capacity(128);
        for (name, desc) in ["gate", "up", "down"].into_iter().zip(self.desc.matrices()) {
            let (format, rows, cols) = (desc.format(), desc.rows(), desc.cols());
            text.extend_from_slice(format!("{name} {format} {rows} {cols}\n").as_bytes());
        }
        text.extend_from_slice(&blake3);
        Some(half_hash(&text))
    }

    /// What the expert is by a sample: the first half of the BLAKE3 of formats, shapes and the
    /// first 256 bytes of the weights of each matrix, which are read. `None` where weights
    /// are not stored row by row, or cannot be read.
    pub fn sampled_identity(&self, reader: &Reader) -> Option<[u8; 16]> {
        let mut text = Vec::with_capacity(1024);
        for (at, desc) in self.desc.matrices().into_iter().enumerate() {
            let Stored::Canonical { weights, .. } = &self.matrices[at] else { return None };
            let read = &self.reads[weights.read];
            let len = weights.len.min(SAMPLE_BYTES);
            let mut buffer = PageBuffer::zeroed(PageBuffer::bytes_for(reader.span_bytes(len)));
            let offset = read.offset + weights.at as u64;
            let skip = reader.read_span(read.file, offset, len, &mut buffer, &mut AtOnce).ok()?;
            let (format, rows, cols) = (desc.format(), desc.rows(), desc.cols());
            text.extend_from_slice(format!("sample {format} {rows} {cols}\n").as_bytes());
            text.extend_from_slice(&buffer[skip..skip + len]);
        }
        Some(half_hash(&text))
    }

    /// Where the expert begins in its file.
    fn start(&self) -> &ByteRange {
        &self.reads[0]
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
        let spans = self.reads.iter().map(|read| buffer_span(reader, read) as u64);
        if self.by_matrix { spans.max().unwrap_or(0) } else { spans.sum() }
    }

    /// Bytes of memory of the expert.
    pub fn slot_bytes(&self) -> u64 {
        PageBuffer::bytes_for(self.desc.bytes()) as u64
    }
}

/// A record cut where its second and third matrix begin; `None` where not each matrix would lie in
/// one of the pieces, in order.
fn pieces(record: &Record, sources: &[QSource; 3]) -> Option<[ByteRange; 3]> {
    let Record { file, offset, len, .. } = *record;
    let [_, up, down] = sources.each_ref().map(|source| source.weights.offset);
    let cuts = [offset, up, down, offset + len];
    let fits = |(source, cut): (&QSource, &[u64])| {
        let QSource { weights, scales, .. } = source;
        scales.is_none() && cut[0] <= weights.offset && weights.offset + weights.len <= cut[1]
    };
    let each_has_its_own = sources.iter().zip(cuts.windows(2)).all(fits);
    each_has_its_own.then(|| {
        [0, 1, 2].map(|at| ByteRange { file, offset: cuts[at], len: cuts[at + 1] - cuts[at] })
    })
}

/// Bytes of buffer for a read, whole pages.
fn buffer_span(reader: &Reader, read: &ByteRange) -> usize {
    PageBuffer::bytes_for(reader.span_bytes(read.len as usize))
}

/// The experts of a model, by layer.
#[derive(Debug, Default)]
pub struct ExpertTable {
    /// Places without an expert are those that this machine does not hold.
    layers: Vec<Vec<Option<ExpertSource>>>,
}

impl ExpertTable {
    /// Resolves the experts of `layers` (layers without any have no places). `int8` says whether
    /// int8 activations may meet routed experts.
    pub fn new(
        model: &Model,
        layers: impl Iterator<Item = (usize, Range<usize>)>,
        int8: bool,
    ) -> Result<ExpertTable, ContainerError> {
        let mut descs: HashMap<[(Format, usize, usize); 3], Arc<ExpertDesc>> = HashMap::new();
        let mut table = ExpertTable::default();
        for (layer, experts) in layers {
            table.layers.resize_with(table.layers.len().max(layer + 1), Vec::new);
            table.layers[layer].resize_with(model.config.moe.experts, || None);
            for expert in experts {
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
                let source = ExpertSource::new(desc, &sources, record);
                table.layers[layer][expert] = Some(source);
            }
        }
        Ok(table)
    }

    /// The experts of every sparse decoder layer of a model.
    pub fn of(model: &Model, int8: bool) -> Result<ExpertTable, ContainerError> {
        let config = &model.config;
        let layers = (0..config.layers)
            .filter(|layer| config.layer_kind(*layer) == Some(LayerKind::Sparse))
            .map(|layer| (layer, 0..config.moe.experts));
        ExpertTable::new(model, layers, int8)
    }

    /// Number of layers, those without experts included.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Number of places of a layer: its experts, held or not.
    pub fn places(&self, layer: usize) -> usize {
        self.layers.get(layer).map_or(0, Vec::len)
    }

    /// An expert, if it is held.
    pub fn get(&self, (layer, expert): Key) -> Option<&ExpertSource> {
        self.layers.get(layer as usize)?.get(expert as usize)?.as_ref()
    }

    /// An expert that is held.
    pub fn expert(&self, key: Key) -> &ExpertSource {
        self.get(key).unwrap_or_else(|| panic!("{} is not held", name_of(key)))
    }

    /// The places of all experts that are held, layer by layer.
    pub fn keys(&self) -> impl Iterator<Item = Key> + use<'_> {
        let layers = self.layers.iter().enumerate();
        let keys = layers
            .flat_map(|(layer, places)| (0..places.len()).map(move |e| (layer as u32, e as u32)));
        keys.filter(|key| self.get(*key).is_some())
    }

    /// Every expert.
    pub fn iter(&self) -> impl Iterator<Item = &ExpertSource> {
        self.layers.iter().flatten().flatten()
    }

    /// How the experts are read where nothing is asked: through the page cache when all of them
    /// fit in memory and are read once, past it when they are read again and again, in place when
    /// the files lie in memory anyway and `may_map` says that nothing stands against it.
    pub fn default_mode(&self, files: &FileSet, fits: bool, may_map: bool) -> IoMode {
        let in_place = || self.iter().all(|source| source.in_place().is_some());
        if fits {
            IoMode::Buffered
        } else if may_map && files.are_in_memory() && in_place() {
            IoMode::Mmap
        } else {
            IoMode::Direct
        }
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
    let failed = |error| LoadError::Read { tensor: name_of(key), source: error };
    if source.reads_in_place(reader) {
        let ByteRange { file, offset, len } = source.reads[0];
        let skip = reader.read_span(file, offset, len as usize, slot, pace).map_err(failed)?;
        debug_assert_eq!(skip, 0, "records start on pages");
        return verify(reader, key, source, &slot[..len as usize]);
    }
    memory.buffer.grow_to(source.buffer_bytes(reader) as usize);
    // Where in the buffer each read's own bytes begin.
    let mut starts: SmallVec<[usize; 6]> = SmallVec::from_elem(0, source.reads.len());
    let (mut at, mut crc, mut refused) = (0, 0, None);
    for matrix in 0..source.matrices.len() {
        let due = match source.by_matrix {
            true => matrix..matrix + 1,
            false if matrix == 0 => 0..source.reads.len(),
            false => 0..0,
        };
        for index in due {
            let ByteRange { file, offset, len } = source.reads[index];
            let room = buffer_span(reader, &source.reads[index]);
            let span = &mut memory.buffer[at..at + room];
            let skip = reader.read_span(file, offset, len as usize, span, pace).map_err(failed)?;
            if source.crc32c.is_some() {
                crc = crc32c::crc32c_append(crc, &span[skip..skip + len as usize]);
            }
            starts[index] = at + skip;
            at += if source.by_matrix { 0 } else { room };
        }
        if refused.is_none() {
            let arranged = arrange(source, matrix, &starts, memory, slot);
            refused = arranged
                .err()
                .map(|(part, error)| format_error(reader, key, source, matrix, &part, error));
        }
    }
    // Bytes that are not those that were written say more than what is wrong with them.
    if let Some(recorded) = source.crc32c {
        compare_crc(reader, key, source.start(), crc, recorded)?;
    }
    refused.map_or(Ok(()), Err)
}

/// Puts a matrix whose reads are in the buffer where it is computed. Fails with what was refused.
fn arrange(
    source: &ExpertSource,
    matrix: usize,
    starts: &[usize],
    memory: &mut LoadMemory,
    slot: &mut [u8],
) -> Result<(), (Part, FormatError)> {
    let LoadMemory { buffer, coded } = memory;
    let bytes = |part: &Part| &buffer[starts[part.read] + part.at..][..part.len];
    let desc = &source.desc;
    let (of_matrix, range) = (desc.matrices()[matrix], desc.ranges()[matrix].clone());
    let (part, result) = match &source.matrices[matrix] {
        Stored::Canonical { weights, scales } => {
            let scale_bytes = scales.as_ref().map_or(&[][..], bytes);
            let is_e8 = of_matrix.format() == Format::E8Iq3;
            let checked = if is_e8 { check_tag(scale_bytes) } else { Ok(()) };
            // Rows and columns that fill up tiles are not written.
            slot[range].fill(0);
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
            let workspace = coded.get_or_insert_default();
            let decoded = rans::decode(Isa::detect(), of_matrix, bytes(part), tiles, workspace);
            (part, decoded.and_then(|()| of_matrix.check(tiles)))
        }
    };
    result.map_err(|error| (*part, error))
}

/// Checks bytes that lie as in memory: that they are those that were written, and a matrix each.
pub fn verify(
    reader: &Reader,
    key: Key,
    source: &ExpertSource,
    bytes: &[u8],
) -> Result<(), LoadError> {
    if let Some(crc) = source.crc32c {
        check_crc(reader, key, source.start(), bytes, crc)?;
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
    record: &ByteRange,
    bytes: &[u8],
    recorded: u32,
) -> Result<(), LoadError> {
    compare_crc(reader, key, record, crc32c::crc32c(bytes), recorded)
}

fn compare_crc(
    reader: &Reader,
    key: Key,
    record: &ByteRange,
    found: u32,
    recorded: u32,
) -> Result<(), LoadError> {
    if found == recorded {
        return Ok(());
    }
    let path = reader.path(record.file).to_owned();
    Err(LoadError::Checksum { expert: name_of(key), path, offset: record.offset, recorded, found })
}
