//! Measurements in processes of their own: one after another in one process would share its memory.

use std::env;
use std::process::{Command, Output, Stdio};

use crate::workers;

/// Gives this process's own command line once more with `--measurement WHAT`; returns what it
/// prints.
pub fn measured(what: &str) -> Result<String, String> {
    let program = env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    command.args(env::args_os().skip(1)).arg("--measurement").arg(what);
    workers::without_environment(&mut command);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    // Closed when this process ends, however it ends: the child ends with it.
    let alive = child.stdin.take();
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    drop(alive);
    let Output { status, stdout, stderr } = output;
    if status.success() {
        return Ok(String::from_utf8_lossy(&stdout).trim().to_owned());
    }
    let said = String::from_utf8_lossy(&stderr);
    match said.lines().rev().find_map(|line| line.strip_prefix("error: ")) {
        Some(error) => Err(error.to_owned()),
        None => Err(format!("its process ended with {status}; was memory short?")),
    }
}

/// Ends this process when the one that asked for a measurement has ended.
pub fn end_with_the_parent() {
    std::thread::spawn(|| {
        // Nothing is ever sent.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(1);
    });
}
