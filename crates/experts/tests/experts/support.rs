//! A model whose experts are tiny, and a reader that misbehaves as told.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use container::{FileId, Model};
use experts::cache::{CacheOptions, ExpertCache};
use experts::load::ExpertTable;
use experts::{ExpertStore, FileSet, RawFiles, Reader};

/// What the fake disk does with a read.
pub enum Answer {
    /// As the real file.
    Real,
    /// At most so many bytes.
    Short(usize),
    /// An error.
    Error(io::ErrorKind),
    /// The end of the file.
    End,
}

/// A test's decision about call number, file, offset and bytes of a read.
type Script = dyn FnMut(u64, FileId, u64, usize) -> Answer + Send;

/// Real files behind a script that sees (call number, file, offset, bytes).
pub struct FakeDisk {
    real: FileSet,
    calls: AtomicU64,
    script: Mutex<Box<Script>>,
}

impl RawFiles for FakeDisk {
    fn read_at(&self, file: FileId, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        let mut script = self.script.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = script(call, file, offset, buffer.len());
        drop(script);
        match answer {
            Answer::Real => self.real.read_at(file, offset, buffer),
            Answer::Short(max) => {
                let len = buffer.len().min(max);
                self.real.read_at(file, offset, &mut buffer[..len])
            }
            Answer::Error(kind) => Err(kind.into()),
            Answer::End => Ok(0),
        }
    }

    fn path(&self, file: FileId) -> &Path {
        self.real.path(file)
    }
}

/// A model with experts of a few kilobytes.
pub fn small_model() -> Model {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle/glm-groups");
    Model::open(&[dir]).unwrap()
}

/// The bundled model: six layers of 24 quantised experts.
pub fn model() -> Model {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/hummingbird");
    Model::open(&[dir]).unwrap()
}

/// Its experts.
pub fn table(model: &Model) -> ExpertTable {
    let config = &model.config;
    let layers = (0..config.layers)
        .filter(|layer| config.layer_kind(*layer) == Some(container::LayerKind::Sparse))
        .map(|layer| (layer, 0..config.moe.experts));
    ExpertTable::new(model, layers, true).unwrap()
}

/// A reader over a scripted disk.
pub fn reader(
    model: &Model,
    script: impl FnMut(u64, FileId, u64, usize) -> Answer + Send + 'static,
) -> Reader {
    let real = FileSet::open(&model.shards).unwrap();
    let disk = FakeDisk { real, calls: AtomicU64::new(0), script: Mutex::new(Box::new(script)) };
    // Retries do not wait in tests.
    Reader::new(Arc::new(disk)).retry_pause(std::time::Duration::ZERO)
}

/// A store over a scripted disk.
pub fn store(
    model: &Model,
    script: impl FnMut(u64, FileId, u64, usize) -> Answer + Send + 'static,
) -> ExpertStore {
    ExpertStore::new(table(model), reader(model, script))
}

/// A cache of so many bytes over a scripted disk.
pub fn cache(
    model: &Model,
    options: CacheOptions,
    script: impl FnMut(u64, FileId, u64, usize) -> Answer + Send + 'static,
) -> ExpertCache {
    ExpertCache::new(store(model, script), options).unwrap()
}

/// A cache of so many slots, some of them for guesses, which are read however busy the drive is.
pub fn guessing(model: &Model, slots: u64, for_guesses: u64, loaders: usize) -> CacheOptions {
    let slot = table(model).slot_bytes_max();
    CacheOptions {
        ahead_bytes: for_guesses * slot,
        idle_share_min: 0.0,
        ..CacheOptions::new(slots * slot, loaders)
    }
}

/// Layers that have experts.
pub fn layers(model: &Model) -> Vec<usize> {
    let table = table(model);
    (0..table.layers()).filter(|layer| table.places(*layer) > 0).collect()
}
