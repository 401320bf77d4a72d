use std::path::Path;

use crate::support::{arg, fixture, hummingbird, run};

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

const FORMATS: [&str; 12] = [
    "f32",
    "bf16",
    "f16",
    "int8-row",
    "int4-row",
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
    run(&["convert", arg(&source), arg(&to)]).expect(2);
    let args = ["convert", arg(&source), arg(&to), "--experts", "int8", "--dry-run"];
    run(&args).expect(0);
    assert!(!to.exists());
}
