use std::path::Path;

use formats::Format;
use lab::synth::{self, Like, Overrides, SynthOptions};
use numerics::{Activations, Isa};
use runtime::{Engine, EngineOptions, Fingerprint, Session, Want, Work};

/// Beyond two blocks of 512 keys, into a third.
const TOKENS: usize = 1100;
/// Keys that the indexer of the test model selects: more than a block, fewer than the context.
const INDEX_TOPK: usize = 600;

/// A tiny model with a long context.
fn model(dir: &Path, like: Like) {
    let overrides = Overrides {
        layers: Some(2),
        experts: Some(4),
        top_k: Some(2),
        hidden: Some(64),
        heads: Some(2),
        vocab: Some(128),
        intermediate: (like == Like::Glm).then_some(64),
        expert_intermediate: Some(32),
        ..Overrides::default()
    };
    let options = SynthOptions {
        like,
        overrides,
        experts: Format::Int4Grouped(32),
        dense: Format::Int8Row,
        seed: 7,
        shard_bytes: 1 << 30,
        layout: container::Layout::R16k4,
    };
    synth::write(dir, &options, &mut |_, _| {}).unwrap();
    let path = dir.join("config.json");
    let mut config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = TOKENS.into();
    if like == Like::Glm {
        config["index_topk"] = INDEX_TOPK.into();
    }
    std::fs::write(&path, config.to_string()).unwrap();
}

fn ids(count: usize) -> Vec<u32> {
    (0..count).map(|i| (i * 7919 % 128) as u32).collect()
}

fn open(dir: &Path, change: impl Fn(&mut EngineOptions)) -> Engine {
    let mut options = EngineOptions {
        activations: Activations::Int8,
        threads: Some(2),
        ram_bytes: Some(2_000_000_000),
        sessions: 2,
        ..EngineOptions::new(vec![dir.to_owned()])
    };
    change(&mut options);
    Engine::open(&options, &mut |_, _| {}).unwrap()
}

/// Feeds tokens in chunks; the fingerprint of the logits of every 50th of them.
fn fingerprint(engine: &Engine, session: &mut Session, ids: &[u32]) -> String {
    let mut fingerprint = Fingerprint::default();
    let mut at = 0;
    let mut each = |hidden: &[f32]| {
        let width = engine.config().hidden_size;
        for row in hidden.chunks_exact(width) {
            at += 1;
            if at % 50 == 0 {
                engine.each_logits(row, |logits| fingerprint.add(logits))?;
            }
        }
        Ok(())
    };
    engine.prefill(session, ids, Want::All, &mut each, &mut |_| true).unwrap();
    fingerprint.hex()
}

#[test]
fn contexts_of_several_key_blocks_have_the_same_bits_whatever_chunk_threads_and_level() {
    let dir = tempfile::tempdir().unwrap();
    for (name, like) in [("glm", Like::Glm), ("olmoe", Like::Olmoe)] {
        let dir = dir.path().join(name);
        model(&dir, like);
        let ids = ids(TOKENS);
        let run = |change: &dyn Fn(&mut EngineOptions)| {
            let engine = open(&dir, change);
            let mut session = engine.session().unwrap();
            fingerprint(&engine, &mut session, &ids)
        };
        let want = run(&|_| {});
        for chunk in [37, 100] {
            let got = run(&|options| options.prefill_chunk = chunk);
            assert_eq!(got, want, "{name}, chunks of {chunk}");
        }
        assert_eq!(run(&|options| options.threads = Some(5)), want, "{name}, five threads");
        for isa in Isa::available() {
            assert_eq!(run(&|options| options.isa = isa), want, "{name} at {isa:?}");
        }
    }
}

#[test]
fn sequences_of_unequal_length_in_one_step_have_the_bits_that_each_has_alone() {
    let dir = tempfile::tempdir().unwrap();
    for (name, like) in [("glm", Like::Glm), ("olmoe", Like::Olmoe)] {
        let dir = dir.path().join(name);
        model(&dir, like);
        let engine = open(&dir, |_| {});
        // Both choose their keys where there is an indexer, from different numbers of pages.
        let lengths = [INDEX_TOPK + 5, TOKENS - 1];
        let mut sessions: Vec<Session> = lengths
            .iter()
            .map(|length| {
                let mut session = engine.session().unwrap();
                fingerprint(&engine, &mut session, &ids(*length));
                session
            })
            .collect();
        let step = |sessions: &mut [&mut Session]| {
            let mut work: Vec<Work<'_>> = sessions
                .iter_mut()
                .map(|session| Work { session, tokens: &[3], want: Want::Last })
                .collect();
            engine.step(&mut work).unwrap()
        };
        let [first, second] = &mut sessions[..] else { panic!("two") };
        let together = step(&mut [first, second]);
        for (session, length) in [first, second].into_iter().zip(lengths) {
            session.truncate(length);
            let at = usize::from(length == lengths[1]);
            assert_eq!(step(&mut [session])[0], together[at], "{name}, {length} tokens");
        }
    }
}
