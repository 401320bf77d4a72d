//! Direct reads through io_uring: one large read is many small ones in flight at once.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use container::FileId;
use io_uring::{IoUring, opcode, types};

use super::{DirectFiles, RawFiles};

/// Bytes of one entry: large enough that entries cost little, small enough that one read keeps a
/// queue on the drive.
const ENTRY_BYTES: usize = 512 << 10;
/// Entries of a ring; a longer read returns after as many.
const ENTRIES: u32 = 64;

/// Files read through rings, one ring per thread that reads at a time.
pub struct UringFiles {
    files: DirectFiles,
    rings: Mutex<Vec<IoUring>>,
}

impl UringFiles {
    /// Reads of `files` through rings. Refused, with the files given back, where the kernel has no
    /// io_uring or does not let this process use it.
    pub fn new(files: DirectFiles) -> Result<UringFiles, (DirectFiles, io::Error)> {
        match IoUring::new(ENTRIES) {
            Ok(ring) => Ok(UringFiles { files, rings: Mutex::new(vec![ring]) }),
            Err(error) => Err((files, error)),
        }
    }

    fn rings(&self) -> std::sync::MutexGuard<'_, Vec<IoUring>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RawFiles for UringFiles {
    fn read_at(&self, file: FileId, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let spare = self.rings().pop();
        let mut ring = match spare {
            Some(ring) => ring,
            // A ring more than the system allows is no failure of the drive.
            None => match IoUring::new(ENTRIES) {
                Ok(ring) => ring,
                Err(_) => return self.files.read_at(file, offset, buffer),
            },
        };
        let fd = types::Fd(self.files.direct(file).as_raw_fd());
        let read = read_through(&mut ring, fd, offset, buffer);
        // A ring that still holds entries would write to memory that is no longer borrowed.
        if ring.submission().is_empty() {
            self.rings().push(ring);
        }
        read
    }

    fn path(&self, file: FileId) -> &Path {
        self.files.path(file)
    }

    fn alignment(&self) -> usize {
        self.files.alignment()
    }

    fn read_unaligned_at(&self, file: FileId, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.files.read_unaligned_at(file, offset, buffer)
    }
}

/// Reads by entries that are all in flight together. Returns the bytes that came in one run from
/// the start; an error only when there are none.
fn read_through(
    ring: &mut IoUring,
    fd: types::Fd,
    offset: u64,
    buffer: &mut [u8],
) -> io::Result<usize> {
    let mut results = [0i32; ENTRIES as usize];
    let pieces = buffer.chunks_mut(ENTRY_BYTES).take(ENTRIES as usize);
    let (mut pushed, mut lengths) = (0usize, [0usize; ENTRIES as usize]);
    for (at, piece) in pieces.enumerate() {
        let position = offset + (at * ENTRY_BYTES) as u64;
        let entry = opcode::Read::new(fd, piece.as_mut_ptr(), piece.len() as u32)
            .offset(position)
            .build()
            .user_data(at as u64);
        // SAFETY: the piece is borrowed for this whole call, which does not return before the
        // kernel has completed every entry pushed; the descriptor lives longer.
        if unsafe { ring.submission().push(&entry) }.is_err() {
            break;
        }
        lengths[at] = piece.len();
        pushed = at + 1;
    }
    let mut completed = 0;
    while completed < pushed {
        // Whatever the kernel answers, the entries it has taken must be waited for: it writes into
        // the caller's memory.
        let waited = ring.submit_and_wait(1);
        let before = completed;
        for completion in ring.completion() {
            if let Some(result) = results.get_mut(completion.user_data() as usize) {
                *result = completion.result();
            }
            completed += 1;
        }
        if let Err(error) = waited
            && completed == before
            && error.kind() != io::ErrorKind::Interrupted
        {
            if ring.submission().len() == pushed {
                return Err(error);
            }
            std::thread::yield_now();
        }
    }
    let mut got = 0;
    for (result, len) in results.iter().zip(&lengths).take(pushed) {
        match usize::try_from(*result) {
            Ok(read) => {
                got += read;
                if read < *len {
                    break;
                }
            }
            Err(_) if got == 0 => return Err(io::Error::from_raw_os_error(-result)),
            Err(_) => break,
        }
    }
    Ok(got)
}
