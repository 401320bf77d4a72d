//! Directories of safetensors files: every header read once, merged into one table of tensors.
//!
//! Only headers are read, never tensor data. What a tensor means is decided elsewhere; here it
//! has a name, a type, a shape and a place.

use std::borrow::Cow;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::error::ContainerError;
use crate::header::{self, Dtype, Header, LENGTH_BYTES};
use crate::json::read_optional;
use crate::numbering::{MissingShards, Series};
use crate::record::{RECORDS_KEY, Records};
use crate::stamp::{STAMP_KEY, Stamp, Stamps};

/// Most safetensors files of one model; the largest releases have a few hundred.
pub const MAX_FILES: usize = 65_536;
/// Most tensors of one model: 512 layers of 2,048 experts with their scales.
pub const MAX_TENSORS: usize = 1 << 23;
/// Largest `model.safetensors.index.json` read; 120,000 tensors need about 15 MB.
pub const MAX_INDEX_BYTES: u64 = 256 << 20;
/// Name of the file that lists which tensor is in which file.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// Threads that parse headers; beyond four the disk is the limit.
const MAX_PARSE_THREADS: usize = 4;

/// Number of a file within one [`Shards`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FileId(pub u32);

/// Where a tensor is and what its elements are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorEntry {
    /// The file.
    pub file: FileId,
    /// Element type.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: Vec<usize>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// One safetensors file.
#[derive(Clone, Debug)]
pub struct ShardFile {
    /// Its path, as reached from the directory that was given.
    pub path: PathBuf,
    /// Its length in bytes.
    pub len: u64,
    /// Where tensor data begins, in bytes.
    pub data_start: u64,
    /// Number of tensors, padding not counted.
    pub tensors: usize,
    /// The strings of `__metadata__`.
    pub metadata: Vec<(String, String)>,
}

impl ShardFile {
    /// The value of a metadata key.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }
}

/// All tensors of one model, over all its directories.
pub struct Shards {
    dirs: Vec<PathBuf>,
    files: Vec<ShardFile>,
    tensors: HashMap<Box<str>, TensorEntry>,
    stamps: Stamps,
    records: Records,
    /// Files that an index names and no directory holds.
    unlisted: Vec<String>,
    has_index: bool,
}

impl std::fmt::Debug for Shards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shards")
            .field("dirs", &self.dirs)
            .field("files", &self.files.len())
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

impl Shards {
    /// Reads the headers of every `*.safetensors` in `dirs` (primary first).
    ///
    /// Refused: an unreadable, damaged, truncated or overlong file, a tensor name present twice
    /// (except `__pad__.` names, which are dropped), conflicting stamps, an unreadable index
    /// file. Missing files are not an error here: see [`Shards::missing_shards`].
    pub fn open(dirs: &[PathBuf]) -> Result<Shards, ContainerError> {
        let dirs = distinct_dirs(dirs)?;
        let mut paths = Vec::new();
        for dir in &dirs {
            list_safetensors(dir, &mut paths)?;
        }
        if paths.is_empty() {
            return Err(ContainerError::NoTensorFiles { dirs: join_paths(&dirs) });
        }
        let headers = parse_all(&paths)?;
        let files = paths.into_iter().zip(headers);
        let mut shards =
            Shards::from_headers(files.map(|(path, (header, len))| (path, header, len)))?;
        shards.dirs = dirs;
        shards.read_indexes()?;
        Ok(shards)
    }

    /// Merges headers that are already parsed, each with the path and length of its file. The
    /// paths serve messages only; nothing is opened.
    pub fn from_headers(
        files: impl IntoIterator<Item = (PathBuf, Header, u64)>,
    ) -> Result<Shards, ContainerError> {
        let mut shards = Shards {
            dirs: Vec::new(),
            files: Vec::new(),
            tensors: HashMap::new(),
            stamps: Stamps::default(),
            records: Records::default(),
            unlisted: Vec::new(),
            has_index: false,
        };
        for (path, header, len) in files {
            shards.tensors.reserve(header.tensors.len());
            shards.add(path, len, header)?;
        }
        Ok(shards)
    }

    fn add(&mut self, path: PathBuf, len: u64, header: Header) -> Result<(), ContainerError> {
        let file = FileId(self.files.len() as u32);
        let table = header.metadata.iter().find(|(key, _)| key == RECORDS_KEY);
        if let Some((_, json)) = table {
            let path_of = |id: FileId| match self.files.get(id.0 as usize) {
                Some(shard) => shard.path.clone(),
                None => path.clone(),
            };
            self.records.merge(file, json, &header, len, path_of)?;
        }
        self.files.push(ShardFile {
            path,
            len,
            data_start: header.data_start,
            tensors: header.tensors.len(),
            // The table of records is read and may be large.
            metadata: header.metadata.into_iter().filter(|(key, _)| key != RECORDS_KEY).collect(),
        });
        for tensor in header.tensors {
            match self.tensors.entry(tensor.name) {
                Entry::Vacant(slot) => {
                    slot.insert(TensorEntry {
                        file,
                        dtype: tensor.dtype,
                        shape: tensor.shape,
                        offset: tensor.offset,
                        len: tensor.len,
                    });
                }
                Entry::Occupied(slot) => {
                    return Err(ContainerError::DuplicateTensor {
                        name: slot.key().to_string(),
                        first: self.files[slot.get().file.0 as usize].path.clone(),
                        second: self.files[file.0 as usize].path.clone(),
                    });
                }
            }
        }
        if self.tensors.len() > MAX_TENSORS {
            return Err(ContainerError::TooMany {
                path: self.files[file.0 as usize].path.clone(),
                what: "tensors in this and the files before it",
                found: self.tensors.len(),
                limit: MAX_TENSORS,
            });
        }
        let files = &self.files;
        if let Some(json) = files[file.0 as usize].metadata(STAMP_KEY) {
            self.stamps.merge(file, json, |id| files[id.0 as usize].path.clone())?;
        }
        Ok(())
    }

    fn read_indexes(&mut self) -> Result<(), ContainerError> {
        let mut listed = BTreeSet::new();
        for dir in &self.dirs {
            if let Some(files) = read_index(dir, IndexQuery::Files)? {
                self.has_index = true;
                listed.extend(files);
            }
        }
        let present: BTreeSet<String> = self.files.iter().map(|f| file_name(&f.path)).collect();
        self.unlisted = listed.into_iter().filter(|file| !present.contains(file)).collect();
        Ok(())
    }

    /// The entry of a tensor.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// The path of a file of this container; an id of another container gives an empty path.
    pub fn path(&self, file: FileId) -> &Path {
        self.files.get(file.0 as usize).map_or(Path::new(""), |f| &f.path)
    }

    /// The files, indexed by [`FileId`].
    pub fn files(&self) -> &[ShardFile] {
        &self.files
    }

    /// The directories, primary first, without repetitions.
    pub fn dirs(&self) -> &[PathBuf] {
        &self.dirs
    }

    /// All tensor names, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(|name| &**name)
    }

    /// All tensors, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        self.tensors.iter().map(|(name, entry)| (&**name, entry))
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is no tensor at all.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// What the files state about the format of a tensor.
    pub fn stamp(&self, name: &str) -> Option<&Stamp> {
        self.stamps.get(name)
    }

    /// The records that the files state.
    pub fn records(&self) -> &Records {
        &self.records
    }

    /// Number of stamped tensors.
    pub fn stamp_count(&self) -> usize {
        self.stamps.len()
    }

    /// Which files seem to be missing, judged by numbering and by the index file.
    pub fn missing_shards(&self) -> MissingShards {
        let names: Vec<String> = self.files.iter().map(|f| file_name(&f.path)).collect();
        MissingShards {
            found: self.files.len(),
            series: Series::collect(names.iter().map(String::as_str)),
            without_file: self.unlisted.clone(),
            has_index: self.has_index,
        }
    }

    /// The file that an index file names for a tensor. Reads the index again: for messages only.
    pub fn indexed_file(&self, name: &str) -> Option<String> {
        let file_in = |dir: &PathBuf| read_index(dir, IndexQuery::Tensor(name)).ok()??.pop_first();
        self.dirs.iter().find_map(file_in)
    }
}

fn distinct_dirs(dirs: &[PathBuf]) -> Result<Vec<PathBuf>, ContainerError> {
    let mut seen = BTreeSet::new();
    let mut distinct = Vec::new();
    for dir in dirs {
        let real = fs::canonicalize(dir)
            .map_err(|e| ContainerError::io(dir, "open the model directory", e))?;
        if !real.is_dir() {
            return Err(ContainerError::NotADirectory { path: dir.clone() });
        }
        if seen.insert(real) {
            distinct.push(dir.clone());
        }
    }
    Ok(distinct)
}

fn list_safetensors(dir: &Path, paths: &mut Vec<PathBuf>) -> Result<(), ContainerError> {
    let list = |e| ContainerError::io(dir, "list the model directory", e);
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(list)? {
        let path = entry.map_err(list)?.path();
        if path.extension().is_some_and(|ext| ext == "safetensors") {
            found.push(path);
        }
        if paths.len() + found.len() > MAX_FILES {
            return Err(ContainerError::TooMany {
                path: dir.to_owned(),
                what: "safetensors files",
                found: paths.len() + found.len(),
                limit: MAX_FILES,
            });
        }
    }
    found.sort();
    paths.append(&mut found);
    Ok(())
}

/// Parses every header, results in the order of `paths`; of several errors the first file's.
fn parse_all(paths: &[PathBuf]) -> Result<Vec<(Header, u64)>, ContainerError> {
    let threads = std::thread::available_parallelism()
        .map_or(1, |n| n.get())
        .min(MAX_PARSE_THREADS)
        .min(paths.len());
    let next = AtomicUsize::new(0);
    type Parsed = Result<(Header, u64), ContainerError>;
    let slots: Vec<Mutex<Option<Parsed>>> = paths.iter().map(|_| Mutex::new(None)).collect();
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let (Some(path), Some(slot)) = (paths.get(i), slots.get(i)) else { return };
            let parsed = read_header(path);
            if let Ok(mut slot) = slot.lock() {
                *slot = Some(parsed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    slots
        .into_iter()
        .zip(paths)
        .map(|(slot, path)| {
            slot.into_inner().ok().flatten().unwrap_or_else(|| {
                let stopped = std::io::Error::other("the reading thread stopped");
                Err(ContainerError::io(path, "read the header", stopped))
            })
        })
        .collect()
}

fn read_header(path: &Path) -> Result<(Header, u64), ContainerError> {
    let metadata =
        fs::metadata(path).map_err(|e| ContainerError::io(path, "look at the file", e))?;
    if !metadata.is_file() {
        return Err(ContainerError::NotAFile { path: path.to_owned() });
    }
    let file_bytes = metadata.len();
    let wrap = |source| ContainerError::Header { path: path.to_owned(), source };
    if file_bytes < LENGTH_BYTES {
        return Err(wrap(header::HeaderError::TooShort { file_bytes }));
    }
    let mut file = File::open(path).map_err(|e| ContainerError::io(path, "open the file", e))?;
    let mut prefix = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut prefix)
        .map_err(|e| ContainerError::io(path, "read 8 bytes at offset 0", e))?;
    let length = header::header_len(prefix, file_bytes).map_err(wrap)?;
    let mut json = vec![0; length];
    file.read_exact(&mut json).map_err(|e| {
        ContainerError::io(path, format!("read {length} bytes at offset {LENGTH_BYTES}"), e)
    })?;
    Ok((header::parse_header(&json, file_bytes).map_err(wrap)?, file_bytes))
}

/// Which files an index names, or, when asked for one tensor, which file holds it.
enum IndexQuery<'a> {
    Files,
    Tensor(&'a str),
}

/// Answers a query from the index file of a directory; `None` without such a file.
///
/// The 120,000 entries of a large model are looked at as they are parsed and not kept.
fn read_index(
    dir: &Path,
    query: IndexQuery<'_>,
) -> Result<Option<BTreeSet<String>>, ContainerError> {
    let path = dir.join(INDEX_FILE);
    let Some(bytes) = read_optional(&path, MAX_INDEX_BYTES)? else { return Ok(None) };
    let mut found = BTreeSet::new();
    let mut parser = serde_json::Deserializer::from_slice(&bytes);
    let parsed = IndexSeed { query, found: &mut found, depth: 0 }
        .deserialize(&mut parser)
        .and_then(|()| parser.end());
    parsed.map_err(|e| ContainerError::Json {
        path,
        what: "index file",
        message: e.to_string(),
    })?;
    Ok(Some(found))
}

/// Walks the index: depth 0 is the file, depth 1 its `weight_map`.
struct IndexSeed<'a, 'f> {
    query: IndexQuery<'a>,
    found: &'f mut BTreeSet<String>,
    depth: u8,
}

impl<'de> DeserializeSeed<'de> for IndexSeed<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for IndexSeed<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.depth == 0 { "an index file" } else { "tensor names with file names" })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let IndexSeed { query, found, depth } = self;
        if depth > 0 {
            while let Some(Name(tensor)) = map.next_key()? {
                let Name(file) = map.next_value()?;
                let wanted = match query {
                    IndexQuery::Files => !found.contains(&*file),
                    IndexQuery::Tensor(name) => tensor == name,
                };
                if wanted {
                    found.insert(file.into_owned());
                }
            }
            return Ok(());
        }
        let mut query = Some(query);
        while let Some(Name(key)) = map.next_key()? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let Some(query) = query.take() else {
                return Err(A::Error::custom("weight_map is written twice"));
            };
            map.next_value_seed(IndexSeed { query, found: &mut *found, depth: 1 })?;
        }
        if query.is_some() {
            return Err(A::Error::missing_field("weight_map"));
        }
        Ok(())
    }
}

/// A text that is borrowed when the JSON allows it.
#[derive(serde::Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

/// Last component of a path as text, for comparing with names in an index file.
pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

pub(crate) fn join_paths(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}
