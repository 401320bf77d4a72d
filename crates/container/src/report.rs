//! What a check of a container found, and the message about tensors that are missing.
//!
//! Holds facts and formats them; finding them is [`crate::source`]'s job.

use std::collections::BTreeMap;
use std::fmt;

use formats::Format;

use crate::family::TensorClass;
use crate::numbering::MissingShards;

/// Names listed before a message says "and N more".
pub const MAX_LISTED: usize = 4;

/// Whether an optional part of the model is stored. A part that is stored incompletely is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    /// The configuration does not ask for it.
    NotConfigured,
    /// Nothing of it is stored.
    Absent,
    /// All of it is stored.
    Present,
}

/// How much of a class is stored in one format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FormatUse {
    /// Matrices and vectors.
    pub tensors: usize,
    /// Numbers in them.
    pub elements: u64,
    /// Bytes, scales included.
    pub bytes: u64,
}

impl FormatUse {
    /// Measured bits per number, scales included.
    pub fn bits(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.elements.max(1) as f64
    }
}

/// Facts of a container whose required tensors are all present and recognised.
#[derive(Clone, Debug)]
pub struct Report {
    /// What is stored, by class and format name.
    pub stored: BTreeMap<(TensorClass, String), FormatUse>,
    /// The sparse-attention indexer of the decoder layers.
    pub indexer: Presence,
    /// The multi-token-prediction layers.
    pub mtp: Presence,
    /// Stored tensors that nothing uses: how many, and the first names in order.
    pub unused: (usize, Vec<String>),
    /// Numbering and index facts.
    pub shards: MissingShards,
    /// Facts a user should know although the model loads.
    pub warnings: Vec<String>,
}

impl Report {
    /// A report of nothing yet.
    pub(crate) fn empty(shards: MissingShards) -> Report {
        Report {
            stored: Default::default(),
            indexer: Presence::NotConfigured,
            mtp: Presence::NotConfigured,
            unused: (0, Vec::new()),
            shards,
            warnings: Vec::new(),
        }
    }

    /// Bytes of all used tensors.
    pub fn bytes(&self) -> u64 {
        self.stored.values().map(|used| used.bytes).sum()
    }

    /// Bytes of one class.
    pub fn class_bytes(&self, class: TensorClass) -> u64 {
        self.stored.iter().filter(|((c, _), _)| *c == class).map(|(_, used)| used.bytes).sum()
    }

    pub(crate) fn count(&mut self, class: TensorClass, format: Format, elements: u64, bytes: u64) {
        let used = self.stored.entry((class, format.to_string())).or_default();
        used.tensors += 1;
        used.elements += elements;
        used.bytes += bytes;
    }
}

/// A part that a model can run without when none of it is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OptionalPart {
    /// Sparse-attention indexer.
    Indexer,
    /// Multi-token-prediction layers.
    Mtp,
}

impl OptionalPart {
    /// Name for people.
    pub const fn name(self) -> &'static str {
        match self {
            OptionalPart::Indexer => "the sparse-attention indexer",
            OptionalPart::Mtp => "the multi-token-prediction layer",
        }
    }

    /// What to do instead of completing it.
    const fn alternative(self) -> &'static str {
        match self {
            OptionalPart::Indexer => "remove all of its tensors to run with dense attention",
            OptionalPart::Mtp => {
                "set num_nextn_predict_layers to 0 in config.json to run without drafts"
            }
        }
    }
}

/// Tensors that are in no file, and everything that helps to find out why.
#[derive(Clone, Debug, Default)]
pub struct MissingTensors {
    /// The directories searched, joined.
    pub dirs: String,
    /// What is incomplete, when it is an optional part and not the model itself.
    pub part: Option<OptionalPart>,
    /// First missing names.
    pub names: Vec<String>,
    /// Number of missing tensors.
    pub count: usize,
    /// Number of tensors wanted.
    pub wanted: usize,
    /// Inclusive ranges of layers with a missing tensor.
    pub layers: Vec<(usize, usize)>,
    /// Inclusive ranges of layers without any tensor.
    pub empty_layers: Vec<(usize, usize)>,
    /// Layers the configuration states.
    pub config_layers: usize,
    /// Numbering and index facts.
    pub shards: MissingShards,
    /// The file that the index names for the first missing tensor, and whether it is there.
    pub indexed: Option<(String, bool)>,
}

impl fmt::Display for MissingTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.dirs)?;
        if let Some(part) = self.part {
            write!(f, "{} is incomplete: ", part.name())?;
        }
        write!(
            f,
            "{} of {} tensors are missing: {}",
            self.count,
            self.wanted,
            self.names.join(", ")
        )?;
        if self.count > self.names.len() {
            write!(f, " and {} more", self.count - self.names.len())?;
        }
        if !self.layers.is_empty() {
            write!(f, "; affected: {}", layers_text(&self.layers))?;
        }
        if !self.empty_layers.is_empty() {
            write!(
                f,
                "; there is no tensor at all for {} (config.json: {} layers)",
                layers_text(&self.empty_layers),
                self.config_layers
            )?;
        }
        write!(f, "; {}", self.shards)?;
        if let (Some((file, there)), Some(name)) = (&self.indexed, self.names.first()) {
            let state =
                if *there { "which is there but does not hold it" } else { "which is not there" };
            write!(f, "; the index places {name} in {file}, {state}")?;
        }
        write!(f, "; {}", self.remedy())?;
        match self.part {
            Some(part) => write!(f, ", or {}", part.alternative()),
            None => Ok(()),
        }
    }
}

impl std::error::Error for MissingTensors {}

impl MissingTensors {
    /// What the user should do.
    fn remedy(&self) -> String {
        let missing = self.shards.file_names(MAX_LISTED);
        if !missing.is_empty() {
            let all = missing.len() < MAX_LISTED;
            return format!("fetch {}{} again", missing.join(", "), if all { "" } else { ", …" });
        }
        if let Some((file, _)) = &self.indexed {
            return format!("fetch {file} again");
        }
        let open_ended = self.shards.series.iter().filter(|series| series.total.is_none());
        let next: Vec<String> =
            open_ended.map(|series| series.name(series.found.1.saturating_add(1))).collect();
        if !next.is_empty() {
            return format!(
                "the numbers have no gap, so files after the last one may be missing ({}): compare with the \
                 file list of the repository",
                next.join(", ")
            );
        }
        "no file number is missing: the files are incomplete at their source or belong to another \
         config.json; compare with the file list of the repository"
            .to_owned()
    }
}

/// Sorted numbers as inclusive ranges.
pub(crate) fn ranges(sorted: impl IntoIterator<Item = usize>) -> Vec<(usize, usize)> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for number in sorted {
        match ranges.last_mut() {
            Some((_, last)) if number <= last.saturating_add(1) => *last = (*last).max(number),
            _ => ranges.push((number, number)),
        }
    }
    ranges
}

fn layers_text(ranges: &[(usize, usize)]) -> String {
    let one = |&(first, last): &(usize, usize)| {
        if first == last { first.to_string() } else { format!("{first} to {last}") }
    };
    let listed: Vec<String> = ranges.iter().take(MAX_LISTED).map(one).collect();
    let single = ranges.len() == 1 && ranges[0].0 == ranges[0].1;
    let more = ranges.len().saturating_sub(MAX_LISTED);
    let word = if single { "layer" } else { "layers" };
    let tail = if more > 0 { format!(" and {more} more ranges") } else { String::new() };
    format!("{word} {}{tail}", listed.join(", "))
}
