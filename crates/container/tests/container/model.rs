//! Whole models: what opens, and what an incomplete one says.

use container::Presence;

use crate::common::*;

#[test]
fn tiny_models_open() {
    for (config, layers) in [(GLM, 4), (OLMOE, 2)] {
        let dir = tempfile::tempdir().unwrap();
        write_model(dir.path(), config, 3);
        let model = open(dir.path()).unwrap();
        assert_eq!(model.config.all_layers(), layers);
        let report = model.report();
        assert_eq!(report.unused.0, 0);
        assert!(report.shards.is_complete());
        let glm = layers == 4;
        assert_eq!(report.indexer, if glm { Presence::Present } else { Presence::NotConfigured });
        assert_eq!(report.mtp, if glm { Presence::Present } else { Presence::NotConfigured });
        for layer in 1..layers {
            for expert in 0..model.config.moe.experts {
                let [gate, up, down] = model.expert_sources(layer, expert).unwrap();
                assert_eq!((gate.rows, gate.cols), (8, 16));
                assert_eq!((up.rows, up.cols), (8, 16));
                assert_eq!((down.rows, down.cols), (16, 8));
            }
        }
    }
}
