//! Reading experts from files with the readers of the engine, beside plain direct reads of the same
//! files.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use container::{FileId, Model, Shards, TensorClass};
use experts::load::{ExpertTable, LoadMemory, load_expert};
use experts::reader::{AtOnce, PageBuffer, RateLimit, open_files};
use experts::{FileSet, IoMode, Reader};
use models::Int8Classes;

use super::Rates;
use crate::error::LabError;

/// Threads that read, as many as the engine's loaders of large experts.
const READERS: usize = 4;
/// Bytes of one plain read.
const PLAIN_BYTES: usize = 8 << 20;
/// Bytes read per measurement, at most.
const SAMPLE_BYTES: u64 = 1 << 30;
/// Bytes of a file's length that may be unallocated: the end of a last block.
const UNALLOCATED_BYTES_MAX: u64 = 1 << 20;

/// How fast a model's drive gives bytes that are in no cache of this machine.
pub struct Device {
    reader: Reader,
    pieces: Vec<(FileId, u64)>,
}

impl Device {
    /// Prepares to measure the drive that holds the files of `shards`. Refused where a figure would
    /// mean nothing: holes in the files are not read from any drive, and without direct reads they
    /// may come from memory.
    pub fn of(shards: &Shards) -> Result<Device, LabError> {
        let doubtful =
            |why: String| LabError::Request(format!("the drive cannot be measured: {why}"));
        let mut pieces = Vec::new();
        for (index, shard) in shards.files().iter().enumerate() {
            if let Some(bytes) = unallocated_bytes(&shard.path)? {
                return Err(doubtful(format!(
                    "{} has {bytes} bytes that were never written; let the download end",
                    shard.path.display()
                )));
            }
            let whole = shard.len / PLAIN_BYTES as u64;
            pieces.extend((0..whole).map(|at| (FileId(index as u32), at * PLAIN_BYTES as u64)));
        }
        if pieces.is_empty() {
            return Err(doubtful(format!("no file of the model has {PLAIN_BYTES} bytes")));
        }
        let opened = open_files(FileSet::open(shards)?, IoMode::Direct);
        match opened.fallback {
            Some(why) => Err(doubtful(why)),
            None => Ok(Device { reader: Reader::new(opened.files), pieces }),
        }
    }

    /// The drive as it is with a limit of bytes per second, if there is one.
    pub fn limited(self, bytes_per_s: Option<u64>) -> Device {
        let limit = bytes_per_s.map(|bytes_per_s| Arc::new(RateLimit::new(bytes_per_s as f64)));
        Device { reader: self.reader.limited(limit), ..self }
    }

    /// 10^9 bytes per second of direct reads of 8 MiB in a scattered order, `round` after `round`
    /// in other places.
    pub fn measure(&self, round: usize) -> Result<f64, LabError> {
        let count = self.pieces.len().min((SAMPLE_BYTES as usize / PLAIN_BYTES).max(READERS));
        let stride = scatter(self.pieces.len());
        let next = AtomicUsize::new(0);
        let started = Instant::now();
        on_readers(|| {
            let mut buffer = PageBuffer::zeroed(PLAIN_BYTES);
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                if at >= count {
                    return Ok(());
                }
                let at = (round * count + at) % self.pieces.len();
                let (file, offset) = self.pieces[at * stride % self.pieces.len()];
                self.reader.read_span(file, offset, PLAIN_BYTES, &mut buffer, &mut AtOnce)?;
            }
        })?;
        Ok((count * PLAIN_BYTES) as f64 / started.elapsed().as_secs_f64() / 1e9)
    }
}

/// Bytes of a file's length that have no place on the drive, if more than an end of a block.
fn unallocated_bytes(path: &std::path::Path) -> Result<Option<u64>, LabError> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let facts = std::fs::metadata(path).map_err(LabError::write(path, "look at"))?;
        let missing = facts.len().saturating_sub(facts.blocks() * 512);
        Ok((missing > UNALLOCATED_BYTES_MAX).then_some(missing))
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        Ok(None)
    }
}

/// Figures of one reader.
#[derive(Clone, Debug)]
pub struct IoFigures {
    /// The reader.
    pub reader: &'static str,
    /// 10^9 bytes of experts per second: read, checked, and arranged for the kernels.
    pub gb_per_s: Rates,
    /// 10^9 bytes per second of plain direct reads of the same files, 8 MiB at a time.
    pub device_gb_per_s: Rates,
}

impl IoFigures {
    /// Share of the plain reads' rate.
    pub fn device_ratio(&self) -> f64 {
        self.gb_per_s.median / self.device_gb_per_s.median
    }
}

/// Loads experts in a scattered order with every reader, and reads the files plainly, in turns,
/// each time with the files dropped from the page cache of this machine. Readers that the system
/// refuses are left out; `notice` is told.
pub fn io(
    model: &Model,
    repetitions: usize,
    notice: &mut dyn FnMut(&str),
) -> Result<Vec<IoFigures>, LabError> {
    let int8 = Int8Classes::default().contains(TensorClass::Experts);
    let table = ExpertTable::of(model, int8)?;
    if table.iter().next().is_none() {
        return Err(LabError::Request("this model has no routed experts to read".to_owned()));
    }
    let device = Device::of(&model.shards)?;
    let mut readers = Vec::new();
    for mode in [IoMode::Buffered, IoMode::Direct, IoMode::Uring] {
        let opened = open_files(FileSet::open(&model.shards)?, mode);
        match opened.fallback {
            Some(why) => notice(&format!("{}: {why}", mode.name())),
            None => readers.push((mode.name(), Reader::new(opened.files), Vec::new())),
        }
    }
    let mut plain = Vec::new();
    for repetition in 0..repetitions.max(1) {
        plain.push(device.measure(repetition)?);
        for (_, reader, rates) in &mut readers {
            drop_cached(model)?;
            rates.push(expert_rate(&table, reader, repetition)?);
        }
    }
    let device_gb_per_s = Rates::of(plain);
    let figures = readers.into_iter().map(|(reader, _, rates)| IoFigures {
        reader,
        gb_per_s: Rates::of(rates),
        device_gb_per_s,
    });
    Ok(figures.collect())
}

/// Asks the system to forget the pages of the model's files.
pub fn drop_cached(model: &Model) -> Result<(), LabError> {
    for shard in model.shards.files() {
        let file = File::open(&shard.path).map_err(LabError::write(&shard.path, "open"))?;
        #[cfg(target_os = "linux")]
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).map_err(|error| {
            LabError::write(&shard.path, "drop the cached pages of")(error.into())
        })?;
        let _ = file;
    }
    Ok(())
}

/// 10^9 bytes per second of experts loaded as the engine loads them.
fn expert_rate(table: &ExpertTable, reader: &Reader, round: usize) -> Result<f64, LabError> {
    let keys: Vec<_> = table.keys().collect();
    let stride = scatter(keys.len());
    let mut wanted = Vec::new();
    let mut total = 0;
    for at in 0..keys.len() {
        if total < SAMPLE_BYTES {
            let key = keys[(round + at) * stride % keys.len()];
            total += table.expert(key).file_bytes();
            wanted.push(key);
        }
    }
    let next = AtomicUsize::new(0);
    let started = Instant::now();
    on_readers(|| {
        let mut memory = LoadMemory::default();
        let mut slot = PageBuffer::default();
        while let Some(&key) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
            let source = table.expert(key);
            slot.grow_to(source.slot_bytes() as usize);
            load_expert(reader, key, source, &mut memory, &mut slot, &mut AtOnce)?;
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
