//! `tokenizer_config.json`: special tokens, the class of the tokenizer and the chat template.
//!
//! Only reads the file; the tokenizer and the template use it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::config::MAX_VOCAB;
use crate::error::ContainerError;
use crate::json::{UniqueMap, read_optional_text};

/// Name of the file.
pub const FILE: &str = "tokenizer_config.json";
/// Largest file read; a file with a long template and 1,000 special tokens has about 250 kB.
pub const MAX_BYTES: u64 = 16 << 20;
/// Most special tokens; the largest vocabularies have about 1,000.
pub const MAX_ADDED: usize = 1 << 16;
/// Named tokens that templates and encoders know.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"];

/// One entry of `added_tokens_decoder`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct AddedEntry {
    pub(crate) content: String,
    pub(crate) special: bool,
    pub(crate) lstrip: bool,
    pub(crate) rstrip: bool,
    pub(crate) single_word: bool,
    pub(crate) normalized: bool,
}

/// What this program uses of the file.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct TokenizerConfig {
    pub(crate) path: PathBuf,
    /// By id; `None` when the file has no such table.
    pub(crate) added: Option<BTreeMap<u32, AddedEntry>>,
    /// Texts of the named tokens, by field name.
    pub(crate) named: Vec<(&'static str, String)>,
    /// Further special tokens.
    pub(crate) additional: Vec<String>,
    pub(crate) class: Option<String>,
    pub(crate) chat_template: Option<Value>,
}

#[derive(serde::Deserialize)]
struct RawAdded {
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    normalized: bool,
}

impl TokenizerConfig {
    /// Reads the file of a directory; `None` without one.
    pub(crate) fn load(dir: &Path) -> Result<Option<TokenizerConfig>, ContainerError> {
        let path = dir.join(FILE);
        match read_optional_text(&path, MAX_BYTES, "tokenizer configuration")? {
            Some(text) => TokenizerConfig::parse(&text, &path).map(Some),
            None => Ok(None),
        }
    }

    pub(crate) fn parse(text: &str, path: &Path) -> Result<TokenizerConfig, ContainerError> {
        let bad = |message: String| ContainerError::Json {
            path: path.to_owned(),
            what: "tokenizer configuration",
            message,
        };
        let map: UniqueMap<Value> = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
        let mut config = TokenizerConfig { path: path.to_owned(), ..TokenizerConfig::default() };
        for (key, value) in map.0 {
            match key.as_str() {
                "added_tokens_decoder" if !value.is_null() => {
                    config.added = Some(added(value).map_err(bad)?);
                }
                "additional_special_tokens" | "extra_special_tokens" => {
                    let items: Vec<&Value> = match &value {
                        Value::Array(items) => items.iter().collect(),
                        Value::Object(items) => items.values().collect(),
                        _ => Vec::new(),
                    };
                    config.additional.extend(items.into_iter().filter_map(token_text));
                }
                "tokenizer_class" => config.class = value.as_str().map(str::to_owned),
                "chat_template" if !value.is_null() => config.chat_template = Some(value),
                key => {
                    if let Some(name) = NAMED.into_iter().find(|name| *name == key)
                        && let Some(text) = token_text(&value)
                    {
                        config.named.push((name, text));
                    }
                }
            }
        }
        if config.additional.len() > MAX_ADDED {
            return Err(bad(format!("more than {MAX_ADDED} special tokens")));
        }
        Ok(config)
    }

    /// Every text that is a special token by this file.
    pub(crate) fn special_texts(&self) -> impl Iterator<Item = &str> {
        let named = self.named.iter().map(|(_, text)| text.as_str());
        named.chain(self.additional.iter().map(String::as_str))
    }
}

fn added(value: Value) -> Result<BTreeMap<u32, AddedEntry>, String> {
    let Value::Object(map) = value else {
        return Err("added_tokens_decoder is not an object".to_owned());
    };
    if map.len() > MAX_ADDED {
        return Err(format!("added_tokens_decoder has more than {MAX_ADDED} entries"));
    }
    let mut table = BTreeMap::new();
    for (key, value) in map {
        let id: u32 = key
            .parse()
            .ok()
            .filter(|id| (*id as usize) < MAX_VOCAB)
            .ok_or_else(|| format!("added_tokens_decoder: {key:?} is not a token id"))?;
        let raw: RawAdded = serde_json::from_value(value)
            .map_err(|e| format!("added_tokens_decoder, token {id}: {e}"))?;
        let entry = AddedEntry {
            content: raw.content,
            special: raw.special,
            lstrip: raw.lstrip,
            rstrip: raw.rstrip,
            single_word: raw.single_word,
            normalized: raw.normalized,
        };
        if let Some(first) = table.insert(id, entry) {
            return Err(format!("added_tokens_decoder: id {id} twice, first {:?}", first.content));
        }
    }
    Ok(table)
}

/// A token is written as text or as an object with `content`.
fn token_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(map) => map.get("content")?.as_str().map(str::to_owned),
        _ => None,
    }
    .filter(|text| !text.is_empty())
}
