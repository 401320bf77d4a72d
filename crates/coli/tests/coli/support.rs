//! Running the binary.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// What a run gave.
pub struct Outcome {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    /// The one JSON object of stdout.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}\n{}", self.stdout, self.stderr))
    }

    /// Asserts an exit code, showing the output otherwise.
    pub fn expect(self, code: i32) -> Outcome {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }
}

/// Root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The bundled model.
pub fn hummingbird() -> PathBuf {
    root().join("models/hummingbird")
}

/// A fixture.
pub fn fixture(name: &str) -> PathBuf {
    root().join("fixtures/oracle").join(name)
}

/// The binary, with none of the caller's `COLI_` variables.
pub fn coli() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coli"));
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("COLI_")) {
        command.env_remove(name);
    }
    // Tests leave no history and are the same whatever was run before.
    command.env("COLI_NO_USAGE", "true").env("COLI_PIN", "none");
    command.env("XDG_STATE_HOME", "/nonexistent");
    command.current_dir(root()).stdin(Stdio::null());
    #[cfg(feature = "mutations")]
    command.envs(cluster::mutation::name().map(|name| ("MUTATION", name)));
    command
}

/// Runs a prepared command.
pub fn finish(command: &mut Command) -> Outcome {
    let output = command.output().unwrap();
    Outcome {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Runs the binary with arguments.
pub fn run<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Outcome {
    finish(coli().args(args))
}

/// A copy of a model directory that may be damaged.
pub fn copy(from: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    dir
}

/// Shorthand for a path argument.
pub fn arg(path: &Path) -> &str {
    path.to_str().unwrap()
}
