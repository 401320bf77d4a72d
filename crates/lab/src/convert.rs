//! Conversion of checkpoints and containers into any format per tensor class, by row blocks in
//! bounded memory, resumable, never mixing parameters.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use container::{ByteRange, Layout, Model};
use experts::load::for_each_block;
use experts::{FileSet, Reader, durable};
use formats::format::FP8_BLOCK;
use formats::{Encoder, MatrixDesc, MatrixRef, QTensor};
use numerics::hadamard::Rotation;
use numerics::{Isa, Team};

use crate::error::LabError;
use crate::manifest::{
    DirLock, FileRecord, LOCK_FILE, MANIFEST_FILE, Manifest, SourceIdentity, record,
};
use crate::plan::{Choice, Item, Plan};
use crate::shard::{
    Place, ShardSet, ShardWriter, TakePiece, Target, Unit, canonical, split, units,
};

/// Shard size when none is asked for.
pub const SHARD_BYTES: u64 = 4_000_000_000;
/// Bytes copied at once where the format stays.
const COPY_BYTES: usize = 4 << 20;
/// Samples of each source file for its identity, beside the one at its start, and their bytes.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 16_384;
/// Endings of files beside the weights that belong to a model.
const SIDE_ENDINGS: [&str; 5] = ["json", "jinja", "tiktoken", "model", "txt"];
/// Files of those endings that describe the source's own shards.
const OWN_FILES: [&str; 2] = [MANIFEST_FILE, container::index::INDEX_FILE];

/// Whether a file belongs to a model and is not its weights: configuration, tokenizer, templates,
/// licence.
fn is_side_file(name: &str) -> bool {
    let ending = name.rsplit_once('.').map(|(_, ending)| ending);
    let belongs = ending.is_some_and(|ending| SIDE_ENDINGS.contains(&ending));
    (belongs || name.starts_with("LICENSE")) && !OWN_FILES.contains(&name)
}

fn target_of(item: &Item) -> &Target {
    &item.target
}

/// A conversion that has been planned.
pub struct Conversion {
    source_dirs: Vec<PathBuf>,
    model: Model,
    destination: PathBuf,
    plan: Plan,
    layout: Layout,
    shards: Vec<Vec<Unit<Item>>>,
    manifest: Manifest,
    done: usize,
    reader: Reader,
    team: Team,
}

impl Conversion {
    /// Plans a conversion and checks it against what the destination holds. Writes nothing.
    pub fn plan(
        source: &[PathBuf],
        destination: &Path,
        choice: &Choice,
        layout: Layout,
        shard_bytes: u64,
        threads: usize,
    ) -> Result<Conversion, LabError> {
        let model = Model::open(source)?;
        let plan = Plan::new(&model, choice)?;
        let files = FileSet::open(&model.shards)?;
        let reader = Reader::new(Arc::new(files));

        let mut parameters = choice.parameters();
        parameters.insert("shard-bytes".to_owned(), shard_bytes.to_string());
        parameters.insert("layout".to_owned(), layout.name().to_owned());
        let manifest = Manifest::new(source_identity(&model, &reader)?, parameters);
        let (manifest, done) = check_destination(source, destination, manifest)?;

        if layout == Layout::R16k4Rans {
            plan.check_coded()?;
        }
        let units = units(plan.items.clone(), layout, |item| item.expert);
        let shards = split(units, shard_bytes.max(1), target_of);
        let team = Team::new(threads).map_err(LabError::write(destination, "start threads for"))?;
        Ok(Conversion {
            source_dirs: source.to_vec(),
            model,
            destination: destination.to_owned(),
            plan,
            layout,
            shards,
            manifest,
            done,
            reader,
            team,
        })
    }

    /// What will be done.
    pub fn the_plan(&self) -> &Plan {
        &self.plan
    }

    /// Files that an earlier run finished, of all.
    pub fn resumed(&self) -> (usize, usize) {
        (self.done, self.shards.len())
    }

    /// Whether nothing is left to do.
    pub fn is_complete(&self) -> bool {
        self.manifest.complete
    }

    /// Writes what is left. `progress` is told output bytes done and in all.
    pub fn run(mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<Manifest, LabError> {
        if self.manifest.complete {
            return Ok(self.manifest);
        }
        fs::create_dir_all(&self.destination)
            .map_err(LabError::write(&self.destination, "create"))?;
        let _lock = DirLock::take(&self.destination)?;
        let mut manifest = self.manifest.clone();
        let shards = ShardSet {
            dir: &self.destination,
            layout: self.layout,
            shards: &self.shards,
            done: self.done,
            target_of,
        };
        let write = &mut |unit: &Unit<Item>, shard: &mut ShardWriter| self.write_unit(unit, shard);
        shards.write(&mut manifest, write, progress)?;
        self.manifest = manifest;
        // The source must be what it was when the run began, or two sources are mixed.
        let now = source_identity(&self.model, &self.reader)?;
        if now != self.manifest.source {
            return Err(LabError::Request(format!(
                "the source changed while it was converted; remove {} and start again",
                self.destination.display()
            )));
        }
        self.copy_side_files()?;
        self.manifest.complete = true;
        self.manifest.store(&self.destination)?;
        Ok(self.manifest)
    }

    fn write_unit(&self, unit: &Unit<Item>, shard: &mut ShardWriter) -> Result<(), LabError> {
        match unit {
            Unit::Tensor(item) => {
                let place = shard.place(&item.target);
                self.write_item(item, place, shard)
            }
            Unit::Expert { layer, expert, parts } => {
                let made = |item| canonical(|take| self.each_piece(item, take));
                let [gate, up, down] = parts.each_ref().map(made);
                let canonical = [gate?, up?, down?];
                let targets = parts.each_ref().map(|item| &item.target);
                shard.write_expert((*layer, *expert), targets, &canonical)
            }
        }
    }

    fn write_item(&self, item: &Item, place: Place, shard: &ShardWriter) -> Result<(), LabError> {
        let Item { source, target, .. } = item;
        if source.format == target.format && source.layout == Layout::Canonical {
            self.copy(&item.source.name, source.weights, place.weights, shard)?;
            if let Some(scales) = source.scales {
                self.copy(&item.source.name, scales, place.scales, shard)?;
            }
            return Ok(());
        }
        shard.write_pieces(place, |take| self.each_piece(item, take))
    }

    /// Hands the canonical bytes of a target to `take`, block by block: weights and their scales.
    fn each_piece(&self, item: &Item, take: &mut TakePiece<'_>) -> Result<(), LabError> {
        let Item { source, target, .. } = item;
        let encode_error = |error| LabError::Encode { tensor: target.name.clone(), source: error };
        let desc =
            MatrixDesc::for_rows(source.format, source.rows, source.cols).map_err(encode_error)?;
        let encoder = Encoder::new(target.format, target.cols);
        let rotation = source.format.is_rotated().then(|| Rotation::shared(source.cols));
        let same = source.format == target.format;
        let mut failure = None;
        for_each_block(&self.reader, source, desc, FP8_BLOCK, |rows, weights, scales| {
            if failure.is_some() {
                return Ok(());
            }
            if same {
                failure = take(weights, scales).err();
                return Ok(());
            }
            let block = MatrixDesc::for_rows(source.format, rows.len(), source.cols)?;
            let mut canonical = QTensor::zeroed(block);
            canonical.store(0..rows.len(), weights, scales)?;
            let encoded = self.encode_block(canonical.view(), &encoder, rotation.as_deref());
            let taken =
                encoded.map_err(encode_error).and_then(|(weights, scales)| take(&weights, &scales));
            failure = taken.err();
            Ok(())
        })?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        let mut tail = Vec::new();
        encoder.finish(&mut tail);
        take(&[], &tail)
    }

    /// Encodes a block of decoded rows, in pieces of 128 rows on all threads.
    fn encode_block(
        &self,
        block: MatrixRef<'_>,
        encoder: &Encoder,
        rotation: Option<&Rotation>,
    ) -> Result<(Vec<u8>, Vec<u8>), formats::FormatError> {
        let (rows, cols) = (block.desc.rows(), block.desc.cols());
        let pieces = rows.div_ceil(FP8_BLOCK);
        let results: Vec<_> = (0..pieces).map(|_| Mutex::new(None)).collect();
        self.team.run(pieces, |piece| {
            let isa = Isa::detect();
            let range = piece * FP8_BLOCK..((piece + 1) * FP8_BLOCK).min(rows);
            let mut values = vec![0.0; range.len() * cols];
            for (row, values) in range.zip(values.chunks_exact_mut(cols)) {
                block.decode_row(isa, row, values);
                if let Some(rotation) = rotation {
                    rotation.invert(isa, values);
                }
            }
            let (mut weights, mut scales) = (Vec::new(), Vec::new());
            let result = encoder.encode(isa, &values, &mut weights, &mut scales);
            let result = result.map(|()| (weights, scales));
            *results[piece].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        });
        let (mut weights, mut scales) = (Vec::new(), Vec::new());
        for result in results {
            let result = result.into_inner().unwrap_or_else(PoisonError::into_inner);
            let (w, s) = result.unwrap_or_else(|| Ok((Vec::new(), Vec::new())))?;
            weights.extend_from_slice(&w);
            scales.extend_from_slice(&s);
        }
        Ok((weights, scales))
    }

    fn copy(
        &self,
        name: &str,
        from: ByteRange,
        to: u64,
        shard: &ShardWriter,
    ) -> Result<(), LabError> {
        let mut buffer = vec![0; COPY_BYTES.min(from.len as usize)];
        let mut done = 0;
        while done < from.len {
            let count = (from.len - done).min(buffer.len() as u64) as usize;
            self.reader
                .read_exact(from.file, from.offset + done, &mut buffer[..count])
                .map_err(|source| experts::LoadError::Read { tensor: name.to_owned(), source })?;
            shard.write(to + done, &buffer[..count])?;
            done += count as u64;
        }
        Ok(())
    }

    /// Copies what belongs to the model beside its weights and records it; of a name in several
    /// directories the first one's.
    fn copy_side_files(&mut self) -> Result<(), LabError> {
        for (name, path) in side_files(&self.source_dirs)? {
            let bytes = fs::read(&path).map_err(LabError::write(&path, "read"))?;
            durable::write(&self.destination.join(&name), &bytes)?;
            self.manifest.files.push(record(&self.destination, &name)?);
        }
        Ok(())
    }
}

/// Files beside the weights that belong to a model, by name.
fn side_files(dirs: &[PathBuf]) -> Result<BTreeMap<String, PathBuf>, LabError> {
    let mut found = BTreeMap::new();
    for dir in dirs {
        for entry in fs::read_dir(dir).map_err(LabError::write(dir, "list"))? {
            let path = entry.map_err(LabError::write(dir, "list"))?.path();
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            if let Some(name) = name.filter(|name| path.is_file() && is_side_file(name)) {
                found.entry(name).or_insert(path);
            }
        }
    }
    Ok(found)
}

/// Identity of a source: its tensor table, size, time and samples of every file, and the files
/// beside the weights. It tells checkpoints of equal shape apart without reading all of them.
fn source_identity(model: &Model, reader: &Reader) -> Result<SourceIdentity, LabError> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&model.table_hash()?);
    for (index, file) in model.shards.files().iter().enumerate() {
        let facts = fs::metadata(&file.path).map_err(LabError::write(&file.path, "look at"))?;
        let modified = facts.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let bytes = facts.len();
        hasher.update(&bytes.to_le_bytes());
        hasher.update(&modified.unwrap_or_default().as_nanos().to_le_bytes());
        for sample in 0..=SAMPLES {
            let start = bytes.saturating_sub(SAMPLE_BYTES) / SAMPLES * sample;
            let mut buffer = vec![0; SAMPLE_BYTES.min(bytes - start) as usize];
            reader.read_exact(container::FileId(index as u32), start, &mut buffer)?;
            hasher.update(&buffer);
        }
    }
    for (name, path) in side_files(&model.dirs)? {
        let bytes = fs::read(&path).map_err(LabError::write(&path, "read"))?;
        hasher.update(name.as_bytes()).update(&bytes);
    }
    let name = model.dirs.first().and_then(|dir| dir.canonicalize().ok());
    let name = name.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy());
    Ok(SourceIdentity {
        name: name.unwrap_or_default().into_owned(),
        blake3: hasher.finalize().to_hex().to_string(),
    })
}

/// What the destination already holds: the manifest to go on with and the shards that are done.
/// Every file that counts as done is read and compared with its recorded hash.
fn check_destination(
    source: &[PathBuf],
    dir: &Path,
    fresh: Manifest,
) -> Result<(Manifest, usize), LabError> {
    let canonical = |path: &Path| path.canonicalize().ok();
    if source.iter().any(|source| canonical(source).is_some_and(|s| canonical(dir) == Some(s))) {
        return Err(LabError::Request(format!(
            "{} is the source itself; choose another destination",
            dir.display()
        )));
    }
    if dir.exists() && !dir.is_dir() {
        return Err(LabError::Request(format!("{} is not a directory", dir.display())));
    }
    let Some(old) = Manifest::load(dir)? else {
        let own = |name: &str| name.starts_with(MANIFEST_FILE) || name == LOCK_FILE;
        let occupied = fs::read_dir(dir).is_ok_and(|entries| {
            entries.flatten().any(|entry| !own(&entry.file_name().to_string_lossy()))
        });
        if occupied {
            return Err(LabError::Request(format!(
                "{} is not empty and no conversion of this program; choose another destination",
                dir.display()
            )));
        }
        return Ok((fresh, 0));
    };
    old.check_same_run(&fresh, dir)?;
    let intact = |file: &FileRecord| record(dir, &file.name).is_ok_and(|found| found == *file);
    let is_shard = |file: &&FileRecord| file.name.ends_with(".safetensors");
    let done = old.files.iter().take_while(is_shard).take_while(|file| intact(file)).count();
    if old.complete && old.files.iter().all(intact) {
        return Ok((old, done));
    }
    let mut manifest = fresh;
    manifest.files = old.files[..done].to_vec();
    Ok((manifest, done))
}
