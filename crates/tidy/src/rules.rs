//! The rules. Each is a function over one file that returns what it found; lists of exceptions
//! stand at the top.

use crate::scan::Source;

/// Longest line of Rust.
const COLUMNS_MAX: usize = 100;
/// Files with lines that are longer, nearly all of them literals, and how many: none may be added.
const LONG_LINES: [(&str, usize); 19] = [
    ("crates/coli/src/args.rs", 1),
    ("crates/coli/src/bundled.rs", 1),
    ("crates/coli/src/cmd/bench.rs", 1),
    ("crates/coli/src/cmd/oracle.rs", 1),
    ("crates/container/src/config.rs", 2),
    ("crates/container/src/error.rs", 7),
    ("crates/container/src/header.rs", 7),
    ("crates/container/src/recognise.rs", 1),
    ("crates/container/src/report.rs", 1),
    ("crates/container/src/source.rs", 1),
    ("crates/container/src/tokenizer.rs", 7),
    ("crates/container/tests/container/config.rs", 3),
    ("crates/container/tests/container/header.rs", 2),
    ("crates/container/tests/container/model.rs", 1),
    ("crates/container/tests/container/shards.rs", 1),
    ("crates/container/tests/container/template.rs", 7),
    ("crates/container/tests/container/tokenizer.rs", 1),
    ("crates/formats/tests/formats/kernels.rs", 1),
    ("crates/lab/src/shard.rs", 1),
];
/// Longest file of Rust that is not a kernel.
const LINES_MAX: usize = 800;
/// Files of kernels, which may be longer.
const KERNEL_FILES: [&str; 2] = ["crates/numerics/src/simd/x86.rs", "crates/formats/src/matmul.rs"];
/// Where `unsafe` may stand.
const UNSAFE_FOLDERS: [&str; 3] =
    ["crates/numerics/", "crates/formats/", "crates/experts/src/reader"];
/// The only folder with code for one kind of CPU.
const CPU_FOLDER: &str = "crates/numerics/src/simd/";
/// The command line: the only reader of the environment, and what prints.
const COMMAND_LINE: &str = "crates/coli/";
/// Lines above an `unsafe` block in which its reason may begin.
const REASON_LINES_MAX: usize = 4;

/// What a rule found.
#[derive(Debug, PartialEq)]
pub struct Finding {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong and what to do.
    pub what: String,
}

/// Everything that is wrong with a file.
pub fn check(source: &Source) -> Vec<Finding> {
    let mut found = white_space(source);
    found.extend(absolute_paths(source));
    if source.is_rust() {
        let rules = [
            long_lines,
            long_files,
            module_docs,
            unsafe_places,
            unsafe_reasons,
            cpu_specific_code,
            cpu_specific_modules,
            environment,
            unwraps,
            leftovers,
        ];
        found.extend(rules.into_iter().flat_map(|rule| rule(source)));
    }
    found.sort_by_key(|finding| finding.line);
    found
}

fn finding(line: usize, what: impl Into<String>) -> Finding {
    Finding { line, what: what.into() }
}

fn white_space(source: &Source) -> Vec<Finding> {
    let mut found = Vec::new();
    for (at, line) in source.numbered() {
        if line.text.contains('\t') {
            found.push(finding(at, "a tab; indent with spaces"));
        }
        if line.text.ends_with([' ', '\t', '\r']) {
            found.push(finding(at, "white space at the end of the line"));
        }
        if let Some(c) = line.text.chars().find(|c| c.is_control() && !matches!(c, '\t' | '\r')) {
            found.push(finding(at, format!("control character U+{:04X}", c as u32)));
        }
    }
    match source.lines.last() {
        Some(last) if !last.text.is_empty() => {
            found.push(finding(source.lines.len(), "no newline at the end of the file"));
        }
        _ => {}
    }
    found
}

/// Whether a line is part of a table of numbers.
fn is_number_table(text: &str) -> bool {
    let text = text.trim();
    let number = |part: &str| {
        let part = part.trim();
        part.is_empty()
            || part.starts_with(|c: char| c.is_ascii_digit() || c == '-')
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    text.contains(',') && text.split(',').all(number)
}

fn long_lines(source: &Source) -> Vec<Finding> {
    let is_long = |text: &str| text.chars().count() > COLUMNS_MAX;
    let excused = |text: &str| text.contains("://") || is_number_table(text);
    let long = source.numbered().filter(|(_, line)| is_long(&line.text) && !excused(&line.text));
    let long: Vec<_> = long.collect();
    let known = LONG_LINES.iter().find(|(path, _)| *path == source.path);
    if long.len() <= known.map_or(0, |(_, count)| *count) {
        return Vec::new();
    }
    long.into_iter()
        .map(|(at, line)| {
            let columns = line.text.chars().count();
            finding(at, format!("{columns} columns, at most {COLUMNS_MAX}; break it"))
        })
        .collect()
}

fn long_files(source: &Source) -> Vec<Finding> {
    // Text after the last newline counts as a line of its own only when there is some.
    let empty_end = source.lines.last().is_some_and(|line| line.text.is_empty());
    let lines = source.lines.len() - usize::from(empty_end);
    if lines <= LINES_MAX || KERNEL_FILES.contains(&source.path.as_str()) {
        return Vec::new();
    }
    vec![finding(lines, format!("{lines} lines, at most {LINES_MAX} outside kernels; split it"))]
}

/// Whether a file is a crate root or a module of a crate, rather than a part of its tests.
fn is_module(path: &str) -> bool {
    let folders: Vec<&str> = path.split('/').collect();
    matches!(
        folders.as_slice(),
        ["crates", _, "src", ..]
            | ["crates", _, "tests", _]
            | ["crates", _, "tests", .., "main.rs"]
    )
}

fn module_docs(source: &Source) -> Vec<Finding> {
    let is_doc = source.lines.first().is_some_and(|line| line.text.starts_with("//!"));
    if is_doc || !is_module(&source.path) {
        return Vec::new();
    }
    vec![finding(1, "the file does not begin with //! and what it is for")]
}

/// Byte offsets of a word in code.
fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        !code[..*at].ends_with(is_word) && !code[at + word.len()..].starts_with(is_word)
    })
}

fn unsafe_places(source: &Source) -> Vec<Finding> {
    if UNSAFE_FOLDERS.iter().any(|folder| source.path.starts_with(folder)) {
        return Vec::new();
    }
    let lines = source.numbered().filter(|(_, line)| words(&line.code, "unsafe").next().is_some());
    lines.map(|(at, _)| finding(at, "unsafe outside numerics, formats and the readers")).collect()
}

/// Whether `unsafe` at byte `at` of a line opens a block or begins an implementation; functions
/// state their demands in their documentation instead.
fn needs_reason(code: &str, at: usize) -> bool {
    let rest = code[at + "unsafe".len()..].trim_start();
    rest.is_empty() || rest.starts_with('{') || rest.starts_with("impl")
}

fn unsafe_reasons(source: &Source) -> Vec<Finding> {
    let mut found = Vec::new();
    for (at, line) in source.numbered() {
        if !words(&line.code, "unsafe").any(|word| needs_reason(&line.code, word)) {
            continue;
        }
        let near = &source.lines[at.saturating_sub(1 + REASON_LINES_MAX)..at];
        if !near.iter().any(|line| line.comment.contains("SAFETY:")) {
            found.push(finding(at, "unsafe without a SAFETY: comment above it"));
        }
    }
    found
}

fn cpu_specific_code(source: &Source) -> Vec<Finding> {
    if source.path.starts_with(CPU_FOLDER) {
        return Vec::new();
    }
    let is_specific = |code: &str| {
        let starts_word = |part: &str| {
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            code.match_indices(part).any(|(at, _)| !code[..at].ends_with(is_word))
        };
        code.contains("core::arch")
            || code.contains("std::arch")
            || starts_word("target_feature")
            || starts_word("_mm")
    };
    let lines = source.numbered().filter(|(_, line)| is_specific(&line.code));
    lines.map(|(at, _)| finding(at, format!("CPU-specific code outside {CPU_FOLDER}"))).collect()
}

/// Modules named after a CPU must exist on that CPU only.
fn cpu_specific_modules(source: &Source) -> Vec<Finding> {
    let mut found = Vec::new();
    for (name, arch) in [("x86", "x86_64"), ("neon", "aarch64"), ("amx", "x86_64")] {
        for (at, line) in source.numbered() {
            let declared = words(&line.code, "mod").any(|word| {
                let rest = line.code[word + "mod".len()..].trim_start();
                rest.strip_prefix(name)
                    .is_some_and(|rest| rest.trim_start().starts_with([';', '{']))
            });
            let condition = format!("target_arch = \"{arch}\"");
            let above = at.checked_sub(2).and_then(|above| source.lines.get(above));
            let here_or_above = line.text.contains(&condition)
                || above.is_some_and(|l| l.text.contains(&condition));
            if declared && !here_or_above {
                found.push(finding(at, format!("mod {name} without #[cfg({condition})] above it")));
            }
        }
    }
    found
}

fn environment(source: &Source) -> Vec<Finding> {
    if source.path.starts_with(COMMAND_LINE) {
        return Vec::new();
    }
    let reads = |code: &str| {
        ["env::var(", "env::var_os(", "env::vars(", "env::vars_os("]
            .iter()
            .any(|c| code.contains(c))
    };
    let lines = source.numbered().filter(|(_, line)| !line.is_test && reads(&line.code));
    lines.map(|(at, _)| finding(at, "only coli reads the environment")).collect()
}

fn unwraps(source: &Source) -> Vec<Finding> {
    let mut found = Vec::new();
    for (at, line) in source.numbered().filter(|(_, line)| !line.is_test) {
        for call in [".unwrap()", ".expect("] {
            if line.code.contains(call) {
                found.push(finding(at, format!("{call} outside tests; return an error")));
            }
        }
    }
    found
}

fn leftovers(source: &Source) -> Vec<Finding> {
    let mut found = Vec::new();
    let prints = !source.path.starts_with(COMMAND_LINE);
    for (at, line) in source.numbered() {
        for name in ["todo!", "unimplemented!", "dbg!"] {
            if words(&line.code, &name[..name.len() - 1]).any(|w| line.code[w..].starts_with(name))
            {
                found.push(finding(at, format!("{name} left over")));
            }
        }
        if !prints || line.is_test {
            continue;
        }
        for name in ["println!", "eprintln!", "print!", "eprint!"] {
            if words(&line.code, &name[..name.len() - 1]).any(|w| line.code[w..].starts_with(name))
            {
                found.push(finding(at, format!("{name} outside coli; return what is to be said")));
            }
        }
    }
    found
}

/// Beginnings of paths that exist on one person's machine, in halves so that this file has none.
const ABSOLUTE: [(&str, &str); 4] =
    [("/ho", "me/"), ("/Us", "ers/"), ("/ro", "ot/"), ("/wo", "rk/")];

fn absolute_paths(source: &Source) -> Vec<Finding> {
    let mut found = Vec::new();
    for (at, line) in source.numbered() {
        for (first, second) in ABSOLUTE {
            let path = format!("{first}{second}");
            // Inside a longer path or address the name is nothing of a machine's.
            let inside = |c: char| c.is_alphanumeric() || "/._-*".contains(c);
            let absolute =
                line.text.match_indices(&path).any(|(at, _)| !line.text[..at].ends_with(inside));
            if absolute {
                found.push(finding(at, format!("a path of one machine, {path}")));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "crates/models/src/a.rs";

    /// Lines that a rule finds in a snippet.
    fn lines(rule: fn(&Source) -> Vec<Finding>, path: &str, text: &str) -> Vec<usize> {
        rule(&Source::new(path, text)).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn white_space_is_found() {
        assert_eq!(lines(white_space, "a.md", "a\tb\nc \nd\u{1b}e\nf"), [1, 2, 3, 4]);
        assert_eq!(lines(white_space, "a.md", "a\r\nb\n"), [1]);
        assert!(lines(white_space, "a.md", "a b\n\nc é — λ\n").is_empty());
    }

    #[test]
    fn long_lines_are_found_but_not_addresses_or_tables() {
        let long = "x".repeat(COLUMNS_MAX + 1);
        assert_eq!(lines(long_lines, FILE, &format!("a\n{long}\n")), [2]);
        assert!(lines(long_lines, FILE, &"é".repeat(COLUMNS_MAX)).is_empty());
        assert!(lines(long_lines, FILE, &format!("// https://a.example/{long}")).is_empty());
        assert!(lines(long_lines, FILE, &"0x04040404, -1.5e3, ".repeat(9)).is_empty());
        assert_eq!(lines(long_lines, FILE, &"name_of_a_thing, ".repeat(9)), [1]);
    }

    #[test]
    fn long_lines_are_found_beyond_those_that_are_known() {
        let long = format!("\"{}\"\n", "x".repeat(COLUMNS_MAX));
        assert_eq!(lines(long_lines, FILE, &long), [1]);
        let (known, count) = LONG_LINES[0];
        assert!(lines(long_lines, known, &long.repeat(count)).is_empty());
        assert_eq!(lines(long_lines, known, &long.repeat(count + 1)).len(), count + 1);
    }

    #[test]
    fn long_files_are_found_but_not_kernels() {
        let text = "a\n".repeat(LINES_MAX);
        assert!(lines(long_files, FILE, &text).is_empty());
        let text = text + "a\n";
        assert_eq!(lines(long_files, FILE, &text), [LINES_MAX + 1]);
        assert!(lines(long_files, KERNEL_FILES[0], &text).is_empty());
    }

    #[test]
    fn missing_module_docs_are_found() {
        assert_eq!(lines(module_docs, FILE, "use a;\n"), [1]);
        assert_eq!(lines(module_docs, FILE, "/// Not of the module.\n"), [1]);
        assert!(lines(module_docs, FILE, "//! What it is for.\n").is_empty());
        assert_eq!(lines(module_docs, "crates/a/tests/a/main.rs", "mod b;\n"), [1]);
        assert_eq!(lines(module_docs, "crates/a/tests/a.rs", "mod b;\n"), [1]);
        assert!(lines(module_docs, "crates/a/tests/a/b.rs", "use a;\n").is_empty());
    }

    #[test]
    fn unsafe_is_found_outside_its_places() {
        let text = "// unsafe in a comment\nlet a = unsafe { b() };\nlet c = \"unsafe\";\n";
        assert_eq!(lines(unsafe_places, FILE, text), [2]);
        assert!(lines(unsafe_places, "crates/numerics/src/a.rs", text).is_empty());
        assert!(lines(unsafe_places, "crates/experts/src/reader/uring.rs", text).is_empty());
        assert!(lines(unsafe_places, FILE, "#![deny(unsafe_op_in_unsafe_fn)]").is_empty());
    }

    #[test]
    fn unsafe_without_a_reason_is_found() {
        assert_eq!(lines(unsafe_reasons, FILE, "let a = unsafe { b() };"), [1]);
        assert_eq!(lines(unsafe_reasons, FILE, "x\nunsafe impl Send for A {}"), [2]);
        assert_eq!(lines(unsafe_reasons, FILE, "// SAFETY: a\n1\n2\n3\n4\n5\nunsafe { b() }"), [7]);
        let good = "// SAFETY: it is\n// because.\nlet a =\n    unsafe { b() };";
        assert!(lines(unsafe_reasons, FILE, good).is_empty());
        assert!(lines(unsafe_reasons, FILE, "unsafe fn a() {}").is_empty());
        assert_eq!(lines(unsafe_reasons, FILE, "let s = \"SAFETY: no\";\nunsafe { b() }"), [2]);
    }

    #[test]
    fn cpu_specific_code_is_found_outside_its_folder() {
        for text in [
            "use core::arch::x86_64::*;",
            "use std::arch::asm;",
            "#[target_feature(enable = \"avx2\")]",
            "let a = _mm256_add_ps(b, c);",
        ] {
            assert_eq!(lines(cpu_specific_code, FILE, text), [1], "{text}");
            assert!(lines(cpu_specific_code, "crates/numerics/src/simd/x86.rs", text).is_empty());
        }
        assert!(lines(cpu_specific_code, FILE, "let from_mm = a; // _mm256_add_ps").is_empty());
    }

    #[test]
    fn cpu_modules_without_a_condition_are_found() {
        assert_eq!(lines(cpu_specific_modules, FILE, "a;\npub mod x86;"), [2]);
        assert_eq!(lines(cpu_specific_modules, FILE, "mod neon {\n}"), [1]);
        let good = "#[cfg(target_arch = \"x86_64\")]\npub mod x86;\nmod x86_of_other_things;";
        assert!(lines(cpu_specific_modules, FILE, good).is_empty());
        let wrong = "#[cfg(target_arch = \"aarch64\")]\nmod x86;";
        assert_eq!(lines(cpu_specific_modules, FILE, wrong), [2]);
    }

    #[test]
    fn readers_of_the_environment_are_found() {
        let text = "let a = std::env::var(\"A\");\nlet b = env!(\"B\");\n#[cfg(test)]\nmod t {\n\
                    fn a() { std::env::var_os(\"A\"); }\n}";
        assert_eq!(lines(environment, FILE, text), [1]);
        assert!(lines(environment, "crates/coli/src/main.rs", text).is_empty());
    }

    #[test]
    fn unwraps_are_found_outside_tests() {
        let text = "a.unwrap();\nb.expect(\"c\");\nd.unwrap_or(0); // .unwrap()\n\
                    #[test]\nfn e() {\n f.unwrap();\n}";
        assert_eq!(lines(unwraps, FILE, text), [1, 2]);
        assert!(lines(unwraps, "crates/a/tests/a.rs", text).is_empty());
    }

    #[test]
    fn leftovers_are_found() {
        let text =
            "todo!();\ndbg!(a);\nprintln!(\"b\");\neprintln!();\nwriteln!(c, \"println!\")?;";
        assert_eq!(lines(leftovers, FILE, text), [1, 2, 3, 4]);
        assert_eq!(lines(leftovers, "crates/coli/src/a.rs", text), [1, 2]);
        assert_eq!(lines(leftovers, "crates/a/tests/a.rs", text), [1, 2]);
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        let path = |(first, second): (&str, &str)| format!("{first}{second}");
        for beginning in ABSOLUTE {
            let text = format!("ok\nsee {}me/a.txt", path(beginning));
            assert_eq!(lines(absolute_paths, "a.md", &text), [2]);
        }
        let address =
            format!("https://a.example{}b, target{}c", path(ABSOLUTE[3]), path(ABSOLUTE[3]));
        assert!(lines(absolute_paths, "a.md", &address).is_empty());
    }

    #[test]
    fn a_file_is_checked_by_every_rule_that_applies() {
        let found = check(&Source::new(FILE, "use a;\t\nlet b = c.unwrap();"));
        let lines: Vec<usize> = found.iter().map(|finding| finding.line).collect();
        assert_eq!(lines, [1, 1, 1, 2, 2]);
        assert!(check(&Source::new("a.md", "println!(\"in prose\")\n")).is_empty());
    }
}
