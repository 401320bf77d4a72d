//! A file as rules see it: every line with its code and its comments apart, and whether it is a
//! test's. Enough of Rust's grammar to be right about comments, literals and braces; no more.

/// One line of a file.
#[derive(Debug, Default, Clone)]
pub struct Line {
    /// The line as written.
    pub text: String,
    /// Its code: comments and the insides of literals are blanks.
    pub code: String,
    /// Its comments, without code.
    pub comment: String,
    /// Whether it is part of a test.
    pub is_test: bool,
}

/// One file.
#[derive(Debug)]
pub struct Source {
    /// Path from the root of the repository.
    pub path: String,
    /// Lines in order.
    pub lines: Vec<Line>,
}

impl Source {
    /// Scans a file. Only `.rs` files have code and comments told apart.
    pub fn new(path: &str, text: &str) -> Source {
        let mut source = Source { path: path.to_owned(), lines: Vec::new() };
        if source.is_rust() {
            source.lines = split(text);
            mark_tests(&mut source);
        } else {
            let line = |text: &str| Line { text: text.to_owned(), ..Line::default() };
            source.lines = text.split('\n').map(line).collect();
        }
        source
    }

    /// Whether it is Rust.
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Whether the whole file serves tests.
    pub fn is_test_file(&self) -> bool {
        let in_folder = |name| self.path.split('/').any(|part| part == name);
        in_folder("tests")
            || in_folder("benches")
            || self.path.starts_with("fuzz/")
            || self.path.starts_with("crates/tidy/")
    }

    /// Lines with their numbers, from 1.
    pub fn numbered(&self) -> impl Iterator<Item = (usize, &Line)> {
        self.lines.iter().enumerate().map(|(at, line)| (at + 1, line))
    }
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Code,
    LineComment,
    /// Nesting depth.
    BlockComment(u32),
    Text,
    /// Number of `#`.
    RawText(usize),
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Cuts text into lines whose code and comments are apart.
fn split(text: &str) -> Vec<Line> {
    let chars: Vec<char> = text.chars().collect();
    let mut lines = vec![Line::default()];
    let mut state = State::Code;
    let mut at = 0;
    while at < chars.len() {
        let c = chars[at];
        if c == '\n' {
            if state == State::LineComment {
                state = State::Code;
            }
            lines.push(Line::default());
            at += 1;
            continue;
        }
        let next = chars.get(at + 1).copied().unwrap_or('\0');
        let (length, kind, after) = step(&chars, at, c, next, state);
        let line = lines.last_mut().expect("there is always a line");
        for &c in &chars[at..at + length] {
            line.text.push(c);
            line.code.push(if kind == Kind::Code { c } else { ' ' });
            if kind == Kind::Comment {
                line.comment.push(c);
            }
        }
        state = after;
        at += length;
    }
    lines
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Code,
    Comment,
    Literal,
}

/// How many characters belong together from `at` on, what they are, and the state after them.
fn step(chars: &[char], at: usize, c: char, next: char, state: State) -> (usize, Kind, State) {
    match state {
        State::LineComment => (1, Kind::Comment, state),
        State::BlockComment(depth) => match (c, next) {
            ('/', '*') => (2, Kind::Comment, State::BlockComment(depth + 1)),
            ('*', '/') if depth == 1 => (2, Kind::Comment, State::Code),
            ('*', '/') => (2, Kind::Comment, State::BlockComment(depth - 1)),
            _ => (1, Kind::Comment, state),
        },
        State::Text => match c {
            '\\' if next != '\n' && next != '\0' => (2, Kind::Literal, state),
            '"' => (1, Kind::Code, State::Code),
            _ => (1, Kind::Literal, state),
        },
        State::RawText(hashes) => {
            let closes = c == '"'
                && chars[at + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes;
            if closes { (1 + hashes, Kind::Code, State::Code) } else { (1, Kind::Literal, state) }
        }
        State::Code => step_in_code(chars, at, c, next),
    }
}

fn step_in_code(chars: &[char], at: usize, c: char, next: char) -> (usize, Kind, State) {
    match (c, next) {
        ('/', '/') => (2, Kind::Comment, State::LineComment),
        ('/', '*') => (2, Kind::Comment, State::BlockComment(1)),
        ('"', _) => (1, Kind::Code, State::Text),
        ('r', '"' | '#') if !ends_word(chars, at) => {
            let hashes = chars[at + 1..].iter().take_while(|c| **c == '#').count();
            match chars.get(at + 1 + hashes) {
                Some('"') => (2 + hashes, Kind::Code, State::RawText(hashes)),
                // A raw identifier.
                _ => (1, Kind::Code, State::Code),
            }
        }
        ('\'', '\\') => {
            let rest = chars.get(at + 3..).unwrap_or(&[]);
            let close = rest.iter().position(|c| *c == '\'');
            (close.map_or(1, |close| 4 + close), Kind::Literal, State::Code)
        }
        // Anything else after a quote without a second one is a lifetime.
        ('\'', _) if chars.get(at + 2) == Some(&'\'') => (3, Kind::Literal, State::Code),
        _ => (1, Kind::Code, State::Code),
    }
}

/// Whether the character at `at` ends a word that began earlier; `b` and `c` alone are prefixes of
/// literals.
fn ends_word(chars: &[char], at: usize) -> bool {
    let word = |back: usize| at >= back && is_word(chars[at - back]);
    word(1) && (word(2) || !matches!(chars[at - 1], 'b' | 'c'))
}

/// Marks the items behind `#[cfg(test)]` and `#[test]`.
fn mark_tests(source: &mut Source) {
    if source.is_test_file() || source.lines.iter().any(|line| line.code.contains("#![cfg(test)]"))
    {
        source.lines.iter_mut().for_each(|line| line.is_test = true);
        return;
    }
    let (mut braces, mut others) = (0i32, 0i32);
    // Depths at which the item behind a test attribute began, and whether its body has opened.
    let mut item: Option<(i32, i32, bool)> = None;
    for line in &mut source.lines {
        if item.is_none() && is_test_attribute(&line.code) {
            item = Some((braces, others, false));
        }
        line.is_test = item.is_some();
        for c in line.code.chars() {
            match c {
                '{' => braces += 1,
                '}' => braces -= 1,
                '(' | '[' => others += 1,
                ')' | ']' => others -= 1,
                _ => {}
            }
            let Some((from, from_others, opened)) = &mut item else { continue };
            *opened |= c == '{' && braces == *from + 1;
            let ended = (c == '}' && *opened && braces == *from)
                || (c == ';' && !*opened && braces == *from && others == *from_others);
            if ended {
                item = None;
            }
        }
    }
}

fn is_test_attribute(code: &str) -> bool {
    ["#[cfg(test)]", "#[cfg(all(test", "#[test]"].iter().any(|attribute| code.contains(attribute))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> Vec<String> {
        let source = Source::new("crates/a/src/a.rs", text);
        source.lines.into_iter().map(|line| line.code.trim_end().to_owned()).collect()
    }

    #[test]
    fn comments_and_literals_are_not_code() {
        assert_eq!(code("a(); // b()"), ["a();"]);
        assert_eq!(code("a /* /* b */ */ c"), ["a               c"]);
        assert_eq!(code(r#"a("b \" // c") d"#), [r#"a("         ") d"#]);
        assert_eq!(code("a(r#\"b \" c\"#) d"), ["a(r#\"     \"#) d"]);
        assert_eq!(code("a(br\"b\\\") d"), ["a(br\"  \") d"]);
        assert_eq!(code("f('\"', '\\'', b'{') g"), ["f(   ,     , b   ) g"]);
        assert_eq!(code("fn f<'a>(x: &'a str) {}"), ["fn f<'a>(x: &'a str) {}"]);
        assert_eq!(code("\"a\nb\" c"), ["\"", " \" c"]);
        assert_eq!(code("let r#type = 1; // r#\"x"), ["let r#type = 1;"]);
    }

    #[test]
    fn comments_are_kept_apart() {
        let source = Source::new("a.rs", "x(); // SAFETY: y\n/* z */ w");
        assert_eq!(source.lines[0].comment, "// SAFETY: y");
        assert_eq!(source.lines[1].comment, "/* z */");
    }

    #[test]
    fn test_items_are_found_to_their_last_brace() {
        let text = "fn a() {}\n#[cfg(test)]\nmod t {\n fn b() { \"}\"; }\n}\nfn c() {}\n\
                    #[cfg(test)]\nuse x;\nfn d() {}\n\
                    #[cfg(test)]\nfn e(a: [u8; 2]) {\n}\nfn f() {}";
        let source = Source::new("crates/a/src/a.rs", text);
        let marked: Vec<usize> =
            source.numbered().filter(|(_, line)| line.is_test).map(|(at, _)| at).collect();
        assert_eq!(marked, [2, 3, 4, 5, 7, 8, 10, 11, 12]);
    }

    #[test]
    fn files_of_tests_are_tests_throughout() {
        assert!(Source::new("crates/a/tests/a/main.rs", "fn a() {}").lines[0].is_test);
        assert!(Source::new("fuzz/fuzz_targets/a.rs", "fn a() {}").lines[0].is_test);
        assert!(!Source::new("crates/a/src/tests_of.rs", "fn a() {}").lines[0].is_test);
    }
}
