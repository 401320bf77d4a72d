//! Small helpers for JSON that came from outside: bounded reading of a file, and maps in which a
//! key written twice is an error.
//!
//! Nothing here knows what the JSON means.

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::marker::PhantomData;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::error::ContainerError;

/// An object as pairs in file order; a repeated key does not parse.
pub(crate) struct UniqueMap<V>(pub(crate) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapVisitor<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for MapVisitor<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap<V>, A::Error> {
                let mut pairs = Vec::new();
                let mut seen = HashSet::new();
                while let Some(key) = map.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(A::Error::custom(format_args!("key {key:?} is written twice")));
                    }
                    pairs.push((key, map.next_value()?));
                }
                Ok(UniqueMap(pairs))
            }
        }
        deserializer.deserialize_map(MapVisitor(PhantomData))
    }
}

/// Reads a whole small file; `None` when there is none of that name.
///
/// Only regular files of at most `limit_bytes` are read, so a pipe cannot hang the program and a
/// wrong file cannot fill the memory.
pub(crate) fn read_optional(
    path: &Path,
    limit_bytes: u64,
) -> Result<Option<Vec<u8>>, ContainerError> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        // A link that leads nowhere is an unfinished download, not an absent file.
        Err(e) if e.kind() == ErrorKind::NotFound && fs::symlink_metadata(path).is_err() => {
            return Ok(None);
        }
        Err(e) => return Err(ContainerError::io(path, "look at the file", e)),
    };
    if !metadata.is_file() {
        return Err(ContainerError::NotAFile { path: path.to_owned() });
    }
    let too_large = |found_bytes| ContainerError::FileTooLarge {
        path: path.to_owned(),
        found_bytes,
        limit_bytes,
    };
    if metadata.len() > limit_bytes {
        return Err(too_large(metadata.len()));
    }
    let file = File::open(path).map_err(|e| ContainerError::io(path, "open the file", e))?;
    let mut bytes = Vec::new();
    file.take(limit_bytes + 1).read_to_end(&mut bytes).map_err(|e| {
        ContainerError::io(path, format!("read the file after {} bytes", bytes.len()), e)
    })?;
    if bytes.len() as u64 > limit_bytes {
        return Err(too_large(bytes.len() as u64));
    }
    Ok(Some(bytes))
}

/// Reads a whole small text file; `None` when there is none of that name.
pub(crate) fn read_optional_text(
    path: &Path,
    limit_bytes: u64,
    what: &'static str,
) -> Result<Option<String>, ContainerError> {
    let Some(bytes) = read_optional(path, limit_bytes)? else { return Ok(None) };
    match String::from_utf8(bytes) {
        Ok(text) => Ok(Some(text)),
        Err(e) => Err(ContainerError::Json {
            path: path.to_owned(),
            what,
            message: format!("not UTF-8 at byte {}", e.utf8_error().valid_up_to()),
        }),
    }
}
