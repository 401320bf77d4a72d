//! Mirrors: staged, verified, read from, and survived.

use std::fs;
use std::path::Path;

use crate::support::{Outcome, arg, fixture, hummingbird, run};

/// The bundled model in the native layout, and a mirror of a part of it.
fn staged(dir: &Path) -> (std::path::PathBuf, std::path::PathBuf) {
    let (model, mirror) = (dir.join("model"), dir.join("mirror"));
    run(&["convert", arg(&hummingbird()), arg(&model)]).expect(0);
    let args = ["mirror", "stage", "--model", arg(&model), "--to", arg(&mirror)];
    let staged = run(&[&args[..], &["--budget", "0.005", "--json"]].concat()).expect(0);
    assert!(staged.json()["experts"].as_u64().unwrap() > 50);
    (model, mirror)
}

fn generate(model: &Path, more: &[&str]) -> Outcome {
    let args = ["run", "--model", arg(model), "--ids", "5,6,7,8", "--max-tokens", "12"];
    let flags = ["--cache-experts", "2", "--fingerprint", "--json"];
    run(&[&args[..], &flags[..], more].concat()).expect(0)
}

#[test]
fn a_mirror_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let (model, mirror) = staged(dir.path());
    let verified = run(&["mirror", "verify", arg(&mirror), "--model", arg(&model)]).expect(0);
    assert!(verified.stdout.ends_with("0 bad\n"), "{}", verified.stdout);
    let alone = generate(&model, &[]).json();
    let weighted = format!("{}=50", arg(&mirror));
    let with = generate(&model, &["--mirror", &weighted]);
    assert_eq!(with.json()["fingerprint"], alone["fingerprint"]);
    assert!(!with.stderr.contains("warning"), "{}", with.stderr);
}

#[test]
fn a_damaged_mirror_costs_one_warning_and_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let (model, mirror) = staged(dir.path());
    let file = mirror.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    // One byte of each page of the records.
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 8;
    for at in (header..bytes.len()).step_by(4096) {
        bytes[at] ^= 1;
    }
    fs::write(&file, bytes).unwrap();
    let verified = run(&["mirror", "verify", arg(&mirror), "--model", arg(&model)]).expect(1);
    assert!(verified.stdout.contains("layer 1, expert 0: "), "{}", verified.stdout);
    assert!(verified.stdout.contains("CRC-32C"), "{}", verified.stdout);
    let alone = generate(&model, &[]).json();
    let weighted = format!("{}=50", arg(&mirror));
    let with = generate(&model, &["--mirror", &weighted]);
    assert_eq!(with.json()["fingerprint"], alone["fingerprint"]);
    assert_eq!(with.stderr.matches("warning").count(), 1, "{}", with.stderr);
    assert!(with.stderr.contains(arg(&mirror)), "{}", with.stderr);
}

#[test]
fn what_is_no_mirror_of_the_model_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (model, mirror) = staged(dir.path());
    let other = dir.path().join("other");
    run(&["convert", arg(&model), arg(&other), "--experts", "int8"]).expect(0);
    let args = ["run", "--model", arg(&other), "--ids", "1,2", "--mirror", arg(&mirror)];
    let refused = run(&args).expect(2);
    assert!(refused.stderr.contains("other weights"), "{}", refused.stderr);
    let canonical = fixture("glm-dsa");
    let args = ["mirror", "plan", "--model", arg(&canonical), "--budget", "1"];
    let refused = run(&args).expect(2);
    assert!(refused.stderr.contains("coli convert"), "{}", refused.stderr);
    let args = ["mirror", "stage", "--model", arg(&model), "--budget", "1"];
    let refused = run(&[&args[..], &["--to", arg(&mirror)]].concat()).expect(2);
    assert!(refused.stderr.contains("not empty"), "{}", refused.stderr);
}
