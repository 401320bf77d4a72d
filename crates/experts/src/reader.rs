//! Reads that either fill their buffer or say what is wrong with which file.
//!
//! A short or interrupted read is continued, a transient failure retried a bounded number of
//! times; anything else is a typed error with file, offset, and bytes wanted and got.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use container::{FileId, ShardFile, Shards};

/// Transient failures in a row after which a read gives up.
const RETRIES_MAX: u32 = 10;
/// Pause before the first retry; each further one is twice as long, a second in all.
const RETRY_PAUSE: Duration = Duration::from_millis(1);
/// Bytes of one system call; some systems refuse 2 GiB and more.
const CALL_BYTES_MAX: usize = 1 << 30;
/// Descriptors kept for everything that is not a shard.
const DESCRIPTORS_SPARE: u64 = 64;

/// A read that could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The operating system refused.
    #[error(
        "{}: reading {wanted} bytes at offset {offset} failed after {got}: {source}; \
         check the drive and the file", path.display()
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// First byte wanted.
        offset: u64,
        /// Bytes wanted.
        wanted: usize,
        /// Bytes read before the failure.
        got: usize,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The file ends too early; it was cut after it was opened.
    #[error(
        "{}: ends at byte {end}, {wanted} bytes at offset {offset} wanted; fetch the file again",
        path.display()
    )]
    End {
        /// The file.
        path: PathBuf,
        /// First byte wanted.
        offset: u64,
        /// Bytes wanted.
        wanted: usize,
        /// Where the file ends.
        end: u64,
    },
    /// A file is not the one whose header was read.
    #[error(
        "{}: had {was} bytes when its header was read and has {is} now; \
         do not change a model while it is opened", path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
        /// Its length then.
        was: u64,
        /// Its length now.
        is: u64,
    },
    /// A file could not be opened.
    #[error("{}: cannot be opened: {source}{hint}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
        /// What to do, when known.
        hint: String,
    },
}

/// Positioned reads of numbered files, as an operating system gives them: possibly short,
/// interrupted or failing.
pub trait RawFiles: Send + Sync {
    /// Reads some bytes at `offset`; 0 means the end of the file.
    fn read_at(&self, file: FileId, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;
    /// Path of a file, for messages.
    fn path(&self, file: FileId) -> &Path;
}

/// Real files, all open.
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
        let limit = raise_descriptor_limit(files.len() as u64 + DESCRIPTORS_SPARE);
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
}

/// "Too many open files" on every Unix.
const EMFILE: i32 = 24;

/// Raises the soft limit of open files to at least `wanted` where the hard limit allows it;
/// returns the limit in force.
#[cfg(unix)]
fn raise_descriptor_limit(wanted: u64) -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    match limit.current {
        Some(current) if current < wanted => {
            let raised = limit.maximum.map_or(wanted, |maximum| wanted.min(maximum));
            let new = Rlimit { current: Some(raised), maximum: limit.maximum };
            Some(setrlimit(Resource::Nofile, new).map_or(current, |()| raised))
        }
        current => current,
    }
}

#[cfg(not(unix))]
fn raise_descriptor_limit(_wanted: u64) -> Option<u64> {
    None
}

impl RawFiles for FileSet {
    #[cfg(unix)]
    fn read_at(&self, file: FileId, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(&self.files[file.0 as usize].1, buffer, offset)
    }

    #[cfg(windows)]
    fn read_at(&self, file: FileId, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_read(&self.files[file.0 as usize].1, buffer, offset)
    }

    fn path(&self, file: FileId) -> &Path {
        &self.files[file.0 as usize].0
    }
}

/// Whole reads over raw files, counted.
#[derive(Clone)]
pub struct Reader {
    files: Arc<dyn RawFiles>,
    bytes: Arc<AtomicU64>,
}

impl Reader {
    /// A reader of `files`.
    pub fn new(files: Arc<dyn RawFiles>) -> Reader {
        Reader { files, bytes: Arc::new(AtomicU64::new(0)) }
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Path of a file.
    pub fn path(&self, file: FileId) -> &Path {
        self.files.path(file)
    }

    /// Fills `buffer` from `offset` of a file.
    pub fn read_exact(
        &self,
        file: FileId,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<(), ReadError> {
        let wanted = buffer.len();
        let path = || self.files.path(file).to_owned();
        let (mut got, mut failures) = (0, 0);
        while got < wanted {
            let call = (wanted - got).min(CALL_BYTES_MAX);
            match self.files.read_at(file, offset + got as u64, &mut buffer[got..got + call]) {
                Ok(0) => {
                    let end = offset + got as u64;
                    return Err(ReadError::End { path: path(), offset, wanted, end });
                }
                Ok(read) => {
                    got += read.min(call);
                    failures = 0;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_transient(&error) && failures < RETRIES_MAX => {
                    std::thread::sleep(RETRY_PAUSE * (1 << failures));
                    failures += 1;
                }
                Err(source) => {
                    return Err(ReadError::Io { path: path(), offset, wanted, got, source });
                }
            }
        }
        self.bytes.fetch_add(wanted as u64, Ordering::Relaxed);
        Ok(())
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
