//! Where experts are read from: the model's own files, and drives that mirror some of them.
//!
//! Every replica of an expert is the same expert, so which one is read shows in nothing but time.
//! The choice is a function of the expert and the weights of the drives alone; a drive that fails
//! is left alone for a while, and the expert is read elsewhere within the same load.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use container::{ContainerError, Model, Record, Shards};
use smallvec::SmallVec;

use crate::cache::Key;
use crate::cache::counters::Counter;
use crate::load::{ExpertSource, ExpertTable, LoadError, LoadMemory, load_expert, name_of};
use crate::reader::{FileSet, IoMode, Pace, PageBuffer, RateLimit, ReadError, Reader, open_files};

/// Loads for which a drive that failed is left alone, before it is tried again.
const SICK_LOADS: u64 = 256;

/// Says something to the user that is no error.
pub type Notice = Arc<dyn Fn(&str) + Send + Sync>;

/// Why a mirror cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// Its files.
    #[error(transparent)]
    Container(#[from] ContainerError),
    /// Reading them.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// It mirrors nothing.
    #[error(
        "mirror {}: {problem}; make one with coli mirror stage", dir.display()
    )]
    Useless {
        /// The mirror.
        dir: PathBuf,
        /// What is wrong.
        problem: &'static str,
    },
    /// It is of another model.
    #[error(
        "mirror {}: expert {expert} of layer {layer} {problem}; \
         make it anew with coli mirror stage", dir.display()
    )]
    Other {
        /// The mirror.
        dir: PathBuf,
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
        /// What is wrong.
        problem: &'static str,
    },
}

/// The expert that other files have a record of, or why it is no copy of the model's.
pub fn copy_of(
    model: &Model,
    table: &ExpertTable,
    shards: &Shards,
    (layer, expert): (usize, usize),
    record: &Record,
) -> Result<Result<ExpertSource, &'static str>, ContainerError> {
    let key = (u32::try_from(layer).unwrap_or(u32::MAX), u32::try_from(expert).unwrap_or(u32::MAX));
    let Some(own) = table.get(key) else {
        return Ok(Err("is not one of this model's"));
    };
    match model.expert_record(layer, expert) {
        None => return Ok(Err("has no hash in the model; convert the model")),
        Some(own) if own.blake3 != record.blake3 => {
            return Ok(Err("has other weights than the model's"));
        }
        Some(own) if own.len == record.len && own.crc32c != record.crc32c => {
            return Ok(Err("has other bytes than the model's"));
        }
        Some(_) => {}
    }
    let Some((sources, record)) = model.expert_in(shards, layer, expert)? else {
        return Ok(Err("has a record but not all its tensors"));
    };
    let desc = own.desc.clone();
    let fits = sources.iter().zip(desc.matrices()).all(|(source, desc)| {
        (source.format, source.rows, source.cols) == (desc.format(), desc.rows(), desc.cols())
    });
    if !fits {
        return Ok(Err("has another format than the model's"));
    }
    Ok(Ok(ExpertSource::new(desc, &sources, Some(&record))))
}

/// A directory with copies of experts on another drive.
pub struct Mirror {
    /// The directory, for messages.
    pub dir: PathBuf,
    /// Reads its files.
    pub reader: Reader,
    /// The experts it has.
    pub experts: HashMap<Key, ExpertSource>,
    /// Its share of the reads of what it has, beside 1 for the model's own files.
    pub weight: f64,
}

impl Mirror {
    /// Opens a mirror of `model`, whose experts `table` describes. Every expert of it must be one
    /// of the model's, by the hashes that both record. `notice` is told when the files cannot be
    /// read in `mode`.
    pub fn open(
        dir: PathBuf,
        weight: f64,
        model: &Model,
        table: &ExpertTable,
        mode: IoMode,
        notice: &Notice,
    ) -> Result<Mirror, MirrorError> {
        let shards = Shards::open(std::slice::from_ref(&dir))?;
        let mut experts = HashMap::new();
        for (layer, expert, record) in shards.records().iter() {
            let source = copy_of(model, table, &shards, (layer, expert), record)?;
            let source = source.map_err(|problem| {
                let dir = dir.clone();
                MirrorError::Other { dir, layer, expert, problem }
            })?;
            experts.insert((layer as u32, expert as u32), source);
        }
        let problem = match fs::canonicalize(&dir) {
            Ok(real) if is_one_of(&real, &model.dirs) => Some("it is the model's own directory"),
            _ if experts.is_empty() => Some("it has no record of an expert"),
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(MirrorError::Useless { dir, problem });
        }
        let opened = open_files(FileSet::open(&shards)?, mode);
        if let Some(why) = opened.fallback {
            notice(&format!("{}: {why}", dir.display()));
        }
        Ok(Mirror { dir, reader: Reader::new(opened.files), experts, weight })
    }

    /// The mirror with a share of a rate that its reads do not go beyond.
    pub fn limited(self, limit: Option<Arc<RateLimit>>) -> Mirror {
        Mirror { reader: self.reader.limited(limit), ..self }
    }
}

/// Whether a directory is one of some others, whatever they are called.
fn is_one_of(real: &Path, dirs: &[PathBuf]) -> bool {
    dirs.iter().any(|dir| fs::canonicalize(dir).is_ok_and(|dir| dir == real))
}

/// How a drive does.
#[derive(Debug, Default)]
pub struct Health {
    /// Experts read from it.
    pub loads: Counter,
    /// Loads that failed there.
    pub failures: Counter,
    /// Loads that went elsewhere because it had failed.
    pub avoided: Counter,
    /// Loads to be avoided, and the trial after them; 0 for a healthy drive.
    sick_for: AtomicU64,
}

impl Health {
    /// Whether the drive failed lately.
    pub fn is_sick(&self) -> bool {
        self.sick_for.load(Ordering::Relaxed) > 0
    }

    /// Whether to leave the drive alone now; counts down to the next trial.
    fn avoid(&self) -> bool {
        // At the last it is tried until it works or fails again.
        let less = |left: u64| (left > 1).then(|| left - 1);
        let avoid = self.sick_for.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok();
        if avoid {
            self.avoided.add(1);
        }
        avoid
    }

    /// Notes a failure; true when the drive was healthy before.
    fn fail(&self) -> bool {
        self.failures.add(1);
        self.sick_for.swap(SICK_LOADS, Ordering::Relaxed) == 0
    }
}

/// An expert on a drive, and what reads it.
type Replica<'a> = (&'a Reader, &'a ExpertSource);

/// A drive that an expert is read from.
struct Drive<'a> {
    at: usize,
    replica: Replica<'a>,
    /// Whether success shows that the drive works again: not where it was read for lack of another.
    trial: bool,
}

/// The experts of a model and everywhere they can be read from.
pub struct ExpertStore {
    table: ExpertTable,
    reader: Reader,
    mirrors: Vec<Mirror>,
    /// Of the model's own files, then of each mirror.
    health: Vec<Health>,
    notice: Notice,
}

impl ExpertStore {
    /// The experts of `table`, read by `reader`.
    pub fn new(table: ExpertTable, reader: Reader) -> ExpertStore {
        let notice: Notice = Arc::new(|_| {});
        ExpertStore { table, reader, mirrors: Vec::new(), health: vec![Health::default()], notice }
    }

    /// The store with mirrors; `notice` is told when a drive fails and when it works again.
    pub fn with_mirrors(mut self, mirrors: Vec<Mirror>, notice: Notice) -> ExpertStore {
        self.health = (0..=mirrors.len()).map(|_| Health::default()).collect();
        ExpertStore { mirrors, notice, ..self }
    }

    /// The experts.
    pub fn table(&self) -> &ExpertTable {
        &self.table
    }

    /// The reader of the model's own files.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// The mirrors, each with how it does.
    pub fn mirrors(&self) -> impl Iterator<Item = (&Mirror, &Health)> {
        self.mirrors.iter().zip(&self.health[1..])
    }

    /// Bytes read so far, from everywhere.
    pub fn bytes_read(&self) -> u64 {
        let mirrors = self.mirrors.iter().map(|mirror| mirror.reader.bytes_read());
        self.reader.bytes_read() + mirrors.sum::<u64>()
    }

    /// Bytes of working memory that any load may need.
    pub fn load_memory_bytes(&self) -> u64 {
        let own = self.table.iter().map(|source| source.buffer_bytes(&self.reader));
        let mirrored = self.mirrors.iter().flat_map(|mirror| {
            mirror.experts.values().map(|source| source.buffer_bytes(&mirror.reader))
        });
        own.chain(mirrored).max().unwrap_or(0)
    }

    /// Where an expert is on a drive: 0 is the model's own files.
    fn replica(&self, at: usize, key: Key) -> Option<Replica<'_>> {
        match at.checked_sub(1) {
            None => Some((&self.reader, self.table.expert(key))),
            Some(mirror) => {
                let mirror = &self.mirrors[mirror];
                Some((&mirror.reader, mirror.experts.get(&key)?))
            }
        }
    }

    /// The drive that an expert is read from while all are well.
    fn choose(&self, key: Key) -> usize {
        let mut weights: SmallVec<[f64; 4]> = SmallVec::from_slice(&[1.0]);
        weights.extend(
            self.mirrors
                .iter()
                .map(|mirror| if mirror.experts.contains_key(&key) { mirror.weight } else { 0.0 }),
        );
        choose_among(key, &weights)
    }

    /// Reads an expert into `slot`; see [`load_expert`]. Fails when it could be read nowhere, with
    /// what the first drive said.
    pub fn load(
        &self,
        key: Key,
        memory: &mut LoadMemory,
        slot: &mut PageBuffer,
        pace: &mut dyn Pace,
    ) -> Result<(), LoadError> {
        if self.mirrors.is_empty() {
            self.health[0].loads.add(1);
            return load_expert(&self.reader, key, self.table.expert(key), memory, slot, pace);
        }
        let chosen = self.choose(key);
        let others = (0..self.health.len()).filter(|at| *at != chosen);
        let with_replica = |at| Some((at, self.replica(at, key)?));
        let mut avoided: SmallVec<[(usize, Replica<'_>); 4]> = SmallVec::new();
        let mut first_error = None;
        let mut read_from = |(at, replica), trial| {
            let drive = Drive { at, replica, trial };
            match self.load_at(drive, key, memory, slot, pace) {
                Ok(()) => true,
                Err(error) => {
                    first_error.get_or_insert(error);
                    false
                }
            }
        };
        let drives: SmallVec<[(usize, Replica<'_>); 4]> =
            std::iter::once(chosen).chain(others).filter_map(with_replica).collect();
        for drive in &drives {
            // A drive that alone has the expert is no choice.
            if drives.len() > 1 && self.health[drive.0].avoid() {
                avoided.push(*drive);
            } else if read_from(*drive, drives.len() > 1) {
                return Ok(());
            }
        }
        // Nothing else could be read: a drive that failed before is better than none.
        if avoided.into_iter().any(|drive| read_from(drive, false)) {
            return Ok(());
        }
        Err(first_error.unwrap_or_else(|| LoadError::Panicked { tensor: name_of(key) }))
    }

    /// Reads an expert from a drive, and notes how the drive does.
    fn load_at(
        &self,
        Drive { at, replica: (reader, source), trial }: Drive<'_>,
        key: Key,
        memory: &mut LoadMemory,
        slot: &mut PageBuffer,
        pace: &mut dyn Pace,
    ) -> Result<(), LoadError> {
        let health = &self.health[at];
        let place = || match at.checked_sub(1) {
            None => "the model's own directory".to_owned(),
            Some(mirror) => format!("the mirror {}", self.mirrors[mirror].dir.display()),
        };
        let loaded = load_expert(reader, key, source, memory, slot, pace);
        match &loaded {
            Ok(()) => {
                health.loads.add(1);
                if trial && health.is_sick() && health.sick_for.swap(0, Ordering::Relaxed) > 0 {
                    (self.notice)(&format!("{} can be read again", place()));
                }
            }
            Err(error) => {
                if health.fail() {
                    let place = place();
                    (self.notice)(&format!(
                        "{place} fails, its experts are read elsewhere: {error}"
                    ));
                }
            }
        }
        loaded
    }
}

/// Which of several drives an expert is read from: each gets the share of its weight, and a drive
/// of weight 0 nothing. A function of the expert and the weights alone.
pub fn choose_among(key: Key, weights: &[f64]) -> usize {
    // The upper bits of a mixed place as a number below 1.
    let mut at = (mixed(key) >> 11) as f64 / (1u64 << 53) as f64 * weights.iter().sum::<f64>();
    let mut last = 0;
    for (drive, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
        last = drive;
        at -= weight;
        if at < 0.0 {
            break;
        }
    }
    last
}

/// A number that depends on all bits of a place in the model: finalisation of a 64-bit hash.
fn mixed((layer, expert): Key) -> u64 {
    let mut bits = u64::from(layer) << 32 | u64::from(expert);
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}
