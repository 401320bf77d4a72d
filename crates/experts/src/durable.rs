//! Small files written whole: a reader sees the old file or the new one, never a part.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// A small file that could not be written; the old one, if any, is whole, or the new one is there
/// and may not outlast a loss of power.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot {action}: {source}; check the directory and its free space", path.display())]
pub struct WriteError {
    /// The file or directory.
    pub path: PathBuf,
    /// What was tried.
    pub action: &'static str,
    /// The system's answer.
    #[source]
    pub source: io::Error,
}

impl WriteError {
    /// Attaches a path to a failed action.
    pub(crate) fn at(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> WriteError {
        let path = path.to_owned();
        move |source| WriteError { path, action, source }
    }
}

/// Writes `bytes` under a temporary name in the same directory, puts them on disk, then gives them
/// the name `path`. A symbolic link of that name is replaced, not followed. What an interrupted
/// write left under the temporary name is dropped; writers of one file take turns.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = PathBuf::from(temporary);
    let written = put(&temporary, bytes)
        .and_then(|()| fs::rename(&temporary, path).map_err(WriteError::at(path, "name")));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written?;
    sync_dir(path)
}

/// Reads a small file whole. Only regular files are opened, so that a pipe cannot hang the program;
/// what is longer than `limit` bytes is refused.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::other(format!("it has more than {limit} bytes")));
    }
    Ok(bytes)
}

/// Makes a file that was not there, so that a link planted under the temporary name is not
/// followed, and puts its bytes on disk.
fn put(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(WriteError::at(path, "replace")(error));
        }
        _ => {}
    }
    let mut file = File::create_new(path).map_err(WriteError::at(path, "create"))?;
    file.write_all(bytes).map_err(WriteError::at(path, "write"))?;
    file.sync_all().map_err(WriteError::at(path, "sync"))
}

/// Makes a rename in the directory of `path` durable.
pub fn sync_dir(path: &Path) -> Result<(), WriteError> {
    #[cfg(unix)]
    if let Some(dir) = path.parent() {
        let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        let file = File::open(dir).map_err(WriteError::at(dir, "open"))?;
        file.sync_all().map_err(WriteError::at(dir, "sync"))?;
    }
    Ok(())
}
