use std::collections::BTreeMap;

use numerics::{Activations, Isa, Level, NUMERICS_VERSION};

use crate::support::{fixtures, open, options, reference, root, teacher_force};

/// Writes the fingerprints of this build over the golden ones when set: for a change that raises
/// `NUMERICS_VERSION`, and for new fixtures.
const REWRITE: &str = "REWRITE_GOLDEN_FINGERPRINTS";

#[test]
fn every_level_gives_the_golden_fingerprints_of_this_numerics_version() {
    for level in Level::ALL.into_iter().filter(|level| Isa::at(*level).is_none()) {
        println!("SKIPPED: this CPU has no {level}");
    }
    let path = root().join("fixtures/golden.json");
    let mut got = BTreeMap::new();
    for dir in fixtures() {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let ids = reference(&dir).full_ids;
        for activations in [Activations::F32, Activations::Int8] {
            for isa in Isa::available() {
                let engine = open(&runtime::EngineOptions { isa, ..options(&dir, activations) });
                let (_, fingerprint) = teacher_force(&engine, &mut engine.session().unwrap(), &ids);
                let known =
                    got.entry(format!("{name} {activations}")).or_insert(fingerprint.clone());
                assert_eq!(*known, fingerprint, "{name} {activations} at {isa:?}");
            }
        }
    }
    let got = serde_json::json!({ "numerics_version": NUMERICS_VERSION, "fingerprints": got });
    let golden = std::fs::read_to_string(&path).unwrap();
    let mut golden: serde_json::Value = serde_json::from_str(&golden).unwrap();
    if std::env::var_os(REWRITE).is_some() {
        let same_version = golden["numerics_version"] == got["numerics_version"];
        for (name, known) in golden["fingerprints"].as_object().unwrap() {
            let now = &got["fingerprints"][name];
            assert!(!same_version || now.is_null() || now == known, "{name} has changed bits");
        }
        std::fs::write(&path, format!("{got:#}\n")).unwrap();
        golden = got.clone();
    }
    assert_eq!(got, golden, "bits have changed: if on purpose, raise NUMERICS_VERSION");
}
