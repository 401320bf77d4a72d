//! The two Python functions that chat templates lean on: `json.dumps` and `strftime`.
//!
//! Output is what Python prints, down to spaces and the spelling of floats.

use std::fmt::Write as _;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Deepest nesting written; the JSON parser that messages come from allows 128.
const MAX_DEPTH: usize = 192;
/// Longest text that `strftime` makes.
const MAX_TIME_TEXT: usize = 4096;

/// How `json.dumps` was asked to write.
#[derive(Clone, Debug)]
pub(crate) struct JsonStyle {
    pub(crate) ascii: bool,
    pub(crate) sorted: bool,
    pub(crate) indent: Option<usize>,
    pub(crate) item_separator: String,
    pub(crate) key_separator: String,
}

impl Default for JsonStyle {
    fn default() -> JsonStyle {
        JsonStyle {
            ascii: false,
            sorted: false,
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
        }
    }
}

/// `json.dumps(value)`; `charge` is told of bytes as they are written.
pub(crate) fn json(
    value: &Value,
    style: &JsonStyle,
    charge: impl Fn(usize) -> Result<(), Error>,
) -> Result<String, Error> {
    let mut writer = Writer { out: String::new(), charged: 0, style, charge };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Writer<'a, F> {
    out: String,
    charged: usize,
    style: &'a JsonStyle,
    charge: F,
}

impl<F: Fn(usize) -> Result<(), Error>> Writer<'_, F> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
        }
        // Charged in steps, so that a long document stops early.
        if self.out.len() - self.charged > 4096 {
            (self.charge)(self.out.len() - self.charged)?;
            self.charged = self.out.len();
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => {
                let _ = write!(self.out, "{value}");
            }
            ValueKind::Number => self.out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.open('[');
                for (i, item) in items.iter().enumerate() {
                    self.separate(i, depth + 1);
                    self.value(item, depth + 1)?;
                }
                self.close(']', items.len(), depth);
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.style.sorted {
                    keys.sort();
                }
                self.open('{');
                for (i, key) in keys.iter().enumerate() {
                    self.separate(i, depth + 1);
                    self.key(key)?;
                    self.out.push_str(&self.style.key_separator);
                    self.value(&value.get_item(key)?, depth + 1)?;
                }
                self.close('}', keys.len(), depth);
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: a value of kind {kind} is not JSON"),
                ));
            }
        }
        Ok(())
    }

    fn key(&mut self, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                self.out.push('"');
                self.value(key, 0)?;
                self.out.push('"');
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: a key of kind {kind} is not JSON"),
                ));
            }
        }
        Ok(())
    }

    fn open(&mut self, bracket: char) {
        self.out.push(bracket);
    }

    fn close(&mut self, bracket: char, items: usize, depth: usize) {
        if items > 0 {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    fn separate(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.out.push_str(&self.style.item_separator);
        }
        self.line(depth);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.style.ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// `repr` of a float: shortest digits, an exponent below 1e-4 and from 1e16.
pub(crate) fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    if value != 0.0 && !(1e-4..1e16).contains(&value.abs()) {
        let text = format!("{value:e}");
        return match text.split_once('e') {
            Some((digits, exponent)) => {
                let (sign, exponent) = match exponent.strip_prefix('-') {
                    Some(exponent) => ('-', exponent),
                    None => ('+', exponent),
                };
                format!("{digits}e{sign}{exponent:0>2}")
            }
            None => text,
        };
    }
    let text = format!("{value}");
    if text.contains('.') { text } else { format!("{text}.0") }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// `strftime` in the C locale for a time in UTC, `seconds` after 1970. Codes that templates do
/// not use are refused.
pub(crate) fn strftime(format: &str, seconds: i64) -> Result<String, Error> {
    let unknown = |code: char| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now: %{code} is not implemented"))
    };
    let days = seconds.div_euclid(86_400);
    let second_of_day = seconds.rem_euclid(86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) =
        (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let weekday = (days + 4).rem_euclid(7);
    let day_of_year = days - days_from_civil(year, 1, 1) + 1;
    let hour12 = (hour + 11) % 12 + 1;
    let month_name = usize::try_from(month - 1).ok().and_then(|i| MONTHS.get(i)).unwrap_or(&"");
    let day_name = usize::try_from(weekday).ok().and_then(|i| DAYS.get(i)).unwrap_or(&"");
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if out.len() > MAX_TIME_TEXT {
            return Err(Error::new(ErrorKind::InvalidOperation, "strftime_now: text too long"));
        }
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next().unwrap_or('%');
        let unpadded = code == '-';
        if unpadded {
            code = chars.next().unwrap_or('%');
        }
        let mut number = |value: i64, width: usize| {
            let width = if unpadded { 1 } else { width };
            let _ = write!(out, "{value:0width$}");
        };
        match code {
            'Y' => number(year, 4),
            'm' => number(month, 2),
            'd' => number(day, 2),
            'H' => number(hour, 2),
            'I' => number(hour12, 2),
            'M' => number(minute, 2),
            'S' => number(second, 2),
            'y' => number(year.rem_euclid(100), 2),
            'j' => number(day_of_year, 3),
            'w' => number(weekday, 1),
            'u' => number((weekday + 6) % 7 + 1, 1),
            's' => number(seconds, 1),
            'B' => out.push_str(month_name),
            'b' | 'h' => out.push_str(&month_name[..3.min(month_name.len())]),
            'A' => out.push_str(day_name),
            'a' => out.push_str(&day_name[..3.min(day_name.len())]),
            'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            'F' => {
                let _ = write!(out, "{year:04}-{month:02}-{day:02}");
            }
            'T' => {
                let _ = write!(out, "{hour:02}:{minute:02}:{second:02}");
            }
            'D' => {
                let _ = write!(out, "{month:02}/{day:02}/{:02}", year.rem_euclid(100));
            }
            'Z' => out.push_str("UTC"),
            'z' => out.push_str("+0000"),
            'n' => out.push('\n'),
            't' => out.push('\t'),
            '%' => out.push('%'),
            other => return Err(unknown(other)),
        }
    }
    Ok(out)
}

/// Year, month and day of a day number (0 is 1 January 1970), proleptic Gregorian.
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

/// The inverse of [`civil`].
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let month_from_march = if month > 2 { month - 3 } else { month + 9 };
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_python() {
        for (value, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1.7976931348623157e308, "1.7976931348623157e+308"),
            (5e-324, "5e-324"),
            (f64::INFINITY, "Infinity"),
        ] {
            assert_eq!(float(value), text);
        }
    }

    #[test]
    fn times_print_as_in_the_c_locale() {
        // 29 February 2024, 13:05:09 UTC, a Thursday.
        let at = 1_709_211_909;
        for (format, text) in [
            ("%Y-%m-%d %H:%M:%S", "2024-02-29 13:05:09"),
            ("%d %b %Y", "29 Feb 2024"),
            ("%A, %B %-d, %Y", "Thursday, February 29, 2024"),
            ("%I:%M %p, day %j, 100%%", "01:05 PM, day 060, 100%"),
            ("%F %T %Z %y %a %w %u", "2024-02-29 13:05:09 UTC 24 Thu 4 4"),
        ] {
            assert_eq!(strftime(format, at).unwrap(), text);
        }
        assert_eq!(strftime("%F", -1).unwrap(), "1969-12-31");
        assert_eq!(strftime("%F", 0).unwrap(), "1970-01-01");
        assert!(strftime("%Q", 0).is_err());
        for seconds in [i64::MIN, i64::MAX] {
            let _ = strftime("%F %T %j %y", seconds);
        }
    }

    #[test]
    fn days_round_trip() {
        for day in (-1_000_000..1_000_000).step_by(37) {
            let (y, m, d) = civil(day);
            assert_eq!(days_from_civil(y, m, d), day);
        }
    }
}
