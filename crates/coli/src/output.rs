//! Printing, and figures for people.

use std::fmt;
use std::io::{self, ErrorKind, Write};

/// Prints a line on stdout.
#[macro_export]
macro_rules! say {
    ($($argument:tt)*) => {
        $crate::output::print(format_args!("{}\n", format_args!($($argument)*)))
    };
}

/// Prints on stdout without ending the line.
#[macro_export]
macro_rules! say_part {
    ($($argument:tt)*) => { $crate::output::print(format_args!($($argument)*)) };
}

/// Prints a line on stderr.
#[macro_export]
macro_rules! note {
    ($($argument:tt)*) => {
        $crate::output::print_note(format_args!("{}\n", format_args!($($argument)*)))
    };
}

/// Prints on stderr without ending the line.
#[macro_export]
macro_rules! note_part {
    ($($argument:tt)*) => { $crate::output::print_note(format_args!($($argument)*)) };
}

/// Writes to stderr; that it cannot be written is no reason to stop.
pub fn print_note(text: fmt::Arguments<'_>) {
    let _ = io::stderr().lock().write_fmt(text);
}

/// Writes to stdout at once. A reader that has gone ends the process quietly, as it ends any
/// filter; there is nobody left to tell.
pub fn print(text: fmt::Arguments<'_>) {
    let mut out = io::stdout().lock();
    match out.write_fmt(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => {
            note!("error: cannot write to stdout: {error}");
            std::process::exit(1);
        }
        Ok(()) => {}
    }
}

/// A count and its noun.
pub fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Bytes with a decimal unit.
pub fn bytes(count: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// A count with thousands separated.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Prints one JSON object on stdout.
pub fn print_json(value: &serde_json::Value) {
    say!("{value:#}");
}

/// A table whose columns are as wide as their widest cell; the first is left-aligned, the others
/// as `right` says.
pub fn table(rows: &[Vec<String>], right: &[bool]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let padding = " ".repeat(widths[column] - cell.chars().count());
            if column > 0 {
                line.push_str("  ");
            }
            if right.get(column).copied().unwrap_or(false) {
                line.push_str(&padding);
                line.push_str(cell);
            } else {
                line.push_str(cell);
                line.push_str(&padding);
            }
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_readable() {
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1_500_000), "1.5 MB");
        assert_eq!(bytes(12_700_000_000), "12.7 GB");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(12), "12");
    }

    #[test]
    fn tables_align() {
        let rows = [vec!["a".into(), "1".into()], vec!["long".into(), "234".into()]];
        assert_eq!(table(&rows, &[false, true]), "a       1\nlong  234\n");
    }
}
