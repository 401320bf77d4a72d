//! `coli oracle`: every argmax against a reference, teacher-forced, then a greedy continuation.

use numerics::topk;
use runtime::{Fingerprint, Generation, GenerationOptions, SamplerOptions, StepError, Want};
use serde::Deserialize;
use serde_json::json;

use crate::args::OracleArgs;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::{Outcome, model, output};

/// Largest reference read.
const REFERENCE_BYTES_MAX: u64 = 256 << 20;

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
    let engine = model::open(&args.engine)?;
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
    let mut progress = Progress::count("teacher forcing");
    engine.prefill(&mut session, &reference.full_ids, Want::All, &mut each, &mut |done| {
        progress.set(done as u64, positions as u64);
        true
    })?;
    drop(progress);
    let matched = positions - mismatches.len();

    // The engine plans memory for one session.
    drop(session);
    let mut session = engine.session()?;
    let greedy = &reference.full_ids[reference.prompt_ids.len()..];
    if !greedy.is_empty() {
        let options = GenerationOptions {
            max_tokens: greedy.len(),
            sampler: SamplerOptions::default(),
            stop_ids: Vec::new(),
            fingerprint: false,
        };
        let generated = Generation::new(&engine, options).run(
            &mut session,
            &reference.prompt_ids,
            &mut |_| true,
        )?;
        // After the first difference the two texts are not comparable.
        let differs = generated.ids.iter().zip(greedy).position(|(got, want)| got != want);
        if let Some(at) = differs {
            mismatches.push(Mismatch {
                kind: "greedy",
                position: reference.prompt_ids.len() + at,
                expected: greedy[at],
                got: generated.ids[at],
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
            "fingerprint": args.fingerprint.then(|| fingerprint.hex()),
        }));
    } else {
        say!("oracle: {matched}/{positions} positions match");
        for m in &mismatches {
            say!("  {} position {}: expected {}, got {}", m.kind, m.position, m.expected, m.got);
        }
        if !mismatches.iter().any(|m| m.kind == "greedy") {
            say!("greedy: {0}/{0} tokens match", greedy.len());
        }
        if args.fingerprint {
            say!("fingerprint {}", fingerprint.hex());
        }
    }
    if mismatches.is_empty() { Ok(()) } else { Err(Failure::Reported(1)) }
}

fn load(args: &OracleArgs) -> Result<Reference, Failure> {
    let path = &args.reference;
    let unusable = |what: String| Failure::usage(format!("{}: {what}", path.display()));
    let size = std::fs::metadata(path).map_err(|error| unusable(error.to_string()))?.len();
    if size > REFERENCE_BYTES_MAX {
        return Err(unusable(format!("{size} bytes is too large for a reference")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
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
    if prompt_ids.is_empty() || !full_ids.starts_with(prompt_ids) {
        return Err(unusable("full_ids does not begin with prompt_ids".to_owned()));
    }
    Ok(reference)
}
