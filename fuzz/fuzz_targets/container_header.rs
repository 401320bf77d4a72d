//! Safetensors headers, alone and as the only file of a tiny model.

#![no_main]

use std::path::PathBuf;

use container::header::{Header, parse_header, parse_prefix};
use container::{Config, Model, Shards, tensor_specs};
use libfuzzer_sys::fuzz_target;

const CONFIG: &str = r#"{"model_type": "olmoe", "vocab_size": 4, "hidden_size": 4,
    "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts": 2,
    "num_experts_per_tok": 1}"#;

fuzz_target!(|data: &[u8]| {
    if let Ok(header) = parse_prefix(data, data.len() as u64) {
        check(header, data.len() as u64);
    }
    // The same bytes as JSON alone, in front of data of the length that the first two bytes say.
    let Some((length, json)) = data.split_first_chunk::<2>() else { return };
    let file_bytes = 8 + json.len() as u64 + u64::from(u16::from_le_bytes(*length));
    if let Ok(header) = parse_header(json, file_bytes) {
        check(header, file_bytes);
    }
});

/// What an accepted header promises.
fn check(header: Header, file_bytes: u64) {
    let mut places: Vec<(u64, u64)> = header.tensors.iter().map(|t| (t.offset, t.len)).collect();
    places.sort_unstable();
    let mut end = header.data_start;
    for (offset, len) in places {
        assert!(offset >= end);
        end = offset.checked_add(len).unwrap();
    }
    assert!(end <= file_bytes);
    let path = PathBuf::from("model-00001-of-00002.safetensors");
    let Ok(shards) = Shards::from_headers([(path, header, file_bytes)]) else { return };
    let _ = shards.missing_shards().to_string();
    let config = Config::from_json(CONFIG, None).unwrap();
    match Model::from_parts(config, shards) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(model) => {
            for spec in tensor_specs(&model.config) {
                let source = model.source(&spec).unwrap();
                for range in [Some(source.weights), source.scales].into_iter().flatten() {
                    assert!(range.offset + range.len <= file_bytes);
                }
            }
            model.table_hash().unwrap();
        }
    }
}
