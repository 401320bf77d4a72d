use std::io::Read;
use std::process::Stdio;
use std::time::Duration;

use crate::support::{arg, coli, run};

/// Runs with a ceiling and watches the process from outside; returns its JSON and peak RSS.
#[cfg(target_os = "linux")]
fn watched(args: &[&str]) -> (serde_json::Value, u64) {
    let mut child = coli().args(args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let high = text.lines().find(|line| line.starts_with("VmHWM:"));
        let kib = high.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        peak = peak.max(kib.unwrap_or(0) * 1024);
        std::thread::park_timeout(Duration::from_millis(5));
    }
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    (serde_json::from_str(&text).unwrap_or_else(|error| panic!("{args:?}: {error}")), peak)
}

#[test]
#[cfg(target_os = "linux")]
fn a_model_three_times_the_ceiling_runs_within_it_with_the_bits_of_unlimited_memory() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("glm");
    let shape = [
        "synth",
        arg(&model),
        "--like",
        "glm-5.2",
        "--layers",
        "3",
        "--dense-layers",
        "1",
        "--experts",
        "64",
        "--hidden",
        "1024",
        "--intermediate",
        "1024",
        "--expert-intermediate",
        "1536",
        "--heads",
        "4",
        "--vocab",
        "2000",
        "--context",
        "1024",
        "--shard-gb",
        "0.05",
    ];
    run(&shape).expect(0);
    let bytes: u64 = std::fs::read_dir(&model)
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    let ceiling = 130_000_000;
    assert!(bytes > 3 * ceiling, "the model has only {bytes} bytes");
    let run_with = |ram: &str| {
        watched(&[
            "run",
            "--model",
            arg(&model),
            "--ids",
            "1,2,3,4,5,6,7,8,9,10,11,12",
            "--max-tokens",
            "12",
            "--fingerprint",
            "--json",
            "--ram",
            ram,
            "--ctx",
            "64",
            "--prefill-chunk",
            "8",
            // A temporary directory in memory would be mapped.
            "--io",
            "buffered",
        ])
    };
    let (small, peak) = run_with("0.13");
    let (large, _) = run_with("4");
    assert_eq!(small["fingerprint"], large["fingerprint"]);
    assert_eq!(small["ids"], large["ids"]);
    let allowed = ceiling + (ceiling / 20).max(48_000_000);
    assert!(peak <= allowed, "peak RSS {peak} above {allowed}");
    assert!(small["bytes_read"].as_u64() > large["bytes_read"].as_u64(), "nothing was evicted");
}
