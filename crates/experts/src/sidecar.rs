//! What the readers of route traces and coupling tables share: lines of bounded length, whole
//! numbers, and errors that name file and line.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use container::config::{MAX_EXPERTS, MAX_LAYERS, MAX_MTP_LAYERS};

/// Bytes of a line that a message shows.
const EXCERPT_BYTES: usize = 60;

/// The layers and experts that a file may name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RouteShape {
    /// Decoder layers, those for multi-token prediction included.
    pub layers: usize,
    /// Routed experts of a layer.
    pub experts: usize,
}

impl RouteShape {
    /// As many as any model may have, where the model is not known.
    pub const ANY: RouteShape =
        RouteShape { layers: MAX_LAYERS + MAX_MTP_LAYERS, experts: MAX_EXPERTS };
}

/// A route trace or coupling table that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SidecarError {
    /// The operating system refused to give it.
    #[error("{}: cannot be read after line {line}: {source}; check the file", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Lines read before.
        line: usize,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A line is not what it must be.
    #[error("{} line {line}: expected {expected}, found {found}; {remedy}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What would be right.
        expected: String,
        /// What is there.
        found: String,
        /// What to do.
        remedy: &'static str,
    },
    /// It was written by another version of the program.
    #[error(
        "{}: version {found} of the format, this program reads {version}; \
         use the program that wrote it or make the file again",
        path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Version in the file.
        found: u64,
        /// The version that is read.
        version: u64,
    },
    /// More than any real file has.
    #[error("{} line {line}: more than {limit} {what}; is this the right file?", path.display())]
    TooMany {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is counted.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
}

/// Opens a file or pipe to be read line by line.
pub(crate) fn open(path: &Path) -> Result<BufReader<File>, SidecarError> {
    let file = File::open(path).map_err(|source| SidecarError::Read {
        path: path.to_owned(),
        line: 0,
        source,
    })?;
    Ok(BufReader::new(file))
}

/// The beginning of a text from outside, quoted.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(EXCERPT_BYTES)];
    let dots = if cut.len() < bytes.len() { "…" } else { "" };
    format!("\"{}{dots}\"", cut.escape_ascii())
}

/// A whole number in decimal digits and nothing else.
pub(crate) fn whole<T: std::str::FromStr>(field: &str) -> Option<T> {
    let is_whole = field.bytes().all(|byte| byte.is_ascii_digit());
    is_whole.then(|| field.parse().ok()).flatten()
}

/// One line of a file.
#[derive(Clone, Copy)]
pub(crate) struct Line<'a> {
    /// The file.
    pub path: &'a Path,
    /// Line, from 1.
    pub number: usize,
    /// Its text, without white space at the ends.
    pub text: &'a str,
    /// What to do with a file that has a wrong line.
    pub remedy: &'static str,
}

impl Line<'_> {
    /// The line is not what it must be.
    pub fn wrong(&self, expected: impl fmt::Display) -> SidecarError {
        self.wrong_part(expected, excerpt(self.text.as_bytes()))
    }

    /// A part of the line is not what it must be.
    pub fn wrong_part(
        &self,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> SidecarError {
        SidecarError::Line {
            path: self.path.to_owned(),
            line: self.number,
            expected: expected.to_string(),
            found: found.to_string(),
            remedy: self.remedy,
        }
    }

    /// The file goes over a limit with this line.
    pub fn too_many(&self, what: &'static str, limit: usize) -> SidecarError {
        SidecarError::TooMany { path: self.path.to_owned(), line: self.number, what, limit }
    }

    /// A layer or expert below `end`.
    pub fn index(&self, what: &str, field: &str, end: usize) -> Result<u32, SidecarError> {
        let index = whole(field).filter(|index: &u32| (*index as usize) < end);
        index.ok_or_else(|| {
            let expected = format_args!("{what} below {end}").to_string();
            self.wrong_part(expected, excerpt(field.as_bytes()))
        })
    }
}

/// The lines of a file, one at a time.
pub(crate) struct Lines<'a, R> {
    path: &'a Path,
    source: R,
    buffer: Vec<u8>,
    number: usize,
    limit_bytes: usize,
    remedy: &'static str,
}

impl<'a, R: BufRead> Lines<'a, R> {
    /// Lines of at most `limit_bytes`; `path` and `remedy` are for messages.
    pub fn new(path: &'a Path, source: R, limit_bytes: usize, remedy: &'static str) -> Self {
        Lines { path, source, buffer: Vec::new(), number: 0, limit_bytes, remedy }
    }

    /// The next line, if there is one.
    pub fn next(&mut self) -> Result<Option<Line<'_>>, SidecarError> {
        self.buffer.clear();
        let mut limited = (&mut self.source).take(self.limit_bytes as u64 + 1);
        limited.read_until(b'\n', &mut self.buffer).map_err(|source| SidecarError::Read {
            path: self.path.to_owned(),
            line: self.number,
            source,
        })?;
        if self.buffer.is_empty() {
            return Ok(None);
        }
        self.number += 1;
        let (path, number, remedy) = (self.path, self.number, self.remedy);
        let line = Line { path, number, text: "", remedy };
        if self.buffer.len() > self.limit_bytes {
            let expected = format_args!("at most {} bytes", self.limit_bytes).to_string();
            return Err(line.wrong_part(expected, excerpt(&self.buffer)));
        }
        match std::str::from_utf8(&self.buffer) {
            Ok(text) => Ok(Some(Line { text: text.trim_ascii(), ..line })),
            Err(_) => Err(line.wrong_part("UTF-8", excerpt(&self.buffer))),
        }
    }
}
