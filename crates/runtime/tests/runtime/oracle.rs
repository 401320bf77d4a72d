use numerics::Activations;
use runtime::{Generation, GenerationOptions, SamplerOptions};

use crate::support::{fixtures, open, options, reference, teacher_force};

#[test]
fn every_fixture_matches_its_reference_teacher_forced_and_greedy() {
    let mut failures = Vec::new();
    for dir in fixtures() {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let want = reference(&dir);
        let engine = open(&options(&dir, Activations::F32));
        let (got, _) = teacher_force(&engine, &mut engine.session().unwrap(), &want.full_ids);
        let wrong = got.iter().zip(&want.tf_pred).filter(|(got, want)| got != want).count();
        if wrong > 0 || got.len() != want.tf_pred.len() {
            failures.push(format!("{name}: {wrong} of {} positions", got.len()));
        }
        let generation = GenerationOptions {
            max_tokens: want.full_ids.len() - want.prompt_ids.len(),
            sampler: SamplerOptions::default(),
            stop_ids: Vec::new(),
            fingerprint: false,
            profile: false,
        };
        // A second session needs its own memory; the first is gone by now.
        let mut session = engine.session().unwrap();
        let generated = Generation::new(&engine, generation)
            .run(&mut session, &want.prompt_ids, &mut |_| true)
            .unwrap();
        if generated.ids != want.full_ids[want.prompt_ids.len()..] {
            failures.push(format!("{name}: greedy continuation differs"));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
