//! Reading what users name: with a limit, whatever the file turns out to be.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::failure::Failure;

/// Reads text of at most `limit_bytes` from a file or pipe.
pub fn read_file(path: &Path, limit_bytes: u64) -> Result<String, Failure> {
    let unusable = |what: String| Failure::usage(format!("{}: {what}", path.display()));
    let file = File::open(path).map_err(|error| unusable(error.to_string()))?;
    read_text(file, limit_bytes).map_err(unusable)
}

/// Reads text of at most `limit_bytes`; says what is wrong with it otherwise.
pub fn read_text(source: impl Read, limit_bytes: u64) -> Result<String, String> {
    let mut bytes = Vec::new();
    source.take(limit_bytes + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > limit_bytes {
        return Err(format!("more than {limit_bytes} bytes, the most that is read"));
    }
    String::from_utf8(bytes).map_err(|error| format!("not UTF-8: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_up_to_the_limit_and_no_further() {
        assert_eq!(read_text(&b"abc"[..], 3).as_deref(), Ok("abc"));
        assert!(read_text(&b"abcd"[..], 3).is_err());
        assert!(read_text(std::io::repeat(b'x'), 1000).is_err());
        assert!(read_text(&b"\xff"[..], 3).unwrap_err().contains("UTF-8"));
    }
}
