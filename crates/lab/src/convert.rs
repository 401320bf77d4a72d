//! Conversion of checkpoints and containers into any format per tensor class, by row blocks in
//! bounded memory, resumable, never mixing parameters.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use container::{ByteRange, Model};
use experts::load::for_each_block;
use experts::{FileSet, Reader};
use formats::format::FP8_BLOCK;
use formats::{Encoder, MatrixDesc, MatrixRef, QTensor};
use numerics::hadamard::Rotation;
use numerics::{Isa, Team};

use crate::error::LabError;
use crate::manifest::{MANIFEST_FILE, Manifest, SourceIdentity, record};
use crate::plan::{Choice, Item, Plan};
use crate::shard::{Layout, Place, ShardFile, Target, shard_name, split};

/// Shard size when none is asked for.
pub const SHARD_BYTES: u64 = 4_000_000_000;
/// Bytes copied at once where the format stays.
const COPY_BYTES: usize = 4 << 20;
/// Bytes sampled at the start, middle and end of each source file for its identity.
const SAMPLE_BYTES: u64 = 65_536;
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

/// A conversion that has been planned.
pub struct Conversion {
    source_dirs: Vec<PathBuf>,
    destination: PathBuf,
    plan: Plan,
    shards: Vec<Vec<Item>>,
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
        shard_bytes: u64,
        threads: usize,
    ) -> Result<Conversion, LabError> {
        let model = Model::open(source)?;
        let plan = Plan::new(&model, choice)?;
        let files = FileSet::open(model.shards.files().iter().map(|file| file.path.as_path()))?;
        let reader = Reader::new(Arc::new(files));

        let mut parameters = choice.parameters();
        parameters.insert("shard-bytes".to_owned(), shard_bytes.to_string());
        let manifest = Manifest::new(source_identity(&model, &reader)?, parameters);
        let (manifest, done) = check_destination(destination, manifest)?;

        let mut items = plan.items.iter().cloned();
        let targets = plan.items.iter().map(|item| item.target.clone()).collect();
        let shards: Vec<Vec<Item>> = split(targets, shard_bytes.max(1))
            .into_iter()
            .map(|shard| items.by_ref().take(shard.len()).collect())
            .collect();
        let team = Team::new(threads).map_err(LabError::write(destination, "start threads for"))?;
        Ok(Conversion {
            source_dirs: source.to_vec(),
            destination: destination.to_owned(),
            plan,
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
        check_space(&self.destination, &self.plan, &self.manifest)?;
        self.manifest.store(&self.destination)?;
        let total = self.plan.bytes();
        let mut written = 0;
        let count = self.shards.len();
        for (index, items) in std::mem::take(&mut self.shards).into_iter().enumerate() {
            if index < self.done {
                written += items.iter().map(|item| item.target.bytes()).sum::<u64>();
                progress(written, total);
                continue;
            }
            let name = shard_name(index, count);
            let targets: Vec<Target> = items.iter().map(|item| item.target.clone()).collect();
            let layout = Layout::new(&targets);
            let shard = ShardFile::create(&self.destination.join(&name), &layout)?;
            for (at, item) in items.iter().enumerate() {
                self.write_item(item, layout.place(at), &shard)?;
                written += item.target.bytes();
                progress(written, total);
            }
            shard.finish()?;
            self.manifest.files.push(record(&self.destination, &name)?);
            self.manifest.store(&self.destination)?;
        }
        self.copy_side_files()?;
        self.manifest.complete = true;
        self.manifest.store(&self.destination)?;
        Ok(self.manifest)
    }

    fn write_item(&self, item: &Item, place: Place, shard: &ShardFile) -> Result<(), LabError> {
        let Item { source, target } = item;
        if source.format == target.format {
            self.copy(&item.source.name, source.weights, place.weights, shard)?;
            if let Some(scales) = source.scales {
                self.copy(&item.source.name, scales, place.scales, shard)?;
            }
            return Ok(());
        }
        let encode_error = |error| LabError::Encode { tensor: target.name.clone(), source: error };
        let desc =
            MatrixDesc::for_rows(source.format, source.rows, source.cols).map_err(encode_error)?;
        let encoder = Encoder::new(target.format, target.cols);
        let rotation = source.format.is_rotated().then(|| Rotation::shared(source.cols));
        let row_bytes = target.format.row_bytes(target.cols).unwrap_or(0) as u64;
        let mut scales_at = place.scales;
        let mut failure = None;
        for_each_block(&self.reader, source, desc, FP8_BLOCK, |rows, weights, scales| {
            if failure.is_some() {
                return Ok(());
            }
            let block = MatrixDesc::for_rows(source.format, rows.len(), source.cols)?;
            let mut canonical = QTensor::zeroed(block);
            canonical.store(0..rows.len(), weights, scales)?;
            let encoded = self.encode_block(canonical.view(), &encoder, rotation.as_deref());
            let written = encoded.map_err(encode_error).and_then(|(weights, scales)| {
                shard.write(place.weights + rows.start as u64 * row_bytes, &weights)?;
                shard.write(scales_at, &scales)?;
                scales_at += scales.len() as u64;
                Ok(())
            });
            failure = written.err();
            Ok(())
        })?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        let mut tail = Vec::new();
        encoder.finish(&mut tail);
        shard.write(scales_at, &tail)
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
                block.decode_row(row, values);
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
        shard: &ShardFile,
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

    /// Copies what belongs to the model beside its weights; of a name in several directories the
    /// first one's.
    fn copy_side_files(&self) -> Result<(), LabError> {
        let mut copied = BTreeSet::new();
        for dir in &self.source_dirs {
            for entry in fs::read_dir(dir).map_err(LabError::write(dir, "list"))? {
                let path = entry.map_err(LabError::write(dir, "list"))?.path();
                let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
                let Some(name) = name.filter(|name| path.is_file() && is_side_file(name)) else {
                    continue;
                };
                let to = self.destination.join(&name);
                if copied.insert(name) {
                    let bytes = fs::read(&path).map_err(LabError::write(&path, "read"))?;
                    fs::write(&to, bytes).map_err(LabError::write(&to, "write"))?;
                }
            }
        }
        Ok(())
    }
}

/// Identity of a source: its tensor table and samples of every file. It tells two checkpoints of
/// equal shape apart without reading all of them.
fn source_identity(model: &Model, reader: &Reader) -> Result<SourceIdentity, LabError> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&model.table_hash()?);
    for (index, file) in model.shards.files().iter().enumerate() {
        let bytes = fs::metadata(&file.path).map_err(LabError::write(&file.path, "look at"))?.len();
        hasher.update(&bytes.to_le_bytes());
        for start in [0, bytes / 2, bytes.saturating_sub(SAMPLE_BYTES)] {
            let count = SAMPLE_BYTES.min(bytes - start) as usize;
            let mut sample = vec![0; count];
            reader.read_exact(container::FileId(index as u32), start, &mut sample)?;
            hasher.update(&sample);
        }
    }
    let name = model.dirs.first().and_then(|dir| dir.canonicalize().ok());
    let name = name.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy());
    Ok(SourceIdentity {
        name: name.unwrap_or_default().into_owned(),
        blake3: hasher.finalize().to_hex().to_string(),
    })
}

/// What the destination already holds: the manifest to go on with and the files that are done.
fn check_destination(dir: &Path, fresh: Manifest) -> Result<(Manifest, usize), LabError> {
    let Some(old) = Manifest::load(dir)? else {
        let occupied = fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
        if occupied {
            return Err(LabError::Request(format!(
                "{} is not empty and no conversion of this program; choose another destination",
                dir.display()
            )));
        }
        return Ok((fresh, 0));
    };
    old.check_same_run(&fresh, dir)?;
    let intact = |file: &&crate::manifest::FileRecord| {
        fs::metadata(dir.join(&file.name)).is_ok_and(|found| found.len() == file.bytes)
    };
    let done = old.files.iter().take_while(intact).count();
    if old.complete && done == old.files.len() {
        return Ok((old, done));
    }
    let mut manifest = fresh;
    manifest.files = old.files[..done].to_vec();
    Ok((manifest, done))
}

#[cfg(unix)]
fn check_space(dir: &Path, plan: &Plan, manifest: &Manifest) -> Result<(), LabError> {
    let Ok(stat) = rustix::fs::statvfs(dir) else { return Ok(()) };
    let free = stat.f_bavail * stat.f_frsize;
    let done: u64 = manifest.files.iter().map(|file| file.bytes).sum();
    let wanted = plan.bytes().saturating_sub(done);
    if wanted <= free {
        return Ok(());
    }
    Err(LabError::Request(format!(
        "{}: {wanted} bytes to write, {free} free; make room or choose another destination",
        dir.display()
    )))
}

#[cfg(not(unix))]
fn check_space(_dir: &Path, _plan: &Plan, _manifest: &Manifest) -> Result<(), LabError> {
    Ok(())
}

/// Parameters of a manifest, for people.
pub fn describe(parameters: &BTreeMap<String, String>) -> String {
    let pairs: Vec<String> = parameters.iter().map(|(k, v)| format!("{k}={v}")).collect();
    pairs.join(" ")
}
