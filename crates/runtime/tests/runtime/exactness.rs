//! "Configuration A gives the bits of configuration B", by fingerprint of every position. Each
//! test also shows that its configuration was really in force.

use std::path::PathBuf;

use numerics::{Activations, Isa, Level};
use runtime::{Engine, EngineOptions, Session, Want, Work};

use crate::support::{fixtures, open, options, reference, root, teacher_force};

const MODES: [Activations; 2] = [Activations::F32, Activations::Int8];

/// Every fixture and the bundled model, with tokens to feed.
fn models() -> Vec<(PathBuf, Vec<u32>)> {
    let mut models: Vec<_> =
        fixtures().into_iter().map(|dir| (dir.clone(), reference(&dir).full_ids)).collect();
    let ids = (0..150).map(|i| (i * 7919 + 11) % 6144).collect();
    models.push((root().join("models/hummingbird"), ids));
    models
}

fn fingerprint(options: &EngineOptions, ids: &[u32]) -> (Engine, String) {
    let engine = open(options);
    let (_, fingerprint) = teacher_force(&engine, &mut engine.session().unwrap(), ids);
    (engine, fingerprint)
}

/// Compares a changed configuration with the plain one on every model in both modes.
fn same_bits(change: impl Fn(&mut EngineOptions), in_force: impl Fn(&Engine) -> bool) {
    let mut effective = 0;
    for (dir, ids) in models() {
        for mode in MODES {
            let plain = options(&dir, mode);
            let mut changed = plain.clone();
            change(&mut changed);
            let (_, want) = fingerprint(&plain, &ids);
            let (engine, got) = fingerprint(&changed, &ids);
            assert_eq!(got, want, "{} {mode}", dir.display());
            effective += usize::from(in_force(&engine));
        }
    }
    assert!(effective > 20, "the configuration was in force in {effective} runs only");
}

#[test]
fn one_cached_expert_per_layer_gives_the_bits_of_all() {
    // Each of an expert's uses in a chunk is one hit; with one slot, chunks of a single token must
    // read again and again.
    let change = |options: &mut EngineOptions| {
        options.cache_experts = Some(1);
        options.prefill_chunk = 1;
    };
    same_bits(change, |engine| {
        let stats = engine.expert_stats();
        let sparse = engine.config().layers as u64;
        stats.misses > sparse * engine.config().moe.experts as u64
    });
}

#[test]
fn two_cached_experts_per_layer_give_the_bits_of_all() {
    let change = |options: &mut EngineOptions| options.cache_experts = Some(2);
    same_bits(change, |engine| {
        let config = engine.config();
        let all = config.layers as u64 * config.moe.experts as u64;
        let stats = engine.expert_stats();
        // Experts of a fixture are of one size, so bytes count them.
        let cached = stats.cached_bytes * all / engine.cache_bytes().max(1);
        config.moe.experts > 2 && cached <= 2 * config.layers as u64 && stats.misses > cached
    });
}

#[test]
fn one_thread_gives_the_bits_of_two_and_of_five() {
    for threads in [1, 5] {
        let change = |options: &mut EngineOptions| options.threads = Some(threads);
        same_bits(change, |engine| engine.compute().team.threads() == threads);
    }
}

#[test]
fn prefill_in_chunks_gives_the_bits_of_the_whole() {
    for chunk in [1, 7] {
        let change = |options: &mut EngineOptions| options.prefill_chunk = chunk;
        same_bits(change, |engine| engine.prefill_chunk() == chunk);
    }
}

#[test]
fn every_instruction_set_level_gives_the_bits_of_the_portable_code() {
    for level in Level::ALL {
        if Isa::at(level).is_none() {
            println!("SKIPPED: this CPU has no {level}");
        }
    }
    for (dir, ids) in models() {
        for mode in MODES {
            let at = |isa| EngineOptions { isa, ..options(&dir, mode) };
            let (_, want) = fingerprint(&at(Isa::SCALAR), &ids);
            for isa in Isa::available().filter(|isa| *isa != Isa::SCALAR) {
                let (engine, got) = fingerprint(&at(isa), &ids);
                assert_eq!(got, want, "{} {mode} {}", dir.display(), isa.level());
                assert_eq!(engine.compute().isa, isa);
            }
        }
    }
}

#[test]
fn a_sequence_alone_gives_the_bits_of_the_same_sequence_in_a_batch() {
    for (dir, ids) in models() {
        for mode in MODES {
            let engine = open(&EngineOptions { sessions: 4, ..options(&dir, mode) });
            let half = ids.len() / 2;
            // Three sequences: the tokens, their reverse, and a rotation of them.
            let mut reversed = ids.clone();
            reversed.reverse();
            let mut rotated = ids.clone();
            rotated.rotate_left(3);
            let sequences = [ids.clone(), reversed, rotated];
            let alone: Vec<Vec<f32>> = sequences
                .iter()
                .map(|ids| {
                    let mut session = engine.session().unwrap();
                    feed(&engine, &mut [(&mut session, ids)]).swap_remove(0)
                })
                .collect();
            let mut sessions: Vec<Session> = (0..3).map(|_| engine.session().unwrap()).collect();
            // Unequal progress: the second sequence starts earlier, the third later.
            feed(&engine, &mut [(&mut sessions[1], &sequences[1][..half])]);
            let [first, second, third] = &mut sessions[..] else { unreachable!() };
            let mixed = feed(
                &engine,
                &mut [
                    (first, &sequences[0][..]),
                    (second, &sequences[1][half..]),
                    (third, &sequences[2][..]),
                ],
            );
            let name = dir.display();
            let width = engine.config().hidden_size;
            assert_eq!(bits(&mixed[0]), bits(&alone[0]), "{name} {mode}");
            assert_eq!(bits(&mixed[1]), bits(&alone[1][half * width..]), "{name} {mode}");
            assert_eq!(bits(&mixed[2]), bits(&alone[2]), "{name} {mode}");
        }
    }
}

fn feed(engine: &Engine, work: &mut [(&mut Session, &[u32])]) -> Vec<Vec<f32>> {
    let mut items: Vec<Work<'_>> = work
        .iter_mut()
        .map(|(session, tokens)| Work { session, tokens, want: Want::All })
        .collect();
    engine.step(&mut items).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
