//! `.coli_usage`: how often each expert of a model was chosen, over all runs.
//!
//! This is the file: its text, its checks, and how several processes write it. What a history is
//! used for is not known here. `docs/sidecars.md` has the format.

use std::fmt;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use container::Family;
use container::hex;

use crate::durable::{self, WriteError};
use crate::sidecar::excerpt;

/// Name of a history beside its model.
pub const USAGE_FILE: &str = ".coli_usage";
/// Version of the format.
pub const USAGE_VERSION: u32 = 1;
/// Largest history read: a record of every routed expert a model may have takes less than 10 MB.
pub const USAGE_BYTES_MAX: u64 = 64 << 20;
/// Selections of one layer above which its history is halved. A turn of 256 tokens with eight
/// experts each is then at least 3 % of what the layer remembers.
pub const LAYER_SELECTIONS_MAX: u64 = 1 << 16;
/// Problems listed of one file; further ones are counted.
pub const PROBLEMS_MAX: usize = 16;

/// First number of the header record with the dimensions.
const DIMENSIONS: i128 = -1;
/// First number of the header record with version and family.
const IDENTITY: i128 = -2;
/// Digits of a model id in a file name: 128 bits, enough that two models never meet.
const MODEL_ID_DIGITS: usize = 32;

/// The model that a history belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UsageShape {
    /// Decoder layers without multi-token prediction; layer `layers` of a record is the MTP layer.
    pub layers: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Name of the family, the first `model_type` of its registry row.
    pub family: &'static str,
}

/// How a history was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// It lies where a model's history lies: another family's is refused.
    Found,
    /// The user named the file: another family's is taken if its dimensions fit.
    Named,
}

/// A record that was left out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// Line, from 1.
    pub line: usize,
    /// What was expected and what was found.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

/// The records that were left out of a file.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Problems {
    /// The first of them, at most [`PROBLEMS_MAX`].
    pub listed: Vec<Problem>,
    /// How many there are.
    pub total: usize,
}

impl Problems {
    fn add(&mut self, line: usize, what: impl FnOnce() -> String) {
        self.total += 1;
        if self.listed.len() < PROBLEMS_MAX {
            self.listed.push(Problem { line, what: what() });
        }
    }
}

/// A history that cannot be used or written. The file is untouched.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// The operating system refused to give it.
    #[error("{}: cannot be read: {source}; check the file and its rights", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The name, or that of its lock, is a directory, pipe or device.
    #[error("{}: not a regular file; remove it", path.display())]
    NotAFile {
        /// What was found.
        path: PathBuf,
    },
    /// Larger than any history.
    #[error("{}: more than {limit} bytes, no history is as large; remove it", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The most that is read, in bytes.
        limit: u64,
    },
    /// It was written for another family.
    #[error(
        "{} line {line}: a history of {}, this model is {expected} ({}); \
         remove the file, or name it explicitly to use it all the same",
        path.display(), family_of(*found), engine_id(expected)
    )]
    Family {
        /// The file.
        path: PathBuf,
        /// Line of the header record.
        line: usize,
        /// Id in the file.
        found: i128,
        /// Family of the model.
        expected: &'static str,
    },
    /// It was written for another number of layers or experts.
    #[error(
        "{} line {line}: a history of {} layers of {} experts, this model has {} of {}; \
         remove the file or use that of this model",
        path.display(), found.0, found.1, expected.layers, expected.experts
    )]
    Dimensions {
        /// The file.
        path: PathBuf,
        /// Line of the header record.
        line: usize,
        /// Layers and experts in the file.
        found: (i128, i128),
        /// The model.
        expected: UsageShape,
    },
    /// It was written by a newer program.
    #[error(
        "{} line {line}: version {found} of the format, this program reads {USAGE_VERSION}; \
         use the program that wrote it or remove the file",
        path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Line of the header record.
        line: usize,
        /// Version in the file.
        found: i128,
    },
    /// Not one line of it is a record, so it is not overwritten.
    #[error(
        "{}: not a history, {first}; it was left as it is, move it away or remove it",
        path.display()
    )]
    NotAHistory {
        /// The file.
        path: PathBuf,
        /// The first line that is no record.
        first: Problem,
    },
    /// The lock that keeps two writers apart could not be had.
    #[error("{}: cannot be locked: {source}; check the rights of the directory", path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The new history could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// The number that stands for a family in a history: the 32-bit FNV-1a of its name.
pub fn engine_id(family_name: &str) -> u32 {
    let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    family_name.bytes().fold(0x811c_9dc5, step)
}

/// Whose id this is, for messages.
fn family_of(id: i128) -> String {
    let names = Family::ALL.into_iter().flat_map(|family| family.row().model_types);
    let named = names.copied().find(|name| i128::from(engine_id(name)) == id);
    named.map_or_else(|| format!("an unknown family ({id})"), |name| format!("{name} ({id})"))
}

/// How often each expert of each layer was chosen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Usage {
    shape: UsageShape,
    /// `[layers + 1, experts]`.
    counts: Vec<u64>,
}

/// A file's content and whether it had a header record.
struct Parsed {
    usage: Usage,
    problems: Problems,
    has_header: bool,
}

impl Usage {
    /// No history: eight bytes for every expert of `layers + 1` layers, all 0.
    pub fn empty(shape: UsageShape) -> Usage {
        Usage { shape, counts: vec![0; (shape.layers + 1) * shape.experts] }
    }

    /// The model it belongs to.
    pub fn shape(&self) -> UsageShape {
        self.shape
    }

    /// Whether nothing was ever counted.
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }

    /// Selections of each expert of a layer, at most [`UsageShape::layers`].
    pub fn layer(&self, layer: usize) -> &[u64] {
        &self.counts[layer * self.shape.experts..][..self.shape.experts]
    }

    /// Selections of all experts of a layer.
    pub fn layer_total(&self, layer: usize) -> u64 {
        self.layer(layer).iter().fold(0, |total, count| total.saturating_add(*count))
    }

    /// Counts selections of an expert of the model.
    pub fn add(&mut self, layer: usize, expert: usize, selections: u64) {
        let count = &mut self.layer_mut(layer)[expert];
        *count = count.saturating_add(selections);
    }

    fn layer_mut(&mut self, layer: usize) -> &mut [u64] {
        &mut self.counts[layer * self.shape.experts..][..self.shape.experts]
    }

    /// Adds what was counted since to an older history of the same shape. A layer that would hold
    /// more than [`LAYER_SELECTIONS_MAX`] has its old counts halved, rounded down, until it does
    /// not or nothing of them is left.
    pub fn absorb(&mut self, newer: &Usage) {
        assert_eq!(self.shape, newer.shape, "histories of two models");
        for layer in 0..=self.shape.layers {
            let added = newer.layer_total(layer);
            if added == 0 {
                continue;
            }
            loop {
                let total = self.layer_total(layer);
                if total == 0 || total.saturating_add(added) <= LAYER_SELECTIONS_MAX {
                    break;
                }
                self.layer_mut(layer).iter_mut().for_each(|count| *count /= 2);
            }
            for (count, new) in self.layer_mut(layer).iter_mut().zip(newer.layer(layer)) {
                *count = count.saturating_add(*new);
            }
        }
    }

    /// Reads a history. `path` is for messages. Records that are not three whole numbers, or name
    /// no layer or expert of the model, are left out and reported; an empty text is no history.
    ///
    /// Another version or other dimensions are an error, and so is another family unless the user
    /// named the file.
    pub fn parse(
        path: &Path,
        bytes: &[u8],
        shape: UsageShape,
        origin: Origin,
    ) -> Result<(Usage, Problems), UsageError> {
        let parsed = parse(path, bytes, shape, origin)?;
        Ok((parsed.usage, parsed.problems))
    }

    /// Reads a history from a file; none of that name is no history. Fails as
    /// [`Usage::parse`] does, and for what is not a regular file of at most [`USAGE_BYTES_MAX`].
    pub fn load(
        path: &Path,
        shape: UsageShape,
        origin: Origin,
    ) -> Result<(Usage, Problems), UsageError> {
        Usage::parse(path, &read(path)?, shape, origin)
    }

    /// The text of the file: headers, then every count that is not 0 by layer and expert. No
    /// history is an empty text.
    pub fn to_text(&self) -> String {
        use fmt::Write;
        if self.is_empty() {
            return String::new();
        }
        let UsageShape { layers, experts, family } = self.shape;
        let mut text = format!("{DIMENSIONS} {layers} {experts}\n");
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{IDENTITY} {USAGE_VERSION} {}", engine_id(family));
        for layer in 0..=layers {
            for (expert, count) in self.layer(layer).iter().enumerate() {
                if *count > 0 {
                    let _ = writeln!(text, "{layer} {expert} {count}");
                }
            }
        }
        text
    }
}

fn parse(
    path: &Path,
    bytes: &[u8],
    shape: UsageShape,
    origin: Origin,
) -> Result<Parsed, UsageError> {
    let mut parsed =
        Parsed { usage: Usage::empty(shape), problems: Problems::default(), has_header: false };
    for (at, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let (line, number) = (line.trim_ascii(), at + 1);
        if line.is_empty() {
            continue;
        }
        let Some(record) = three_numbers(line) else {
            let what = || format!("expected three whole numbers, found {}", excerpt(line));
            parsed.problems.add(number, what);
            continue;
        };
        if record[0] < 0 {
            check_header(path, number, record, shape, origin)?;
            parsed.has_header = true;
            continue;
        }
        match counted(record, shape) {
            Ok((layer, expert, count)) => parsed.usage.add(layer, expert, count),
            Err(what) => parsed.problems.add(number, || what),
        }
    }
    Ok(parsed)
}

/// The numbers of a line that has exactly three.
fn three_numbers(line: &[u8]) -> Option<[i128; 3]> {
    let mut fields = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let mut numbers = [0; 3];
    for number in &mut numbers {
        *number = fields.next()?.parse().ok()?;
    }
    fields.next().is_none().then_some(numbers)
}

/// Refuses a header record that this model's history cannot have; unknown ones are ignored.
fn check_header(
    path: &Path,
    line: usize,
    record: [i128; 3],
    shape: UsageShape,
    origin: Origin,
) -> Result<(), UsageError> {
    let path = || path.to_owned();
    let [kind, second, third] = record;
    if kind == DIMENSIONS && (second, third) != (shape.layers as i128, shape.experts as i128) {
        let found = (second, third);
        return Err(UsageError::Dimensions { path: path(), line, found, expected: shape });
    }
    if kind == IDENTITY {
        if second != i128::from(USAGE_VERSION) {
            return Err(UsageError::Version { path: path(), line, found: second });
        }
        if origin == Origin::Found && third != i128::from(engine_id(shape.family)) {
            let expected = shape.family;
            return Err(UsageError::Family { path: path(), line, found: third, expected });
        }
    }
    Ok(())
}

/// Layer, expert and count of a record, or what is out of range.
fn counted(record: [i128; 3], shape: UsageShape) -> Result<(usize, usize, u64), String> {
    let [layer, expert, count] = record;
    let index = |what: &str, found: i128, end: usize| {
        let index = usize::try_from(found).ok().filter(|index| *index < end);
        index.ok_or_else(|| format!("expected {what} below {end}, found {found}"))
    };
    Ok((
        index("a layer", layer, shape.layers + 1)?,
        index("an expert", expert, shape.experts)?,
        u64::try_from(count).map_err(|_| format!("expected a 64-bit count, found {count}"))?,
    ))
}

/// The bytes of a history; none where there is no such file. Only regular files are opened, so that
/// a pipe cannot hang the program.
fn read(path: &Path) -> Result<Vec<u8>, UsageError> {
    let failed = |source| UsageError::Read { path: path.to_owned(), source };
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => return Err(UsageError::NotAFile { path: path.to_owned() }),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    }
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = Vec::new();
    file.take(USAGE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > USAGE_BYTES_MAX {
        return Err(UsageError::TooLarge { path: path.to_owned(), limit: USAGE_BYTES_MAX });
    }
    Ok(bytes)
}

/// Adds what was counted since the last call to the history at `path`, which several processes may
/// share, and returns the sum with the records that were left out. Waits for another writer.
///
/// Nothing counted writes nothing. A file that is another family's, another model's, a newer
/// program's or no history at all is left as it is and is an error. Header records that this
/// program does not know are not kept. Missing directories are made.
pub fn merge(path: &Path, counted: &Usage) -> Result<(Usage, Problems), UsageError> {
    if counted.is_empty() {
        return Usage::load(path, counted.shape, Origin::Found);
    }
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        fs::create_dir_all(dir).map_err(WriteError::at(dir, "create"))?;
    }
    let _lock = lock(path)?;
    let parsed = parse(path, &read(path)?, counted.shape, Origin::Found)?;
    let Parsed { mut usage, problems, has_header } = parsed;
    if let (Some(first), true) = (problems.listed.first(), usage.is_empty() && !has_header) {
        return Err(UsageError::NotAHistory { path: path.to_owned(), first: first.clone() });
    }
    usage.absorb(counted);
    durable::write(path, usage.to_text().as_bytes())?;
    Ok((usage, problems))
}

/// The exclusive right to write the history at `path`, until the file is dropped. The lock file
/// stays: a process that waits for a removed one would not keep out the next.
fn lock(path: &Path) -> Result<File, UsageError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let path = PathBuf::from(name);
    // A link would be followed and a pipe would wait for its other end.
    if fs::symlink_metadata(&path).is_ok_and(|found| !found.is_file()) {
        return Err(UsageError::NotAFile { path });
    }
    let open = || {
        let file = File::options().create(true).truncate(false).write(true).open(&path)?;
        loop {
            match file.lock() {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => return other.map(|()| file),
            }
        }
    };
    open().map_err(|source| UsageError::Lock { path: path.clone(), source })
}

/// What identifies a model in the name of a history away from it: the first 128 bits of
/// [`container::Model::table_hash`], in hexadecimal.
pub fn model_id(table_hash: &[u8; 32]) -> String {
    hex::encode(table_hash)[..MODEL_ID_DIGITS].to_owned()
}

/// Where the history of a model lies: beside it, or under `state_dir` (the user's directory for
/// the state of all programs) when its primary directory cannot be written or the model is the
/// bundled one. `None` where there is no such directory: then nothing is kept.
pub fn history_path(
    primary: &Path,
    writable: bool,
    is_bundled: bool,
    state_dir: Option<&Path>,
    model_id: &str,
) -> Option<PathBuf> {
    if writable && !is_bundled {
        return Some(primary.join(USAGE_FILE));
    }
    Some(state_dir?.join("colibri").join("usage").join(format!("{model_id}{USAGE_FILE}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: UsageShape = UsageShape { layers: 3, experts: 8, family: "olmoe" };
    const HEADER: &str = "-1 3 8\n-2 1 3841822045\n";

    fn parse(text: &str, origin: Origin) -> Result<(Usage, Problems), UsageError> {
        Usage::parse(Path::new("history"), text.as_bytes(), SHAPE, origin)
    }

    fn found(text: &str) -> Usage {
        let (usage, problems) = parse(text, Origin::Found).unwrap();
        assert_eq!(problems, Problems::default(), "{text}");
        usage
    }

    #[test]
    fn the_ids_of_families_are_the_published_ones() {
        assert_eq!(engine_id("glm_moe_dsa"), 3_815_245_270);
        assert_eq!(engine_id("olmoe"), 3_841_822_045);
    }

    #[test]
    fn a_history_survives_its_text() {
        let mut usage = Usage::empty(SHAPE);
        usage.add(0, 7, 5);
        usage.add(3, 0, u64::MAX);
        usage.add(2, 1, 1);
        assert_eq!(usage.to_text(), format!("{HEADER}0 7 5\n2 1 1\n3 0 {}\n", u64::MAX));
        assert_eq!(found(&usage.to_text()), usage);
        assert_eq!(usage.layer(0), [0, 0, 0, 0, 0, 0, 0, 5]);
        assert_eq!(Usage::empty(SHAPE).to_text(), "");
        assert!(found("").is_empty());
    }

    #[test]
    fn legacy_files_unknown_headers_and_other_line_ends_are_accepted() {
        let mut usage = Usage::empty(SHAPE);
        usage.add(1, 2, 7);
        assert_eq!(found("1 2 7\n"), usage);
        assert_eq!(found("  1   2 7"), usage);
        assert_eq!(found("-1 3 8\r\n\r\n1 2 3\r\n1 2 4\r\n1 3 0\r\n"), usage);
        let unknown = format!("-3 0 99\n{HEADER}-7 5 5\n1 2 7\n");
        assert_eq!(found(&unknown), usage);
    }

    #[test]
    fn bad_records_are_reported_and_the_rest_is_kept() {
        let text = "1 2 7\nnonsense\n1 2\n1 2 3 4\n4 0 1\n0 8 1\n0 0 -1\n0 1 1.5\n\
                    0 0 99999999999999999999\n0 0 9999999999999999999999999999999999999999\n\
                    3 7 1\n";
        let (usage, problems) = parse(text, Origin::Found).unwrap();
        assert_eq!((usage.layer(1)[2], usage.layer(3)[7], usage.layer_total(0)), (7, 1, 0));
        let lines: Vec<usize> = problems.listed.iter().map(|problem| problem.line).collect();
        assert_eq!(lines, [2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(problems.total, 9);
        let first = problems.listed[0].to_string();
        assert_eq!(first, "line 2: expected three whole numbers, found \"nonsense\"");
        assert_eq!(problems.listed[3].what, "expected a layer below 4, found 4");
        assert_eq!(problems.listed[4].what, "expected an expert below 8, found 8");

        let (usage, problems) = parse(&format!("1 2 7\n{}", "x\n".repeat(1000)), Origin::Found)
            .expect("a history with much that is none");
        assert_eq!((problems.listed.len(), problems.total), (PROBLEMS_MAX, 1000));
        assert_eq!(usage.layer(1)[2], 7);
        let bytes = b"\xff\xfe 1 2\n1 2 7\n";
        let (usage, problems) =
            Usage::parse(Path::new("history"), bytes, SHAPE, Origin::Found).unwrap();
        assert_eq!((usage.layer(1)[2], problems.total), (7, 1));
        let long = "9".repeat(1 << 20);
        let (_, problems) = parse(&long, Origin::Found).unwrap();
        assert!(problems.listed[0].what.len() < 200, "{}", problems.listed[0].what.len());
    }

    #[test]
    fn another_family_is_refused_by_name_unless_the_user_named_the_file() {
        let text = format!("-1 3 8\n-2 1 {}\n1 2 7\n", engine_id("glm_moe_dsa"));
        let error = parse(&text, Origin::Found).unwrap_err().to_string();
        for needle in ["history line 2", "glm_moe_dsa", "3815245270", "olmoe", "3841822045"] {
            assert!(error.contains(needle), "{needle} is missing from {error}");
        }
        assert_eq!(parse(&text, Origin::Named).unwrap().0.layer(1)[2], 7);
        let error = parse("-2 1 12\n", Origin::Found).unwrap_err().to_string();
        assert!(error.contains("unknown family (12)"), "{error}");
    }

    #[test]
    fn other_dimensions_and_newer_versions_are_always_refused() {
        for origin in [Origin::Found, Origin::Named] {
            for text in ["-1 4 8\n", "-1 3 9\n1 2 7\n", "1 2 7\n-1 -3 8\n"] {
                let error = parse(text, origin).unwrap_err();
                assert!(matches!(error, UsageError::Dimensions { .. }), "{text}: {error}");
            }
            for text in ["-2 2 3841822045\n", "1 2 7\n-2 0 3841822045\n", "-2 2 12\n"] {
                let error = parse(text, origin).unwrap_err();
                assert!(matches!(error, UsageError::Version { .. }), "{text}: {error}");
            }
        }
    }

    #[test]
    fn one_turn_moves_an_old_history() {
        let shape = UsageShape { layers: 1, ..SHAPE };
        let (mut usage, mut turn) = (Usage::empty(shape), Usage::empty(shape));
        // A thousand turns that always chose experts 0 to 3, then turns that never do.
        (0..4).for_each(|expert| turn.add(0, expert, 512));
        (0..1000).for_each(|_| usage.absorb(&turn));
        assert!(usage.layer_total(0) <= LAYER_SELECTIONS_MAX);
        assert!(usage.layer_total(0) > LAYER_SELECTIONS_MAX / 4);
        let mut other = Usage::empty(shape);
        (4..8).for_each(|expert| other.add(0, expert, 512));
        let share = |usage: &Usage| {
            usage.layer(0)[4..].iter().sum::<u64>() as f64 / usage.layer_total(0) as f64
        };
        usage.absorb(&other);
        assert!(share(&usage) >= 0.03, "{}", share(&usage));
        // As many selections as the bound outweigh everything older.
        (1..32).for_each(|_| usage.absorb(&other));
        assert!(share(&usage) > 0.5, "{}", share(&usage));
        // Layers are counted apart.
        assert_eq!(usage.layer_total(1), 0);
    }

    #[test]
    fn old_counts_are_halved_rounded_down_only_when_the_bound_is_passed() {
        let mut usage = Usage::empty(SHAPE);
        usage.add(0, 0, LAYER_SELECTIONS_MAX - 4);
        usage.add(0, 1, 3);
        let mut one = Usage::empty(SHAPE);
        one.add(0, 2, 1);
        usage.absorb(&one);
        assert_eq!(usage.layer(0)[..3], [LAYER_SELECTIONS_MAX - 4, 3, 1]);
        usage.absorb(&one);
        assert_eq!(usage.layer(0)[..3], [LAYER_SELECTIONS_MAX / 2 - 2, 1, 1]);
        // One count larger than the bound leaves nothing of what was there.
        let mut flood = Usage::empty(SHAPE);
        flood.add(0, 3, LAYER_SELECTIONS_MAX * 2);
        usage.absorb(&flood);
        assert_eq!(usage.layer(0)[..4], [0, 0, 0, LAYER_SELECTIONS_MAX * 2]);
        // Counts at the limit of their type neither overflow nor stay.
        let mut huge = Usage::empty(SHAPE);
        (0..8).for_each(|expert| huge.add(0, expert, u64::MAX));
        huge.absorb(&one);
        assert!(huge.layer_total(0) <= LAYER_SELECTIONS_MAX);
    }

    #[test]
    fn a_history_lies_beside_its_model_unless_it_cannot_or_must_not() {
        let (model, state) = (Path::new("model"), Path::new("state"));
        let id = model_id(&[0xab; 32]);
        assert_eq!(id, "ab".repeat(16));
        let path = |writable, bundled, state| history_path(model, writable, bundled, state, &id);
        assert_eq!(path(true, false, Some(state)), Some(model.join(".coli_usage")));
        assert_eq!(path(true, false, None), Some(model.join(".coli_usage")));
        let away = state.join(format!("colibri/usage/{id}.coli_usage"));
        assert_eq!(path(false, false, Some(state)), Some(away.clone()));
        assert_eq!(path(true, true, Some(state)), Some(away));
        assert_eq!(path(true, true, None), None);
    }
}
