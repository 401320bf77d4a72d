//! Reading experts from files with the readers of the engine, beside plain reads of the same files.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use container::{FileId, Model, TensorClass};
use experts::load::{ExpertTable, load_expert};
use experts::{FileSet, Reader};
use models::Int8Classes;

use super::Rates;
use crate::error::LabError;

/// Threads that read, as many as the engine's loaders.
const READERS: usize = 4;
/// Bytes of one plain read.
const PLAIN_BYTES: usize = 8 << 20;
/// Bytes read per measurement, at most.
const SAMPLE_BYTES: u64 = 2 << 30;

/// Figures of one reader.
#[derive(Clone, Debug)]
pub struct IoFigures {
    /// The reader.
    pub reader: &'static str,
    /// 10^9 bytes of experts per second: read, checked, and arranged for the kernels.
    pub gb_per_s: Rates,
    /// 10^9 bytes per second of plain reads of the same files, 8 MiB at a time.
    pub device_gb_per_s: Rates,
}

impl IoFigures {
    /// Share of the plain reads' rate.
    pub fn device_ratio(&self) -> f64 {
        self.gb_per_s.median / self.device_gb_per_s.median
    }
}

/// Loads experts in a scattered order and reads the files plainly, in turns, each time with the
/// files dropped from the page cache of this machine.
pub fn io(model: &Model, repetitions: usize) -> Result<Vec<IoFigures>, LabError> {
    let int8 = Int8Classes::default().contains(TensorClass::Experts);
    let table = ExpertTable::of(model, int8)?;
    if table.iter().next().is_none() {
        return Err(LabError::Request("this model has no routed experts to read".to_owned()));
    }
    let reader = Reader::new(Arc::new(FileSet::open(&model.shards)?));
    let (mut experts, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..repetitions.max(1) {
        drop_cached(model)?;
        plain.push(plain_rate(model, &reader)?);
        drop_cached(model)?;
        experts.push(expert_rate(&table, &reader)?);
    }
    Ok(vec![IoFigures {
        reader: "buffered",
        gb_per_s: Rates::of(experts),
        device_gb_per_s: Rates::of(plain),
    }])
}

/// Asks the system to forget the pages of the model's files.
fn drop_cached(model: &Model) -> Result<(), LabError> {
    for shard in model.shards.files() {
        let file = open(&shard.path)?;
        #[cfg(target_os = "linux")]
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).map_err(|error| {
            LabError::write(&shard.path, "drop the cached pages of")(error.into())
        })?;
        let _ = file;
    }
    Ok(())
}

fn open(path: &std::path::Path) -> Result<File, LabError> {
    File::open(path).map_err(LabError::write(path, "open"))
}

/// 10^9 bytes per second of plain reads.
fn plain_rate(model: &Model, reader: &Reader) -> Result<f64, LabError> {
    let mut pieces = Vec::new();
    let mut total = 0;
    for (index, shard) in model.shards.files().iter().enumerate() {
        for offset in (0..shard.len).step_by(PLAIN_BYTES) {
            if total < SAMPLE_BYTES {
                let len = (PLAIN_BYTES as u64).min(shard.len - offset);
                pieces.push((FileId(index as u32), offset, len as usize));
                total += len;
            }
        }
    }
    let next = AtomicUsize::new(0);
    let started = Instant::now();
    on_readers(|| {
        let mut buffer = vec![0; PLAIN_BYTES];
        while let Some(&(file, offset, len)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            reader.read_exact(file, offset, &mut buffer[..len])?;
        }
        Ok(())
    })?;
    Ok(total as f64 / started.elapsed().as_secs_f64() / 1e9)
}

/// 10^9 bytes per second of experts loaded as the engine loads them.
fn expert_rate(table: &ExpertTable, reader: &Reader) -> Result<f64, LabError> {
    let sources: Vec<_> = table.iter().collect();
    let stride = scatter(sources.len());
    let mut wanted = Vec::new();
    let mut total = 0;
    for at in 0..sources.len() {
        if total < SAMPLE_BYTES {
            let source = sources[at * stride % sources.len()];
            total += source.file_bytes();
            wanted.push(source);
        }
    }
    let next = AtomicUsize::new(0);
    let started = Instant::now();
    on_readers(|| {
        let mut buffer = Vec::new();
        while let Some(source) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut slot = vec![0; source.desc.bytes()];
            load_expert(reader, "bench", source, &mut buffer, &mut slot)?;
        }
        Ok(())
    })?;
    Ok(total as f64 / started.elapsed().as_secs_f64() / 1e9)
}

/// Runs `work` on every reading thread; the first error of one of them.
fn on_readers(work: impl Fn() -> Result<(), LabError> + Sync) -> Result<(), LabError> {
    thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS).map(|_| scope.spawn(&work)).collect();
        let panicked = |_| Err(LabError::Check("a reading thread panicked".to_owned()));
        let join = |reader: thread::ScopedJoinHandle<'_, _>| reader.join().unwrap_or_else(panicked);
        readers.into_iter().try_for_each(join)
    })
}

/// A step through `len` places that visits all of them in no useful order.
fn scatter(len: usize) -> usize {
    let common = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let start = len * 5 / 8 + 1;
    (start..start + len.max(1)).find(|step| common(*step, len) == 1).unwrap_or(1)
}
