//! `colibri.json`: what made a container, so that a run can be resumed and never mixed.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::Read;
use std::path::{Path, PathBuf};

use experts::durable;
use serde::{Deserialize, Serialize};

use crate::error::LabError;

/// Name of the manifest.
pub const MANIFEST_FILE: &str = "colibri.json";
/// Version of its form.
const MANIFEST_VERSION: u32 = 1;
/// Largest manifest read.
const MANIFEST_BYTES_MAX: u64 = 64 << 20;

/// The manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this form.
    pub version: u32,
    /// Version of the program that wrote the container.
    pub tool_version: String,
    /// Numerics version of that program.
    pub numerics_version: u32,
    /// What the container was made from.
    pub source: SourceIdentity,
    /// Everything that shapes the output, by name.
    pub parameters: BTreeMap<String, String>,
    /// Files that are complete, in order.
    pub files: Vec<FileRecord>,
    /// Whether all files are.
    pub complete: bool,
}

/// What identifies a source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceIdentity {
    /// Name of its directory or kind.
    pub name: String,
    /// Hash of configuration, tensor table and samples of every file.
    pub blake3: String,
}

/// A complete file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Hash of its bytes.
    pub blake3: String,
}

impl Manifest {
    /// A manifest of a run that begins.
    pub fn new(source: SourceIdentity, parameters: BTreeMap<String, String>) -> Manifest {
        Manifest {
            version: MANIFEST_VERSION,
            tool_version: env!("CARGO_PKG_VERSION").to_owned(),
            numerics_version: numerics::NUMERICS_VERSION,
            source,
            parameters,
            files: Vec::new(),
            complete: false,
        }
    }

    /// The manifest of a directory, if it has one.
    pub fn load(dir: &Path) -> Result<Option<Manifest>, LabError> {
        let path = dir.join(MANIFEST_FILE);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(LabError::write(&path, "open")(error)),
        };
        let mut text = String::new();
        file.take(MANIFEST_BYTES_MAX)
            .read_to_string(&mut text)
            .map_err(LabError::write(&path, "read"))?;
        match serde_json::from_str::<Manifest>(&text) {
            Ok(manifest) if manifest.version == MANIFEST_VERSION => Ok(Some(manifest)),
            Ok(manifest) => Err(LabError::Request(format!(
                "{}: version {} of the manifest is newer than this program's {MANIFEST_VERSION}",
                path.display(),
                manifest.version
            ))),
            Err(error) => {
                Err(LabError::Request(format!("{}: not a manifest: {error}", path.display())))
            }
        }
    }

    /// Writes the manifest.
    pub fn store(&self, dir: &Path) -> Result<(), LabError> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|error| LabError::Request(format!("manifest: {error}")))?;
        Ok(durable::write(&dir.join(MANIFEST_FILE), text.as_bytes())?)
    }

    /// Refuses to go on with a run of other parameters or another source, naming the difference.
    pub fn check_same_run(&self, other: &Manifest, dir: &Path) -> Result<(), LabError> {
        let mut differences = Vec::new();
        let mut compare = |what: &str, here: &str, asked: &str| {
            if here != asked {
                differences.push(format!("{what} is {here} there and {asked} now"));
            }
        };
        compare("source", &self.source.name, &other.source.name);
        compare("source hash", &self.source.blake3, &other.source.blake3);
        compare("tool version", &self.tool_version, &other.tool_version);
        let version = |manifest: &Manifest| manifest.numerics_version.to_string();
        compare("numerics version", &version(self), &version(other));
        let keys = self.parameters.keys().chain(other.parameters.keys());
        let keys: std::collections::BTreeSet<&String> = keys.collect();
        for key in keys {
            let value = |manifest: &Manifest| {
                manifest.parameters.get(key).map_or("(none)", String::as_str).to_owned()
            };
            compare(key, &value(self), &value(other));
        }
        if differences.is_empty() {
            return Ok(());
        }
        Err(LabError::Request(format!(
            "{} holds a conversion with other parameters: {}; nothing was changed, \
             choose another destination or remove that directory",
            dir.display(),
            differences.join("; ")
        )))
    }
}

/// Name of the file whose lock keeps two writers out of one directory.
pub const LOCK_FILE: &str = "colibri.lock";

/// The exclusive right to write a directory, until it is dropped or the process ends.
pub struct DirLock {
    file: File,
    path: PathBuf,
}

impl DirLock {
    /// Takes the lock; refuses when another process has it.
    pub fn take(dir: &Path) -> Result<DirLock, LabError> {
        let path = dir.join(LOCK_FILE);
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(LabError::write(&path, "create"))?;
        match file.try_lock() {
            Ok(()) => Ok(DirLock { file, path }),
            Err(TryLockError::WouldBlock) => Err(LabError::Request(format!(
                "another process is writing {}; wait for it or choose another destination",
                dir.display()
            ))),
            Err(TryLockError::Error(error)) => Err(LabError::write(&path, "lock")(error)),
        }
    }
}

impl Drop for DirLock {
    fn drop(&mut self) {
        // Removed while the lock is still held; a process that opened it before finds its own
        // directory complete when it gets the lock.
        let _ = fs::remove_file(&self.path);
        let _ = self.file.unlock();
    }
}

/// The record of a complete file.
pub fn record(dir: &Path, name: &str) -> Result<FileRecord, LabError> {
    let path = dir.join(name);
    let mut file = File::open(&path).map_err(LabError::write(&path, "open"))?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let read = file.read(&mut buffer).map_err(LabError::write(&path, "read"))?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
        bytes += read as u64;
    }
    Ok(FileRecord { name: name.to_owned(), bytes, blake3: hasher.finalize().to_hex().to_string() })
}
