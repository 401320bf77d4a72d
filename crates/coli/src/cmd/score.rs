//! `coli score`: negative log-likelihood and perplexity.

use std::path::Path;

use container::Tokenizer;
use lab::score::{Score, missing_prefix, score_ids, score_text};
use runtime::Engine;
use serde::Deserialize;
use serde_json::json;

use crate::args::ScoreArgs;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::{Outcome, input, model, output, workers};

/// Largest input read.
const INPUT_BYTES_MAX: u64 = 256 << 20;

#[derive(Deserialize)]
struct Case {
    text: Option<String>,
    context: Option<String>,
    continuation: Option<String>,
}

pub fn run(args: &ScoreArgs) -> Outcome {
    let tokenizer = model::tokenizer(&args.engine.model)?;
    let (path, is_text) = match (&args.text, &args.file) {
        (Some(path), _) => (path, true),
        (None, Some(path)) => (path, false),
        (None, None) => return Err(Failure::usage("give a FILE.jsonl or --text FILE")),
    };
    let input = input::read_file(path, INPUT_BYTES_MAX)?;
    // Encoded before memory is planned, so that the plan knows what it took.
    let text_ids = if is_text { tokenizer.encode(&input, false)? } else { Vec::new() };
    let model::Opened { engine, workers, .. } = model::open(&args.engine)?;
    let prefix = match &args.prefix {
        Some(text) if text.is_empty() => Vec::new(),
        Some(text) => tokenizer.encode(text, false)?,
        None => model::family_prefix(engine.config().family, &tokenizer),
    };
    let shown = tokenizer.decode(&prefix, false)?;
    note!(
        "prefix {}",
        if prefix.is_empty() { "none".to_owned() } else { format!("{shown:?}, once per case") }
    );
    let (total, cases) = if is_text {
        let window = args.window.unwrap_or_else(|| engine.context());
        check_window(window, prefix.len(), engine.context())?;
        let mut progress = Progress::count("scoring");
        let score = score_text(&engine, &prefix, &text_ids, window, &mut |done, total| {
            progress.set(done as u64, total as u64);
        })?;
        (score, Vec::new())
    } else {
        score_cases(&engine, &tokenizer, &prefix, path, &input)?
    };
    if total.tokens == 0 {
        return Err(Failure::usage(format!(
            "{}: there is no token to score (a text needs two, or a prefix)",
            path.display()
        )));
    }
    if args.json {
        let cases: Vec<_> =
            cases.iter().map(|s| json!({"nll": s.nll, "tokens": s.tokens})).collect();
        output::print_json(&json!({
            "nll": total.nll,
            "cluster": workers::json(&workers),
            "tokens": total.tokens,
            "perplexity": total.perplexity(),
            "prefix": shown,
            "prefix_ids": prefix,
            "activations": engine.compute().activations.to_string(),
            "cases": cases,
        }));
    } else {
        for (at, score) in cases.iter().enumerate() {
            say!("case {}: nll {:.4} over {} tokens", at + 1, score.nll, score.tokens);
        }
        say!(
            "nll {:.4} over {} tokens, {:.4} per token, perplexity {:.4}",
            total.nll,
            output::count(total.tokens),
            total.nll / total.tokens as f64,
            total.perplexity()
        );
    }
    workers::note(&workers);
    model::close(&engine)
}

/// Refuses a window that cannot be honoured.
fn check_window(window: usize, prefix: usize, context: usize) -> Result<(), Failure> {
    if window > context {
        return Err(Failure::usage(format!(
            "--window {window} is longer than the context of {context}; raise --ctx"
        )));
    }
    if window < prefix + 2 {
        return Err(Failure::usage(format!(
            "--window {window} leaves no room to score; with this prefix it must be at least {}",
            prefix + 2
        )));
    }
    Ok(())
}

fn score_cases(
    engine: &Engine,
    tokenizer: &Tokenizer,
    prefix: &[u32],
    path: &Path,
    input: &str,
) -> Result<(Score, Vec<Score>), Failure> {
    let mut total = Score::default();
    let mut cases = Vec::new();
    let lines: Vec<&str> = input.lines().collect();
    let mut progress = Progress::count("scoring");
    for (at, line) in lines.iter().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let unusable =
            |what: String| Failure::usage(format!("{} line {}: {what}", path.display(), at + 1));
        let case: Case =
            serde_json::from_str(line).map_err(|error| unusable(format!("not a case: {error}")))?;
        let (context, scored) = match (case.text, case.context, case.continuation) {
            (Some(text), None, None) => (String::new(), text),
            (None, Some(context), Some(continuation)) => (context, continuation),
            _ => {
                return Err(unusable(
                    "needs either \"text\", or \"context\" and \"continuation\"".to_owned(),
                ));
            }
        };
        // Encoded apart, as evaluation sets count continuation tokens.
        let context = tokenizer.encode(&context, false)?;
        let scored = tokenizer.encode(&scored, false)?;
        let mut ids = missing_prefix(prefix, if context.is_empty() { &scored } else { &context });
        ids.extend_from_slice(&context);
        let from = ids.len().max(prefix.len());
        ids.extend_from_slice(&scored);
        if ids.len() > engine.context() {
            return Err(unusable(format!(
                "{} tokens, the context holds {}; raise --ctx",
                ids.len(),
                engine.context()
            )));
        }
        let score = score_ids(engine, &ids, from)?;
        total.add(score);
        cases.push(score);
        progress.set(at as u64 + 1, lines.len() as u64);
    }
    Ok((total, cases))
}
