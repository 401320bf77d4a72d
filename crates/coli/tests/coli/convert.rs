use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::support::{arg, coli, fixture, hummingbird, run};

fn files(dir: &Path) -> Vec<(String, blake3::Hash)> {
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, blake3::hash(&std::fs::read(path).unwrap()))
        })
        .collect();
    files.sort_by(|a, b| a.0.cmp(&b.0));
    files
}

const FORMATS: [&str; 14] = [
    "f32",
    "bf16",
    "f16",
    "int8-row",
    "int4-row",
    "int2-row",
    "int4-g16",
    "int4-g32",
    "int4-g64",
    "int3-g64",
    "e8-iq3",
    "mxfp4",
    "fp8-e4m3-b128",
    "fp8-e4m3-b128-ue8m0",
];

#[test]
fn every_format_of_experts_converts_opens_and_runs() {
    let source = fixture("glm-fp8-checkpoint");
    for format in FORMATS {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("out");
        let args = ["convert", arg(&source), arg(&to), "--experts", format, "--json"];
        let json = run(&args).expect(0).json();
        assert_eq!(json["written"], true);
        let info = run(&["info", "--model", arg(&to), "--json"]).expect(0).json();
        let experts: Vec<&str> = info["stored"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|line| line["class"] == "experts")
            .map(|line| line["format"].as_str().unwrap())
            .collect();
        assert_eq!(experts, [format.trim_end_matches("-ue8m0")]);
        run(&["run", "--model", arg(&to), "--ids", "1,2,3", "--max-tokens", "3"]).expect(0);
    }
}

#[test]
fn plain_conversion_keeps_every_bit_of_the_logits() {
    // bf16 widened to f32 is the same model; so is a container copied in its own formats.
    for (source, flags) in [
        (fixture("glm-dsa"), ["--experts", "f32"]),
        (fixture("glm-int4-g64"), ["--router", "f32"]),
        (fixture("glm-fp8-checkpoint"), ["--router", "f32"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("out");
        let args = ["convert", arg(&source), arg(&to), flags[0], flags[1]];
        run(&args).expect(0);
        let fingerprint = |dir: &Path| {
            let args = [
                "run",
                "--model",
                arg(dir),
                "--ids",
                "5,6,7",
                "--max-tokens",
                "5",
                "--json",
                "--fingerprint",
                "--activations",
                "f32",
            ];
            run(&args).expect(0).json()["fingerprint"].clone()
        };
        assert_eq!(fingerprint(&source), fingerprint(&to), "{}", source.display());
    }
}

#[test]
fn an_interrupted_conversion_resumes_to_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, cut) = (dir.path().join("whole"), dir.path().join("cut"));
    let convert = |to: &Path| {
        let source = hummingbird();
        run(&["convert", arg(&source), arg(to), "--experts", "int4-g32", "--shard-gb", "0.003"])
    };
    convert(&whole).expect(0);
    convert(&cut).expect(0);
    // As if it had been killed in the third file: the manifest knows two, the rest is half done.
    let manifest = cut.join("colibri.json");
    let mut json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&manifest).unwrap()).unwrap();
    let names: Vec<String> = json["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| file["name"].as_str().unwrap().to_owned())
        .collect();
    assert!(names.len() > 3);
    json["files"].as_array_mut().unwrap().truncate(2);
    json["complete"] = false.into();
    std::fs::write(&manifest, json.to_string()).unwrap();
    for name in &names[2..] {
        std::fs::remove_file(cut.join(name)).unwrap();
    }
    std::fs::write(cut.join(format!("{}.tmp", names[2])), b"half a shard").unwrap();
    let resumed = convert(&cut).expect(0);
    assert!(resumed.stderr.contains("resuming: 2 of"), "{}", resumed.stderr);
    assert_eq!(files(&cut), files(&whole));
    let again = convert(&cut).expect(0);
    assert!(again.stderr.contains("nothing to do"), "{}", again.stderr);
}

#[test]
fn other_parameters_or_another_source_are_refused_and_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("out");
    let source = fixture("glm-fp8-checkpoint");
    run(&["convert", arg(&source), arg(&to), "--experts", "int4-g32"]).expect(0);
    let before = files(&to);
    let out = run(&["convert", arg(&source), arg(&to), "--experts", "int8"]).expect(2);
    assert!(out.stderr.contains("int4-g32") && out.stderr.contains("int8"), "{}", out.stderr);
    let other = fixture("glm-dsa");
    let out = run(&["convert", arg(&other), arg(&to), "--experts", "int4-g32"]).expect(2);
    assert!(out.stderr.contains("source"), "{}", out.stderr);
    assert_eq!(files(&to), before);

    let occupied = dir.path().join("occupied");
    std::fs::create_dir(&occupied).unwrap();
    std::fs::write(occupied.join("precious.txt"), "x").unwrap();
    run(&["convert", arg(&source), arg(&occupied), "--experts", "int8"]).expect(2);
    assert_eq!(files(&occupied).len(), 1);
}

#[test]
fn requests_that_cannot_be_honoured_are_refused_before_anything_is_written() {
    let source = fixture("glm-mtp");
    for (flags, needle) in [
        (["--experts", "int8-g64"], "int8-g64"),
        (["--experts", "int4-g256"], "group"),
        (["--mtp", "int4-row"], "eh_proj"),
        (["--kv-b", "e8-iq3"], "rotated"),
        (["--embedding", "e8"], "rotated"),
        (["--layout", "r16k4-rans"], "int4"),
        (["--layout", "r32"], "r16k4"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("out");
        let args = ["convert", arg(&source), arg(&to), flags[0], flags[1]];
        let out = run(&args).expect(2);
        assert!(out.stderr.contains(needle), "{flags:?}: {}", out.stderr);
        assert!(!to.exists());
    }
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("out");
    let args = ["convert", arg(&source), arg(&to), "--experts", "int8", "--dry-run"];
    run(&args).expect(0);
    assert!(!to.exists());
}

#[test]
fn a_conversion_killed_again_and_again_ends_with_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, cut) = (dir.path().join("whole"), dir.path().join("cut"));
    let source = hummingbird();
    let args = |to: &Path| {
        let args =
            ["convert", arg(&source), arg(to), "--experts", "int4-g32", "--shard-gb", "0.002"];
        args.map(str::to_owned)
    };
    run(&args(&whole)).expect(0);
    for pause_ms in [20, 60, 120, 200] {
        let mut child = coli().args(args(&cut)).stderr(Stdio::null()).spawn().unwrap();
        std::thread::park_timeout(Duration::from_millis(pause_ms));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    run(&args(&cut)).expect(0);
    assert_eq!(files(&cut), files(&whole));
}

#[test]
fn damaged_files_of_a_finished_conversion_are_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("out");
    let source = hummingbird();
    let args = ["convert", arg(&source), arg(&to), "--experts", "int4-g32", "--shard-gb", "0.005"];
    run(&args).expect(0);
    let before = files(&to);
    std::fs::write(to.join("config.json"), "").unwrap();
    let shard = to.join(&before.iter().find(|(name, _)| name.contains("00002")).unwrap().0);
    let mut bytes = std::fs::read(&shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let doctor = run(&["doctor", "--model", arg(&to), "--deep"]).expect(2);
    assert!(doctor.stdout.contains("config.json"), "{}", doctor.stdout);
    run(&args).expect(0);
    assert_eq!(files(&to), before);
}

#[test]
fn two_conversions_into_one_directory_are_kept_apart() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("out");
    std::fs::create_dir(&to).unwrap();
    let source = fixture("glm-fp8-checkpoint");
    let args = ["convert", arg(&source), arg(&to), "--experts", "int8"];
    let lock = lab::manifest::DirLock::take(&to).unwrap();
    let refused = run(&args).expect(2);
    assert!(refused.stderr.contains("another process"), "{}", refused.stderr);
    drop(lock);
    run(&args).expect(0);
    let onto_itself = run(&["convert", arg(&source), arg(&source), "--experts", "int8"]).expect(2);
    assert!(onto_itself.stderr.contains("source itself"), "{}", onto_itself.stderr);
}

#[test]
fn an_unfinished_conversion_is_not_run_and_a_class_the_model_lacks_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("out");
    let source = fixture("olmoe-mha");
    run(&["convert", arg(&source), arg(&to), "--experts", "int8"]).expect(0);
    let manifest = to.join("colibri.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, text.replace("\"complete\": true", "\"complete\": false")).unwrap();
    let out = run(&["run", "--model", arg(&to), "--ids", "1"]).expect(2);
    assert!(out.stderr.contains("unfinished"), "{}", out.stderr);
    let other = dir.path().join("other");
    let out = run(&["convert", arg(&source), arg(&other), "--kv-b", "int8"]).expect(2);
    assert!(out.stderr.contains("--kv-b"), "{}", out.stderr);
}
