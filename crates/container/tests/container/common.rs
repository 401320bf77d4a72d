//! Writes small containers and configurations.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// One tensor to write: name, dtype, shape and bytes.
#[derive(Clone, Debug)]
pub struct T {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// A tensor of zero bytes of the right length.
pub fn zeros(name: &str, dtype: &'static str, shape: &[usize]) -> T {
    let size = match dtype {
        "F32" | "I32" => 4,
        "BF16" | "F16" => 2,
        "I64" | "F64" => 8,
        _ => 1,
    };
    let n: usize = shape.iter().product();
    T { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes: vec![0; n * size] }
}

/// The bytes of a safetensors file.
pub fn file_bytes(tensors: &[T], metadata: &[(&str, &str)]) -> Vec<u8> {
    let mut header = String::from("{");
    if !metadata.is_empty() {
        let map: BTreeMap<_, _> = metadata.iter().copied().collect();
        header += &format!("\"__metadata__\":{},", serde_json::to_string(&map).unwrap());
    }
    let mut data = Vec::new();
    for t in tensors {
        header += &format!(
            "{}:{{\"dtype\":\"{}\",\"shape\":{:?},\"data_offsets\":[{},{}]}},",
            serde_json::to_string(&t.name).unwrap(),
            t.dtype,
            t.shape,
            data.len(),
            data.len() + t.bytes.len()
        );
        data.extend(&t.bytes);
    }
    if header.ends_with(',') {
        header.pop();
    }
    header.push('}');
    raw_file(&header, &data)
}

/// A file of a given header text and data.
pub fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

pub fn write(dir: &Path, file: &str, tensors: &[T], metadata: &[(&str, &str)]) -> PathBuf {
    let path = dir.join(file);
    fs::write(&path, file_bytes(tensors, metadata)).unwrap();
    path
}

/// A tiny GLM configuration: 3 layers (first dense), 6 experts top-2, one MTP layer.
pub const GLM: &str = r#"{
 "model_type": "glm_moe_dsa", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
 "moe_intermediate_size": 8, "num_hidden_layers": 3, "first_k_dense_replace": 1,
 "num_attention_heads": 2, "n_routed_experts": 6, "num_experts_per_tok": 2,
 "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
 "v_head_dim": 5, "index_topk": 8, "index_head_dim": 4, "index_n_heads": 2,
 "num_nextn_predict_layers": 1, "eos_token_id": 3
}"#;

/// A tiny OLMoE configuration: 2 layers, 4 experts top-2, two key/value heads.
pub const OLMOE: &str = r#"{
 "model_type": "olmoe", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 8,
 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4,
 "num_experts_per_tok": 2, "eos_token_id": [5, 7]
}"#;

/// A configuration with some fields replaced or added.
pub fn with(config: &str, changes: serde_json::Value) -> String {
    let mut config: serde_json::Value = serde_json::from_str(config).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config.to_string()
}

/// Every tensor of a configuration in bf16 (vectors in f32).
pub fn tensors_of(config: &str) -> Vec<T> {
    let config = container::Config::from_json(config, None).unwrap();
    container::tensor_specs(&config)
        .iter()
        .map(|spec| {
            if spec.role.is_vector() {
                zeros(&spec.name, "F32", &[spec.cols])
            } else {
                zeros(&spec.name, "BF16", &[spec.rows, spec.cols])
            }
        })
        .collect()
}

/// Writes a whole model in `files` numbered shards.
pub fn write_model(dir: &Path, config: &str, files: usize) -> Vec<String> {
    fs::write(dir.join("config.json"), config).unwrap();
    let tensors = tensors_of(config);
    let per_file = tensors.len().div_ceil(files);
    let mut names = Vec::new();
    for (i, chunk) in tensors.chunks(per_file).enumerate() {
        let name = format!("model-{:05}-of-{files:05}.safetensors", i + 1);
        write(dir, &name, chunk, &[]);
        names.push(name);
    }
    assert_eq!(names.len(), files);
    names
}

pub fn open(dir: &Path) -> Result<container::Model, container::ContainerError> {
    container::Model::open(&[dir.to_owned()])
}
