//! The rules of style that a test can check, over every file of the repository. `CONTRIBUTING.md`
//! has the rules in words.
//!
//! There is nothing here but tests. A finding names file and line; a rule is a function over one
//! file and has a test of its own on a made-up snippet.

#[cfg(test)]
mod rules;
#[cfg(test)]
mod scan;
#[cfg(test)]
mod walk;

#[cfg(test)]
mod tests {
    use crate::rules;
    use crate::scan::Source;
    use crate::walk;

    /// Fewer files than this mean that the walk looked in the wrong place.
    const FILES_MIN: usize = 80;

    #[test]
    fn the_repository_is_tidy() {
        let root = walk::root();
        let files = walk::files(&root);
        assert!(files.len() >= FILES_MIN, "only {} files under {}", files.len(), root.display());
        let mut findings = Vec::new();
        for path in &files {
            let bytes = match std::fs::read(root.join(path)) {
                Ok(bytes) => bytes,
                // A file may go while others work in the tree.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => panic!("{path}: {error}"),
            };
            let Ok(text) = String::from_utf8(bytes) else {
                findings.push(format!("{path}:1: not UTF-8"));
                continue;
            };
            let source = Source::new(path, &text);
            let found = rules::check(&source);
            findings.extend(found.iter().map(|f| format!("{path}:{}: {}", f.line, f.what)));
        }
        assert!(findings.is_empty(), "{} findings:\n{}", findings.len(), findings.join("\n"));
    }
}
