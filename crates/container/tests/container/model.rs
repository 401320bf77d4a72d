//! Whole models: what opens, how experts are found, and what an incomplete model says.

use std::fs;
use std::path::{Path, PathBuf};

use container::{
    ByteRange, Config, ContainerError, Dtype, Family, Layout, Model, Presence, QSource, Role,
    TensorClass, layer_specs, spec, tensor_specs,
};
use formats::{Format, Fp8Scale};
use serde_json::json;
use tempfile::{TempDir, tempdir};

use crate::common::*;

/// A model in one file, after a change of its tensors.
fn one_file(
    config: &str,
    change: impl FnOnce(&mut Vec<T>),
) -> (TempDir, Result<Model, ContainerError>) {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config).unwrap();
    let mut tensors = tensors_of(config);
    change(&mut tensors);
    write(dir.path(), "model.safetensors", &tensors, &[]);
    let model = open(dir.path());
    (dir, model)
}

fn refused(result: Result<Model, ContainerError>, words: &[&str]) {
    let text = result.unwrap_err().to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} lacks {word:?}");
    }
}

#[test]
fn tiny_models_open() {
    for (config, layers) in [(GLM, 4), (OLMOE, 2)] {
        let dir = tempdir().unwrap();
        write_model(dir.path(), config, 3);
        let model = open(dir.path()).unwrap();
        assert_eq!(model.config.all_layers(), layers);
        let report = model.report();
        assert_eq!(report.unused.0, 0);
        assert!(report.shards.is_complete());
        let glm = layers == 4;
        let expected = if glm { Presence::Present } else { Presence::NotConfigured };
        assert_eq!((&report.indexer, &report.mtp), (&expected, &expected));
        assert_eq!(model.has_indexer(0), glm);
        for layer in 1..layers {
            for expert in 0..model.config.moe.experts {
                let [gate, up, down] = model.expert_sources(layer, expert).unwrap();
                assert_eq!((gate.rows, gate.cols), (8, 16));
                assert_eq!((up.rows, up.cols), (8, 16));
                assert_eq!((down.rows, down.cols), (16, 8));
            }
        }
        assert!(model.expert_sources(1, 99).is_err());
        let total: u64 = tensors_of(config).iter().map(|t| t.bytes.len() as u64).sum();
        assert_eq!(report.bytes(), total);
        assert_eq!(report.stored[&(TensorClass::Experts, "bf16".to_owned())].bits(), 16.0);
    }
}

/// Every source of every committed fixture has the bytes that its format needs, inside its file.
#[test]
fn oracle_fixtures_open() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle");
    let mut opened = 0;
    for entry in fs::read_dir(&fixtures).unwrap() {
        let dir = entry.unwrap().path();
        if !dir.join("config.json").is_file() {
            continue;
        }
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let model = open(&dir).unwrap_or_else(|e| panic!("{name}: {e}"));
        for spec in tensor_specs(&model.config) {
            let Some(source) = model.find(&spec).unwrap() else {
                assert!(spec.optional, "{name}: {}", spec.name);
                continue;
            };
            let QSource { format, rows, cols, weights, scales, layout, .. } = source;
            assert_eq!((rows, cols, layout), (spec.rows, spec.cols, Layout::Canonical));
            assert_eq!(weights.len, format.weight_bytes(rows, cols).unwrap() as u64);
            assert_eq!(scales.map_or(0, |s| s.len), format.scale_bytes(rows, cols).unwrap() as u64);
            for range in [Some(weights), scales].into_iter().flatten() {
                let file = &model.shards.files()[range.file.0 as usize];
                assert!(range.offset >= file.data_start && range.offset + range.len <= file.len);
            }
        }
        let experts: Vec<&str> = model
            .report()
            .stored
            .keys()
            .filter(|(class, _)| *class == TensorClass::Experts)
            .map(|(_, format)| format.as_str())
            .collect();
        let stated = |format: &str| assert_eq!(experts, [format], "{name}");
        match name.as_str() {
            "glm-e8" | "glm-e8-tail" | "olmoe-e8" => stated("e8-iq3"),
            "glm-int8-row" => stated("int8-row"),
            "glm-int4-row" => stated("int4-row"),
            "glm-int2-row" => stated("int2-row"),
            "glm-int3-g64" => stated("int3-g64"),
            "glm-int4-g32" => stated("int4-g32"),
            "glm-int4-g64" => stated("int4-g64"),
            "olmoe-int4-g48" => stated("int4-g48"),
            "olmoe-int4-g96" => stated("int4-g96"),
            "glm-mxfp4" | "olmoe-mxfp4" => stated("mxfp4"),
            "glm-fp8" | "glm-fp8-ue8m0" | "glm-fp8-checkpoint" => stated("fp8-e4m3-b128"),
            "glm-f16" => stated("f16"),
            "glm-no-indexer" => assert_eq!(model.report().indexer, Presence::Absent),
            "glm-mtp" => assert_eq!(model.report().mtp, Presence::Present),
            _ => {}
        }
        opened += 1;
    }
    assert!(opened >= 30, "only {opened} fixtures");
}

#[test]
fn config_and_tensor_shapes_must_agree() {
    let edit = |name: &'static str, dtype: &'static str, shape: &'static [usize]| {
        one_file(GLM, move |tensors| {
            for t in tensors.iter_mut().filter(|t| t.name == name) {
                *t = zeros(name, dtype, shape);
            }
        })
        .1
    };
    let o = "model.layers.0.self_attn.o_proj.weight";
    refused(
        edit(o, "BF16", &[10, 16]),
        &[o, "[16, 10] by config.json", "[10, 16]", "model.safetensors"],
    );
    refused(edit(o, "BF16", &[160]), &[o, "[16, 10] by config.json", "[160]"]);
    refused(edit(o, "F32", &[16, 12]), &[o, "[16, 10] by config.json", "[16, 12]"]);
    refused(
        edit("model.norm.weight", "F32", &[17]),
        &["model.norm.weight", "[16] by config.json", "[17]"],
    );
    refused(edit("model.norm.weight", "I32", &[16]), &["model.norm.weight", "I32"]);
    refused(edit(o, "I64", &[16, 10]), &[o, "I64"]);
    // A stray byte tensor is an error, whatever its size.
    refused(edit(o, "U8", &[16, 5]), &[o, ".qs"]);
    let expert = "model.layers.2.mlp.experts.5.up_proj.weight";
    refused(edit(expert, "BF16", &[16, 8]), &[expert, "[8, 16] by config.json"]);
    let (_dir, result) = one_file(GLM, |_| ());
    result.unwrap();
    assert!(edit("model.norm.weight", "F32", &[1, 16]).is_ok());
}

#[test]
fn quantised_tensors_are_recognised_in_place() {
    let o = "model.layers.0.self_attn.o_proj.weight";
    let (_dir, model) = one_file(GLM, |tensors| {
        tensors.retain(|t| t.name != o);
        tensors.push(zeros(o, "U8", &[16 * 5]));
        tensors.push(zeros(&format!("{o}.qs"), "F32", &[16]));
    });
    let model = model.unwrap();
    let spec = spec(&model.config, Role::O, Some(0), None).unwrap();
    let source = model.source(&spec).unwrap();
    assert_eq!(source.format, Format::Int4Row);
    assert_eq!((source.weights.len, source.scales.unwrap().len), (80, 64));
    // Norms are never quantised.
    let norm = "model.norm.weight";
    let (_dir, model) = one_file(GLM, |tensors| {
        tensors.retain(|t| t.name != norm);
        tensors.push(zeros(norm, "U8", &[16]));
        tensors.push(zeros(&format!("{norm}.qs"), "F32", &[1]));
    });
    refused(model, &[norm, "plain numbers", "int8-row"]);
    // Plain numbers with scales beside them are neither.
    let (_dir, model) =
        one_file(GLM, |tensors| tensors.push(zeros(&format!("{o}.qs"), "F32", &[16])));
    refused(model, &[o, "no scales"]);
}

#[test]
fn original_fp8_checkpoints() {
    let o = "model.layers.0.self_attn.o_proj.weight";
    let with_scale = |weight: T, scale: Vec<T>| {
        one_file(GLM, |tensors| {
            tensors.retain(|t| t.name != o);
            tensors.push(weight);
            tensors.extend(scale);
        })
        .1
    };
    let inverse = "model.layers.0.self_attn.o_proj.weight_scale_inv";
    let weight = || zeros(o, "F8_E4M3", &[16, 10]);
    let model = with_scale(weight(), vec![zeros(inverse, "F32", &[1, 1])]).unwrap();
    let source = model.source(&spec(&model.config, Role::O, Some(0), None).unwrap()).unwrap();
    assert_eq!(source.format, Format::Fp8B128(Fp8Scale::F32));
    assert_eq!(source.scales.unwrap().len, 4);
    let model = with_scale(weight(), vec![zeros(inverse, "F8_E8M0", &[1, 1])]).unwrap();
    let source = model.source(&spec(&model.config, Role::O, Some(0), None).unwrap()).unwrap();
    assert_eq!(source.format, Format::Fp8B128(Fp8Scale::Ue8m0));
    refused(with_scale(weight(), vec![]), &[o, "_scale_inv"]);
    refused(
        with_scale(weight(), vec![zeros(inverse, "F32", &[2, 1])]),
        &[o, "1 F32 scales", "8 bytes of F32"],
    );
    refused(with_scale(weight(), vec![zeros(inverse, "BF16", &[1, 1])]), &[o, "BF16"]);
    refused(
        with_scale(zeros(o, "U8", &[16, 10]), vec![zeros(inverse, "F32", &[1, 1])]),
        &[o, "F8_E4M3"],
    );
    let both = vec![zeros(inverse, "F32", &[1, 1]), zeros(&format!("{o}.qs"), "F32", &[1, 1])];
    refused(with_scale(weight(), both), &["both", ".qs", "_scale_inv"]);
}

/// Experts 8 x 16 of 6, layer 1, stored under other names.
fn fused(names: &[(&str, &'static str, &[usize])]) -> Result<Model, ContainerError> {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("config.json"), GLM).unwrap();
    let mut tensors = tensors_of(GLM);
    tensors.retain(|t| !t.name.starts_with("model.layers.1.mlp.experts."));
    for (name, dtype, shape) in names {
        tensors.push(zeros(&format!("model.layers.1.mlp.experts.{name}"), dtype, shape));
    }
    write(dir.path(), "model.safetensors", &tensors, &[]);
    open(dir.path())
}

#[test]
fn fused_experts_are_cut_by_expert_and_role() {
    let range = |model: &Model, name: &str, offset: u64, len: u64| {
        let entry = model.shards.get(&format!("model.layers.1.mlp.experts.{name}")).unwrap();
        ByteRange { file: entry.file, offset: entry.offset + offset, len }
    };
    for ending in ["", ".weight"] {
        let (joint, down) = (format!("gate_up_proj{ending}"), format!("down_proj{ending}"));
        let model = fused(&[(&joint, "BF16", &[6, 16, 16]), (&down, "F32", &[6, 16, 8])]).unwrap();
        let [g, u, d] = model.expert_sources(1, 4).unwrap();
        assert_eq!(g.weights, range(&model, &joint, 4 * 512, 256));
        assert_eq!(u.weights, range(&model, &joint, 4 * 512 + 256, 256));
        assert_eq!(d.weights, range(&model, &down, 4 * 512, 512));
        assert_eq!((g.format, d.format), (Format::Bf16, Format::F32));
        assert_eq!(model.report().unused.0, 0);
    }
    // One tensor per role.
    let separate = [
        ("gate_proj", "F32", &[6, 8, 16][..]),
        ("up_proj", "F32", &[6, 8, 16]),
        ("down_proj", "F32", &[6, 16, 8]),
    ];
    let model = fused(&separate).unwrap();
    let [_, u, d] = model.expert_sources(1, 5).unwrap();
    assert_eq!(u.weights, range(&model, "up_proj", 5 * 512, 512));
    assert_eq!(d.weights, range(&model, "down_proj", 5 * 512, 512));
    // Quantised: int8 rows with their scales, flat.
    let int8 = [
        ("gate_up_proj", "U8", &[6 * 16 * 16][..]),
        ("gate_up_proj.qs", "F32", &[6 * 16]),
        ("down_proj", "U8", &[6 * 16 * 8]),
        ("down_proj.qs", "F32", &[6 * 16]),
    ];
    let model = fused(&int8).unwrap();
    let [g, u, d] = model.expert_sources(1, 2).unwrap();
    assert_eq!((g.format, u.format, d.format), (Format::Int8Row, Format::Int8Row, Format::Int8Row));
    assert_eq!(u.weights, range(&model, "gate_up_proj", 2 * 256 + 128, 128));
    assert_eq!(u.scales.unwrap(), range(&model, "gate_up_proj.qs", 2 * 64 + 32, 32));
    assert_eq!(g.scales.unwrap(), range(&model, "gate_up_proj.qs", 2 * 64, 32));
    assert_eq!(d.scales.unwrap(), range(&model, "down_proj.qs", 2 * 64, 64));
    // e8 has one tag for all experts.
    let e8 = [
        ("gate_up_proj", "U8", &[6 * 16 * 98][..]),
        ("gate_up_proj.qs", "F32", &[1]),
        ("down_proj", "U8", &[6 * 16 * 98]),
        ("down_proj.qs", "F32", &[6]),
    ];
    let model = fused(&e8).unwrap();
    let [g, u, d] = model.expert_sources(1, 3).unwrap();
    assert_eq!((g.format, u.format, d.format), (Format::E8Iq3, Format::E8Iq3, Format::E8Iq3));
    assert_eq!(u.weights, range(&model, "gate_up_proj", (3 * 16 + 8) * 98, 8 * 98));
    assert_eq!(u.scales.unwrap(), range(&model, "gate_up_proj.qs", 0, 4));
    assert_eq!(d.scales.unwrap(), range(&model, "down_proj.qs", 12, 4));
}

#[test]
fn fused_experts_that_do_not_fit() {
    let down = ("down_proj", "F32", &[6, 16, 8][..]);
    let joint = |shape: &'static [usize]| fused(&[("gate_up_proj", "F32", shape), down]);
    refused(joint(&[5, 16, 16]), &["gate_up_proj", "[6, 16, 16] by config.json", "[5, 16, 16]"]);
    refused(joint(&[6, 16, 8]), &["gate_up_proj", "[6, 16, 16] by config.json"]);
    refused(joint(&[6, 256]), &["gate_up_proj", "[6, 256]"]);
    refused(
        fused(&[("gate_up_proj", "U8", &[1537]), ("gate_up_proj.qs", "F32", &[96]), down]),
        &["gate_up_proj", "6 experts of equal size"],
    );
    refused(fused(&[("gate_up_proj", "U8", &[6 * 256]), down]), &["gate_up_proj", ".qs"]);
    // Gate and up of 8 rows share one row of fp8 scale blocks.
    refused(
        fused(&[
            ("gate_up_proj", "F8_E4M3", &[6, 16, 16]),
            ("gate_up_proj_scale_inv", "F32", &[6, 1, 1]),
            down,
        ]),
        &["gate_up_proj", "multiple of 128"],
    );
    // Stored in two ways: which one counts?
    let twice =
        [("gate_up_proj", "F32", &[6, 16, 16][..]), ("gate_proj", "F32", &[6, 8, 16]), down];
    refused(fused(&twice), &["stored twice", "gate_proj", "gate_up_proj"]);
    let single =
        [("gate_up_proj", "F32", &[6, 16, 16][..]), ("3.up_proj.weight", "F32", &[8, 16]), down];
    refused(fused(&single), &["stored twice", "3.up_proj"]);
}

#[test]
fn fused_fp8_of_whole_blocks() {
    let config = with(
        GLM,
        json!({"moe_intermediate_size": 128, "n_routed_experts": 2, "num_nextn_predict_layers": 0, "num_hidden_layers": 2}),
    );
    let (_dir, model) = one_file(&config, |tensors| {
        tensors.retain(|t| !t.name.starts_with("model.layers.1.mlp.experts."));
        let name = |name: &str| format!("model.layers.1.mlp.experts.{name}");
        tensors.push(zeros(&name("gate_up_proj"), "F8_E4M3", &[2, 256, 16]));
        tensors.push(zeros(&name("gate_up_proj_scale_inv"), "F32", &[2, 2, 1]));
        tensors.push(zeros(&name("down_proj"), "F8_E4M3", &[2, 16, 128]));
        tensors.push(zeros(&name("down_proj_scale_inv"), "F32", &[2, 1, 1]));
    });
    let model = model.unwrap();
    let [g, u, d] = model.expert_sources(1, 1).unwrap();
    let joint = model.shards.get("model.layers.1.mlp.experts.gate_up_proj_scale_inv").unwrap();
    assert_eq!(g.scales.unwrap().offset - joint.offset, 8);
    assert_eq!((u.scales.unwrap().offset - joint.offset, u.scales.unwrap().len), (12, 4));
    assert_eq!(d.scales.unwrap().len, 4);
    assert_eq!(u.weights.len, 128 * 16);
}

#[test]
fn a_missing_shard_is_named_with_its_layers() {
    for absent in 0..5 {
        let dir = tempdir().unwrap();
        let names = write_model(dir.path(), GLM, 5);
        fs::remove_file(dir.path().join(&names[absent])).unwrap();
        let error = open(dir.path()).unwrap_err();
        let ContainerError::MissingTensors(missing) = &error else { panic!("{error}") };
        assert_eq!(missing.shards.found, 4);
        let text = error.to_string();
        assert!(text.contains(&format!("{} is missing", names[absent])), "{text}");
        assert!(text.contains(&format!("fetch {} again", names[absent])), "{text}");
        assert!(text.contains("affected: layer"), "{text}");
        assert!(text.contains("there is no index file"), "{text}");
    }
}

#[test]
fn an_index_names_the_file_of_a_missing_tensor() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("config.json"), OLMOE).unwrap();
    let tensors = tensors_of(OLMOE);
    let (first, second) = tensors.split_at(20);
    write(dir.path(), "first.safetensors", first, &[]);
    let file_of = |i: usize| if i < 20 { "first.safetensors" } else { "second.safetensors" };
    let map: serde_json::Map<String, serde_json::Value> =
        tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), json!(file_of(i)))).collect();
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    refused(
        open(dir.path()),
        &[
            "the index names second.safetensors, which is not there",
            "fetch second.safetensors again",
            &second[0].name,
        ],
    );
    // The file is there but does not hold what the index says.
    write(dir.path(), "second.safetensors", &second[1..], &[]);
    refused(
        open(dir.path()),
        &[&second[0].name, "there but does not hold it", "fetch second.safetensors"],
    );
    write(dir.path(), "second.safetensors", second, &[]);
    assert!(open(dir.path()).unwrap().report().warnings.is_empty());
    // Nothing that is needed is missing: said, not refused.
    let stale = r#"{"weight_map": {"model.extra": "third.safetensors"}}"#;
    fs::write(dir.path().join("model.safetensors.index.json"), stale).unwrap();
    assert!(open(dir.path()).unwrap().report().warnings[0].contains("third.safetensors"));
    for bad in [
        "{",
        "{}",
        r#"{"weight_map": {"a": 1}}"#,
        r#"{"weight_map": {}, "weight_map": {}}"#,
        r#"{"weight_map": {}} x"#,
        "[]",
    ] {
        fs::write(dir.path().join("model.safetensors.index.json"), bad).unwrap();
        refused(open(dir.path()), &["model.safetensors.index.json"]);
    }
}

#[test]
fn the_last_file_of_an_unnumbered_total() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("config.json"), GLM).unwrap();
    let mut tensors = tensors_of(GLM);
    tensors.retain(|t| {
        !t.name.starts_with("model.layers.2.") && !t.name.starts_with("model.layers.3.")
    });
    let half = tensors.len() / 2;
    write(dir.path(), "out-00000.safetensors", &tensors[..half], &[]);
    write(dir.path(), "out-00001.safetensors", &tensors[half..], &[]);
    refused(
        open(dir.path()),
        &[
            "no tensor at all for layer 2 (config.json: 3 layers)",
            "out-00002.safetensors",
            "affected: layer 2",
        ],
    );
}

#[test]
fn indexer_all_or_nothing() {
    let (_dir, model) = one_file(GLM, |tensors| tensors.retain(|t| !t.name.contains(".indexer.")));
    let model = model.unwrap();
    assert_eq!(model.report().indexer, Presence::Absent);
    assert_eq!(model.report().mtp, Presence::Present);
    assert!(!model.has_indexer(0));
    let (_dir, model) = one_file(GLM, |tensors| {
        tensors.retain(|t| t.name != "model.layers.1.self_attn.indexer.k_norm.bias");
    });
    refused(model, &["indexer is incomplete", "1 of 15", "layers.1.self_attn.indexer.k_norm.bias"]);
    // Shared layers have no indexer of their own.
    let config = with(GLM, json!({"indexer_types": ["full", "shared", "full"]}));
    let (_dir, model) = one_file(&config, |_| ());
    let model = model.unwrap();
    assert_eq!(model.report().indexer, Presence::Present);
    assert!(model.has_indexer(0) && !model.has_indexer(1) && model.has_indexer(2));
}

#[test]
fn draft_layer_absent_partial_or_undeclared() {
    let mtp = |name: &str| name.starts_with("model.layers.3.");
    let (_dir, model) = one_file(GLM, |tensors| tensors.retain(|t| !mtp(&t.name)));
    assert_eq!(model.unwrap().report().mtp, Presence::Absent);
    let (_dir, model) =
        one_file(GLM, |tensors| tensors.retain(|t| t.name != "model.layers.3.enorm.weight"));
    refused(
        model,
        &[
            "multi-token-prediction layer is incomplete",
            "1 of 41",
            "model.layers.3.enorm.weight",
            "num_nextn",
        ],
    );
    // A broken tensor of it is refused like any other.
    let (_dir, model) = one_file(GLM, |tensors| {
        let name = "model.layers.3.mlp.experts.0.up_proj.weight";
        tensors.retain(|t| t.name != name);
        tensors.push(zeros(name, "BF16", &[3]));
    });
    refused(model, &["model.layers.3.mlp.experts.0.up_proj.weight"]);
    // A draft layer may live in a file of its own directory.
    let dir = tempdir().unwrap();
    let second = tempdir().unwrap();
    fs::write(dir.path().join("config.json"), GLM).unwrap();
    let (draft, main): (Vec<T>, Vec<T>) = tensors_of(GLM).into_iter().partition(|t| mtp(&t.name));
    write(dir.path(), "model.safetensors", &main, &[]);
    write(second.path(), "out-mtp-00001.safetensors", &draft, &[]);
    let dirs: Vec<PathBuf> = vec![dir.path().to_owned(), second.path().to_owned()];
    assert_eq!(Model::open(&dirs).unwrap().report().mtp, Presence::Present);
    // eh_proj with one scale per row loses one of its halves.
    let (_dir, model) = one_file(GLM, |tensors| {
        let name = "model.layers.3.eh_proj.weight";
        tensors.retain(|t| t.name != name);
        tensors.push(zeros(name, "U8", &[16 * 16]));
        tensors.push(zeros(&format!("{name}.qs"), "F32", &[16]));
    });
    assert!(model.unwrap().report().warnings[0].contains("eh_proj"));
}

/// A pruned model has fewer experts than any literal would assume.
#[test]
fn pruned_models_keep_their_draft_layer() {
    let config = with(GLM, json!({"n_routed_experts": 5}));
    let (_dir, model) = one_file(&config, |_| ());
    assert_eq!(model.unwrap().report().mtp, Presence::Present);
}

#[test]
fn tied_heads_and_unused_tensors() {
    let config = with(GLM, json!({"tie_word_embeddings": true}));
    let (_dir, model) = one_file(&config, |tensors| {
        assert!(tensors.iter().all(|t| t.name != "lm_head.weight"));
        tensors.push(zeros("lm_head.weight", "BF16", &[32, 16]));
        tensors.push(zeros("rotary.inv_freq", "I64", &[4]));
    });
    let model = model.unwrap();
    let expected = vec!["lm_head.weight".to_owned(), "rotary.inv_freq".to_owned()];
    assert_eq!(model.report().unused, (2, expected));
    assert_eq!(model.shards.get("rotary.inv_freq").unwrap().dtype, Dtype::I64);
    assert!(spec(&model.config, Role::Head, None, None).is_none());
    let (_dir, model) = one_file(GLM, |tensors| tensors.retain(|t| t.name != "lm_head.weight"));
    refused(model, &["lm_head.weight", "1 of"]);
}

#[test]
fn the_table_hash_sees_formats_and_configuration_but_not_files() {
    let hash = |config: &str, files: usize| {
        let dir = tempdir().unwrap();
        write_model(dir.path(), config, files);
        open(dir.path()).unwrap().table_hash().unwrap()
    };
    let base = hash(GLM, 1);
    assert_eq!(base, hash(GLM, 4));
    assert_eq!(base, hash(&with(GLM, json!({"eos_token_id": 9})), 1));
    for change in [
        json!({"rms_norm_eps": 1e-6}),
        json!({"rope_theta": 5.0}),
        json!({"n_group": 2, "topk_group": 2}),
        json!({"indexer_types": ["full", "shared", "full"]}),
        json!({"norm_topk_prob": false}),
        json!({"index_topk": 9}),
    ] {
        assert_ne!(base, hash(&with(GLM, change.clone()), 1), "{change}");
    }
    let (_dir, model) = one_file(GLM, |tensors| {
        for t in tensors.iter_mut().filter(|t| t.name == "model.norm.weight") {
            *t = zeros("model.norm.weight", "BF16", &[16]);
        }
    });
    assert_ne!(base, model.unwrap().table_hash().unwrap());
}

#[test]
fn specs_of_a_configuration() {
    let config = Config::from_json(GLM, None).unwrap();
    let specs = tensor_specs(&config);
    let mut names: Vec<&str> = specs.iter().map(|s| s.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), specs.len());
    for s in &specs {
        let again = spec(&config, s.role, s.layer, s.expert).unwrap();
        assert_eq!(&again, s);
        assert_eq!(s.optional, s.role.is_indexer() || s.layer == Some(3), "{}", s.name);
        assert_eq!(s.role.is_vector(), s.rows == 1, "{}", s.name);
    }
    assert!(layer_specs(&config, 4).is_empty());
    assert!(spec(&config, Role::ExpertUp, Some(0), Some(0)).is_none());
    assert!(spec(&config, Role::ExpertUp, Some(1), None).is_none());
    assert!(spec(&config, Role::DenseUp, Some(1), None).is_none());
    assert!(spec(&config, Role::Embedding, Some(0), None).is_none());
    assert!(spec(&config, Role::Q, Some(0), None).is_none());
    for family in Family::ALL {
        assert_eq!(Family::from_model_type(family.row().model_types[0]), Some(family));
    }
}

#[test]
fn no_directory_at_all() {
    assert!(Model::open(&[]).is_err());
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("config.json"), GLM).unwrap();
    refused(open(dir.path()), &["no *.safetensors"]);
}
