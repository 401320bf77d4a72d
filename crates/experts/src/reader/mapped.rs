//! Files mapped into memory, whose experts are computed where they lie.

use std::io;

use container::FileId;
use memmap2::{Advice, Mmap};

use super::FileSet;

/// Every file of a model, mapped for reading.
///
/// A file that is cut or written while it is mapped ends the process or changes what is computed:
/// the operating system gives no other answer. That a model's files are left alone while it is
/// opened is what every user of this program is told; only mapped files depend on it for more than
/// an error.
pub struct MappedFiles {
    maps: Vec<Mmap>,
}

impl MappedFiles {
    /// Maps the files.
    pub fn open(files: &FileSet) -> io::Result<MappedFiles> {
        let map = |at: usize| {
            // SAFETY: the bytes are only read, as plain numbers, and checked before they are used.
            // That nobody changes the file meanwhile is the condition stated above.
            let map = unsafe { Mmap::map(files.file(FileId(at as u32)))? };
            // Experts are visited in no order; reading ahead would fetch what nobody asked for.
            let _ = map.advise(Advice::Random);
            Ok(map)
        };
        Ok(MappedFiles { maps: (0..files.len()).map(map).collect::<io::Result<_>>()? })
    }

    /// Bytes of a file; `None` beyond its end.
    pub fn bytes(&self, file: FileId, offset: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        self.maps.get(file.0 as usize)?.get(start..start.checked_add(len)?)
    }

    /// Bytes mapped.
    pub fn len_bytes(&self) -> u64 {
        self.maps.iter().map(|map| map.len() as u64).sum()
    }
}
