use std::path::Path;

use serde_json::Value;

use crate::support::{Outcome, arg, copy, fixture, run};

fn run_ids(dir: &Path) -> Outcome {
    run(&["run", "--model", arg(dir), "--ids", "1,2,3,4,5,6,7,8", "--max-tokens", "2"])
}

/// Header of a safetensors file and where its data begins.
fn header(path: &Path) -> (Value, usize) {
    let bytes = std::fs::read(path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + len]).unwrap(), 8 + len)
}

/// Overwrites bytes of a tensor.
fn poke(dir: &Path, tensor: &str, at: usize, bytes: &[u8]) {
    let path = dir.join("model.safetensors");
    let (header, data) = header(&path);
    let offset = header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    let mut file = std::fs::read(&path).unwrap();
    file[data + offset + at..][..bytes.len()].copy_from_slice(bytes);
    std::fs::write(&path, file).unwrap();
}

#[test]
fn a_bad_scale_of_an_expert_fails_its_first_read_and_nothing_else() {
    let dir = copy(&fixture("glm-int8-row"));
    let tensor = "model.layers.1.mlp.experts.2.up_proj.weight.qs";
    poke(dir.path(), tensor, 4, &f32::NAN.to_le_bytes());
    // Headers are fine, so it opens.
    run(&["info", "--model", arg(dir.path())]).expect(0);
    let out = run_ids(dir.path()).expect(2);
    for needle in ["layer 1", "expert 2", "model.safetensors", "scale 1"] {
        assert!(out.stderr.contains(needle), "{needle} is missing from {}", out.stderr);
    }
    let out = run(&["doctor", "--model", arg(dir.path()), "--deep", "--json"]).expect(2).json();
    let tensors = out.as_array().unwrap().iter().find(|c| c["id"] == "tensors").unwrap();
    assert_eq!(tensors["state"], "fail", "{out}");
    assert!(tensors["detail"].as_str().unwrap().contains("experts.2.up_proj"), "{out}");
}

#[test]
fn a_dense_value_that_is_not_a_number_is_refused_at_load() {
    for (name, tensor, bytes) in [
        ("glm-dense", "model.norm.weight", f32::INFINITY.to_le_bytes().to_vec()),
        ("glm-dense", "model.layers.0.input_layernorm.weight", f32::NAN.to_le_bytes().to_vec()),
        ("glm-int8-dense", "lm_head.weight.qs", f32::NAN.to_le_bytes().to_vec()),
    ] {
        let dir = copy(&fixture(name));
        poke(dir.path(), tensor, 0, &bytes);
        let out = run_ids(dir.path()).expect(2);
        let tensor = tensor.trim_end_matches(".qs");
        assert!(out.stderr.contains(tensor), "{}", out.stderr);
    }
}

#[test]
fn a_weight_that_spoils_a_step_is_reported_with_its_layer() {
    let dir = copy(&fixture("glm-dense"));
    let tensor = "model.layers.1.self_attn.o_proj.weight";
    poke(dir.path(), tensor, 0, &f32::NAN.to_le_bytes());
    let out = run_ids(dir.path());
    assert!(out.code == 1 || out.code == 2, "{}", out.stderr);
    assert!(out.stderr.contains("layer 1") || out.stderr.contains(tensor), "{}", out.stderr);
}

#[test]
fn every_cut_of_the_configuration_is_a_named_error() {
    let dir = copy(&fixture("glm-dense"));
    let path = dir.path().join("config.json");
    let text = std::fs::read(&path).unwrap();
    // Every tenth cut here; every one of them in the container's own tests.
    for cut in (0..text.len() - 1).step_by(10) {
        std::fs::write(&path, &text[..cut]).unwrap();
        let out = run_ids(dir.path()).expect(2);
        assert!(out.stderr.contains("config.json"), "cut at {cut}: {}", out.stderr);
    }
}

#[test]
fn a_cut_weight_file_is_a_named_error() {
    let dir = copy(&fixture("glm-dense"));
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    for cut in [0, 1, 7, 8, 9, 100, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..cut]).unwrap();
        let out = run_ids(dir.path()).expect(2);
        assert!(out.stderr.contains("model.safetensors"), "cut at {cut}: {}", out.stderr);
    }
}

#[test]
fn a_missing_shard_names_its_file_whatever_its_place() {
    let whole = fixture("glm-sharded");
    let shards: Vec<String> = std::fs::read_dir(&whole)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    assert!(shards.len() >= 3);
    for shard in shards {
        for index in [true, false] {
            let dir = copy(&whole);
            std::fs::remove_file(dir.path().join(&shard)).unwrap();
            if !index {
                std::fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
            }
            let out = run_ids(dir.path()).expect(2);
            assert!(out.stderr.contains(&shard), "{shard}: {}", out.stderr);
        }
    }
}

#[test]
fn a_model_may_be_spread_over_directories() {
    let whole = fixture("glm-sharded");
    let (first, second) = (copy(&whole), tempfile::tempdir().unwrap());
    let shard = std::fs::read_dir(&whole)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .find(|name| name.to_string_lossy().contains("00002-of"))
        .unwrap();
    std::fs::rename(first.path().join(&shard), second.path().join(&shard)).unwrap();
    run_ids(first.path()).expect(2);
    let dirs = format!("{}:{}", first.path().display(), second.path().display());
    let args = ["run", "--ids", "1,2,3,4,5,6,7,8", "--max-tokens", "2", "--fingerprint", "--json"];
    let split =
        crate::support::finish(crate::support::coli().args(args).env("COLI_MODEL_DIRS", &dirs));
    let plain =
        crate::support::finish(crate::support::coli().args(args).args(["--model", arg(&whole)]));
    assert_eq!(split.expect(0).json()["fingerprint"], plain.expect(0).json()["fingerprint"]);
}

#[test]
fn damaged_bytes_never_panic() {
    let dir = copy(&fixture("glm-int4-g64"));
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let (_, data) = header(&path);
    let mut state = 12_345u64;
    for _ in 0..60 {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut damaged = bytes.clone();
        // Half of the damage in the header, half anywhere.
        let bound = if state >> 63 == 0 { data } else { bytes.len() };
        let at = (state >> 20) as usize % bound;
        damaged[at] ^= 1 << (state >> 8 & 7);
        std::fs::write(&path, damaged).unwrap();
        let out = run_ids(dir.path());
        assert!((0..=2).contains(&out.code), "byte {at}: exit {}, {}", out.code, out.stderr);
        assert!(!out.stderr.contains("panicked"), "byte {at}: {}", out.stderr);
    }
}
