//! Writing safetensors shards, experts as records in kernel order or everything in the canonical
//! layout. A file appears under its name only when it is complete and on disk.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use container::header::{LENGTH_BYTES, PAD_PREFIX};
use container::record::{RECORD_ALIGN, RECORDS_KEY, row_json};
use container::source::SCALE_ENDING;
use container::stamp::STAMP_KEY;
use container::{ByteRange, Layout, QSource, Record};
use experts::durable::sync_dir;
use formats::{Arrangement, ExpertDesc, Format, MatrixDesc, MatrixRef, ScaleType, rans};
use serde_json::{Map, Value, json};

use crate::error::LabError;
use crate::manifest::{Manifest, record};

/// A matrix or vector to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// Name of the weight tensor; scales get the container's ending.
    pub name: String,
    /// Format.
    pub format: Format,
    /// Outputs; 1 for vectors.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Whether it is a vector, stored one-dimensional.
    pub vector: bool,
}

impl Target {
    /// Bytes of the weights.
    pub fn weight_bytes(&self) -> u64 {
        self.format.weight_bytes(self.rows, self.cols).unwrap_or(usize::MAX) as u64
    }

    /// Bytes of the scales.
    pub fn scale_bytes(&self) -> u64 {
        self.format.scale_bytes(self.rows, self.cols).unwrap_or(usize::MAX) as u64
    }

    /// Bytes of both.
    pub fn bytes(&self) -> u64 {
        self.weight_bytes().saturating_add(self.scale_bytes())
    }

    fn dtype(&self) -> &'static str {
        match self.format {
            Format::F32 => "F32",
            Format::Bf16 => "BF16",
            Format::F16 => "F16",
            Format::Int8Row => "I8",
            Format::Fp8B128(_) => "F8_E4M3",
            Format::Int4Row
            | Format::Int2Row
            | Format::Int4Grouped(_)
            | Format::Int3G64
            | Format::E8Iq3
            | Format::Mxfp4 => "U8",
        }
    }

    fn shape(&self) -> Vec<usize> {
        if self.vector {
            return vec![self.cols];
        }
        let cols = match self.format {
            Format::F32 | Format::Bf16 | Format::F16 => self.cols,
            other => other.row_bytes(self.cols).unwrap_or(usize::MAX),
        };
        vec![self.rows, cols]
    }
}

/// Where a target's bytes lie in its file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// Offset of the weights.
    pub weights: u64,
    /// Offset of the scales.
    pub scales: u64,
}

/// What is written together.
#[derive(Clone, Debug)]
pub enum Unit<T> {
    /// One tensor in the canonical layout.
    Tensor(T),
    /// A routed expert as one record.
    Expert {
        /// Its layer.
        layer: usize,
        /// Its number.
        expert: usize,
        /// Gate, up, down.
        parts: Box<[T; 3]>,
    },
}

impl<T> Unit<T> {
    /// The tensors, in order.
    pub fn parts(&self) -> &[T] {
        match self {
            Unit::Tensor(part) => std::slice::from_ref(part),
            Unit::Expert { parts, .. } => &parts[..],
        }
    }
}

/// Makes units of tensors: every three of one routed expert become a record, unless the layout is
/// canonical. `place_of` says the layer and expert of a tensor.
pub fn units<T>(
    tensors: Vec<T>,
    layout: Layout,
    place_of: impl Fn(&T) -> Option<(usize, usize)>,
) -> Vec<Unit<T>> {
    let mut units = Vec::new();
    let mut tensors = tensors.into_iter();
    while let Some(first) = tensors.next() {
        match place_of(&first).filter(|_| layout != Layout::Canonical) {
            None => units.push(Unit::Tensor(first)),
            // The list of a model's tensors has gate, up and down one after the other.
            Some((layer, expert)) => {
                let mut next = || tensors.next().filter(|t| place_of(t) == Some((layer, expert)));
                let rest = next().zip(next());
                let (up, down) =
                    rest.unwrap_or_else(|| panic!("gate is not followed by up and down"));
                let parts = Box::new([first, up, down]);
                units.push(Unit::Expert { layer, expert, parts });
            }
        }
    }
    units
}

/// Canonical bytes of a matrix: weights, and scales where the format has any.
pub type Canonical = (Vec<u8>, Vec<u8>);

/// Takes canonical bytes of some rows: weights and their scales.
pub type TakePiece<'a> = dyn FnMut(&[u8], &[u8]) -> Result<(), LabError> + 'a;

/// All canonical bytes that come piece by piece.
pub fn canonical(
    each_piece: impl FnOnce(&mut TakePiece<'_>) -> Result<(), LabError>,
) -> Result<Canonical, LabError> {
    let mut bytes = Canonical::default();
    each_piece(&mut |weights, scales| {
        bytes.0.extend_from_slice(weights);
        bytes.1.extend_from_slice(scales);
        Ok(())
    })?;
    Ok(bytes)
}

/// Bytes of a JSON entry beside the tensor's name, at most: type, shape, offsets, punctuation.
const ENTRY_BYTES: u64 = 160;
/// Bytes of a record's JSON row, at most.
const RECORD_BYTES: u64 = 128;
/// Entries of padding around a record, at most.
const RECORD_PADS: u64 = 4;
/// Matrices of a coded record start at multiples of it.
const CODED_ALIGN: u64 = 64;

/// A shard being written under a temporary name, unit by unit. Room for the header is kept in
/// front; the header is written last, because hashes and lengths of records are known then.
pub struct ShardWriter {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
    layout: Layout,
    /// Where tensor data begins.
    data_start: u64,
    /// End of what is placed, from there.
    at: u64,
    entries: Map<String, Value>,
    stamps: Map<String, Value>,
    records: Map<String, Value>,
    pads: usize,
}

impl ShardWriter {
    /// Starts `path` for these units; what an interrupted run left under the temporary name is
    /// dropped.
    pub fn create<'a, T: 'a>(
        path: &Path,
        layout: Layout,
        units: impl Iterator<Item = &'a Unit<T>>,
        target_of: impl Fn(&T) -> &Target,
    ) -> Result<ShardWriter, LabError> {
        let mut header = 2 * ENTRY_BYTES;
        for unit in units {
            if matches!(unit, Unit::Expert { .. }) {
                header += RECORD_BYTES + RECORD_PADS * ENTRY_BYTES;
            }
            for part in unit.parts() {
                // The name stands in the entry, in that of its scales and, escaped, in the stamps.
                header += 3 * (target_of(part).name.len() as u64 + ENTRY_BYTES);
            }
        }
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".tmp");
        let temporary = PathBuf::from(temporary);
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)
            .map_err(LabError::write(&temporary, "create"))?;
        Ok(ShardWriter {
            file,
            temporary,
            path: path.to_owned(),
            layout,
            data_start: header.next_multiple_of(RECORD_ALIGN),
            at: 0,
            entries: Map::new(),
            stamps: Map::new(),
            records: Map::new(),
            pads: 0,
        })
    }

    /// Writes bytes at an offset of the file.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), LabError> {
        write_all_at(&self.file, offset, bytes).map_err(LabError::write(&self.temporary, "write"))
    }

    /// Writes canonical bytes that come piece by piece.
    pub fn write_pieces(
        &self,
        place: Place,
        each_piece: impl FnOnce(&mut TakePiece<'_>) -> Result<(), LabError>,
    ) -> Result<(), LabError> {
        let (mut weights_at, mut scales_at) = (place.weights, place.scales);
        each_piece(&mut |weights, scales| {
            self.write(weights_at, weights)?;
            self.write(scales_at, scales)?;
            weights_at += weights.len() as u64;
            scales_at += scales.len() as u64;
            Ok(())
        })
    }

    /// Places a tensor in the canonical layout; its bytes are written by the caller.
    pub fn place(&mut self, target: &Target) -> Place {
        self.rows(target, None)
    }

    /// Places a tensor in the canonical layout, its scales at an offset from the start of tensor
    /// data or right behind it.
    fn rows(&mut self, target: &Target, scales_at: Option<u64>) -> Place {
        if !target.vector {
            self.stamps.insert(target.name.clone(), json!(target.format.to_string()));
        }
        let weights =
            self.entry(target.name.clone(), target.dtype(), target.shape(), target.weight_bytes());
        if target.scale_bytes() == 0 {
            return Place { weights, scales: self.data_start + self.at };
        }
        if let Some(offset) = scales_at {
            self.pad_to(offset);
        }
        let dtype = match target.format.scale_type() {
            ScaleType::F32 => "F32",
            ScaleType::Ue8m0 | ScaleType::None => "U8",
        };
        let count = target.format.scale_count(target.rows, target.cols).unwrap_or(0);
        let name = format!("{}{SCALE_ENDING}", target.name);
        let scales = self.entry(name, dtype, vec![count], target.scale_bytes());
        Place { weights, scales }
    }

    /// Places a tensor behind what is placed; returns its offset in the file.
    fn entry(&mut self, name: String, dtype: &str, shape: Vec<usize>, bytes: u64) -> u64 {
        let (start, end) = (self.at, self.at + bytes);
        self.entries
            .insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
        self.at = end;
        self.data_start + start
    }

    /// Fills up to an offset from the start of tensor data.
    fn pad_to(&mut self, offset: u64) {
        if offset > self.at {
            let (bytes, number) = (offset - self.at, self.pads);
            self.pads += 1;
            self.entry(format!("{PAD_PREFIX}{number}"), "U8", vec![bytes as usize], bytes);
        }
    }

    /// Writes an expert as one record: its matrices as they lie in memory, or coded. `canonical`
    /// has the bytes of each.
    pub fn write_expert(
        &mut self,
        key: (usize, usize),
        targets: [&Target; 3],
        canonical: &[Canonical; 3],
    ) -> Result<(), LabError> {
        let failed = |at: usize| {
            let tensor = targets[at].name.clone();
            move |source| LabError::Encode { tensor, source }
        };
        let mut descs = Vec::with_capacity(targets.len());
        for (at, target) in targets.iter().enumerate() {
            let desc = MatrixDesc::for_matmul(target.format, target.rows, target.cols, false);
            descs.push(desc.map_err(failed(at))?);
        }
        let desc = ExpertDesc { gate: descs[0], up: descs[1], down: descs[2] };
        let mut image = vec![0; desc.bytes()];
        for (at, (weights, scales)) in canonical.iter().enumerate() {
            desc.store(at, weights, scales, &mut image).map_err(failed(at))?;
        }
        let blake3 = identity(&desc, &image);

        self.pad_to(self.at.next_multiple_of(RECORD_ALIGN));
        let start = self.at;
        let coded = match self.layout {
            Layout::R16k4Rans => code(&desc, &image),
            Layout::Canonical | Layout::R16k4 => None,
        };
        let bytes = match coded {
            Some(streams) => self.place_coded(start, targets, &streams),
            None => {
                self.place_image(start, targets, &desc);
                image
            }
        };
        let bytes = &bytes[..(self.at - start) as usize];
        self.add_record(key, start, bytes, &blake3, crc32c::crc32c(bytes))
    }

    fn add_record(
        &mut self,
        (layer, expert): (usize, usize),
        start: u64,
        bytes: &[u8],
        blake3: &[u8; 16],
        crc32c: u32,
    ) -> Result<(), LabError> {
        self.write(self.data_start + start, bytes)?;
        let row = row_json(start, bytes.len() as u64, blake3, crc32c);
        self.records.insert(format!("{layer}.{expert}"), row);
        Ok(())
    }

    /// Writes an expert's record as another file has it: the same bytes, places and hashes.
    pub fn copy_record(
        &mut self,
        key: (usize, usize),
        targets: &[Target; 3],
        sources: &[QSource; 3],
        record: &Record,
        bytes: &[u8],
    ) -> Result<(), LabError> {
        self.pad_to(self.at.next_multiple_of(RECORD_ALIGN));
        let start = self.at;
        // Coded matrices may lie in any order.
        let mut parts: [_; 3] = std::array::from_fn(|at| (&targets[at], &sources[at]));
        parts.sort_by_key(|(_, source)| source.weights.offset);
        for (target, source) in parts {
            let place = |range: &ByteRange| start + (range.offset - record.offset);
            self.pad_to(place(&source.weights));
            match source.layout {
                Layout::Canonical => {
                    self.rows(target, source.scales.as_ref().map(place));
                }
                Layout::R16k4 | Layout::R16k4Rans => {
                    self.tiles(target, source.layout, source.weights.len as usize);
                }
            }
        }
        self.pad_to(start + record.len);
        self.add_record(key, start, bytes, &record.blake3, record.crc32c)
    }

    fn place_image(&mut self, start: u64, targets: [&Target; 3], desc: &ExpertDesc) {
        for ((target, desc), range) in targets.iter().zip(desc.matrices()).zip(desc.ranges()) {
            self.pad_to(start + range.start as u64);
            match desc.arrangement() {
                Arrangement::Rows => {
                    let scales_at = start + (range.start + desc.scales_at()) as u64;
                    self.rows(target, Some(scales_at));
                }
                Arrangement::Tiles => self.tiles(target, Layout::R16k4, desc.bytes()),
            }
        }
    }

    fn place_coded(
        &mut self,
        start: u64,
        targets: [&Target; 3],
        streams: &[Vec<u8>; 3],
    ) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (target, stream) in targets.iter().zip(streams) {
            bytes.resize(bytes.len().next_multiple_of(CODED_ALIGN as usize), 0);
            self.pad_to(start + bytes.len() as u64);
            self.tiles(target, Layout::R16k4Rans, stream.len());
            bytes.extend_from_slice(stream);
        }
        bytes
    }

    fn tiles(&mut self, target: &Target, layout: Layout, bytes: usize) {
        let stamp = format!("{}+{}", target.format, layout.name());
        self.stamps.insert(target.name.clone(), json!(stamp));
        self.entry(target.name.clone(), "U8", vec![bytes], bytes as u64);
    }

    /// Puts the file on disk under its name.
    pub fn finish(mut self) -> Result<(), LabError> {
        if !self.records.is_empty() {
            // The last record can be read in whole pages.
            self.pad_to(self.at.next_multiple_of(RECORD_ALIGN));
        }
        let mut metadata = Map::new();
        metadata.insert("format".to_owned(), json!("pt"));
        let stamps = Value::Object(std::mem::take(&mut self.stamps)).to_string();
        metadata.insert(STAMP_KEY.to_owned(), json!(stamps));
        if !self.records.is_empty() {
            let records = Value::Object(std::mem::take(&mut self.records)).to_string();
            metadata.insert(RECORDS_KEY.to_owned(), json!(records));
        }
        let mut entries = Map::new();
        entries.insert("__metadata__".to_owned(), Value::Object(metadata));
        entries.append(&mut self.entries);
        let mut json = Value::Object(entries).to_string().into_bytes();
        let room = (self.data_start - LENGTH_BYTES) as usize;
        assert!(json.len() <= room, "a header of {} bytes in {room}", json.len());
        json.resize(room, b' ');
        self.write(0, &(room as u64).to_le_bytes())?;
        self.write(LENGTH_BYTES, &json)?;
        let len = self.data_start + self.at;
        self.file.set_len(len).map_err(LabError::write(&self.temporary, "extend"))?;
        self.file.sync_all().map_err(LabError::write(&self.temporary, "sync"))?;
        fs::rename(&self.temporary, &self.path).map_err(LabError::write(&self.path, "name"))?;
        Ok(sync_dir(&self.path)?)
    }
}

/// The identity of an expert: the first half of the BLAKE3 of its canonical bytes, weights and then
/// scales of gate, up and down. Bits of a row's last byte that belong to no weight count as zero,
/// and the tag of e8 is left out: neither survives in every layout.
pub fn identity(desc: &ExpertDesc, image: &[u8]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    let (mut weights, mut scales) = (Vec::new(), Vec::new());
    for (desc, range) in desc.matrices().into_iter().zip(desc.ranges()) {
        let matrix = MatrixRef { desc: *desc, data: &image[range] };
        weights.clear();
        scales.clear();
        matrix.append_canonical(0..desc.rows(), &mut weights, &mut scales);
        hasher.update(&weights).update(&scales);
    }
    let mut identity = [0; 16];
    identity.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    identity
}

/// The coded streams of an expert; `None` when one of its matrices has a format that is not coded.
fn code(desc: &ExpertDesc, image: &[u8]) -> Option<[Vec<u8>; 3]> {
    let mut streams = [Vec::new(), Vec::new(), Vec::new()];
    for ((desc, range), stream) in desc.matrices().into_iter().zip(desc.ranges()).zip(&mut streams)
    {
        *stream = rans::encode(desc, &image[range])?;
    }
    Some(streams)
}

/// Puts one unit into its shard.
pub type WriteUnit<'a, T> = dyn FnMut(&Unit<T>, &mut ShardWriter) -> Result<(), LabError> + 'a;
/// The shards of a container.
pub struct ShardSet<'a, T> {
    /// Its directory.
    pub dir: &'a Path,
    /// Layout of routed experts.
    pub layout: Layout,
    /// What each shard holds.
    pub shards: &'a [Vec<Unit<T>>],
    /// Shards that are written already.
    pub done: usize,
    /// What a part is to become.
    pub target_of: fn(&T) -> &Target,
}

impl<T> ShardSet<'_, T> {
    fn bytes(&self, unit: &Unit<T>) -> u64 {
        unit.parts().iter().map(|part| (self.target_of)(part).bytes()).sum()
    }

    /// Writes the shards that are not done yet, and keeps the manifest up to date. `progress` is
    /// told bytes of units done and in all.
    pub fn write(
        &self,
        manifest: &mut Manifest,
        write: &mut WriteUnit<'_, T>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), LabError> {
        let &ShardSet { dir, layout, shards, done, target_of } = self;
        let total: u64 = shards.iter().flatten().map(|unit| self.bytes(unit)).sum();
        let left: u64 = shards.iter().skip(done).flatten().map(|unit| self.bytes(unit)).sum();
        check_space(dir, left)?;
        manifest.store(dir)?;
        let mut written = total - left;
        progress(written, total);
        for (index, units) in shards.iter().enumerate().skip(done) {
            let name = shard_name(index, shards.len());
            let path = dir.join(&name);
            let mut shard = ShardWriter::create(&path, layout, units.iter(), target_of)?;
            for unit in units {
                write(unit, &mut shard)?;
                written += self.bytes(unit);
                progress(written, total);
            }
            shard.finish()?;
            manifest.files.push(record(dir, &name)?);
            manifest.store(dir)?;
        }
        Ok(())
    }
}

/// Refuses to write `bytes` where less is free.
fn check_space(dir: &Path, bytes: u64) -> Result<(), LabError> {
    #[cfg(unix)]
    if let Ok(stat) = rustix::fs::statvfs(dir) {
        let free = stat.f_bavail * stat.f_frsize;
        if bytes > free {
            return Err(LabError::Request(format!(
                "{}: {bytes} bytes to write, {free} free; make room or choose another destination",
                dir.display()
            )));
        }
    }
    Ok(())
}

#[cfg(unix)]
fn write_all_at(file: &File, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
fn write_all_at(file: &File, mut offset: u64, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let written = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        offset += written as u64;
        bytes = &bytes[written..];
    }
    Ok(())
}

/// Cuts units into shards of about `shard_bytes`, never in the middle of one.
pub fn split<T>(
    units: Vec<Unit<T>>,
    shard_bytes: u64,
    target_of: impl Fn(&T) -> &Target,
) -> Vec<Vec<Unit<T>>> {
    let mut shards: Vec<Vec<Unit<T>>> = Vec::new();
    let mut bytes = 0u64;
    for unit in units {
        let of_unit = unit.parts().iter().map(|part| target_of(part).bytes()).sum::<u64>();
        if shards.is_empty() || bytes + of_unit > shard_bytes {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += of_unit;
        if let Some(shard) = shards.last_mut() {
            shard.push(unit);
        }
    }
    shards
}

/// Name of shard `index` of `count`, as checkpoints number them.
pub fn shard_name(index: usize, count: usize) -> String {
    if count == 1 {
        return "model.safetensors".to_owned();
    }
    format!("model-{:05}-of-{count:05}.safetensors", index + 1)
}
