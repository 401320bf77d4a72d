//! Where each matrix of a model lies and in which format: names and configuration meet files.
//!
//! Works on headers alone. Every fault that headers can show is found when a [`Model`] is opened;
//! the values of weights and scales are checked by those who read them.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;
use std::path::PathBuf;

use formats::{ExpertDesc, Format, Fp8Scale, MatrixDesc};

use crate::config::{Config, LayerKind};
use crate::error::{ContainerError, TensorError};
use crate::family::Role;
use crate::header::Dtype;
use crate::held::HeldExperts;
use crate::index::{FileId, Shards, TensorEntry, file_name, join_paths};
use crate::numbering::MissingShards;
use crate::recognise::{Disagreement, Stored, recognise};
use crate::record::Record;
use crate::report::{MAX_LISTED, MissingTensors, OptionalPart, Presence, Report, ranges};
use crate::tensors::{
    FusedSpec, TensorSpec, expert_specs, fused_specs, layer_of, layer_specs, model_specs,
};

/// Ending of the scale tensor of a quantised tensor.
pub const SCALE_ENDING: &str = ".qs";
/// Ending of the scale tensor of an original fp8 checkpoint.
pub const FP8_SCALE_ENDING: &str = "_scale_inv";
/// Unused tensor names kept in a report.
const MAX_UNUSED_LISTED: usize = 16;
const FP8_BLOCK: usize = formats::format::FP8_BLOCK;

/// A run of bytes in one file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ByteRange {
    /// The file.
    pub file: FileId,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Order of a matrix's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Layout {
    /// Row by row, as the format table of the documentation has it.
    #[default]
    Canonical,
    /// Tiles of 16 rows in kernel order, scales among the codes.
    R16k4,
    /// Entropy-coded tiles.
    R16k4Rans,
}

impl Layout {
    /// The layout of a name, as stamps have it after the `+`.
    pub fn from_name(name: &str) -> Option<Layout> {
        [Layout::R16k4, Layout::R16k4Rans].into_iter().find(|layout| layout.name() == name)
    }

    /// The name; `canonical` is never written in a stamp.
    pub const fn name(self) -> &'static str {
        match self {
            Layout::Canonical => "canonical",
            Layout::R16k4 => "r16k4",
            Layout::R16k4Rans => "r16k4-rans",
        }
    }
}

/// A stored matrix or vector: what it is and where its bytes are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QSource {
    /// Name of the tensor asked for, for messages.
    pub name: String,
    /// Format.
    pub format: Format,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Codes or plain numbers: exactly `format.weight_bytes(rows, cols)` in the canonical layout,
    /// the tiles with their scales or a coded stream of them in the others.
    pub weights: ByteRange,
    /// Scales, when format and layout keep any apart: exactly `format.scale_bytes(rows, cols)`.
    pub scales: Option<ByteRange>,
    /// Order of the bytes.
    pub layout: Layout,
}

impl QSource {
    /// Bytes of codes and scales.
    pub fn bytes(&self) -> u64 {
        self.weights.len + self.scales.map_or(0, |scales| scales.len)
    }
}

/// An opened model: configuration, tensors and the facts of its check.
#[derive(Debug)]
pub struct Model {
    /// Directories, primary first.
    pub dirs: Vec<PathBuf>,
    /// All tensors.
    pub shards: Shards,
    /// Configuration of the primary directory.
    pub config: Config,
    report: Report,
}

/// A stored matrix and the entries it was found in.
struct Found<'a> {
    source: QSource,
    weights: &'a TensorEntry,
    scales: Option<&'a TensorEntry>,
}

impl Model {
    /// Reads configuration and headers and checks everything that they can tell.
    pub fn open(dirs: &[PathBuf]) -> Result<Model, ContainerError> {
        let Some(primary) = dirs.first() else {
            return Err(ContainerError::NoTensorFiles { dirs: "(no directory given)".into() });
        };
        let config = Config::load(primary)?;
        Model::from_parts(config, Shards::open(dirs)?)
    }

    /// Reads configuration and headers of a directory that needs no more than some routed experts,
    /// and checks those.
    pub fn open_experts(dirs: &[PathBuf], held: &HeldExperts) -> Result<Model, ContainerError> {
        let Some(primary) = dirs.first() else {
            return Err(ContainerError::NoTensorFiles { dirs: "(no directory given)".into() });
        };
        let (config, shards) = (Config::load(primary)?, Shards::open(dirs)?);
        let report = Lookup { shards: &shards, config: &config }.check_experts(held)?;
        Ok(Model { dirs: shards.dirs().to_vec(), shards, config, report })
    }

    /// Checks a configuration against tensors that are already read.
    pub fn from_parts(config: Config, shards: Shards) -> Result<Model, ContainerError> {
        let report = Lookup { shards: &shards, config: &config }.check()?;
        Ok(Model { dirs: shards.dirs().to_vec(), shards, config, report })
    }

    /// Where a tensor lies. A missing tensor is an error, also when it is optional.
    pub fn source(&self, spec: &TensorSpec) -> Result<QSource, ContainerError> {
        match self.find(spec)? {
            Some(source) => Ok(source),
            None => Err(self.lookup().missing([spec.clone()].iter(), 1, None)),
        }
    }

    /// Where a tensor lies; `None` when it is not stored.
    pub fn find(&self, spec: &TensorSpec) -> Result<Option<QSource>, ContainerError> {
        Ok(self.lookup().find(spec)?.map(|found| found.source))
    }

    /// Gate, up and down of one routed expert.
    pub fn expert_sources(
        &self,
        layer: usize,
        expert: usize,
    ) -> Result<[QSource; 3], ContainerError> {
        let Some([gate, up, down]) = expert_specs(&self.config, layer, expert) else {
            return Err(ContainerError::Config {
                source_name: join_paths(&self.dirs),
                field: "experts".to_owned(),
                problem: format!("there is no expert {expert} in layer {layer}"),
            });
        };
        Ok([self.source(&gate)?, self.source(&up)?, self.source(&down)?])
    }

    /// Layers and experts of `held` that the model has, layer by layer.
    pub fn held_experts(
        &self,
        held: &HeldExperts,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<'_> {
        self.lookup().held(held)
    }

    /// The record of one routed expert, when its file has one: the expert's matrices lie in it at
    /// the places that their arrangement in memory gives, or anywhere in it as coded streams.
    pub fn expert_record(&self, layer: usize, expert: usize) -> Option<&Record> {
        self.shards.records().get(layer, expert)
    }

    /// Gate, up and down of one routed expert as other files hold them, with the record that these
    /// files have of it; `None` when they lack it or state no record.
    pub fn expert_in(
        &self,
        shards: &Shards,
        layer: usize,
        expert: usize,
    ) -> Result<Option<([QSource; 3], Record)>, ContainerError> {
        Lookup { shards, config: &self.config }.recorded(layer, expert)
    }

    /// What the check at opening found.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Checks again that every required tensor is present and recognised.
    pub fn check(&self) -> Result<Report, ContainerError> {
        self.lookup().check()
    }

    /// Whether a layer's own indexer is stored.
    pub fn has_indexer(&self, layer: usize) -> bool {
        let mut indexer =
            layer_specs(&self.config, layer).into_iter().filter(|spec| spec.role.is_indexer());
        indexer.next().is_some_and(|spec| self.shards.get(&spec.name).is_some())
    }

    /// BLAKE3 over configuration and tensor table: names, shapes and formats of everything that
    /// is used, independent of files and directories. It does not cover the weights themselves.
    pub fn table_hash(&self) -> Result<[u8; 32], ContainerError> {
        self.lookup().table_hash()
    }

    fn lookup(&self) -> Lookup<'_> {
        Lookup { shards: &self.shards, config: &self.config }
    }
}

/// Resolves specs against shards.
#[derive(Clone, Copy)]
struct Lookup<'a> {
    shards: &'a Shards,
    config: &'a Config,
}

impl<'a> Lookup<'a> {
    fn find(self, spec: &TensorSpec) -> Result<Option<Found<'a>>, ContainerError> {
        if let Some(entry) = self.shards.get(&spec.name) {
            return self.direct(spec, entry).map(Some);
        }
        let (Some(layer), Some(expert)) = (spec.layer, spec.expert) else { return Ok(None) };
        for fused in fused_specs(self.config, spec.role, layer) {
            if let Some(entry) = self.shards.get(&fused.name) {
                return self.fused(spec, &fused, expert, entry).map(Some);
            }
        }
        Ok(None)
    }

    /// The scale tensor beside `name`, checked against the two conventions.
    fn scales(
        self,
        name: &str,
        entry: &TensorEntry,
    ) -> Result<Option<&'a TensorEntry>, ContainerError> {
        let sidecar = self.shards.get(&format!("{name}{SCALE_ENDING}"));
        if plain(entry.dtype) && sidecar.is_none() {
            return Ok(None);
        }
        let inverse = self.shards.get(&format!("{name}{FP8_SCALE_ENDING}"));
        let refuse = |expected: &str, found: String| {
            let remedy = "the container is damaged or mixed; fetch or convert it again";
            let expected = expected.to_owned();
            self.refuse(name, entry, Disagreement { expected, found, remedy })
        };
        match (sidecar, inverse) {
            (Some(_), Some(_)) => Err(refuse(
                "one scale tensor",
                format!("both {name}{SCALE_ENDING} and {name}{FP8_SCALE_ENDING}"),
            )),
            (None, Some(inverse)) => {
                if entry.dtype != Dtype::F8E4m3 {
                    let found = format!("{} beside {name}{FP8_SCALE_ENDING}", entry.dtype);
                    return Err(refuse("F8_E4M3", found));
                }
                Ok(Some(inverse))
            }
            (sidecar, None) => Ok(sidecar),
        }
    }

    fn direct(
        self,
        spec: &TensorSpec,
        entry: &'a TensorEntry,
    ) -> Result<Found<'a>, ContainerError> {
        let scales = self.scales(&spec.name, entry)?;
        let refuse = |why| self.refuse(&spec.name, entry, why);
        let (format, layout) = recognise(
            spec.rows,
            spec.cols,
            stored(entry, entry.len),
            scales.map(|s| stored(s, s.len)),
            self.shards.stamp(&spec.name),
        )
        .map_err(|why| {
            // For plain numbers the shapes say more than the bytes.
            let misshapen = plain(entry.dtype) && !plain_shape_fits(spec, &entry.shape);
            refuse(if misshapen { wrong_shape(spec, entry) } else { why })
        })?;
        if layout != Layout::Canonical && spec.expert.is_none() {
            return Err(refuse(Disagreement {
                expected: "rows in their own order (only routed experts have another layout)"
                    .into(),
                found: format!("layout {}", layout.name()),
                remedy: "convert the checkpoint again",
            }));
        }
        if spec.role.is_vector() && !format.is_plain() {
            return Err(refuse(Disagreement {
                expected: "a vector of plain numbers (F32, BF16 or F16)".to_owned(),
                found: format.to_string(),
                remedy: "convert the checkpoint again; norms and biases are not quantised",
            }));
        }
        if format.is_plain() && !plain_shape_fits(spec, &entry.shape) {
            return Err(refuse(wrong_shape(spec, entry)));
        }
        let source = QSource {
            name: spec.name.clone(),
            format,
            rows: spec.rows,
            cols: spec.cols,
            weights: whole(entry),
            scales: scales.map(whole),
            layout,
        };
        Ok(Found { source, weights: entry, scales })
    }

    /// One expert's part of a tensor `[experts, rows, cols]`.
    fn fused(
        self,
        spec: &TensorSpec,
        fused: &FusedSpec,
        expert: usize,
        entry: &'a TensorEntry,
    ) -> Result<Found<'a>, ContainerError> {
        let experts = self.config.moe.experts;
        let refuse = |expected: String, found: String, remedy| {
            self.refuse(&fused.name, entry, Disagreement { expected, found, remedy })
        };
        let shape = [experts, fused.rows, fused.cols];
        let again = "config.json and weights do not belong together; fetch both from one place";
        if plain(entry.dtype) && entry.shape != shape {
            return Err(refuse(
                format!("{shape:?} by config.json"),
                format!("{:?}", entry.shape),
                again,
            ));
        }
        let share = |bytes: u64| {
            let share = bytes / experts as u64;
            (share * experts as u64 == bytes).then_some(share)
        };
        let scales = self.scales(&fused.name, entry)?;
        // The e8 tag is one per tensor; every other scale tensor is cut like the weights.
        let tag = scales.is_some_and(|s| s.dtype == Dtype::F32 && s.len == 4) && experts > 1;
        let (Some(weight_share), Some(scale_share)) =
            (share(entry.len), if tag { Some(4) } else { share(scales.map_or(0, |s| s.len)) })
        else {
            let found = format!(
                "{} bytes and {} bytes of scales",
                entry.len,
                scales.map_or(0, |scales| scales.len)
            );
            return Err(refuse(format!("bytes for {experts} experts of equal size"), found, again));
        };
        let (format, layout) = recognise(
            fused.rows,
            fused.cols,
            stored(entry, weight_share),
            scales.map(|s| stored(s, scale_share)),
            self.shards.stamp(&fused.name),
        )
        .map_err(|why| self.refuse(&fused.name, entry, why))?;
        if layout != Layout::Canonical {
            let found = format!("layout {} of several experts together", layout.name());
            return Err(refuse("one tensor per expert and matrix".into(), found, again));
        }
        if tag && format != Format::E8Iq3 {
            return Err(refuse("scales of each expert".into(), "one scale for all".into(), again));
        }
        let part = |what| {
            refuse(what, "a part beyond 64 bits".to_owned(), "the configuration is impossible")
        };
        let first = fused.first_row;
        let (Some(before), Some(len)) =
            (format.weight_bytes(first, fused.cols), format.weight_bytes(spec.rows, fused.cols))
        else {
            return Err(part("weights of one expert".to_owned()));
        };
        let weights = ByteRange {
            file: entry.file,
            offset: entry.offset + expert as u64 * weight_share + before as u64,
            len: len as u64,
        };
        let scale_range = match scales {
            None => None,
            Some(scales) if tag => Some(whole(scales)),
            Some(scales) => {
                let blocks = matches!(format, Format::Fp8B128(Fp8Scale::F32 | Fp8Scale::Ue8m0));
                if blocks && fused.rows != spec.rows && !first.is_multiple_of(FP8_BLOCK) {
                    return Err(refuse(
                        format!("an expert width that is a multiple of {FP8_BLOCK} in fused fp8"),
                        format!("{first}, so gate and up share scales"),
                        "convert the checkpoint from separate experts",
                    ));
                }
                let (Some(before), Some(len)) = (
                    format.scale_bytes(first, fused.cols),
                    format.scale_bytes(spec.rows, fused.cols),
                ) else {
                    return Err(part("scales of one expert".to_owned()));
                };
                // An e8 tag belongs to the whole tensor, whichever rows are taken.
                let before = if format == Format::E8Iq3 { 0 } else { before as u64 };
                let offset = scales.offset + expert as u64 * scale_share + before;
                Some(ByteRange { file: scales.file, offset, len: len as u64 })
            }
        };
        let source = QSource {
            name: spec.name.clone(),
            format,
            rows: spec.rows,
            cols: spec.cols,
            weights,
            scales: scale_range,
            layout: Layout::Canonical,
        };
        Ok(Found { source, weights: entry, scales })
    }

    fn refuse(self, name: &str, entry: &TensorEntry, why: Disagreement) -> ContainerError {
        ContainerError::Tensor(Box::new(TensorError {
            name: name.to_owned(),
            path: self.shards.path(entry.file).to_owned(),
            offset: entry.offset,
            expected: why.expected,
            found: format!("{} (stored shape {:?})", why.found, entry.shape),
            remedy: why.remedy,
        }))
    }

    /// Every spec of a layer, routed experts included.
    fn layer(self, layer: usize) -> impl Iterator<Item = TensorSpec> + use<'a> {
        let config = self.config;
        let sparse = config.layer_kind(layer) == Some(LayerKind::Sparse);
        let experts = if sparse { config.moe.experts } else { 0 };
        let routed = (0..experts).filter_map(move |e| expert_specs(config, layer, e)).flatten();
        layer_specs(config, layer).into_iter().chain(routed)
    }

    fn specs(self) -> impl Iterator<Item = TensorSpec> + use<'a> {
        let layers = (0..self.config.all_layers()).flat_map(move |layer| self.layer(layer));
        model_specs(self.config).into_iter().chain(layers)
    }

    fn check(self) -> Result<Report, ContainerError> {
        let config = self.config;
        let mut report = Report::empty(self.shards.missing_shards());
        let mut required = Gather::default();
        let mut indexer = Gather::default();
        let mut mtp = Gather::default();
        let mut mtp_indexer = Gather::default();
        let mut used: HashSet<usize> = HashSet::with_capacity(self.shards.len());
        let all =
            (0..config.all_layers()).filter(|l| config.layer_kind(*l) == Some(LayerKind::Sparse));
        for layer in all {
            self.refuse_double_storage(layer)?;
        }
        // Gate, up and down of the expert that is looked at.
        let mut expert: Vec<QSource> = Vec::with_capacity(3);
        for spec in self.specs() {
            let group = match (spec.layer.is_some_and(|l| config.is_mtp(l)), spec.role.is_indexer())
            {
                (false, false) => &mut required,
                (false, true) => &mut indexer,
                (true, false) => &mut mtp,
                (true, true) => &mut mtp_indexer,
            };
            group.wanted += 1;
            let Some(found) = self.find(&spec)? else {
                group.missing.push(spec);
                continue;
            };
            used.insert(std::ptr::from_ref(found.weights).addr());
            used.extend(found.scales.map(|entry| std::ptr::from_ref(entry).addr()));
            let source = &found.source;
            let elements = source.rows as u64 * source.cols as u64;
            report.count(spec.role.class(), source.format, elements, source.bytes());
            if spec.role == Role::MtpEhProj && source.format == Format::Int4Row {
                report.warnings.push(format!(
                    "{} is stored as int4-row: one scale for both halves rounds half of it to zero; \
                     convert it with groups or int8",
                    spec.name
                ));
            }
            if spec.role == Role::ExpertGate {
                expert.clear();
            }
            if let Some(place) = spec.layer.zip(spec.expert) {
                expert.push(found.source);
                if let (Role::ExpertDown, [gate, up, down]) = (spec.role, &expert[..]) {
                    self.record_of(place, [gate, up, down])?;
                }
            }
        }
        if !required.missing.is_empty() {
            return Err(self.missing(required.missing.iter(), required.wanted, None));
        }
        // An MTP layer may come without its indexer as a whole, like the model.
        if mtp_indexer.missing.len() < mtp_indexer.wanted {
            mtp.wanted += mtp_indexer.wanted;
            mtp.missing.append(&mut mtp_indexer.missing);
        }
        report.indexer = self.optional(OptionalPart::Indexer, &indexer, &report.shards)?;
        report.mtp = self.optional(OptionalPart::Mtp, &mtp, &report.shards)?;
        if !report.shards.is_complete() {
            let warning = format!("no tensor is missing, but files are: {}", report.shards);
            report.warnings.push(warning);
        }
        report.unused = self.unused(&used);
        Ok(report)
    }

    /// Layers and experts of `held` that the model has. A multi-token-prediction layer that is not
    /// stored is none of them, since a model may come without.
    fn held(self, held: &HeldExperts) -> impl Iterator<Item = (usize, Range<usize>)> + use<'a> {
        held.of(self.config).filter(move |(layer, _)| {
            let first = || expert_specs(self.config, *layer, 0).map(|[gate, ..]| self.find(&gate));
            !self.config.is_mtp(*layer) || matches!(first(), Some(Ok(Some(_)) | Err(_)))
        })
    }

    /// Checks some routed experts and nothing else.
    fn check_experts(self, held: &HeldExperts) -> Result<Report, ContainerError> {
        let mut report = Report::empty(self.shards.missing_shards());
        let mut required = Gather::default();
        for (layer, experts) in self.held(held) {
            self.refuse_double_storage(layer)?;
            for expert in experts {
                for spec in expert_specs(self.config, layer, expert).into_iter().flatten() {
                    required.wanted += 1;
                    match self.find(&spec)? {
                        Some(Found { source, .. }) => {
                            let elements = source.rows as u64 * source.cols as u64;
                            let class = spec.role.class();
                            report.count(class, source.format, elements, source.bytes());
                        }
                        None => required.missing.push(spec),
                    }
                }
                // Refuses a record that does not hold the expert.
                self.recorded(layer, expert)?;
            }
        }
        if required.missing.is_empty() {
            return Ok(report);
        }
        Err(self.missing(required.missing.iter(), required.wanted, None))
    }

    /// A part that is absent as a whole is fine, unless files are known to be missing: then it was
    /// in them.
    fn optional(
        self,
        part: OptionalPart,
        gather: &Gather,
        shards: &MissingShards,
    ) -> Result<Presence, ContainerError> {
        let absent = gather.missing.len() == gather.wanted;
        if gather.wanted == 0 {
            Ok(Presence::NotConfigured)
        } else if gather.missing.is_empty() {
            Ok(Presence::Present)
        } else if absent && shards.is_complete() {
            Ok(Presence::Absent)
        } else {
            Err(self.missing(gather.missing.iter(), gather.wanted, Some(part)))
        }
    }

    /// Experts stored per expert and fused, or fused in two ways, would leave it open which count.
    fn refuse_double_storage(self, layer: usize) -> Result<(), ContainerError> {
        for role in [Role::ExpertGate, Role::ExpertUp, Role::ExpertDown] {
            let mut fused = fused_specs(self.config, role, layer)
                .into_iter()
                .filter_map(|fused| Some((self.shards.get(&fused.name)?, fused.name)));
            let Some((first, first_name)) = fused.next() else { continue };
            let single = (0..self.config.moe.experts)
                .filter_map(|expert| {
                    crate::tensors::spec(self.config, role, Some(layer), Some(expert))
                })
                .find_map(|spec| Some((self.shards.get(&spec.name)?, spec.name)));
            if let Some((second, second_name)) = fused.next().or(single) {
                return Err(ContainerError::DuplicateTensor {
                    name: format!("{second_name} (also part of {first_name})"),
                    first: self.shards.path(first.file).to_owned(),
                    second: self.shards.path(second.file).to_owned(),
                });
            }
        }
        Ok(())
    }

    /// An expert that has a record, and the record; refused when it does not hold the expert.
    fn recorded(
        self,
        layer: usize,
        expert: usize,
    ) -> Result<Option<([QSource; 3], Record)>, ContainerError> {
        let Some(specs) = expert_specs(self.config, layer, expert) else { return Ok(None) };
        let mut sources = Vec::with_capacity(specs.len());
        for spec in &specs {
            match self.find(spec)? {
                Some(found) => sources.push(found.source),
                // Missing tensors are reported by those who look for all of them.
                None => return Ok(None),
            }
        }
        let Ok(sources) = <[QSource; 3]>::try_from(sources) else { return Ok(None) };
        let record = self.record_of((layer, expert), sources.each_ref())?;
        Ok(record.map(|record| (sources, record)))
    }

    /// The record of an expert that lies in `sources`, if there is one; refused when it does not
    /// hold them.
    fn record_of(
        self,
        (layer, expert): (usize, usize),
        sources: [&QSource; 3],
    ) -> Result<Option<Record>, ContainerError> {
        let Some(record) = self.shards.records().get(layer, expert) else { return Ok(None) };
        let Some(why) = record_disagrees(record, sources) else { return Ok(Some(*record)) };
        let record_of = format!("record of layer {layer}, expert {expert}");
        Err(ContainerError::Tensor(Box::new(TensorError {
            name: format!("{} ({record_of})", sources[0].name),
            path: self.shards.path(record.file).to_owned(),
            offset: record.offset,
            expected: why.expected,
            found: why.found,
            remedy: why.remedy,
        })))
    }

    fn unused(self, used: &HashSet<usize>) -> (usize, Vec<String>) {
        let mut count = 0;
        let mut names = BTreeSet::new();
        for (name, entry) in self.shards.iter() {
            if used.contains(&std::ptr::from_ref(entry).addr()) {
                continue;
            }
            count += 1;
            names.insert(name);
            if names.len() > MAX_UNUSED_LISTED {
                names.pop_last();
            }
        }
        (count, names.into_iter().map(str::to_owned).collect())
    }

    fn missing<'s>(
        self,
        specs: impl Iterator<Item = &'s TensorSpec>,
        wanted: usize,
        part: Option<OptionalPart>,
    ) -> ContainerError {
        let mut missing = MissingTensors {
            dirs: join_paths(self.shards.dirs()),
            part,
            wanted,
            config_layers: self.config.layers,
            shards: self.shards.missing_shards(),
            ..MissingTensors::default()
        };
        let mut layers = BTreeSet::new();
        for spec in specs {
            missing.count += 1;
            if missing.names.len() < MAX_LISTED {
                missing.names.push(spec.name.clone());
            }
            layers.extend(spec.layer);
        }
        missing.layers = ranges(layers);
        let stored: BTreeSet<usize> = self.shards.names().filter_map(layer_of).collect();
        missing.empty_layers = ranges((0..self.config.layers).filter(|l| !stored.contains(l)));
        missing.indexed = missing.names.first().and_then(|name| {
            let file = self.shards.indexed_file(name)?;
            let there = self.shards.files().iter().any(|f| file_name(&f.path) == file);
            Some((file, there))
        });
        ContainerError::MissingTensors(Box::new(missing))
    }

    fn table_hash(self) -> Result<[u8; 32], ContainerError> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.config.identity_text().as_bytes());
        for spec in self.specs() {
            if let Some(found) = self.find(&spec)? {
                let source = found.source;
                let line =
                    format!("{} {} {} {}\n", spec.name, source.rows, source.cols, source.format);
                hasher.update(line.as_bytes());
            }
        }
        Ok(*hasher.finalize().as_bytes())
    }
}

/// Why a record does not hold the matrices of an expert, if it does not.
fn record_disagrees(record: &Record, sources: [&QSource; 3]) -> Option<Disagreement> {
    let remedy = "the container is damaged or was written again by another tool; convert it again";
    let place = |range: &ByteRange| format!("{} bytes at {}", range.len, range.offset);
    let record_end = record.offset + record.len;
    for source in sources {
        for range in [Some(&source.weights), source.scales.as_ref()].into_iter().flatten() {
            let inside = range.file == record.file
                && range.offset >= record.offset
                && range.offset + range.len <= record_end;
            if !inside {
                return Some(Disagreement {
                    expected: format!("{} within the record's {} bytes", source.name, record.len),
                    found: place(range),
                    remedy,
                });
            }
        }
    }
    if sources.iter().any(|source| source.layout == Layout::R16k4Rans) {
        return None;
    }
    let desc = |source: &QSource| {
        MatrixDesc::for_matmul(source.format, source.rows, source.cols, false).ok()
    };
    let [Some(gate), Some(up), Some(down)] = sources.map(desc) else {
        return Some(Disagreement {
            expected: "matrices that can be addressed".to_owned(),
            found: "a size beyond 64 bits".to_owned(),
            remedy,
        });
    };
    let expert = ExpertDesc { gate, up, down };
    for ((source, desc), range) in sources.iter().zip(expert.matrices()).zip(expert.ranges()) {
        let weights = record.offset + range.start as u64;
        let scales = weights + desc.scales_at() as u64;
        let scales_fit = source.scales.is_none_or(|found| found.offset == scales);
        if source.weights.offset != weights || !scales_fit {
            return Some(Disagreement {
                expected: format!("{} at byte {weights}, its scales at {scales}", source.name),
                found: place(&source.weights),
                remedy,
            });
        }
    }
    (record.len != expert.bytes() as u64).then(|| Disagreement {
        expected: format!("a record of {} bytes", expert.bytes()),
        found: record.len.to_string(),
        remedy,
    })
}

/// Wanted and missing tensors of one part.
#[derive(Default)]
struct Gather {
    wanted: usize,
    missing: Vec<TensorSpec>,
}

fn plain(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16)
}

fn stored(entry: &TensorEntry, len: u64) -> Stored {
    Stored { dtype: entry.dtype, len }
}

fn whole(entry: &TensorEntry) -> ByteRange {
    ByteRange { file: entry.file, offset: entry.offset, len: entry.len }
}

/// Plain numbers keep their shape: `[rows, cols]`, or `[n]` and `[1, n]` for vectors.
fn plain_shape_fits(spec: &TensorSpec, shape: &[usize]) -> bool {
    shape == [spec.rows, spec.cols] || (spec.role.is_vector() && shape == [spec.cols])
}

fn wrong_shape(spec: &TensorSpec, entry: &TensorEntry) -> Disagreement {
    let expected = if spec.role.is_vector() {
        format!("[{}] by config.json", spec.cols)
    } else {
        format!("[{}, {}] by config.json", spec.rows, spec.cols)
    };
    Disagreement {
        expected,
        found: format!("{:?} of {}", entry.shape, entry.dtype),
        remedy: "config.json and weights do not belong together; fetch both from one place",
    }
}
