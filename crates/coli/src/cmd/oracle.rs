//! `coli oracle`: every argmax against a reference, teacher-forced, then a greedy continuation.

use numerics::topk;
use runtime::{Fingerprint, Generation, GenerationOptions, SamplerOptions, StepError, Want};
use serde::Deserialize;
use serde_json::json;

use crate::args::OracleArgs;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::{Outcome, input, model, output, workers};

/// Largest reference read.
const REFERENCE_BYTES_MAX: u64 = 64 << 20;

#[derive(Deserialize)]
struct Reference {
    prompt_ids: Vec<u32>,
    full_ids: Vec<u32>,
    tf_pred: Vec<u32>,
}

struct Mismatch {
    kind: &'static str,
    position: usize,
    expected: u32,
    got: u32,
}

pub fn run(args: &OracleArgs) -> Outcome {
    let reference = load(args)?;
    let model::Opened { engine, workers, .. } = model::open(&args.engine)?;
    let positions = reference.full_ids.len();
    if positions > engine.context() {
        return Err(Failure::usage(format!(
            "the reference has {positions} tokens, the context holds {}; raise --ctx",
            engine.context()
        )));
    }
    let mut mismatches = Vec::new();
    let mut fingerprint = Fingerprint::default();
    let mut session = engine.session()?;
    let mut position = 0;
    let mut each = |hidden: &[f32]| -> Result<(), StepError> {
        engine.each_logits(hidden, |logits| {
            if args.fingerprint {
                fingerprint.add(logits);
            }
            let (got, expected) = (topk::argmax(logits), reference.tf_pred[position]);
            if got != expected {
                mismatches.push(Mismatch { kind: "teacher-forced", position, expected, got });
            }
            position += 1;
        })
    };
    let mut progress = Progress::share("teacher forcing");
    engine.prefill(&mut session, &reference.full_ids, Want::All, &mut each, &mut |share| {
        progress.set_share(share);
        true
    })?;
    drop(progress);
    let matched = positions - mismatches.len();

    // The engine plans memory for one session.
    drop(session);
    let mut session = engine.session()?;
    let greedy = &reference.full_ids[reference.prompt_ids.len()..];
    let greedy = &greedy[..greedy.len().min(args.max_tokens.unwrap_or(usize::MAX))];
    let mut greedy_match = 0;
    if !greedy.is_empty() {
        let options = GenerationOptions {
            max_tokens: greedy.len(),
            sampler: SamplerOptions::default(),
            stop_ids: Vec::new(),
            fingerprint: false,
            profile: false,
        };
        let generated = Generation::new(&engine, options).run(
            &mut session,
            &reference.prompt_ids,
            &mut |_| true,
        )?;
        // After the first difference the two texts are not comparable.
        let same = generated.ids.iter().zip(greedy).take_while(|(got, want)| got == want);
        greedy_match = same.count();
        if let (Some(expected), Some(got)) =
            (greedy.get(greedy_match), generated.ids.get(greedy_match))
        {
            mismatches.push(Mismatch {
                kind: "greedy",
                position: reference.prompt_ids.len() + greedy_match,
                expected: *expected,
                got: *got,
            });
        }
    }

    if args.json {
        let list: Vec<_> = mismatches
            .iter()
            .map(|m| json!({"kind": m.kind, "position": m.position, "expected": m.expected, "got": m.got}))
            .collect();
        output::print_json(&json!({
            "match": matched,
            "positions": positions,
            "mismatches": mismatches.len(),
            "mismatch_list": list,
            "greedy_tokens": greedy.len(),
            "greedy_match": greedy_match,
            "fingerprint": args.fingerprint.then(|| fingerprint.hex()),
            "cluster": workers::json(&workers),
        }));
    } else {
        say!("oracle: {matched}/{positions} positions match");
        for m in &mismatches {
            say!("  {} position {}: expected {}, got {}", m.kind, m.position, m.expected, m.got);
        }
        say!("greedy: {greedy_match}/{} tokens match", greedy.len());
        if args.fingerprint {
            say!("fingerprint {}", fingerprint.hex());
        }
        workers::note(&workers);
    }
    model::close(&engine)?;
    if mismatches.is_empty() && greedy_match == greedy.len() {
        Ok(())
    } else {
        Err(Failure::Reported(1))
    }
}

fn load(args: &OracleArgs) -> Result<Reference, Failure> {
    let path = &args.reference;
    let unusable = |what: String| Failure::usage(format!("{}: {what}", path.display()));
    let text = input::read_file(path, REFERENCE_BYTES_MAX)?;
    let reference: Reference = serde_json::from_str(&text)
        .map_err(|error| unusable(format!("not a reference: {error}")))?;
    let Reference { prompt_ids, full_ids, tf_pred } = &reference;
    if full_ids.is_empty() || tf_pred.len() != full_ids.len() {
        return Err(unusable(format!(
            "full_ids has {} entries and tf_pred {}; they must be equal and not 0",
            full_ids.len(),
            tf_pred.len()
        )));
    }
    if prompt_ids.is_empty() {
        return Err(unusable("prompt_ids is empty".to_owned()));
    }
    if !full_ids.starts_with(prompt_ids) {
        return Err(unusable("full_ids does not begin with prompt_ids".to_owned()));
    }
    Ok(reference)
}
