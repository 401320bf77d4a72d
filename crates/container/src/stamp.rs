//! The `colibri.fmt` stamps: which format each tensor is stated to have.
//!
//! A stamp is only what a file says; whether the bytes agree is decided in [`crate::recognise`].

use std::collections::HashMap;
use std::path::PathBuf;

use formats::Format;

use crate::error::ContainerError;
use crate::index::FileId;
use crate::json::UniqueMap;

/// Metadata key of the stamps.
pub const STAMP_KEY: &str = "colibri.fmt";

/// What one stamp states.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stamp {
    /// The text as written, for messages.
    pub text: String,
    /// The format.
    pub format: StampFormat,
    /// Name after the `+`, when there is one.
    pub layout: Option<String>,
    /// The (first) file that states it.
    pub file: FileId,
}

/// The format part of a stamp.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StampFormat {
    /// One format. For fp8 the scale tensor's dtype says how scales are stored.
    Exact(Format),
    /// `int4-grouped`: the group follows from the counts.
    Int4Grouped,
    /// A name this program does not know.
    Unknown,
}

impl Stamp {
    fn parse(text: String, file: FileId) -> Stamp {
        let (name, layout) = match text.split_once('+') {
            Some((name, layout)) => (name, Some(layout.to_owned())),
            None => (text.as_str(), None),
        };
        let format = match Format::from_name(name) {
            Some(format) => StampFormat::Exact(format),
            None if name == "int4-grouped" => StampFormat::Int4Grouped,
            None => StampFormat::Unknown,
        };
        Stamp { format, layout, file, text }
    }

    /// Whether two stamps state the same thing, perhaps under two accepted spellings.
    fn agrees(&self, other: &Stamp) -> bool {
        if self.format == StampFormat::Unknown || other.format == StampFormat::Unknown {
            return self.text == other.text;
        }
        self.format == other.format && self.layout == other.layout
    }
}

/// The merged stamps of several files.
#[derive(Default, Debug)]
pub(crate) struct Stamps {
    by_name: HashMap<String, Stamp>,
}

impl Stamps {
    pub(crate) fn get(&self, name: &str) -> Option<&Stamp> {
        if self.by_name.is_empty() { None } else { self.by_name.get(name) }
    }

    pub(crate) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Adds the stamps of one file; `path_of` gives the paths for a message.
    pub(crate) fn merge(
        &mut self,
        file: FileId,
        json: &str,
        path_of: impl Fn(FileId) -> PathBuf,
    ) -> Result<(), ContainerError> {
        let stated: UniqueMap<String> =
            serde_json::from_str(json).map_err(|e| ContainerError::Json {
                path: path_of(file),
                what: "metadata colibri.fmt",
                message: e.to_string(),
            })?;
        for (name, text) in stated.0 {
            let stamp = Stamp::parse(text, file);
            match self.by_name.get(&name) {
                None => {
                    self.by_name.insert(name, stamp);
                }
                Some(first) if first.agrees(&stamp) => {}
                Some(first) => {
                    return Err(ContainerError::ConflictingStamps {
                        name,
                        first: path_of(first.file),
                        first_format: first.text.clone(),
                        second: path_of(file),
                        second_format: stamp.text,
                    });
                }
            }
        }
        Ok(())
    }
}
