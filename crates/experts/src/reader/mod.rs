//! Reads that either fill their buffer or say what is wrong with which file.
//!
//! A short or interrupted read is continued, a transient failure retried a bounded number of
//! times; anything else is a typed error with file, offset, and bytes wanted and got.

mod buffer;
mod files;
mod mapped;
mod rate;
#[cfg(target_os = "linux")]
mod uring;

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use container::FileId;

pub use buffer::{PAGE_BYTES, PageBuffer};
pub use files::{DirectFiles, FileSet};
pub(crate) use mapped::MappedFiles;
pub use rate::RateLimit;
#[cfg(target_os = "linux")]
pub use uring::UringFiles;

/// Transient failures in a row after which a read gives up.
const RETRIES_MAX: u32 = 10;
/// Pause before the first retry; each further one is twice as long, a second in all.
const RETRY_PAUSE: Duration = Duration::from_millis(1);
/// Bytes of one system call; some systems refuse 2 GiB and more.
const CALL_BYTES_MAX: usize = 1 << 30;

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
    /// Reads some bytes at `offset`; 0 means the end of the file. Offset, length and the memory of
    /// `buffer` are multiples of [`RawFiles::alignment`].
    fn read_at(&self, file: FileId, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// Path of a file, for messages.
    fn path(&self, file: FileId) -> &Path;

    /// What reads must be aligned to, a power of two; memory never to more than [`PAGE_BYTES`].
    fn alignment(&self) -> usize {
        1
    }

    /// [`RawFiles::read_at`] without demands.
    fn read_unaligned_at(&self, file: FileId, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_at(file, offset, buffer)
    }
}

/// How experts are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoMode {
    /// Through the page cache.
    Buffered,
    /// Past the page cache.
    Direct,
    /// Past the page cache, each read as many at once.
    Uring,
    /// In place, from the mapped file.
    Mmap,
}

impl IoMode {
    /// Every mode.
    pub const ALL: [IoMode; 4] = [IoMode::Buffered, IoMode::Direct, IoMode::Uring, IoMode::Mmap];

    /// Name, as flags have it.
    pub const fn name(self) -> &'static str {
        match self {
            IoMode::Buffered => "buffered",
            IoMode::Direct => "direct",
            IoMode::Uring => "uring",
            IoMode::Mmap => "mmap",
        }
    }

    /// The mode of a name.
    pub fn from_name(name: &str) -> Option<IoMode> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }
}

/// Files to read experts from, and why they are read otherwise than asked, if they are.
pub struct OpenedFiles {
    /// The files.
    pub files: Arc<dyn RawFiles>,
    /// How they are read: as asked, or the next best that the system allows.
    pub mode: IoMode,
    /// What to tell the user.
    pub fallback: Option<String>,
}

/// Opens files for reading experts into memory. Where the system refuses a mode, the next simpler
/// one is taken and said. [`IoMode::Mmap`] is read as [`IoMode::Buffered`]: what has to be copied
/// from a mapped container comes from the page cache too.
pub fn open_files(cached: FileSet, mode: IoMode) -> OpenedFiles {
    let buffered = |cached: FileSet, fallback| OpenedFiles {
        files: Arc::new(cached),
        mode: IoMode::Buffered,
        fallback,
    };
    if matches!(mode, IoMode::Buffered | IoMode::Mmap) {
        return buffered(cached, None);
    }
    let direct = match DirectFiles::open(cached) {
        Ok(direct) => direct,
        Err((cached, error)) => {
            let why = format!("direct reads are refused ({error}); reading through the page cache");
            return buffered(cached, Some(why));
        }
    };
    if mode == IoMode::Uring {
        return open_uring(direct);
    }
    OpenedFiles { files: Arc::new(direct), mode: IoMode::Direct, fallback: None }
}

#[cfg(target_os = "linux")]
fn open_uring(direct: DirectFiles) -> OpenedFiles {
    match UringFiles::new(direct) {
        Ok(files) => OpenedFiles { files: Arc::new(files), mode: IoMode::Uring, fallback: None },
        Err((direct, error)) => OpenedFiles {
            files: Arc::new(direct),
            mode: IoMode::Direct,
            fallback: Some(format!("the kernel refuses io_uring ({error}); using direct reads")),
        },
    }
}

#[cfg(not(target_os = "linux"))]
fn open_uring(direct: DirectFiles) -> OpenedFiles {
    OpenedFiles {
        files: Arc::new(direct),
        mode: IoMode::Direct,
        fallback: Some("this system has no io_uring; using direct reads".to_owned()),
    }
}

/// How a long read gives way: it is cut in pieces, and between them it may wait.
pub trait Pace {
    /// Bytes read at once, a multiple of pages.
    fn piece_bytes(&self) -> usize {
        CALL_BYTES_MAX
    }

    /// Called between pieces; returns when the read may go on.
    fn between(&mut self) {}
}

/// A read that never waits for others.
pub struct AtOnce;

impl Pace for AtOnce {}

/// Whole reads over raw files, counted.
#[derive(Clone)]
pub struct Reader {
    files: Arc<dyn RawFiles>,
    bytes: Arc<AtomicU64>,
    retry_pause: Duration,
    limit: Option<Arc<RateLimit>>,
}

/// One read: where, how much, and how aligned.
struct Wanted {
    file: FileId,
    /// Where reading begins, aligned.
    start: u64,
    /// Bytes before those that are wanted.
    skip: usize,
    /// Bytes that must come, those before included.
    end: usize,
    alignment: usize,
}

impl Reader {
    /// A reader of `files`.
    pub fn new(files: Arc<dyn RawFiles>) -> Reader {
        let bytes = Arc::new(AtomicU64::new(0));
        Reader { files, bytes, retry_pause: RETRY_PAUSE, limit: None }
    }

    /// The reader with a share of a rate that it does not go beyond.
    pub fn limited(self, limit: Option<Arc<RateLimit>>) -> Reader {
        Reader { limit, ..self }
    }

    /// The reader with another pause before the first retry of a transient failure.
    pub fn retry_pause(self, pause: Duration) -> Reader {
        Reader { retry_pause: pause, ..self }
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Path of a file.
    pub fn path(&self, file: FileId) -> &Path {
        self.files.path(file)
    }

    /// Another reader of the same files, with a count of its own and no limit.
    pub fn counting_apart(&self) -> Reader {
        Reader { bytes: Arc::new(AtomicU64::new(0)), limit: None, ..self.clone() }
    }

    /// What the files' reads are aligned to.
    pub fn alignment(&self) -> usize {
        self.files.alignment()
    }

    /// Bytes of buffer that [`Reader::read_span`] needs for `len` bytes wherever they lie.
    pub fn span_bytes(&self, len: usize) -> usize {
        match self.files.alignment() {
            1 => len,
            alignment => len.saturating_add(2 * (alignment - 1)) & !(alignment - 1),
        }
    }

    /// Fills `buffer` from `offset` of a file.
    pub fn read_exact(
        &self,
        file: FileId,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<(), ReadError> {
        let wanted = Wanted { file, start: offset, skip: 0, end: buffer.len(), alignment: 1 };
        self.fill(&wanted, buffer, &mut AtOnce)
    }

    /// Reads `len` bytes at `offset` of a file into `buffer`, whose memory starts on a page and has
    /// [`Reader::span_bytes`]. Returns where in the buffer they begin: aligned reads bring bytes
    /// before them.
    pub fn read_span(
        &self,
        file: FileId,
        offset: u64,
        len: usize,
        buffer: &mut [u8],
        pace: &mut dyn Pace,
    ) -> Result<usize, ReadError> {
        let alignment = self.files.alignment();
        let start = offset & !(alignment as u64 - 1);
        let skip = (offset - start) as usize;
        let wanted = Wanted { file, start, skip, end: skip + len, alignment };
        self.fill(&wanted, buffer, pace)?;
        Ok(skip)
    }

    fn fill(
        &self,
        wanted: &Wanted,
        buffer: &mut [u8],
        pace: &mut dyn Pace,
    ) -> Result<(), ReadError> {
        let &Wanted { file, start, skip, end, alignment } = wanted;
        let whole = end.next_multiple_of(alignment);
        let path = || self.files.path(file).to_owned();
        let offset = start + skip as u64;
        let (mut got, mut failures) = (0, 0);
        while got < end {
            let at = start + got as u64;
            let aligned = got.is_multiple_of(alignment) && alignment > 1;
            // A direct read that ended within a block is finished through the page cache.
            let call = (if aligned { whole } else { end } - got).min(pace.piece_bytes());
            let piece = &mut buffer[got..got + call];
            let started = Instant::now();
            let read = match aligned {
                true => self.files.read_at(file, at, piece),
                false => self.files.read_unaligned_at(file, at, piece),
            };
            if let (Some(limit), Ok(read)) = (&self.limit, &read) {
                limit.wait(*read, started);
            }
            match read {
                Ok(0) => {
                    return Err(ReadError::End {
                        path: path(),
                        offset,
                        wanted: end - skip,
                        end: at,
                    });
                }
                Ok(read) => {
                    got = (got + read).min(whole);
                    failures = 0;
                    if got < end {
                        pace.between();
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_transient(&error) && failures < RETRIES_MAX => {
                    std::thread::sleep(self.retry_pause * (1 << failures));
                    failures += 1;
                }
                Err(source) => {
                    let (wanted, got) = (end - skip, got.saturating_sub(skip));
                    return Err(ReadError::Io { path: path(), offset, wanted, got, source });
                }
            }
        }
        self.bytes.fetch_add((end - skip) as u64, Ordering::Relaxed);
        Ok(())
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
