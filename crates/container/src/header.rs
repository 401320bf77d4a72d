//! Parses and checks one safetensors header, from memory.
//!
//! Nothing is opened here: the caller hands over the header bytes and the length of the file, so
//! the same code serves files, tests and the fuzzer. The JSON records and the dtypes are those of
//! the `safetensors` crate; this module adds the limits, finds names written twice (a plain map
//! would keep the last one silently) and checks that the tensors cover the data exactly.

use std::fmt;

use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::json::UniqueMap;

/// Longest header read; the reference reader has the same limit.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most tensors in one file: far above the 120,000 of the largest models in a single file.
pub const MAX_TENSORS_PER_FILE: usize = 1 << 20;
/// Most dimensions of a tensor; checkpoints use at most 4.
pub const MAX_RANK: usize = 8;
/// Longest tensor name in bytes; real names have fewer than 100.
pub const MAX_NAME_BYTES: usize = 1024;
/// Names with this prefix are filler between aligned tensors: exempt from every rule but size.
pub const PAD_PREFIX: &str = "__pad__.";
/// Bytes of the length field before the header.
pub const LENGTH_BYTES: u64 = 8;
const METADATA_KEY: &str = "__metadata__";

/// Element type of a stored tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)]
pub enum Dtype {
    F64,
    F32,
    F16,
    Bf16,
    F8E4m3,
    F8E8m0,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
    /// A type that no part of this program reads; the number is its size in bits.
    Other(u8),
}

impl Dtype {
    /// Size of one element in bits.
    pub const fn bits(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 | Dtype::U64 => 64,
            Dtype::F32 | Dtype::I32 | Dtype::U32 => 32,
            Dtype::F16 | Dtype::Bf16 | Dtype::I16 | Dtype::U16 => 16,
            Dtype::F8E4m3 | Dtype::F8E8m0 | Dtype::I8 | Dtype::U8 | Dtype::Bool => 8,
            Dtype::Other(bits) => bits as usize,
        }
    }

    /// Size of one element in bytes; `None` for types smaller than a byte.
    pub const fn size(self) -> Option<usize> {
        if self.bits().is_multiple_of(8) { Some(self.bits() / 8) } else { None }
    }

    fn from_reference(dtype: safetensors::Dtype) -> Dtype {
        match dtype {
            safetensors::Dtype::F64 => Dtype::F64,
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::F16 => Dtype::F16,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            safetensors::Dtype::F8_E4M3 => Dtype::F8E4m3,
            safetensors::Dtype::F8_E8M0 => Dtype::F8E8m0,
            safetensors::Dtype::I64 => Dtype::I64,
            safetensors::Dtype::I32 => Dtype::I32,
            safetensors::Dtype::I16 => Dtype::I16,
            safetensors::Dtype::I8 => Dtype::I8,
            safetensors::Dtype::U64 => Dtype::U64,
            safetensors::Dtype::U32 => Dtype::U32,
            safetensors::Dtype::U16 => Dtype::U16,
            safetensors::Dtype::U8 => Dtype::U8,
            safetensors::Dtype::BOOL => Dtype::Bool,
            other => Dtype::Other(u8::try_from(other.bitsize()).unwrap_or(u8::MAX)),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F64 => "F64",
            Dtype::F32 => "F32",
            Dtype::F16 => "F16",
            Dtype::Bf16 => "BF16",
            Dtype::F8E4m3 => "F8_E4M3",
            Dtype::F8E8m0 => "F8_E8M0",
            Dtype::I64 => "I64",
            Dtype::I32 => "I32",
            Dtype::I16 => "I16",
            Dtype::I8 => "I8",
            Dtype::U64 => "U64",
            Dtype::U32 => "U32",
            Dtype::U16 => "U16",
            Dtype::U8 => "U8",
            Dtype::Bool => "BOOL",
            Dtype::Other(bits) => return write!(f, "an unsupported {bits}-bit type"),
        })
    }
}

/// One tensor of a header.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeaderTensor {
    /// Its name.
    pub name: Box<str>,
    /// Element type.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: Vec<usize>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// A checked header.
#[derive(Clone, Debug, Default)]
pub struct Header {
    /// Every tensor but the padding, in the order of the header.
    pub tensors: Vec<HeaderTensor>,
    /// The `__metadata__` strings, in the order of the header.
    pub metadata: Vec<(String, String)>,
    /// Where tensor data begins, in bytes from the start of the file.
    pub data_start: u64,
}

/// What can be wrong with a header. The file's name is added by the caller.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum HeaderError {
    /// Fewer bytes than the length field has.
    #[error(
        "only {file_bytes} bytes, a safetensors file has at least {LENGTH_BYTES}; the download is incomplete, fetch the file again"
    )]
    TooShort { file_bytes: u64 },
    /// The length field goes beyond the limit.
    #[error(
        "header of {header_bytes} bytes stated at offset 0, at most {MAX_HEADER_BYTES} are accepted; this is not a safetensors file or it is damaged"
    )]
    HeaderTooLong { header_bytes: u64 },
    /// The file ends inside its header.
    #[error(
        "the file ends inside its header: {wanted_bytes} bytes wanted, {file_bytes} found; the download is incomplete, fetch the file again"
    )]
    HeaderCut { wanted_bytes: u64, file_bytes: u64 },
    /// Not the JSON that a header is.
    #[error("header at offset {LENGTH_BYTES} is not valid: {message}; fetch the file again")]
    Json { message: String },
    /// One name twice.
    #[error(
        "tensor {name} is written twice in this header; the file is damaged or was merged wrongly"
    )]
    Duplicate { name: String },
    /// Offsets that run backwards or beyond 64 bits, or a shape whose product overflows.
    #[error("tensor {name}: shape {shape:?} with offsets {begin}..{end} is impossible")]
    Impossible { name: String, shape: Vec<usize>, begin: u64, end: u64 },
    /// Shape and dtype do not give the number of bytes.
    #[error(
        "tensor {name}: shape {shape:?} of {dtype} needs {wanted_bytes} bytes, its offsets give {found_bytes}"
    )]
    WrongSize { name: String, shape: Vec<usize>, dtype: Dtype, wanted_bytes: u64, found_bytes: u64 },
    /// Two tensors share bytes.
    #[error("tensors {first} and {second} overlap at data offset {offset}")]
    Overlap { first: String, second: String, offset: u64 },
    /// Bytes between two tensors belong to none.
    #[error("{bytes} bytes before tensor {name} (data offset {offset}) belong to no tensor")]
    Hole { name: String, offset: u64, bytes: u64 },
    /// The file is shorter than its header promises.
    #[error("the header promises {wanted_bytes} bytes, the file has {file_bytes}: {} bytes are missing (first incomplete tensor: {name}); fetch the file again", .wanted_bytes.saturating_sub(*.file_bytes))]
    Truncated { wanted_bytes: u64, file_bytes: u64, name: String },
    /// The file is longer than its header says.
    #[error(
        "the header promises {wanted_bytes} bytes, the file has {file_bytes}: header and data do not belong together; fetch the file again"
    )]
    TooLong { wanted_bytes: u64, file_bytes: u64 },
    /// A limit of this module.
    #[error("{what}: {found}, at most {limit} accepted")]
    Limit { what: &'static str, found: usize, limit: usize },
}

/// Reads the length field: the number of header bytes that follow it.
///
/// `prefix` is the first eight bytes of a file of `file_bytes` bytes.
pub fn header_len(prefix: [u8; 8], file_bytes: u64) -> Result<usize, HeaderError> {
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(HeaderError::HeaderTooLong { header_bytes });
    }
    let wanted_bytes = LENGTH_BYTES + header_bytes;
    if wanted_bytes > file_bytes {
        return Err(HeaderError::HeaderCut { wanted_bytes, file_bytes });
    }
    usize::try_from(header_bytes).map_err(|_| HeaderError::HeaderTooLong { header_bytes })
}

/// Parses the header at the start of `bytes`, which are the first bytes of a file of
/// `file_bytes` bytes (at least length field and header).
pub fn parse_prefix(bytes: &[u8], file_bytes: u64) -> Result<Header, HeaderError> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(HeaderError::TooShort { file_bytes: file_bytes.min(bytes.len() as u64) });
    };
    let length = header_len(*prefix, file_bytes)?;
    let Some(json) = rest.get(..length) else {
        return Err(HeaderError::HeaderCut {
            wanted_bytes: LENGTH_BYTES + length as u64,
            file_bytes: bytes.len() as u64,
        });
    };
    parse_header(json, file_bytes)
}

/// Parses the JSON of a header and checks it against the length of the file.
///
/// Every returned tensor lies inside the file, has exactly the bytes that its shape and dtype
/// need, and shares none with another.
pub fn parse_header(json: &[u8], file_bytes: u64) -> Result<Header, HeaderError> {
    let raw: RawHeader =
        serde_json::from_slice(json).map_err(|e| HeaderError::Json { message: e.to_string() })?;
    if raw.tensors.len() > MAX_TENSORS_PER_FILE {
        return Err(HeaderError::Limit {
            what: "tensors in one file",
            found: raw.tensors.len(),
            limit: MAX_TENSORS_PER_FILE,
        });
    }
    let data_start = LENGTH_BYTES + json.len() as u64;
    let mut checked = Vec::with_capacity(raw.tensors.len());
    for (name, info) in raw.tensors {
        checked.push(check_tensor(name, info, data_start)?);
    }
    check_names(&checked)?;
    check_cover(&checked, data_start, file_bytes)?;
    checked.retain(|tensor| !tensor.name.starts_with(PAD_PREFIX));
    Ok(Header { tensors: checked, metadata: raw.metadata, data_start })
}

fn check_tensor(
    name: Box<str>,
    info: TensorInfo,
    data_start: u64,
) -> Result<HeaderTensor, HeaderError> {
    if name.len() > MAX_NAME_BYTES {
        return Err(HeaderError::Limit {
            what: "bytes in a tensor name",
            found: name.len(),
            limit: MAX_NAME_BYTES,
        });
    }
    if info.shape.len() > MAX_RANK {
        return Err(HeaderError::Limit {
            what: "dimensions of a tensor",
            found: info.shape.len(),
            limit: MAX_RANK,
        });
    }
    let dtype = Dtype::from_reference(info.dtype);
    let (begin, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
    let impossible = || HeaderError::Impossible {
        name: name.to_string(),
        shape: info.shape.clone(),
        begin,
        end,
    };
    let len = end.checked_sub(begin).ok_or_else(impossible)?;
    let offset = data_start.checked_add(begin).ok_or_else(impossible)?;
    offset.checked_add(len).ok_or_else(impossible)?;
    // A zero dimension must not hide an overflow of the others, so zeros are counted apart.
    let mut elements: u64 = 1;
    let mut empty = false;
    for &dim in &info.shape {
        empty |= dim == 0;
        elements = elements.checked_mul(dim.max(1) as u64).ok_or_else(impossible)?;
    }
    if empty {
        elements = 0;
    }
    let bits = elements.checked_mul(dtype.bits() as u64).ok_or_else(impossible)?;
    if !bits.is_multiple_of(8) {
        return Err(impossible());
    }
    if bits / 8 != len {
        return Err(HeaderError::WrongSize {
            name: name.to_string(),
            shape: info.shape,
            dtype,
            wanted_bytes: bits / 8,
            found_bytes: len,
        });
    }
    Ok(HeaderTensor { name, dtype, shape: info.shape, offset, len })
}

fn check_names(tensors: &[HeaderTensor]) -> Result<(), HeaderError> {
    let mut names: Vec<&str> = tensors
        .iter()
        .map(|tensor| &*tensor.name)
        .filter(|name| !name.starts_with(PAD_PREFIX))
        .collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(HeaderError::Duplicate { name: pair[0].to_owned() }),
        None => Ok(()),
    }
}

/// The tensors must tile the data: no overlap, no hole, nothing missing, nothing left over.
fn check_cover(
    tensors: &[HeaderTensor],
    data_start: u64,
    file_bytes: u64,
) -> Result<(), HeaderError> {
    let mut order: Vec<&HeaderTensor> = tensors.iter().collect();
    order.sort_unstable_by_key(|tensor| (tensor.offset, tensor.len));
    let mut previous: Option<&HeaderTensor> = None;
    let mut end = data_start;
    for tensor in order {
        let at = tensor.offset - data_start;
        if tensor.offset < end {
            return Err(HeaderError::Overlap {
                first: previous.map_or_else(String::new, |p| p.name.to_string()),
                second: tensor.name.to_string(),
                offset: at,
            });
        }
        if tensor.offset > end {
            return Err(HeaderError::Hole {
                name: tensor.name.to_string(),
                offset: at,
                bytes: tensor.offset - end,
            });
        }
        end = tensor.offset + tensor.len;
        previous = Some(tensor);
    }
    if end > file_bytes {
        let name = tensors
            .iter()
            .filter(|tensor| tensor.offset + tensor.len > file_bytes)
            .min_by_key(|tensor| tensor.offset)
            .map_or_else(String::new, |tensor| tensor.name.to_string());
        return Err(HeaderError::Truncated { wanted_bytes: end, file_bytes, name });
    }
    if end < file_bytes {
        return Err(HeaderError::TooLong { wanted_bytes: end, file_bytes });
    }
    Ok(())
}

struct RawHeader {
    tensors: Vec<(Box<str>, TensorInfo)>,
    metadata: Vec<(String, String)>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RawHeader, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensor names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut tensors = Vec::new();
                let mut metadata: Option<UniqueMap<String>> = None;
                while let Some(key) = map.next_key::<Box<str>>()? {
                    if &*key == METADATA_KEY {
                        if metadata.is_some() {
                            return Err(A::Error::custom("__metadata__ is written twice"));
                        }
                        metadata = Some(map.next_value()?);
                    } else {
                        tensors.push((key, map.next_value::<TensorInfo>()?));
                    }
                }
                Ok(RawHeader { tensors, metadata: metadata.map_or_else(Vec::new, |m| m.0) })
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}
