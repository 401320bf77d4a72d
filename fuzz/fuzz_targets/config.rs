//! `config.json` and `generation_config.json`: two texts split by a NUL byte.

#![no_main]

use container::config::{MAX_ROUTED_EXPERTS, MAX_TOP_K};
use container::{Config, layer_specs, model_specs};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (config, generation) = match text.split_once('\0') {
        Some((config, generation)) => (config, Some(generation)),
        None => (text, None),
    };
    match Config::from_json(config, generation) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(config) => {
            assert!(config.moe.top_k <= config.moe.experts.min(MAX_TOP_K));
            assert!(config.all_layers() * config.moe.experts <= MAX_ROUTED_EXPERTS);
            assert_eq!(config.mlp_layer_types.len(), config.layers);
            assert!(config.kv_width() > 0);
            let specs = (0..config.all_layers()).flat_map(|layer| layer_specs(&config, layer));
            for spec in model_specs(&config).into_iter().chain(specs) {
                assert!(spec.rows > 0 && spec.cols > 0, "{}", spec.name);
                spec.rows.checked_mul(spec.cols).unwrap().checked_mul(4).unwrap();
            }
        }
    }
});
