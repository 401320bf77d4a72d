//! The files of a model, read through the page cache or past it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use container::{FileId, ShardFile, Shards};

use super::{PAGE_BYTES, RawFiles, ReadError};

/// Most open files that are asked for: every file of the largest model, twice.
const DESCRIPTORS_MAX: u64 = 1 << 18;

/// Real files, all open, read through the page cache.
#[derive(Debug)]
pub struct FileSet {
    files: Vec<(PathBuf, File)>,
}

impl FileSet {
    /// Opens the files whose headers `shards` holds. Raises the process's limit of open files if
    /// needed and possible. A file that has changed its length since is refused: its tensors no
    /// longer lie where the header said.
    pub fn open(shards: &Shards) -> Result<FileSet, ReadError> {
        let files = shards.files();
        // Other models and mirrors have files of their own: what is allowed is taken.
        let limit = raise_descriptor_limit();
        let open = |shard: &ShardFile| {
            let path = || shard.path.clone();
            let opened = File::open(&shard.path).and_then(|file| {
                let len = file.metadata()?.len();
                Ok((file, len))
            });
            match opened {
                Ok((file, len)) if len == shard.len => Ok((path(), file)),
                Ok((_, len)) => Err(ReadError::Changed { path: path(), was: shard.len, is: len }),
                Err(source) => {
                    let hint = match (source.raw_os_error() == Some(EMFILE), limit) {
                        (true, Some(limit)) => format!(
                            "; this process may hold {limit} open files, raise it with `ulimit -n`"
                        ),
                        _ => String::new(),
                    };
                    Err(ReadError::Open { path: path(), source, hint })
                }
            }
        };
        Ok(FileSet { files: files.iter().map(open).collect::<Result<_, _>>()? })
    }

    /// Whether all files lie in memory: on a memory file system, or on memory that keeps its bytes
    /// and is mapped as it is (DAX).
    #[cfg(target_os = "linux")]
    pub fn are_in_memory(&self) -> bool {
        use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, fstatfs, statx};
        /// Magic numbers of tmpfs and ramfs, from linux/magic.h.
        const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];
        self.files.iter().all(|(_, file)| {
            // Its type differs between architectures.
            let magic = fstatfs(file).map(|facts| u64::try_from(facts.f_type).unwrap_or(0));
            let on_memory = magic.is_ok_and(|magic| IN_MEMORY.contains(&magic));
            let is_dax = || {
                let facts = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::empty());
                facts.is_ok_and(|facts| facts.stx_attributes.contains(StatxAttributes::DAX))
            };
            on_memory || is_dax()
        })
    }

    /// Not known on this system.
    #[cfg(not(target_os = "linux"))]
    pub fn are_in_memory(&self) -> bool {
        false
    }

    /// Number of files.
    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    pub(super) fn file(&self, file: FileId) -> &File {
        &self.files[file.0 as usize].1
    }
}

/// "Too many open files" on every Unix.
const EMFILE: i32 = 24;

/// Raises the soft limit of open files to the hard limit; returns the limit in force.
#[cfg(unix)]
fn raise_descriptor_limit() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    match limit.current {
        Some(current) if limit.maximum.is_none_or(|maximum| current < maximum) => {
            let raised = limit.maximum.unwrap_or(DESCRIPTORS_MAX).min(DESCRIPTORS_MAX).max(current);
            let new = Rlimit { current: Some(raised), maximum: limit.maximum };
            Some(setrlimit(Resource::Nofile, new).map_or(current, |()| raised))
        }
        current => current,
    }
}

#[cfg(not(unix))]
fn raise_descriptor_limit() -> Option<u64> {
    None
}

#[cfg(unix)]
pub(super) fn read_at(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buffer, offset)
}

#[cfg(windows)]
pub(super) fn read_at(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buffer, offset)
}

impl RawFiles for FileSet {
    fn read_at(&self, file: FileId, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        read_at(self.file(file), offset, buffer)
    }

    fn path(&self, file: FileId) -> &Path {
        &self.files[file.0 as usize].0
    }
}

/// The same files, read past the page cache into the caller's memory.
#[derive(Debug)]
pub struct DirectFiles {
    cached: FileSet,
    direct: Vec<File>,
    alignment: usize,
}

impl DirectFiles {
    /// Opens the files of `cached` a second time for direct reads. Refused, with the files given
    /// back, where a file system cannot or asks for more alignment than pages have.
    pub fn open(cached: FileSet) -> Result<DirectFiles, (FileSet, io::Error)> {
        let mut direct = Vec::with_capacity(cached.len());
        let mut alignment = 1;
        for (path, _) in &cached.files {
            match open_direct(path) {
                Ok((file, align)) => {
                    alignment = alignment.max(align);
                    direct.push(file);
                }
                Err(error) => {
                    let text = format!("{}: {error}", path.display());
                    return Err((cached, io::Error::new(error.kind(), text)));
                }
            }
        }
        Ok(DirectFiles { cached, direct, alignment })
    }

    pub(super) fn direct(&self, file: FileId) -> &File {
        &self.direct[file.0 as usize]
    }
}

/// A file opened for direct reads, and what their offsets and lengths must be multiples of.
#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> io::Result<(File, usize)> {
    use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, open, statx};
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    let file = File::from(open(path, flags, Mode::empty())?);
    let mut alignment = PAGE_BYTES;
    // Not every file system states it; pages do for all that are known.
    if let Ok(facts) = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        && facts.stx_dio_mem_align > 0
    {
        if facts.stx_dio_offset_align == 0 || facts.stx_dio_mem_align as usize > PAGE_BYTES {
            return Err(io::ErrorKind::Unsupported.into());
        }
        alignment = alignment.max(facts.stx_dio_offset_align as usize);
    }
    if !alignment.is_power_of_two() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    // Some file systems open a file and refuse the reads.
    let mut probe = super::PageBuffer::zeroed(alignment);
    read_at(&file, 0, &mut probe)?;
    Ok((file, alignment))
}

#[cfg(target_os = "macos")]
fn open_direct(path: &Path) -> io::Result<(File, usize)> {
    let file = File::open(path)?;
    rustix::fs::fcntl_nocache(&file, true)?;
    Ok((file, PAGE_BYTES))
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn open_direct(_path: &Path) -> io::Result<(File, usize)> {
    Err(io::ErrorKind::Unsupported.into())
}

impl RawFiles for DirectFiles {
    fn read_at(&self, file: FileId, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        read_at(self.direct(file), offset, buffer)
    }

    fn path(&self, file: FileId) -> &Path {
        self.cached.path(file)
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn read_unaligned_at(&self, file: FileId, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.cached.read_at(file, offset, buffer)
    }
}
