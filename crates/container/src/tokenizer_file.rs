//! Checks a `tokenizer.json` before the `tokenizers` crate builds it.
//!
//! That crate trusts merges to be consistent with the vocabulary and ids to be small; a file that
//! breaks this trust would make it panic or, with duplicate ids, decode differently in each run.
//! Everything else about the file is left to it.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use crate::config::MAX_VOCAB;
use crate::tokenizer_config::MAX_ADDED;

#[derive(serde::Deserialize)]
struct File {
    model: Model,
    #[serde(default)]
    added_tokens: Option<Vec<Added>>,
    #[serde(default)]
    normalizer: Option<Value>,
    #[serde(default)]
    decoder: Option<Value>,
}

#[derive(serde::Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: HashMap<String, u32>,
    merges: Merges,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

/// Merges are written as `"a b"` or, since tokens may contain spaces, as `["a", "b"]`.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Merges {
    Pairs(Vec<(String, String)>),
    Lines(Vec<String>),
}

#[derive(serde::Deserialize)]
struct Added {
    id: u32,
    content: String,
}

/// Refuses a file that is not a consistent byte-pair tokenizer; the text is the reason. Returns the
/// added tokens with the ids that the file gives them.
pub(crate) fn check(json: &[u8]) -> Result<Vec<(String, u32)>, String> {
    let kind: KindOnly = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    // Files of old versions have no type; those with merges are BPE.
    if kind.model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
        return Err(format!(
            "model type {} is not implemented, only BPE is",
            kind.model.kind.unwrap_or_default()
        ));
    }
    let file: File = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    let model = &file.model;
    debug_assert!(model.kind.as_deref().is_none_or(|kind| kind == "BPE"));
    if model.dropout.is_some_and(|dropout| dropout != 0.0) {
        return Err("dropout makes encoding random; set it to null".to_owned());
    }
    for (field, value) in [
        ("continuing_subword_prefix", &model.continuing_subword_prefix),
        ("end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if value.as_ref().is_some_and(|value| !value.is_empty()) {
            return Err(format!("{field} is not implemented"));
        }
    }
    check_ids(&file)?;
    check_merges(model)?;
    for steps in [&file.normalizer, &file.decoder].into_iter().flatten() {
        let growth = growth(steps, 0)?;
        if growth > MAX_GROWTH {
            return Err(format!(
                "its replacements can make a text {growth:.0} times as long, {MAX_GROWTH} at most"
            ));
        }
    }
    let added = file.added_tokens.unwrap_or_default();
    Ok(added.into_iter().map(|token| (token.content, token.id)).collect())
}

/// Most times longer that the replacements of a tokenizer together may make a text; real ones put
/// three bytes for one.
const MAX_GROWTH: f64 = 64.0;
/// Deepest nesting of sequences.
const MAX_NESTING: usize = 8;

/// How many times longer a normalizer or decoder can make a text.
fn growth(step: &Value, depth: usize) -> Result<f64, String> {
    if depth > MAX_NESTING {
        return Err(format!("sequences nested more than {MAX_NESTING} deep"));
    }
    if let Some(Value::Array(steps)) = step.get("normalizers").or_else(|| step.get("decoders")) {
        let mut product = 1.0;
        for step in steps {
            product *= growth(step, depth + 1)?;
        }
        return Ok(product);
    }
    let length = |value: Option<&Value>| value.and_then(Value::as_str).map(str::len);
    match step.get("type").and_then(Value::as_str) {
        Some("Replace") => {
            let content = length(step.get("content")).unwrap_or(0) as f64;
            match length(step.get("pattern").and_then(|pattern| pattern.get("String"))) {
                Some(0) => Err("a replacement of the empty text".to_owned()),
                Some(pattern) => Ok((content / pattern as f64).max(1.0)),
                // A regular expression may match a single byte.
                None => Ok(content.max(1.0)),
            }
        }
        Some("Prepend") => Ok(1.0 + length(step.get("prepend")).unwrap_or(0) as f64),
        _ => Ok(1.0),
    }
}

#[derive(serde::Deserialize)]
struct KindOnly {
    model: ModelKind,
}

#[derive(serde::Deserialize)]
struct ModelKind {
    #[serde(rename = "type")]
    kind: Option<String>,
}

fn check_ids(file: &File) -> Result<(), String> {
    let added = file.added_tokens.as_deref().unwrap_or_default();
    if added.len() > MAX_ADDED {
        return Err(format!("more than {MAX_ADDED} added tokens"));
    }
    let mut ids = HashSet::with_capacity(file.model.vocab.len());
    for (token, &id) in &file.model.vocab {
        if id as usize >= MAX_VOCAB {
            return Err(format!("token {token:?} has id {id}, below {MAX_VOCAB} expected"));
        }
        if !ids.insert(id) {
            return Err(format!("id {id} belongs to several tokens, one of them {token:?}"));
        }
    }
    let mut texts: HashMap<&str, u32> = HashMap::new();
    for token in added {
        let (text, id) = (token.content.as_str(), token.id);
        if id as usize >= MAX_VOCAB {
            return Err(format!("added token {text:?} has id {id}, below {MAX_VOCAB} expected"));
        }
        if texts.insert(text, id).is_some() {
            return Err(format!("added token {text:?} is listed twice"));
        }
        match file.model.vocab.get(text) {
            Some(other) if *other != id => {
                return Err(format!("added token {text:?} has id {id}, in the vocabulary {other}"));
            }
            Some(_) => {}
            None if !ids.insert(id) => {
                return Err(format!("added token {text:?} has id {id} of another token"));
            }
            None => {}
        }
    }
    Ok(())
}

fn check_merges(model: &Model) -> Result<(), String> {
    let mut joined = String::new();
    let mut check = |i: usize, a: &str, b: &str| {
        joined.clear();
        joined.push_str(a);
        joined.push_str(b);
        for part in [a, b, joined.as_str()] {
            if !model.vocab.contains_key(part) {
                return Err(format!("merge {i} ({a:?}, {b:?}): {part:?} is not in the vocabulary"));
            }
        }
        Ok(())
    };
    match &model.merges {
        Merges::Pairs(pairs) => {
            for (i, (a, b)) in pairs.iter().enumerate() {
                check(i, a, b)?;
            }
        }
        Merges::Lines(lines) => {
            for (i, line) in lines.iter().enumerate() {
                if line.starts_with("#version") {
                    continue;
                }
                let mut parts = line.split(' ');
                match (parts.next(), parts.next(), parts.next()) {
                    (Some(a), Some(b), None) => check(i, a, b)?,
                    _ => return Err(format!("merge {i} ({line:?}) is not two tokens")),
                }
            }
        }
    }
    Ok(())
}
