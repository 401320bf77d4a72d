//! The `colibri.records` tables: where each routed expert lies as one run of bytes, and its hashes.
//!
//! A table states what its own file holds. Whether the tensors lie there is checked when the model
//! is opened, whether the bytes are right by those who read them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::PathBuf;

use crate::error::ContainerError;
use crate::header::Header;
use crate::hex;
use crate::index::FileId;
use crate::json::UniqueMap;

/// Metadata key of the tables.
pub const RECORDS_KEY: &str = "colibri.records";
/// Records start at multiples of it in their file: what every drive reads directly.
pub const RECORD_ALIGN: u64 = 4096;

/// One routed expert as one run of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// The file.
    pub file: FileId,
    /// First byte, from the start of the file; a multiple of [`RECORD_ALIGN`].
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// First half of the BLAKE3 of the expert's canonical bytes: weights and scales of gate, up
    /// and down, whatever the layout.
    pub blake3: [u8; 16],
    /// CRC-32C of the stored bytes.
    pub crc32c: u32,
}

/// The records of several files, by layer and expert.
#[derive(Default, Debug)]
pub struct Records {
    by_expert: HashMap<(u32, u32), Record>,
}

/// Offset from the start of tensor data, length, BLAKE3 and CRC-32C in hexadecimal.
type Row = (u64, u64, String, String);

impl Records {
    /// The record of an expert.
    pub fn get(&self, layer: usize, expert: usize) -> Option<&Record> {
        self.by_expert.get(&(u32::try_from(layer).ok()?, u32::try_from(expert).ok()?))
    }

    /// Number of records.
    pub fn len(&self) -> usize {
        self.by_expert.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_expert.is_empty()
    }

    /// Every record with its layer and expert, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize, &Record)> {
        self.by_expert.iter().map(|(key, record)| (key.0 as usize, key.1 as usize, record))
    }

    /// Adds the table of a file.
    pub(crate) fn merge(
        &mut self,
        file: FileId,
        json: &str,
        header: &Header,
        file_bytes: u64,
        path_of: impl Fn(FileId) -> PathBuf,
    ) -> Result<(), ContainerError> {
        let refuse = |message: String| ContainerError::Json {
            path: path_of(file),
            what: "metadata colibri.records",
            message,
        };
        let rows: UniqueMap<Row> =
            serde_json::from_str(json).map_err(|error| refuse(error.to_string()))?;
        for (name, (offset, len, blake3, crc32c)) in rows.0 {
            let key = name.split_once('.').and_then(|(layer, expert)| {
                Some((layer.parse::<u32>().ok()?, expert.parse::<u32>().ok()?))
            });
            // A second spelling of a place would be another record of it.
            let key = key.filter(|(layer, expert)| name == format!("{layer}.{expert}"));
            let key = key.ok_or_else(|| refuse(format!("{name:?} is not layer.expert")))?;
            let start = header.data_start.checked_add(offset);
            let inside = start.and_then(|start| start.checked_add(len));
            let (Some(start), Some(true)) = (start, inside.map(|end| end <= file_bytes)) else {
                return Err(refuse(format!(
                    "record {name}: {len} bytes at {offset} reach beyond the file's {file_bytes}"
                )));
            };
            if len == 0 || !start.is_multiple_of(RECORD_ALIGN) {
                return Err(refuse(format!(
                    "record {name}: {len} bytes at byte {start} of the file; \
                     records are not empty and start at multiples of {RECORD_ALIGN}"
                )));
            }
            let hash = hex::decode(&blake3).and_then(|bytes| <[u8; 16]>::try_from(bytes).ok());
            let crc = hex::decode(&crc32c).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
            let (Some(blake3), Some(crc)) = (hash, crc) else {
                return Err(refuse(format!(
                    "record {name}: {blake3:?} and {crc32c:?} are not 32 and 8 hexadecimal digits"
                )));
            };
            let crc32c = u32::from_be_bytes(crc);
            let record = Record { file, offset: start, len, blake3, crc32c };
            match self.by_expert.entry(key) {
                Entry::Vacant(slot) => {
                    slot.insert(record);
                }
                Entry::Occupied(slot) => {
                    return Err(ContainerError::DuplicateTensor {
                        name: format!("record {name}"),
                        first: path_of(slot.get().file),
                        second: path_of(file),
                    });
                }
            }
        }
        Ok(())
    }
}

/// The row of a record in its file's table; `offset` counts from the start of tensor data.
pub fn row_json(offset: u64, len: u64, blake3: &[u8; 16], crc32c: u32) -> serde_json::Value {
    serde_json::json!([offset, len, hex::encode(blake3), format!("{crc32c:08x}")])
}
