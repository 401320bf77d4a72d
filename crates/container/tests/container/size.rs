//! A container of the size of the largest models opens quickly: headers only, no data read.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use container::{Config, Model, tensor_specs};
use serde_json::json;

use crate::common::*;

const FILES: usize = 150;

/// 78 layers of 256 experts in int4-g64: about 121,000 tensors in 150 sparse files.
///
/// The time is printed; what is asserted is that nothing but the headers was read, by a limit
/// so wide that only reading 200 GB of holes could exceed it.
#[test]
fn twenty_thousand_experts() {
    let dir = tempfile::tempdir().unwrap();
    let config = with(
        r#"{"model_type": "glm_moe_dsa"}"#,
        json!({"num_nextn_predict_layers": 1, "max_position_embeddings": 4096}),
    );
    std::fs::write(dir.path().join("config.json"), &config).unwrap();
    let specs = tensor_specs(&Config::from_json(&config, None).unwrap());
    let mut tensors = 0;
    let mut weight_map = serde_json::Map::new();
    for (i, chunk) in specs.chunks(specs.len().div_ceil(FILES)).enumerate() {
        let mut header = String::from("{");
        let mut stamps = serde_json::Map::new();
        let mut end = 0usize;
        let mut add = |name: &str, dtype: &str, shape: &[usize], bytes: usize| {
            header += &format!(
                r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{end},{}]}},"#,
                end + bytes
            );
            end += bytes;
            tensors += 1;
        };
        for spec in chunk {
            if spec.expert.is_some() {
                let (bytes, scales) = (spec.rows * spec.cols / 2, spec.rows * spec.cols / 64);
                add(&spec.name, "U8", &[bytes], bytes);
                add(&format!("{}.qs", spec.name), "F32", &[scales], scales * 4);
                stamps.insert(spec.name.clone(), json!("int4-g64"));
            } else if spec.role.is_vector() {
                add(&spec.name, "F32", &[spec.cols], spec.cols * 4);
            } else {
                add(&spec.name, "BF16", &[spec.rows, spec.cols], spec.rows * spec.cols * 2);
            }
        }
        let stamps = serde_json::to_string(&serde_json::Value::Object(stamps).to_string()).unwrap();
        header += &format!(r#""__metadata__":{{"colibri.fmt":{stamps}}}}}"#);
        let name = format!("model-{:05}-of-{FILES:05}.safetensors", i + 1);
        weight_map.extend(chunk.iter().map(|spec| (spec.name.clone(), json!(name))));
        let path = dir.path().join(&name);
        let mut file = File::create(path).unwrap();
        file.write_all(&raw_file(&header, &[])).unwrap();
        file.set_len(8 + header.len() as u64 + end as u64).unwrap();
    }
    let index = json!({"metadata": {}, "weight_map": weight_map}).to_string();
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    let start = Instant::now();
    let shards = container::Shards::open(&[dir.path().to_owned()]).unwrap();
    let headers = start.elapsed();
    assert_eq!(shards.len(), tensors);
    let start = Instant::now();
    let model = Model::open(&[dir.path().to_owned()]).unwrap();
    let whole = start.elapsed();
    eprintln!(
        "{tensors} tensors in {FILES} files: headers {headers:.2?}, whole model checked {whole:.2?}"
    );
    assert!(whole.as_secs() < 60);
    let experts: usize = model
        .report()
        .stored
        .iter()
        .filter(|(k, _)| k.1 == "int4-g64")
        .map(|(_, u)| u.tensors)
        .sum();
    assert_eq!(experts, 76 * 256 * 3);
}
