//! Configurations: defaults of transformers, refusals by name, hostile numbers.

use container::{Attention, Config, ContainerError, Family, IndexerKind, LayerKind, Scoring};
use serde_json::{Value, json};

use crate::common::*;

fn parse(text: &str) -> Result<Config, ContainerError> {
    Config::from_json(text, None)
}

/// The change must be refused with an error that names the field.
fn refused(base: &str, changes: Value, field: &str) {
    let text = with(base, changes.clone());
    match parse(&text) {
        Ok(_) => panic!("accepted {changes}"),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains(field), "{changes}: {text:?} lacks {field:?}");
            assert!(text.contains("config.json"), "{text}");
        }
    }
}

#[test]
fn glm_defaults_are_those_of_transformers() {
    let config = parse(r#"{"model_type": "glm_moe_dsa"}"#).unwrap();
    assert_eq!(config.family, Family::GlmMoeDsa);
    assert_eq!((config.vocab_size, config.hidden_size, config.layers), (154_880, 6144, 78));
    assert_eq!((config.heads, config.max_position), (64, 202_752));
    assert_eq!((config.rms_norm_eps, config.rope_theta), (1e-5, 10_000.0));
    assert!(!config.tie_embeddings);
    let Attention::Mla { q_lora, kv_lora, nope, rope, v_dim, indexer } = &config.attention else {
        panic!()
    };
    assert_eq!((*q_lora, *kv_lora, *nope, *rope, *v_dim), (2048, 512, 192, 64, 256));
    let indexer = indexer.as_ref().unwrap();
    assert_eq!((indexer.heads, indexer.head_dim, indexer.topk), (32, 128, 2048));
    assert!(indexer.types.iter().all(|kind| *kind == IndexerKind::Full));
    assert_eq!(config.dense_intermediate, 12_288);
    assert_eq!(
        config.mlp_layer_types[..4],
        [LayerKind::Dense, LayerKind::Dense, LayerKind::Dense, LayerKind::Sparse]
    );
    let moe = &config.moe;
    assert_eq!(
        (moe.experts, moe.top_k, moe.expert_intermediate, moe.shared_experts),
        (256, 8, 2048, 1)
    );
    assert_eq!(
        (moe.n_group, moe.topk_group, moe.norm_topk_prob, moe.routed_scaling),
        (1, 1, true, 2.5)
    );
    assert_eq!((moe.scoring, config.mtp_layers), (Scoring::Sigmoid, 0));
    assert_eq!(config.stop_ids, [1]);
    assert_eq!(config.kv_width(), 576);
}

#[test]
fn olmoe_defaults_are_those_of_transformers() {
    let config = parse(r#"{"model_type": "olmoe"}"#).unwrap();
    assert_eq!((config.vocab_size, config.hidden_size, config.layers), (50_304, 2048, 16));
    assert_eq!(config.attention, Attention::Gqa { kv_heads: 16, head_dim: 128, qk_norm: true });
    let moe = &config.moe;
    assert_eq!(
        (moe.experts, moe.top_k, moe.expert_intermediate, moe.shared_experts),
        (64, 8, 2048, 0)
    );
    assert_eq!(
        (moe.norm_topk_prob, moe.routed_scaling, moe.scoring),
        (false, 1.0, Scoring::Softmax)
    );
    assert_eq!((config.stop_ids.as_slice(), config.max_position), (&[50_279][..], 4096));
    let text = with(
        r#"{"model_type": "olmoe"}"#,
        json!({"num_key_value_heads": null, "eos_token_id": null}),
    );
    let config = parse(&text).unwrap();
    assert_eq!(config.attention, Attention::Gqa { kv_heads: 16, head_dim: 128, qk_norm: true });
    assert!(config.stop_ids.is_empty());
}

#[test]
fn what_changes_the_mathematics_is_refused_by_name() {
    for base in [GLM, OLMOE] {
        refused(base, json!({"attention_bias": true}), "attention_bias");
        refused(base, json!({"mlp_bias": true}), "mlp_bias");
        refused(base, json!({"hidden_act": "gelu"}), "hidden_act");
        refused(base, json!({"clip_qkv": 8.0}), "clip_qkv");
        refused(base, json!({"sliding_window": 128}), "sliding_window");
        refused(base, json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor");
        refused(base, json!({"layer_types": ["sliding_attention"]}), "layer_types");
        refused(base, json!({"scoring_func": "tanh"}), "scoring_func");
        refused(base, json!({"topk_method": "group_limited_greedy"}), "topk_method");
        refused(base, json!({"moe_layer_freq": 2}), "moe_layer_freq");
        refused(
            base,
            json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}),
            "rope_scaling.rope_type",
        );
        refused(
            base,
            json!({"rope_parameters": {"rope_type": "linear"}}),
            "rope_parameters.rope_type",
        );
        refused(base, json!({"rope_parameters": {"partial_rotary_factor": 0.5}}), "partial_rotary");
        refused(
            base,
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
            "full_attention",
        );
        refused(base, json!({"rope_parameters": {"rope_theta": "x"}}), "rope_theta");
        refused(base, json!({"rope_theta": -1.0}), "rope_theta");
        refused(
            base,
            json!({"quantization_config": {"weight_block_size": [64, 128]}}),
            "weight_block_size",
        );
        refused(base, json!({"model_type": "llama"}), "model_type");
        refused(base, json!({"model_type": null}), "model_type");
        let fine = with(
            base,
            json!({"attention_bias": false, "mlp_bias": false, "hidden_act": "silu",
            "clip_qkv": null, "sliding_window": null, "partial_rotary_factor": 1, "rope_scaling": null,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "dtype": "float32", "torch_dtype": "bfloat16", "layer_types": ["full_attention"]}),
        );
        parse(&fine).unwrap();
    }
    refused(GLM, json!({"q_lora_rank": null}), "q_lora_rank");
    refused(GLM, json!({"rope_interleave": false}), "rope_interleave");
    refused(GLM, json!({"indexer_rope_interleave": false}), "indexer_rope_interleave");
    refused(GLM, json!({"num_key_value_heads": 1}), "num_key_value_heads");
    refused(GLM, json!({"qk_head_dim": 11}), "qk_head_dim");
    refused(OLMOE, json!({"n_group": 2}), "n_group");
    refused(OLMOE, json!({"n_shared_experts": 1}), "n_shared_experts");
    refused(OLMOE, json!({"head_dim": 8}), "head_dim");
    parse(&with(
        GLM,
        json!({"rope_interleave": true, "qk_head_dim": 10, "num_key_value_heads": 2}),
    ))
    .unwrap();
}

#[test]
fn rotary_base_as_in_transformers() {
    let theta = |changes| parse(&with(GLM, changes)).unwrap().rope_theta;
    assert_eq!(theta(json!({})), 10_000.0);
    assert_eq!(theta(json!({"rope_theta": 5e5})), 5e5);
    assert_eq!(
        theta(
            json!({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"}})
        ),
        1e6
    );
    assert_eq!(theta(json!({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}})), 5e5);
    assert_eq!(
        theta(
            json!({"rope_scaling": {"type": "default", "rope_theta": 3.0}, "rope_parameters": {"rope_theta": 2.0}})
        ),
        3.0
    );
    assert_eq!(theta(json!({"rope_scaling": {}, "rope_parameters": {"rope_theta": 2.0}})), 2.0);
}

#[test]
fn experts_groups_and_top_k() {
    refused(GLM, json!({"num_experts_per_tok": 7}), "num_experts_per_tok");
    refused(GLM, json!({"num_experts_per_tok": 0}), "num_experts_per_tok");
    refused(
        GLM,
        json!({"n_routed_experts": 128, "num_experts_per_tok": 65}),
        "num_experts_per_tok",
    );
    refused(GLM, json!({"n_routed_experts": 0}), "experts");
    refused(GLM, json!({"n_group": 4}), "n_group");
    refused(GLM, json!({"n_group": 6}), "n_group");
    refused(GLM, json!({"n_group": 2, "topk_group": 3}), "topk_group");
    refused(GLM, json!({"n_group": 0}), "n_group");
    refused(
        GLM,
        json!({"n_group": 3, "topk_group": 1, "num_experts_per_tok": 3}),
        "num_experts_per_tok",
    );
    refused(GLM, json!({"num_experts": 8}), "num_experts");
    refused(OLMOE, json!({"num_local_experts": 3}), "num_local_experts");
    let config =
        parse(&with(GLM, json!({"n_group": 3, "topk_group": 2, "num_experts_per_tok": 4})))
            .unwrap();
    assert_eq!((config.moe.n_group, config.moe.topk_group), (3, 2));
    let named = r#"{"model_type": "olmoe", "num_local_experts": 10}"#;
    assert_eq!(parse(named).unwrap().moe.experts, 10);
    let named = r#"{"model_type": "glm_moe_dsa", "num_experts": 12}"#;
    assert_eq!(parse(named).unwrap().moe.experts, 12);
}

#[test]
fn indexer_types_as_in_transformers() {
    let types = |changes: Value| -> String {
        let config = parse(&with(GLM, changes)).unwrap();
        let Attention::Mla { indexer: Some(indexer), .. } = config.attention else { panic!() };
        indexer
            .types
            .iter()
            .map(|kind| if *kind == IndexerKind::Full { 'F' } else { 'S' })
            .collect()
    };
    let eight = |extra: Value| {
        let mut changes = extra;
        changes["num_hidden_layers"] = json!(8);
        types(changes)
    };
    assert_eq!(types(json!({})), "FFF");
    assert_eq!(eight(json!({"index_topk_freq": 2})), "FFSFSFSF");
    assert_eq!(eight(json!({"index_topk_freq": 4})), "FFSSSFSS");
    assert_eq!(eight(json!({"index_topk_freq": 4, "index_skip_topk_offset": 3})), "FFFSSSFS");
    assert_eq!(eight(json!({"index_topk_freq": 0})), "FFFFFFFF");
    assert_eq!(eight(json!({"index_topk_freq": -3})), "FFFFFFFF");
    assert_eq!(types(json!({"index_topk_pattern": "FSF"})), "FSF");
    assert_eq!(types(json!({"index_topk_pattern": ["full", "full", "shared"]})), "FFS");
    assert_eq!(
        types(json!({"indexer_types": ["full", "shared", "shared"], "index_topk_pattern": "FFF"})),
        "FSS"
    );
    assert_eq!(types(json!({"indexer_types": ["full", "shared", "shared", "full"]})), "FSS");
    refused(GLM, json!({"index_topk_pattern": "SFF"}), "index_topk_pattern");
    refused(GLM, json!({"index_topk_pattern": "FXF"}), "index_topk_pattern");
    refused(GLM, json!({"index_topk_pattern": "FF"}), "index_topk_pattern");
    refused(GLM, json!({"index_topk_pattern": [1, 2, 3]}), "index_topk_pattern");
    refused(GLM, json!({"index_topk_pattern": 3}), "index_topk_pattern");
    refused(GLM, json!({"indexer_types": ["shared", "full", "full"]}), "indexer_types");
    refused(GLM, json!({"indexer_types": ["full"]}), "indexer_types");
    refused(
        GLM,
        json!({"index_topk_freq": 4, "index_skip_topk_offset": 0}),
        "index_skip_topk_offset",
    );
    refused(GLM, json!({"index_head_dim": 2}), "index_head_dim");
    for offset in [i64::MIN, i64::MAX] {
        let _ = parse(&with(GLM, json!({"index_topk_freq": 3, "index_skip_topk_offset": offset})));
    }
}

#[test]
fn layer_kinds() {
    use LayerKind::{Dense, Sparse};
    let kinds = |changes| parse(&with(GLM, changes)).unwrap().mlp_layer_types;
    assert_eq!(kinds(json!({})), [Dense, Sparse, Sparse]);
    assert_eq!(kinds(json!({"first_k_dense_replace": 99})), [Dense; 3]);
    assert_eq!(
        kinds(json!({"mlp_layer_types": ["sparse", "dense", "sparse"]})),
        [Sparse, Dense, Sparse]
    );
    refused(GLM, json!({"mlp_layer_types": ["sparse"]}), "mlp_layer_types");
    refused(GLM, json!({"mlp_layer_types": ["sparse", "dense", "moe"]}), "mlp_layer_types");
    refused(OLMOE, json!({"mlp_layer_types": ["sparse", "dense"]}), "mlp_layer_types");
}

#[test]
fn stop_ids_are_the_union_of_both_files() {
    let ids = |config: Value, generation: Option<&str>| {
        let config = Config::from_json(&with(GLM, config), generation).unwrap();
        config.stop_ids
    };
    assert_eq!(ids(json!({}), None), [3]);
    assert_eq!(
        ids(json!({"eos_token_id": [9, 4]}), Some(r#"{"eos_token_id": [4, 6]}"#)),
        [4, 6, 9]
    );
    assert_eq!(ids(json!({"eos_token_id": 30}), Some(r#"{"eos_token_id": 31}"#)), [30, 31]);
    assert_eq!(ids(json!({"eos_token_id": null}), Some(r#"{"eos_token_id": 7}"#)), [7]);
    // Ids outside the vocabulary of 32 cannot be produced.
    assert_eq!(ids(json!({"eos_token_id": [-1, 31, 32, 50279]}), Some("{}")), [31]);
    assert!(Config::from_json(GLM, Some(r#"{"eos_token_id": "x"}"#)).is_err());
    let error = Config::from_json(GLM, Some("{")).unwrap_err().to_string();
    assert!(error.contains("generation_config.json") && error.contains("line 1"), "{error}");
}

#[test]
fn hostile_numbers() {
    let max = u64::MAX;
    for field in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "n_routed_experts",
        "num_experts_per_tok",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "index_topk",
        "index_head_dim",
        "index_n_heads",
        "max_position_embeddings",
        "n_group",
        "topk_group",
    ] {
        for value in
            [json!(0), json!(-1), json!(max), json!(1u64 << 40), json!(1.5), json!("x"), json!([])]
        {
            let text = with(GLM, json!({field: value}));
            let error = parse(&text).unwrap_err().to_string();
            assert!(error.contains("config.json"), "{field} = {value}: {error}");
        }
    }
    refused(GLM, json!({"qk_rope_head_dim": 3}), "qk_rope_head_dim");
    refused(GLM, json!({"num_nextn_predict_layers": 1000}), "num_nextn_predict_layers");
    refused(GLM, json!({"n_shared_experts": max}), "n_shared_experts");
    refused(GLM, json!({"rms_norm_eps": 0.0}), "rms_norm_eps");
    refused(GLM, json!({"rms_norm_eps": 1e-60}), "rms_norm_eps");
    refused(GLM, json!({"routed_scaling_factor": 1e300}), "routed_scaling_factor");
    // Each number is allowed, the product is not.
    refused(
        GLM,
        json!({"vocab_size": 1 << 24, "hidden_size": 1 << 22}),
        "vocab_size x hidden_size",
    );
    refused(GLM, json!({"num_attention_heads": 1 << 14, "qk_nope_head_dim": 1 << 22}), "heads");
    refused(
        GLM,
        json!({"num_hidden_layers": 1024, "n_routed_experts": 1 << 16}),
        "layers x experts",
    );
    refused(OLMOE, json!({"num_attention_heads": 16}), "head_dim");
    refused(OLMOE, json!({"num_attention_heads": 32}), "head_dim");
}

#[test]
fn every_cut_of_the_file() {
    for text in [GLM, OLMOE] {
        for cut in 0..text.len() {
            let error = parse(&text[..cut]).unwrap_err().to_string();
            assert!(error.contains("config.json") && error.contains("column"), "{cut}: {error}");
        }
    }
}

#[test]
fn files_of_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let error = Config::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
    std::fs::create_dir(dir.path().join("config.json")).unwrap();
    let error = Config::load(dir.path()).unwrap_err();
    assert!(matches!(error, ContainerError::NotAFile { .. }), "{error}");
    std::fs::remove_dir(dir.path().join("config.json")).unwrap();
    std::fs::write(dir.path().join("config.json"), b"{\xff}").unwrap();
    let error = Config::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("UTF-8 at byte 1"), "{error}");
    std::fs::write(dir.path().join("config.json"), GLM).unwrap();
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": 5}"#).unwrap();
    assert_eq!(Config::load(dir.path()).unwrap().stop_ids, [3, 5]);
}
