//! Key files of clusters.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::Path;

use cluster::wire::secure::Key;

use crate::failure::Failure;

/// Most bytes of a key file.
const KEY_FILE_BYTES_MAX: u64 = 4096;

/// Reads the key that a flag names; one that cannot be read stops the start.
pub fn load(file: Option<&Path>) -> Result<Option<Key>, Failure> {
    let Some(path) = file else { return Ok(None) };
    let refuse = |why: &str| {
        Failure::usage(format!(
            "--cluster-key {}: {why}; make a key with: coli cluster key FILE",
            path.display()
        ))
    };
    let file = File::open(path).map_err(|error| refuse(&error.to_string()))?;
    let mut text = String::new();
    file.take(KEY_FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(|error| refuse(&error.to_string()))?;
    if text.len() as u64 > KEY_FILE_BYTES_MAX {
        return Err(refuse("the file is too long for a key"));
    }
    let key = text.parse::<Key>().map_err(|why| refuse(&format!("the file {why}")))?;
    warn_if_open(path);
    Ok(Some(key))
}

/// Says when others of this machine can read a key.
#[cfg(unix)]
fn warn_if_open(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(path).map_or(0, |data| data.permissions().mode());
    if mode & 0o077 != 0 {
        note!(
            "warning: other users of this machine can read {}; chmod 600 keeps them out",
            path.display()
        );
    }
}

#[cfg(not(unix))]
fn warn_if_open(_path: &Path) {}

/// Writes a new key that only this user can read.
pub fn create(path: &Path) -> Result<(), Failure> {
    let key = Key::generate().map_err(|error| {
        Failure::Failed(anyhow::anyhow!("the system gives no random numbers: {error}"))
    })?;
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let written = options.open(path).and_then(|mut file| {
        file.write_all(format!("{}\n", key.to_hex()).as_bytes())?;
        file.sync_all()
    });
    written.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => Failure::usage(format!(
            "{} exists, and a key is never overwritten; give another name",
            path.display()
        )),
        _ => Failure::usage(format!("{}: {error}", path.display())),
    })
}
