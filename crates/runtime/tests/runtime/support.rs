//! Fixtures and engines.

use std::path::{Path, PathBuf};

use numerics::Activations;
use runtime::{Engine, EngineOptions, Fingerprint, Session, Want};

/// Root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The oracle fixtures, by name.
pub fn fixtures() -> Vec<PathBuf> {
    let dir = root().join("fixtures/oracle");
    let mut found: Vec<PathBuf> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("ref.json").exists())
        .collect();
    found.sort();
    assert!(found.len() >= 20, "fixtures are missing from {}", dir.display());
    found
}

/// A fixture's reference.
pub struct Reference {
    pub prompt_ids: Vec<u32>,
    pub full_ids: Vec<u32>,
    pub tf_pred: Vec<u32>,
}

/// Reads `ref.json` of a fixture.
pub fn reference(dir: &Path) -> Reference {
    let text = std::fs::read_to_string(dir.join("ref.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids = |key: &str| {
        json[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    Reference { prompt_ids: ids("prompt_ids"), full_ids: ids("full_ids"), tf_pred: ids("tf_pred") }
}

/// Options for tests: two threads, a fixed ceiling.
pub fn options(dir: &Path, activations: Activations) -> EngineOptions {
    EngineOptions {
        activations,
        threads: Some(2),
        ram_bytes: Some(4_000_000_000),
        ..EngineOptions::new(vec![dir.to_owned()])
    }
}

/// An open engine.
pub fn open(options: &EngineOptions) -> Engine {
    Engine::open(options, &mut |_, _| {})
        .unwrap_or_else(|error| panic!("{}: {error}", options.dirs[0].display()))
}

/// Teacher-forces tokens; returns the argmax after each and the fingerprint.
pub fn teacher_force(engine: &Engine, session: &mut Session, ids: &[u32]) -> (Vec<u32>, String) {
    let (mut predicted, mut fingerprint) = (Vec::new(), Fingerprint::default());
    let mut each = |hidden: &[f32]| {
        engine.each_logits(hidden, |logits| {
            fingerprint.add(logits);
            predicted.push(numerics::topk::argmax(logits));
        })
    };
    engine.prefill(session, ids, Want::All, &mut each, &mut |_| true).unwrap();
    (predicted, fingerprint.hex())
}
