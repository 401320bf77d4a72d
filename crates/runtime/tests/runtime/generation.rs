use std::path::PathBuf;

use numerics::Activations;
use runtime::{
    Engine, EngineOptions, FinishReason, Generation, GenerationOptions, OpenError, Phase,
    SamplerOptions, Session, StepError, Want, Work,
};

use crate::support::{open, options, root};

fn bundled() -> PathBuf {
    root().join("models/hummingbird")
}

fn generation(max_tokens: usize, stop_ids: Vec<u32>) -> GenerationOptions {
    GenerationOptions {
        max_tokens,
        sampler: SamplerOptions::default(),
        stop_ids,
        fingerprint: true,
        profile: false,
    }
}

fn run(engine: &Engine, session: &mut Session, prompt: &[u32], max: usize) -> Vec<u32> {
    let stops = Vec::new();
    let options = generation(max, stops);
    Generation::new(engine, options).run(session, prompt, &mut |_| true).unwrap().ids
}

const PROMPT: [u32; 5] = [1, 2, 300, 301, 302];

#[test]
fn a_context_too_small_for_the_prompt_is_refused_with_both_numbers_and_changes_nothing() {
    let engine =
        open(&EngineOptions { context: Some(8), ..options(&bundled(), Activations::Int8) });
    let mut session = engine.session().unwrap();
    let long = [5; 9];
    let mut refused = |_: &[f32]| -> Result<(), StepError> { panic!("nothing may be computed") };
    let error =
        engine.prefill(&mut session, &long, Want::All, &mut refused, &mut |_| true).unwrap_err();
    assert!(matches!(error, StepError::Context { used: 0, wanted: 9, context: 8 }), "{error}");
    assert!(session.tokens().is_empty());
}

#[test]
fn the_token_limit_is_clamped_to_the_room_in_the_context() {
    let engine =
        open(&EngineOptions { context: Some(12), ..options(&bundled(), Activations::Int8) });
    let mut session = engine.session().unwrap();
    let options = generation(1_000_000, Vec::new());
    let generated =
        Generation::new(&engine, options).run(&mut session, &PROMPT, &mut |_| true).unwrap();
    // Seven more fit, and the last logits give one token that is not fed any more.
    assert_eq!((generated.ids.len(), generated.finish), (8, FinishReason::Length));
    assert_eq!(session.tokens().len(), 12);
}

#[test]
fn a_stop_id_ends_the_answer_and_is_not_part_of_it() {
    let engine = open(&options(&bundled(), Activations::Int8));
    let free = run(&engine, &mut engine.session().unwrap(), &PROMPT, 10);
    let stop = free[4];
    let before = free.iter().position(|id| *id == stop).unwrap();
    let options = generation(10, vec![stop]);
    let generated = Generation::new(&engine, options)
        .run(&mut engine.session().unwrap(), &PROMPT, &mut |_| true)
        .unwrap();
    assert_eq!((&generated.ids[..], generated.finish), (&free[..before], FinishReason::Stop));
}

#[test]
fn a_cancelled_answer_keeps_its_text_and_its_session_goes_on_with_the_same_bits() {
    let engine = open(&EngineOptions { sessions: 2, ..options(&bundled(), Activations::Int8) });
    let whole = run(&engine, &mut engine.session().unwrap(), &PROMPT, 12);
    let mut session = engine.session().unwrap();
    let mut seen = 0;
    let options = generation(12, Vec::new());
    let cut = Generation::new(&engine, options)
        .run(&mut session, &PROMPT, &mut |phase| {
            seen += usize::from(matches!(phase, Phase::Token(_)));
            seen < 5
        })
        .unwrap();
    assert_eq!((&cut.ids[..], cut.finish), (&whole[..5], FinishReason::Cancelled));
    // The last token was shown but not fed; feeding it goes on as if nothing had happened.
    assert_eq!(session.tokens()[PROMPT.len()..], whole[..4]);
    assert_eq!(run(&engine, &mut session, &whole[4..5], 7), whole[5..]);
}

#[test]
fn a_session_rewound_to_a_common_prefix_gives_the_bits_of_a_fresh_one() {
    let engine = open(&EngineOptions { sessions: 2, ..options(&bundled(), Activations::Int8) });
    let mut rewound = engine.session().unwrap();
    run(&engine, &mut rewound, &[1, 2, 300, 301, 900, 901, 902], 20);
    rewound.truncate(4);
    let again = run(&engine, &mut rewound, &[302, 303], 10);
    let mut fresh = engine.session().unwrap();
    assert_eq!(again, run(&engine, &mut fresh, &[1, 2, 300, 301, 302, 303], 10));
}

#[test]
fn a_token_outside_the_vocabulary_fails_its_step_only() {
    let engine = open(&options(&bundled(), Activations::Int8));
    let mut session = engine.session().unwrap();
    let work = Work { session: &mut session, tokens: &[1, 6144], want: Want::Last };
    let error = engine.step(&mut [work]).unwrap_err();
    assert!(error.to_string().contains("6144"), "{error}");
    assert!(session.tokens().is_empty());
    assert_eq!(run(&engine, &mut session, &PROMPT, 2).len(), 2);
}

#[test]
fn more_sessions_than_planned_are_refused() {
    let engine = open(&options(&bundled(), Activations::Int8));
    let first = engine.session().unwrap();
    assert!(engine.session().is_err());
    drop(first);
    assert!(engine.session().is_ok());
}

#[test]
fn a_ceiling_below_what_cannot_be_streamed_is_refused_with_both_numbers() {
    let options =
        EngineOptions { ram_bytes: Some(10_000_000), ..options(&bundled(), Activations::Int8) };
    let error = Engine::open(&options, &mut |_, _| {}).err().unwrap();
    let OpenError::Ceiling { needed_gb, limit_gb, .. } = &error else { panic!("{error}") };
    assert_eq!(limit_gb, "0.010");
    assert!(error.to_string().contains(&format!("--ram {needed_gb}")), "{error}");
    // What the message asks for is enough.
    let gb: f64 = needed_gb.parse().unwrap();
    let ram_bytes = Some((gb * 1e9) as u64 + 10_000_000);
    open(&EngineOptions { ram_bytes, context: Some(512), ..options });
}

#[test]
fn a_context_longer_than_the_model_is_refused() {
    let options = EngineOptions { context: Some(4096), ..options(&bundled(), Activations::Int8) };
    let error = Engine::open(&options, &mut |_, _| {}).err().unwrap();
    assert!(matches!(error, OpenError::Context { asked: 4096, max: 2048 }), "{error}");
}

#[test]
fn dense_attention_without_an_indexer_ends_at_its_reach_with_a_typed_error() {
    let dir = root().join("fixtures/oracle/glm-no-indexer");
    let config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap();
    let topk = config["index_topk"].as_u64().unwrap() as usize;
    let engine = open(&options(&dir, Activations::F32));
    let mut session = engine.session().unwrap();
    let within = vec![3; topk];
    let work = Work { session: &mut session, tokens: &within, want: Want::Last };
    engine.step(&mut [work]).unwrap();
    let work = Work { session: &mut session, tokens: &[3], want: Want::Last };
    let error = engine.step(&mut [work]).unwrap_err().to_string();
    assert!(error.contains("no indexer tensors") && error.contains(&topk.to_string()), "{error}");
}
