//! The tokenizer of a model: from `tokenizer.json`, or from a rank file with
//! `tokenizer_config.json`.
//!
//! Splitting, added tokens and decoding are those of the `tokenizers` crate. Truncation and
//! padding that a file asks for are dropped: a prompt is never cut silently.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::normalizer::SplitDelimiterBehavior;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    TokenizerImpl,
};

use crate::error::ContainerError;
use crate::family::Family;
use crate::json::{read_optional, read_optional_text};
use crate::rank_bpe::{MAX_RANK_FILE_BYTES, RankBpe, byte_level_bytes};
use crate::tokenizer_config::{FILE as CONFIG_FILE, TokenizerConfig};
use crate::tokenizer_file;

/// Largest `tokenizer.json` read; vocabularies of 200,000 tokens take about 20 MB.
pub const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// How a rank file's text is cut before merging; a rank file does not say.
struct RankSplit {
    /// `tokenizer_class` values of `tokenizer_config.json`.
    classes: &'static [&'static str],
    /// Families that ship such a file without a class of their own.
    families: &'static [Family],
    pattern: &'static str,
}

/// Letters, numbers up to three digits, punctuation with line ends, runs of space.
const WORDS_3_DIGITS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with single digits.
const WORDS_1_DIGIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Chinese runs first, then words split where lower case turns to upper case.
const HAN_AND_CASED_WORDS: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

static RANK_SPLITS: &[RankSplit] = &[
    RankSplit {
        classes: &["ChatGLM4Tokenizer", "GLMTokenizer"],
        families: &[Family::GlmMoeDsa],
        pattern: WORDS_3_DIGITS,
    },
    RankSplit { classes: &["TikTokenTokenizer"], families: &[], pattern: HAN_AND_CASED_WORDS },
    RankSplit { classes: &["QWenTokenizer"], families: &[], pattern: WORDS_1_DIGIT },
];

type RankTokenizer = TokenizerImpl<
    RankBpe,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

enum Inner {
    Json(Box<tokenizers::Tokenizer>),
    Ranks(Box<RankTokenizer>),
}

/// Calls the same method of either kind.
macro_rules! either {
    ($tokenizer:expr, $inner:ident => $call:expr) => {
        match &$tokenizer.inner {
            Inner::Json($inner) => $call,
            Inner::Ranks($inner) => $call,
        }
    };
}

/// A loaded tokenizer. It is immutable and may be shared between threads.
pub struct Tokenizer {
    path: PathBuf,
    inner: Inner,
    byte_level: bool,
    vocab_size: usize,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("path", &self.path)
            .field("vocab_size", &self.vocab_size)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads the tokenizer of a model directory; `None` when it has no tokenizer file.
    ///
    /// `tokenizer.json` comes first, then one `*.tiktoken`, then one `*.model` that holds ranks.
    pub fn load(dir: &Path) -> Result<Option<Tokenizer>, ContainerError> {
        let config = TokenizerConfig::load(dir)?;
        let path = dir.join("tokenizer.json");
        if let Some(json) = read_optional(&path, MAX_TOKENIZER_BYTES)? {
            return Tokenizer::from_json_parts(&json, config.as_ref(), path).map(Some);
        }
        let Some(path) = rank_file(dir)? else { return Ok(None) };
        let Some(ranks) = read_optional(&path, MAX_RANK_FILE_BYTES)? else { return Ok(None) };
        let Some(config) = config else {
            return Err(ContainerError::MissingSpecialTokens {
                path: dir.join(CONFIG_FILE),
                message: "not there, and a rank file alone has no special tokens".to_owned(),
            });
        };
        let family = model_type(dir)?.as_deref().and_then(Family::from_model_type);
        Tokenizer::from_rank_parts(&ranks, &config, family, path).map(Some)
    }

    /// As [`Tokenizer::load`]; having none is an error of its own.
    pub fn load_required(dir: &Path) -> Result<Tokenizer, ContainerError> {
        Tokenizer::load(dir)?.ok_or_else(|| ContainerError::NoTokenizer { dir: dir.to_owned() })
    }

    /// From the text of `tokenizer.json` and, when there is one, of `tokenizer_config.json`.
    pub fn from_json(json: &[u8], config: Option<&str>) -> Result<Tokenizer, ContainerError> {
        let config = match config {
            Some(text) => Some(TokenizerConfig::parse(text, Path::new(CONFIG_FILE))?),
            None => None,
        };
        Tokenizer::from_json_parts(json, config.as_ref(), PathBuf::from("tokenizer.json"))
    }

    /// From the text of a rank file and of `tokenizer_config.json`; `family` decides how text is
    /// cut when the configuration names no known tokenizer class.
    pub fn from_ranks(
        ranks: &[u8],
        config: &str,
        family: Option<Family>,
    ) -> Result<Tokenizer, ContainerError> {
        let config = TokenizerConfig::parse(config, Path::new(CONFIG_FILE))?;
        Tokenizer::from_rank_parts(ranks, &config, family, PathBuf::from("ranks.tiktoken"))
    }

    fn from_json_parts(
        json: &[u8],
        config: Option<&TokenizerConfig>,
        path: PathBuf,
    ) -> Result<Tokenizer, ContainerError> {
        let unusable = |message: String| ContainerError::Tokenizer { path: path.clone(), message };
        let added = tokenizer_file::check(json).map_err(unusable)?;
        let mut inner =
            guard(|| tokenizers::Tokenizer::from_bytes(json).map_err(|e| e.to_string()))
                .map_err(unusable)?;
        for (content, id) in added {
            // The library numbers added tokens itself; another number than the file's would be
            // another token to the model.
            let given = inner.token_to_id(&content);
            if given != Some(id) {
                return Err(unusable(format!(
                    "added token {content:?} has id {id}, but {given:?} by its place in the file"
                )));
            }
        }
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| unusable(e.to_string()))?;
        if let Some(config) = config {
            guard(|| add_tokens(&mut inner, config)).map_err(unusable)?;
        }
        let byte_level = is_byte_level(inner.get_decoder());
        let ids = inner.get_vocab(true).into_values();
        let vocab_size = ids.max().map_or(0, |id| id as usize + 1);
        Ok(Tokenizer { path, inner: Inner::Json(Box::new(inner)), byte_level, vocab_size })
    }

    fn from_rank_parts(
        ranks: &[u8],
        config: &TokenizerConfig,
        family: Option<Family>,
        path: PathBuf,
    ) -> Result<Tokenizer, ContainerError> {
        let unusable = |message: String| ContainerError::Tokenizer { path: path.clone(), message };
        let missing = |message: &str| ContainerError::MissingSpecialTokens {
            path: config.path.clone(),
            message: message.to_owned(),
        };
        let mut model = RankBpe::parse(ranks).map_err(|problem| {
            unusable(format!(
                "not a rank file (lines of base64 and rank; SentencePiece is not implemented): {problem}"
            ))
        })?;
        let added = config.added.as_ref().filter(|added| !added.is_empty()).ok_or_else(|| {
            missing("added_tokens_decoder, the table of special tokens, is absent")
        })?;
        for (id, entry) in added {
            model.add_special(*id, &entry.content).map_err(unusable)?;
        }
        let vocab_size = model.max_id() as usize + 1;
        for text in config.special_texts() {
            if !added.values().any(|entry| entry.content == text) {
                return Err(missing(&format!(
                    "special token {text:?} is not in added_tokens_decoder"
                )));
            }
        }
        let class = config.class.as_deref();
        let split = RANK_SPLITS
            .iter()
            .find(|split| class.is_some_and(|class| split.classes.contains(&class)))
            .or_else(|| {
                RANK_SPLITS
                    .iter()
                    .find(|s| family.is_some_and(|family| s.families.contains(&family)))
            });
        let Some(split) = split else {
            let known: Vec<&str> = RANK_SPLITS.iter().flat_map(|s| s.classes).copied().collect();
            return Err(unusable(format!(
                "how to cut text is not known for tokenizer_class {class:?} (known: {known:?}); use a \
                 tokenizer.json instead"
            )));
        };
        let pattern = SplitPattern::Regex(split.pattern.to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
            .map_err(|e| unusable(e.to_string()))?;
        let mut inner: RankTokenizer = TokenizerImpl::new(model);
        inner.with_pre_tokenizer(Some(split));
        inner.with_decoder(Some(ByteLevel::default()));
        let tokens = added.values().map(|entry| {
            AddedToken::from(entry.content.clone(), entry.special)
                .lstrip(entry.lstrip)
                .rstrip(entry.rstrip)
                .single_word(entry.single_word)
                .normalized(entry.normalized)
        });
        inner.add_tokens(tokens).map_err(|e| unusable(e.to_string()))?;
        Ok(Tokenizer { path, inner: Inner::Ranks(Box::new(inner)), byte_level: true, vocab_size })
    }

    /// The file it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Token ids of a text. `add_special` runs the file's post-processor (which may add tokens);
    /// texts that already carry their special tokens, as chat templates produce, want `false`.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, ContainerError> {
        guard(|| {
            either!(self, inner => inner.encode_fast(text, add_special))
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(|e| e.to_string())
        })
        .map_err(|message| ContainerError::Tokenize { message })
    }

    /// The text of ids. Bytes that form no character become U+FFFD; unknown ids are skipped.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, ContainerError> {
        guard(|| either!(self, inner => inner.decode(ids, skip_special)).map_err(|e| e.to_string()))
            .map_err(|message| ContainerError::Tokenize { message })
    }

    /// The bytes that a token stands for, which may be part of a character; `None` for an id
    /// without a token, and for every id when [`Tokenizer::is_byte_level`] is false.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        if !self.byte_level {
            return None;
        }
        let token = either!(self, inner => inner.id_to_token(id))?;
        Some(byte_level_bytes(&token).unwrap_or_else(|| token.into_bytes()))
    }

    /// Whether tokens are runs of bytes, so that [`Tokenizer::token_bytes`] works.
    pub fn is_byte_level(&self) -> bool {
        self.byte_level
    }

    /// The id of a token, as written in the vocabulary or among the added tokens.
    pub fn token_id(&self, content: &str) -> Option<u32> {
        either!(self, inner => inner.token_to_id(content))
    }

    /// Whether decoding with `skip_special` leaves this id out.
    pub fn is_special(&self, id: u32) -> bool {
        either!(self, inner => {
            let added = inner.get_added_vocabulary();
            added.simple_id_to_token(id).is_some_and(|token| added.is_special_token(&token))
        })
    }

    /// One more than the largest id. The model's vocabulary is often larger.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }
}

/// Runs third-party code on data from a file; a panic becomes an error of this file alone.
fn guard<T>(call: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(format!("the tokenizer stopped: {}", text.unwrap_or_default()))
    })
}

/// Adds what only `tokenizer_config.json` knows, at the ids that it states.
fn add_tokens(inner: &mut tokenizers::Tokenizer, config: &TokenizerConfig) -> Result<(), String> {
    for (&id, entry) in config.added.iter().flatten() {
        let token = AddedToken::from(entry.content.clone(), entry.special)
            .lstrip(entry.lstrip)
            .rstrip(entry.rstrip)
            .single_word(entry.single_word)
            .normalized(entry.normalized);
        let known = inner.token_to_id(&entry.content);
        if known.is_some_and(|known| known != id) {
            return Err(format!(
                "token {:?} has id {} here and {id} in {CONFIG_FILE}; the files do not belong together",
                entry.content,
                known.unwrap_or_default()
            ));
        }
        if known.is_some() && inner.get_added_vocabulary().get_vocab().contains_key(&entry.content)
        {
            continue;
        }
        inner.add_tokens([token]).map_err(|e| e.to_string())?;
        if inner.token_to_id(&entry.content) != Some(id) {
            return Err(format!(
                "token {:?} has id {id} in {CONFIG_FILE}, which leaves a gap after the vocabulary; the files \
                 do not belong together",
                entry.content
            ));
        }
    }
    // Named special tokens that are ordinary vocabulary entries are matched whole from here on.
    for text in config.special_texts() {
        let known = inner.token_to_id(text).is_some();
        if known && !inner.get_added_vocabulary().is_special_token(text) {
            let token = AddedToken::from(text.to_owned(), true);
            inner.add_special_tokens([token]).map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

fn is_byte_level(decoder: Option<&DecoderWrapper>) -> bool {
    match decoder {
        Some(DecoderWrapper::ByteLevel(_)) => true,
        Some(DecoderWrapper::Sequence(sequence)) => {
            matches!(sequence.get_decoders(), [DecoderWrapper::ByteLevel(_)])
        }
        _ => false,
    }
}

/// The rank file of a directory: `*.tiktoken` before `*.model`; two of a kind are refused.
fn rank_file(dir: &Path) -> Result<Option<PathBuf>, ContainerError> {
    let list = |e| ContainerError::io(dir, "list the model directory", e);
    for extension in ["tiktoken", "model"] {
        let mut found = Vec::new();
        for entry in fs::read_dir(dir).map_err(list)? {
            let path = entry.map_err(list)?.path();
            if path.extension().is_some_and(|ext| ext == extension) {
                found.push(path);
            }
        }
        found.sort();
        if let [first, second, ..] = found.as_slice() {
            return Err(ContainerError::Tokenizer {
                path: first.clone(),
                message: format!("{} is there too; keep the one of this model", second.display()),
            });
        }
        if let Some(path) = found.pop() {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

fn model_type(dir: &Path) -> Result<Option<String>, ContainerError> {
    #[derive(serde::Deserialize)]
    struct ModelType {
        model_type: Option<String>,
    }
    let path = dir.join("config.json");
    let limit = crate::config_file::MAX_CONFIG_BYTES;
    let Some(text) = read_optional_text(&path, limit, "configuration")? else { return Ok(None) };
    let parsed: ModelType = serde_json::from_str(&text).map_err(|e| ContainerError::Json {
        path,
        what: "configuration",
        message: e.to_string(),
    })?;
    Ok(parsed.model_type)
}
