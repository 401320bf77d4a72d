//! Directories of files: duplicates, truncation, stamps, numbering.

use std::fs;
use std::path::PathBuf;

use container::numbering::Series;
use container::{ContainerError, Shards};
use tempfile::{TempDir, tempdir};

use crate::common::*;

fn open(dirs: &[&TempDir]) -> Result<Shards, ContainerError> {
    let dirs: Vec<PathBuf> = dirs.iter().map(|dir| dir.path().to_owned()).collect();
    Shards::open(&dirs)
}

/// The error's text, which must contain every word.
fn words(error: ContainerError, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} lacks {word:?}");
    }
}

#[test]
fn several_directories_are_one_model() {
    let (first, second) = (tempdir().unwrap(), tempdir().unwrap());
    write(first.path(), "a.safetensors", &[zeros("x", "F32", &[2])], &[]);
    write(second.path(), "b.safetensors", &[zeros("y", "U8", &[3])], &[]);
    let shards = open(&[&first, &second, &first]).unwrap();
    assert_eq!((shards.len(), shards.files().len(), shards.dirs().len()), (2, 2, 2));
    let y = shards.get("y").unwrap();
    assert_eq!(shards.path(y.file), second.path().join("b.safetensors"));
    assert_eq!(y.len, 3);
    assert!(shards.get("z").is_none());
}

#[test]
fn a_name_twice_is_refused_with_both_files() {
    let (first, second) = (tempdir().unwrap(), tempdir().unwrap());
    write(first.path(), "a.safetensors", &[zeros("x", "F32", &[2])], &[]);
    write(first.path(), "b.safetensors", &[zeros("x", "F32", &[2])], &[]);
    words(open(&[&first]).unwrap_err(), &["tensor x", "a.safetensors", "b.safetensors"]);
    fs::remove_file(first.path().join("b.safetensors")).unwrap();
    write(second.path(), "a.safetensors", &[zeros("x", "U8", &[2])], &[]);
    let both = [first.path().join("a.safetensors"), second.path().join("a.safetensors")];
    let both = both.map(|path| path.display().to_string());
    words(open(&[&first, &second]).unwrap_err(), &[&both[0], &both[1]]);
    let header = r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
    fs::write(second.path().join("a.safetensors"), raw_file(header, &[0; 2])).unwrap();
    words(open(&[&second]).unwrap_err(), &["a.safetensors", "tensor x", "twice in this header"]);
}

#[test]
fn padding_may_repeat() {
    let dir = tempdir().unwrap();
    for file in ["a.safetensors", "b.safetensors"] {
        let own = zeros(file, "U8", &[1]);
        write(dir.path(), file, &[zeros("__pad__.0", "U8", &[4000]), own], &[]);
    }
    let shards = open(&[&dir]).unwrap();
    assert_eq!(shards.len(), 2);
    assert!(shards.get("__pad__.0").is_none());
}

#[test]
fn damaged_files_are_named() {
    let dir = tempdir().unwrap();
    let path =
        write(dir.path(), "model-00001-of-00002.safetensors", &[zeros("x", "F32", &[100])], &[]);
    write(dir.path(), "model-00002-of-00002.safetensors", &[zeros("y", "F32", &[100])], &[]);
    let bytes = fs::read(&path).unwrap();
    let full = bytes.len();
    for len in [0, 3, 8, 20, full - 1] {
        fs::write(&path, &bytes[..len]).unwrap();
        words(
            open(&[&dir]).unwrap_err(),
            &["model-00001-of-00002.safetensors", "fetch the file again"],
        );
    }
    words(open(&[&dir]).unwrap_err(), &[&full.to_string(), &(full - 1).to_string(), "x"]);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    words(open(&[&dir]).unwrap_err(), &["model-00001-of-00002.safetensors", "not a regular file"]);
}

#[cfg(unix)]
#[test]
fn a_dangling_link_and_a_pipe_are_named_and_do_not_hang() {
    let dir = tempdir().unwrap();
    std::os::unix::fs::symlink("/nowhere/at/all", dir.path().join("a.safetensors")).unwrap();
    words(open(&[&dir]).unwrap_err(), &["a.safetensors"]);
    fs::remove_file(dir.path().join("a.safetensors")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(dir.path().join("p.safetensors")).status();
    if made.is_ok_and(|status| status.success()) {
        words(open(&[&dir]).unwrap_err(), &["p.safetensors", "not a regular file"]);
    } else {
        eprintln!("SKIPPED: no mkfifo");
    }
}

#[test]
fn directories_that_are_none() {
    let dir = tempdir().unwrap();
    words(open(&[&dir]).unwrap_err(), &["no *.safetensors"]);
    let missing = dir.path().join("nothing");
    words(Shards::open(std::slice::from_ref(&missing)).unwrap_err(), &["nothing"]);
    fs::write(&missing, "x").unwrap();
    words(Shards::open(&[missing]).unwrap_err(), &["nothing", "not a directory"]);
    assert!(Shards::open(&[]).is_err());
}

#[test]
fn stamps_merge_and_conflict() {
    let stamp = |pairs: &str| format!("{{{pairs}}}");
    let case = |a: &str, b: &str| {
        let dir = tempdir().unwrap();
        write(
            dir.path(),
            "a.safetensors",
            &[zeros("a", "U8", &[1])],
            &[("colibri.fmt", &stamp(a))],
        );
        write(
            dir.path(),
            "b.safetensors",
            &[zeros("b", "U8", &[1])],
            &[("colibri.fmt", &stamp(b))],
        );
        open(&[&dir])
    };
    let shards =
        case(r#""x": "int4-g64", "y": "int8-row""#, r#""x": "int4-g64", "z": "e8-iq3+r16k4""#)
            .unwrap();
    assert_eq!(shards.stamp_count(), 3);
    assert_eq!(shards.stamp("x").unwrap().text, "int4-g64");
    assert_eq!(shards.stamp("z").unwrap().layout.as_deref(), Some("r16k4"));
    assert!(shards.stamp("w").is_none());
    // Two accepted spellings of one format are equal.
    assert!(case(r#""x": "e8-iq3""#, r#""x": "e8-iq3-lattice""#).is_ok());
    assert!(case(r#""x": "strange""#, r#""x": "strange""#).is_ok());
    for (a, b) in [
        (r#""x": "int4-g64""#, r#""x": "int4-g32""#),
        (r#""x": "int4-g64""#, r#""x": "int4-g64+r16k4""#),
        (r#""x": "strange""#, r#""x": "int8-row""#),
        (r#""x": "int4-grouped""#, r#""x": "int4-g64""#),
    ] {
        let error = case(a, b).unwrap_err();
        assert!(matches!(error, ContainerError::ConflictingStamps { .. }), "{error}");
        words(error, &["a.safetensors", "b.safetensors", "tensor x"]);
    }
    for bad in [r#""x": 1"#, r#""x""#, r#""x": "int8-row", "x": "int8-row""#, r#""x": {}"#] {
        words(case(bad, "").unwrap_err(), &["a.safetensors", "colibri.fmt"]);
    }
}

#[test]
fn numbering() {
    let gaps = |names: &[&str]| {
        let series = Series::collect(names.iter().copied());
        let texts: Vec<Vec<(u32, u32)>> = series.iter().map(|s| s.gaps.clone()).collect();
        texts.concat()
    };
    let of = |numbers: &[u32], total: u32| {
        let names: Vec<String> =
            numbers.iter().map(|n| format!("model-{n:05}-of-{total:05}.safetensors")).collect();
        gaps(&names.iter().map(String::as_str).collect::<Vec<_>>())
    };
    assert_eq!(of(&[1, 2, 3], 3), []);
    assert_eq!(of(&[2, 3], 3), [(1, 1)]);
    assert_eq!(of(&[1, 3], 3), [(2, 2)]);
    assert_eq!(of(&[1, 2], 3), [(3, 3)]);
    assert_eq!(of(&[2], 9), [(1, 1), (3, 9)]);
    assert_eq!(of(&[0, 1, 2], 3), []);
    assert_eq!(of(&[0, 2], 3), [(1, 1)]);
    assert_eq!(of(&[7], 3), [(1, 6)]);
    assert_eq!(of(&[1], u32::MAX), [(2, u32::MAX)]);
    assert_eq!(of(&[u32::MAX], u32::MAX), [(1, u32::MAX - 1)]);
    assert_eq!(gaps(&["out-00000.safetensors", "out-00002.safetensors"]), [(1, 1)]);
    assert_eq!(gaps(&["out-00001.safetensors", "out-mtp-00001.safetensors"]), []);
    assert_eq!(
        gaps(&[
            "model.safetensors",
            "a-b.safetensors",
            "a-1-of-x.safetensors",
            "-.safetensors",
            "a-+1.safetensors"
        ]),
        []
    );
    let series = Series::collect(["m-003-of-012.safetensors"].into_iter());
    assert_eq!(series[0].name(4), "m-004-of-012.safetensors");
}
