//! Writing safetensors shards: the header is known before the data, data comes in any order, the
//! file appears under its name only when it is complete and on disk.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use container::source::SCALE_ENDING;
use container::stamp::STAMP_KEY;
use formats::{Format, ScaleType};
use serde_json::{Map, Value, json};

use crate::error::LabError;

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

/// The header and places of a shard.
pub struct Layout {
    header: Vec<u8>,
    places: Vec<Place>,
    bytes: u64,
}

impl Layout {
    /// Lays targets out in order, each one's scales behind its weights.
    pub fn new(targets: &[Target]) -> Layout {
        let mut entries = Map::new();
        let mut stamps = Map::new();
        for target in targets.iter().filter(|target| !target.vector) {
            stamps.insert(target.name.clone(), json!(target.format.to_string()));
        }
        let stamps = Value::Object(stamps).to_string();
        entries.insert("__metadata__".to_owned(), json!({"format": "pt", STAMP_KEY: stamps}));
        let mut at = 0;
        let mut places = Vec::with_capacity(targets.len());
        for target in targets {
            let weights = at;
            at += target.weight_bytes();
            let entry = |dtype: &str, shape: Vec<usize>, start: u64, end: u64| json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
            let value = entry(target.dtype(), target.shape(), weights, at);
            entries.insert(target.name.clone(), value);
            let scales = at;
            if target.scale_bytes() > 0 {
                at += target.scale_bytes();
                let dtype = match target.format.scale_type() {
                    ScaleType::F32 => "F32",
                    ScaleType::Ue8m0 | ScaleType::None => "U8",
                };
                let count = target.format.scale_count(target.rows, target.cols).unwrap_or(0);
                let value = entry(dtype, vec![count], scales, at);
                entries.insert(format!("{}{SCALE_ENDING}", target.name), value);
            }
            places.push(Place { weights, scales });
        }
        let mut json = Value::Object(entries).to_string().into_bytes();
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend_from_slice(&json);
        let data = header.len() as u64;
        for place in &mut places {
            place.weights += data;
            place.scales += data;
        }
        Layout { header, places, bytes: data + at }
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where target number `index` goes.
    pub fn place(&self, index: usize) -> Place {
        self.places[index]
    }
}

/// A shard being written under a temporary name.
pub struct ShardFile {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
}

impl ShardFile {
    /// Starts `path`; what an interrupted run left under the temporary name is dropped.
    pub fn create(path: &Path, layout: &Layout) -> Result<ShardFile, LabError> {
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".tmp");
        let temporary = PathBuf::from(temporary);
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)
            .map_err(LabError::write(&temporary, "create"))?;
        file.set_len(layout.bytes()).map_err(LabError::write(&temporary, "extend"))?;
        let shard = ShardFile { file, temporary, path: path.to_owned() };
        shard.write(0, &layout.header)?;
        Ok(shard)
    }

    /// Writes bytes at an offset.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), LabError> {
        write_all_at(&self.file, offset, bytes).map_err(LabError::write(&self.temporary, "write"))
    }

    /// Puts the file on disk under its name.
    pub fn finish(self) -> Result<(), LabError> {
        self.file.sync_all().map_err(LabError::write(&self.temporary, "sync"))?;
        fs::rename(&self.temporary, &self.path).map_err(LabError::write(&self.path, "name"))?;
        sync_dir(&self.path)
    }
}

/// Refuses to write `bytes` where less is free.
pub(crate) fn check_space(dir: &Path, bytes: u64) -> Result<(), LabError> {
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

/// Makes a rename in the directory of `path` durable.
pub(crate) fn sync_dir(path: &Path) -> Result<(), LabError> {
    #[cfg(unix)]
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        let file = File::open(dir).map_err(LabError::write(dir, "open"))?;
        file.sync_all().map_err(LabError::write(dir, "sync"))?;
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

/// Cuts targets into shards of about `shard_bytes`, never in the middle of a target.
pub fn split(targets: Vec<Target>, shard_bytes: u64) -> Vec<Vec<Target>> {
    let mut shards: Vec<Vec<Target>> = Vec::new();
    let mut bytes = 0u64;
    for target in targets {
        if shards.is_empty() || bytes + target.bytes() > shard_bytes {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += target.bytes();
        if let Some(shard) = shards.last_mut() {
            shard.push(target);
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
