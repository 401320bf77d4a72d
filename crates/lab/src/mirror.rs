//! Copies of experts on another drive: which, written as records, and compared with the model.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use container::{ByteRange, Layout, Model, QSource, Record, Shards};
use experts::load::{ExpertTable, LoadMemory, check_crc, load_expert};
use experts::reader::{AtOnce, PageBuffer};
use experts::store::copy_of;
use experts::usage::model_id;
use experts::{FileSet, Reader, Usage};

use crate::convert::SHARD_BYTES;
use crate::error::LabError;
use crate::manifest::{DirLock, Manifest, SourceIdentity};
use crate::shard::{ShardSet, ShardWriter, Target, Unit, identity, split};

/// Source of the experts, in a mirror's manifest.
const SOURCE_NAME: &str = "mirror";

/// The experts of a mirror.
#[derive(Clone, Debug)]
pub struct MirrorPlan {
    /// Layers and experts, those that are chosen most first.
    pub experts: Vec<(usize, usize)>,
    /// Bytes of their records.
    pub bytes: u64,
    /// Share of the choices of the history that they had; without one their share of all experts.
    pub share: f64,
}

/// The experts with the most choices that fit in `budget_bytes`; without a history a choice spread
/// over all layers. A model whose experts have no records is refused.
pub fn plan(
    model: &Model,
    usage: Option<&Usage>,
    budget_bytes: u64,
) -> Result<MirrorPlan, LabError> {
    let mut records: Vec<_> = model.shards.records().iter().collect();
    if records.is_empty() {
        return Err(LabError::Request(
            "this model has no records of its experts, which a mirror copies; convert it first: \
             coli convert SRC DST"
                .to_owned(),
        ));
    }
    let count_of = |layer: usize, expert: usize| {
        let counts = usage.filter(|usage| layer <= usage.shape().layers);
        counts.and_then(|usage| usage.layer(layer).get(expert).copied()).unwrap_or(0)
    };
    // Layers beyond the decoder's are not read from drives again and again.
    records.retain(|(layer, _, _)| *layer < model.config.layers);
    // Of equals the lower number of every layer before the next number of any.
    records.sort_by_key(|(layer, expert, _)| {
        (std::cmp::Reverse(count_of(*layer, *expert)), *expert, *layer)
    });
    let weight = |layer, expert| if usage.is_some() { count_of(layer, expert) } else { 1 };
    // A count may be as large as a number can be.
    let total: f64 = records.iter().map(|(layer, expert, _)| weight(*layer, *expert) as f64).sum();
    let mut plan = MirrorPlan { experts: Vec::new(), bytes: 0, share: 0.0 };
    let mut covered = 0.0;
    for (layer, expert, record) in records {
        if plan.bytes + record.len > budget_bytes {
            break;
        }
        plan.bytes += record.len;
        covered += weight(layer, expert) as f64;
        plan.experts.push((layer, expert));
    }
    plan.share = covered / total.max(1.0);
    if plan.experts.is_empty() {
        return Err(LabError::Request(format!(
            "not one expert fits in a budget of {budget_bytes} bytes; give a larger --budget"
        )));
    }
    Ok(plan)
}

/// Writes a mirror: the records of the planned experts, byte for byte. `progress` is told bytes
/// done and in all.
pub fn stage(
    model: &Model,
    plan: &MirrorPlan,
    dir: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Manifest, LabError> {
    let is_empty = || fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none());
    if !is_empty() && !is_unfinished(dir) {
        return Err(LabError::Request(format!(
            "{} is not empty; choose another destination",
            dir.display()
        )));
    }
    let reader = Reader::new(Arc::new(FileSet::open(&model.shards)?));
    let mut units = Vec::new();
    for &(layer, expert) in &plan.experts {
        let (sources, _) = recorded(model, layer, expert)?;
        let target = |source: QSource| {
            let QSource { name, format, rows, cols, .. } = source;
            Target { name, format, rows, cols, vector: false }
        };
        let parts = Box::new(sources.map(target));
        units.push(Unit::Expert { layer, expert, parts });
    }
    // In the order of layers, as every container is.
    units.sort_by_key(|unit| match unit {
        Unit::Expert { layer, expert, .. } => (*layer, *expert),
        Unit::Tensor(_) => (0, 0),
    });
    fs::create_dir_all(dir).map_err(LabError::write(dir, "create"))?;
    let _lock = DirLock::take(dir)?;
    fn itself(target: &Target) -> &Target {
        target
    }
    let source =
        SourceIdentity { name: SOURCE_NAME.to_owned(), blake3: model_id(&model.table_hash()?) };
    let mut manifest = Manifest::new(source, Default::default());
    // Whoever finds a part of it knows what it is, and may begin again.
    manifest.store(dir)?;
    let shards = split(units, SHARD_BYTES, itself);
    let set = ShardSet { dir, layout: Layout::R16k4, shards: &shards, done: 0, target_of: itself };
    let mut bytes = Vec::new();
    let mut write = |unit: &Unit<Target>, shard: &mut ShardWriter| {
        let Unit::Expert { layer, expert, parts } = unit else { return Ok(()) };
        let (sources, record) = recorded(model, *layer, *expert)?;
        bytes.resize(record.len as usize, 0);
        reader.read_exact(record.file, record.offset, &mut bytes)?;
        let place = ByteRange { file: record.file, offset: record.offset, len: record.len };
        check_crc(&reader, (*layer as u32, *expert as u32), &place, &bytes, record.crc32c)?;
        shard.copy_record((*layer, *expert), parts, &sources, &record, &bytes)
    };
    set.write(&mut manifest, &mut write, progress)?;
    manifest.complete = true;
    manifest.store(dir)?;
    Ok(manifest)
}

/// An expert that the plan took from the records.
fn recorded(
    model: &Model,
    layer: usize,
    expert: usize,
) -> Result<([QSource; 3], Record), LabError> {
    let found = model.expert_in(&model.shards, layer, expert)?;
    found.ok_or_else(|| {
        LabError::Request(format!(
            "expert {expert} of layer {layer} has a record but not all its tensors; \
             fetch or convert the model again"
        ))
    })
}

/// Whether a directory holds a mirror that was begun and not finished.
fn is_unfinished(dir: &Path) -> bool {
    let manifest = Manifest::load(dir).ok().flatten();
    manifest.is_some_and(|manifest| manifest.source.name == SOURCE_NAME && !manifest.complete)
}

/// Reads every expert that some files, a mirror's or the model's own, have a record of. `bad` is
/// told those whose bytes, weights or hashes are not the model's. Returns the number of experts.
pub fn verify(
    model: &Model,
    shards: &Shards,
    bad: &mut dyn FnMut(usize, usize, String),
) -> Result<usize, LabError> {
    let reader = Reader::new(Arc::new(FileSet::open(shards)?));
    let table = ExpertTable::of(model, true)?;
    let mut places: Vec<_> =
        shards.records().iter().map(|(layer, expert, record)| (layer, expert, *record)).collect();
    // Layers beyond the decoder's have no place in the table of experts.
    let others = model.config.layers..model.config.all_layers();
    places.retain(|(layer, _, _)| !others.contains(layer));
    places.sort_by_key(|(layer, expert, _)| (*layer, *expert));
    let (mut memory, mut slot) = (LoadMemory::default(), PageBuffer::default());
    for (layer, expert, record) in &places {
        let (layer, expert) = (*layer, *expert);
        let source = match copy_of(model, &table, shards, (layer, expert), record)? {
            Ok(source) => source,
            Err(problem) => {
                bad(layer, expert, problem.to_owned());
                continue;
            }
        };
        let desc = source.desc.clone();
        slot.grow_to(source.slot_bytes() as usize);
        let key = (layer as u32, expert as u32);
        match load_expert(&reader, key, &source, &mut memory, &mut slot, &mut AtOnce) {
            Err(error) => bad(layer, expert, error.to_string()),
            Ok(()) if identity(&desc, &slot[..desc.bytes()]) != record.blake3 => {
                bad(layer, expert, "has other weights than its hash says".to_owned());
            }
            Ok(()) => {}
        }
    }
    Ok(places.len())
}
