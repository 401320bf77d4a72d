//! Numbered file names: which numbers of `model-00003-of-00005.safetensors` are not there.
//!
//! Works on names alone; it opens nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Ranges and files listed in a message before it says "and N more".
const MAX_LISTED: usize = 8;

/// Files that share a prefix and, when they have one, a total.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Series {
    /// Text before the number.
    pub prefix: String,
    /// The number after `-of-`.
    pub total: Option<u32>,
    /// Digits of a number in the names.
    pub width: usize,
    /// Lowest and highest number found.
    pub found: (u32, u32),
    /// How many of them there are.
    pub count: usize,
    /// Inclusive ranges of absent numbers.
    pub gaps: Vec<(u32, u32)>,
}

impl Series {
    /// Groups numbered safetensors names; names without a number are left out.
    pub fn collect<'a>(names: impl Iterator<Item = &'a str>) -> Vec<Series> {
        let mut groups = BTreeMap::<(&str, Option<u32>), Group>::new();
        for name in names {
            let Some((prefix, number, total, width)) = parse(name) else { continue };
            let group = groups.entry((prefix, total)).or_default();
            group.width = group.width.max(width);
            group.numbers.insert(number);
        }
        groups
            .into_iter()
            .filter_map(|((prefix, total), Group { width, numbers })| {
                let found = (*numbers.first()?, *numbers.last()?);
                Some(Series {
                    prefix: prefix.to_owned(),
                    total,
                    width,
                    found,
                    count: numbers.len(),
                    gaps: gaps(&numbers, found, total),
                })
            })
            .collect()
    }

    /// The file name of a number.
    pub fn name(&self, number: u32) -> String {
        let width = self.width;
        match self.total {
            Some(total) => {
                format!("{}-{number:0width$}-of-{total:0width$}.safetensors", self.prefix)
            }
            None => format!("{}-{number:0width$}.safetensors", self.prefix),
        }
    }
}

#[derive(Default)]
struct Group {
    width: usize,
    numbers: BTreeSet<u32>,
}

/// Absent numbers. With a total the series runs 1..=total (0..total when a 0 is there); without
/// one it runs from the lower of 1 and the lowest found up to the highest found.
fn gaps(numbers: &BTreeSet<u32>, found: (u32, u32), total: Option<u32>) -> Vec<(u32, u32)> {
    let start = found.0.min(1);
    let end = match total {
        Some(total) if start == 0 => total.saturating_sub(1).max(found.1),
        Some(total) => total.max(found.1),
        None => found.1,
    };
    let mut gaps = Vec::new();
    let mut next = start;
    for &number in numbers {
        if number > next {
            gaps.push((next, number - 1));
        }
        next = number.saturating_add(1);
    }
    if next <= end && numbers.last() != Some(&u32::MAX) {
        gaps.push((next, end));
    }
    gaps
}

/// Splits `PREFIX-K-of-N.safetensors` or `PREFIX-K.safetensors`.
fn parse(name: &str) -> Option<(&str, u32, Option<u32>, usize)> {
    let stem = name.strip_suffix(".safetensors")?;
    if let Some((head, total)) = stem.rsplit_once("-of-") {
        let (prefix, number) = head.rsplit_once('-')?;
        return Some((prefix, digits(number)?, Some(digits(total)?), number.len()));
    }
    let (prefix, number) = stem.rsplit_once('-')?;
    Some((prefix, digits(number)?, None, number.len()))
}

fn digits(text: &str) -> Option<u32> {
    // `parse` alone would accept a sign.
    if text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}

/// Which files of a container seem to be missing.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MissingShards {
    /// Files found.
    pub found: usize,
    /// The numbered series among them.
    pub series: Vec<Series>,
    /// Files that the index file names and that are in no directory.
    pub without_file: Vec<String>,
    /// Whether there is an index file.
    pub has_index: bool,
}

impl MissingShards {
    /// Whether anything points at a missing file.
    pub fn is_complete(&self) -> bool {
        self.without_file.is_empty() && self.series.iter().all(|s| s.gaps.is_empty())
    }

    /// Names of missing files, those of the index first, at most `limit`.
    pub fn file_names(&self, limit: usize) -> Vec<String> {
        let from_index = self.without_file.iter().cloned();
        let from_gaps = self.series.iter().flat_map(|series| {
            series.gaps.iter().flat_map(|&(a, b)| a..=b).map(|number| series.name(number))
        });
        let mut names: Vec<String> = Vec::new();
        for name in from_index.chain(from_gaps) {
            if names.len() == limit {
                break;
            }
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }
}

impl fmt::Display for MissingShards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} safetensors file{} found",
            self.found,
            if self.found == 1 { "" } else { "s" }
        )?;
        for series in &self.series {
            write!(
                f,
                "; {}-*: {} of {}",
                series.prefix,
                series.count,
                series.total.map_or_else(|| "unknown".to_owned(), |total| total.to_string()),
            )?;
            write!(f, ", numbers {} to {}", series.found.0, series.found.1)?;
            for &(first, last) in series.gaps.iter().take(MAX_LISTED) {
                if first == last {
                    write!(f, ", {} is missing", series.name(first))?;
                } else {
                    write!(f, ", {} to {} are missing", series.name(first), series.name(last))?;
                }
            }
            if series.gaps.len() > MAX_LISTED {
                write!(f, " and {} more gaps", series.gaps.len() - MAX_LISTED)?;
            }
        }
        if self.has_index {
            for file in self.without_file.iter().take(MAX_LISTED) {
                write!(f, "; the index names {file}, which is not there")?;
            }
            if self.without_file.len() > MAX_LISTED {
                write!(f, " and {} more", self.without_file.len() - MAX_LISTED)?;
            }
        } else {
            write!(f, "; there is no index file to compare with")?;
        }
        Ok(())
    }
}
