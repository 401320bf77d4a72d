//! Which files are checked: text that people write, wherever it lies in the repository.

use std::path::{Path, PathBuf};

/// Folders that hold nothing of the repository's own.
const SKIPPED: [&str; 9] = [
    "target",
    ".git",
    "__pycache__",
    "venv",
    ".venv",
    "node_modules",
    "corpus",
    "artifacts",
    "shared",
];
/// Texts of others, kept as they are: excerpts, generated vectors, inputs of the fuzzer.
const KEPT_AS_THEY_ARE: [&str; 4] =
    ["fixtures/", "fuzz/seeds/", "models/hummingbird/heldout/", "crates/container/tests/data/"];
/// Endings of text that people write.
const ENDINGS: [&str; 6] = ["rs", "toml", "md", "py", "sh", "txt"];

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Paths of the files to check, relative to `root`, with `/` between their parts.
pub fn files(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(root.join(&folder)) else { continue };
        for entry in entries.flatten() {
            let Ok(kind) = entry.file_type() else { continue };
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
            if kind.is_dir() && !SKIPPED.contains(&name.as_str()) {
                folders.push(path);
            } else if kind.is_file() && is_checked(&path) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Whether a file is text that people write.
fn is_checked(path: &str) -> bool {
    if KEPT_AS_THEY_ARE.iter().any(|kept| path.starts_with(kept)) {
        return false;
    }
    let ending = path.rsplit_once('.').map_or("", |(_, ending)| ending);
    path == ".ci/run" || ENDINGS.contains(&ending)
}

#[test]
fn code_and_documents_are_checked_and_data_is_not() {
    for path in ["README.md", ".ci/run", "crates/a/src/lib.rs", "tools/x/y.py", "deny.toml"] {
        assert!(is_checked(path), "{path}");
    }
    for path in ["fixtures/a/README.md", "Cargo.lock", "m.safetensors", "fuzz/seeds/config/a.txt"] {
        assert!(!is_checked(path), "{path}");
    }
}

#[test]
fn the_walk_finds_its_own_source_and_no_build_output() {
    let files = files(&root());
    assert!(files.contains(&"crates/tidy/src/walk.rs".to_owned()));
    assert!(files.iter().all(|path| !path.split('/').any(|part| part == "target")));
}
