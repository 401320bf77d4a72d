//! Tokenizers: both spellings of merges, special tokens, exact bytes, rank files.

use std::fs;
use std::path::Path;

use container::{ContainerError, Family, Tokenizer};
use serde_json::{Value, json};

/// Byte-level vocabulary: the 256 bytes as ids 0..256, then `extra` tokens.
fn byte_vocab(extra: &[&str]) -> Value {
    let mut vocab = serde_json::Map::new();
    let mut shifted = 0x100;
    for byte in 0..=255u32 {
        let printable = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let c = if printable { byte } else { shifted };
        shifted += u32::from(!printable);
        vocab.insert(char::from_u32(c).unwrap().to_string(), json!(byte));
    }
    for token in extra {
        let id = vocab.len();
        vocab.insert((*token).to_owned(), json!(id));
    }
    Value::Object(vocab)
}

fn tokenizer_json(extra: &[&str], merges: Value, added: Value) -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
            "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": false,
            "vocab": byte_vocab(extra), "merges": merges}
    })
}

fn added(id: u32, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": special})
}

fn load(json: &Value, config: Option<&Value>) -> Result<Tokenizer, ContainerError> {
    let config = config.map(Value::to_string);
    Tokenizer::from_json(json.to_string().as_bytes(), config.as_deref())
}

#[test]
fn both_spellings_of_merges() {
    let extra = ["he", "ll", "llo", "hello"];
    let pairs = json!([["h", "e"], ["l", "l"], ["ll", "o"], ["he", "llo"]]);
    let lines = json!(["h e", "l l", "ll o", "he llo"]);
    for merges in [pairs, lines] {
        let tokenizer = load(&tokenizer_json(&extra, merges, json!([])), None).unwrap();
        assert_eq!(tokenizer.encode("hello", false).unwrap(), [259]);
        assert_eq!(tokenizer.encode("hell", false).unwrap(), [256, 257]);
        assert_eq!(tokenizer.vocab_size(), 260);
    }
}

#[test]
fn special_tokens_ids_and_bytes() {
    let file = tokenizer_json(
        &["Ġa"],
        json!([["Ġ", "a"]]),
        json!([added(257, "<|end|>", true), added(258, "<tool>", false)]),
    );
    let config = json!({"eos_token": "<|end|>", "bos_token": {"content": "<s>"},
        "added_tokens_decoder": {"259": {"content": "<s>", "special": true}}});
    let tokenizer = load(&file, Some(&config)).unwrap();
    let ids = tokenizer.encode("<s>x a<tool><|end|>é", false).unwrap();
    assert_eq!(ids, [259, 120, 256, 258, 257, 195, 169]);
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), "<s>x a<tool><|end|>é");
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "x a<tool>é");
    assert_eq!(tokenizer.token_id("<|end|>"), Some(257));
    assert_eq!(tokenizer.token_id("<nothing>"), None);
    assert!(tokenizer.is_special(257) && tokenizer.is_special(259) && !tokenizer.is_special(258));
    assert_eq!(tokenizer.token_bytes(256).unwrap(), b" a");
    assert_eq!(tokenizer.token_bytes(195).unwrap(), [0xC3]);
    assert_eq!(tokenizer.token_bytes(9999), None);
    assert_eq!(tokenizer.vocab_size(), 260);
    let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap()).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), "<s>x a<tool><|end|>é");
}

#[test]
fn a_stated_cut_of_prompts_is_dropped() {
    let mut file = tokenizer_json(&[], json!([]), json!([]));
    file["truncation"] = json!({"direction": "Right", "max_length": 2,
        "strategy": "LongestFirst", "stride": 0});
    file["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Right",
        "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"});
    let tokenizer = load(&file, None).unwrap();
    assert_eq!(tokenizer.encode("hello", false).unwrap().len(), 5);
}

#[test]
fn inconsistent_files_are_refused() {
    let base = tokenizer_json(&["ab"], json!([["a", "b"]]), json!([added(257, "<x>", true)]));
    assert!(load(&base, None).is_ok());
    let refused = |change: &dyn Fn(&mut Value), config: Option<Value>, word: &str| {
        let mut file = base.clone();
        change(&mut file);
        let error = load(&file, config.as_ref()).unwrap_err().to_string();
        assert!(error.contains(word), "{error} lacks {word:?}");
    };
    refused(&|f| f["model"]["merges"] = json!([["a", "zz"]]), None, "merge 0");
    refused(&|f| f["model"]["merges"] = json!([["b", "a"]]), None, "\"ba\"");
    refused(&|f| f["model"]["merges"] = json!(["a b c"]), None, "not two tokens");
    refused(&|f| f["model"]["dropout"] = json!(0.5), None, "dropout");
    refused(&|f| f["model"]["continuing_subword_prefix"] = json!("##"), None, "continuing");
    refused(&|f| f["model"]["vocab"]["q"] = json!(3), None, "several tokens");
    refused(&|f| f["model"]["vocab"]["q"] = json!(4_294_967_295u32), None, "4294967295");
    refused(&|f| f["model"]["type"] = json!("Unigram"), None, "Unigram");
    refused(&|f| f["added_tokens"][0]["id"] = json!(4_294_967_295u32), None, "4294967295");
    refused(&|f| f["added_tokens"][0]["id"] = json!(97), None, "another token");
    let moved = json!({"added_tokens_decoder": {"300": {"content": "<x>", "special": true}}});
    refused(&|_| (), Some(moved), "do not belong together");
    let gap = json!({"added_tokens_decoder": {"400": {"content": "<y>", "special": true}}});
    refused(&|_| (), Some(gap), "gap");
}

#[test]
fn every_cut_of_a_tokenizer_file_is_an_error() {
    let text =
        tokenizer_json(&["ab"], json!([["a", "b"]]), json!([added(257, "<x>", true)])).to_string();
    for cut in 0..text.len() {
        assert!(Tokenizer::from_json(&text.as_bytes()[..cut], None).is_err(), "cut at {cut}");
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits =
            group.iter().fold(0u32, |bits, b| bits << 8 | u32::from(*b)) << (8 * (3 - group.len()));
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i) & 63) as usize];
            text.push(if i <= group.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

fn rank_file(extra: &[&str]) -> String {
    let bytes = (0..=255u8).map(|b| vec![b]);
    let tokens = bytes.chain(extra.iter().map(|t| t.as_bytes().to_vec()));
    tokens.enumerate().map(|(rank, token)| format!("{} {rank}\n", base64(&token))).collect()
}

fn rank_config() -> Value {
    json!({"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "added_tokens_decoder": {
        "300": {"content": "[BOS]", "special": true}, "301": {"content": "<|im_end|>", "special": true}}})
}

/// `newlines` cannot be reached by merging its own bytes: a list of merges rebuilt from the ranks
/// splits it, rank BPE gives the one token. Inside a longer word it is never formed.
#[test]
fn rank_bpe_is_not_a_list_of_merges() {
    let extra = ["ew", "li", "ewli", "new", "lines", "newlines", "ne", "es", "nes"];
    let tokenizer =
        Tokenizer::from_ranks(rank_file(&extra).as_bytes(), &rank_config().to_string(), None)
            .unwrap();
    let id = |token: &str| 256 + extra.iter().position(|t| *t == token).unwrap() as u32;
    let byte = |b: u8| u32::from(b);
    assert_eq!(tokenizer.encode("newlines", false).unwrap(), [id("newlines")]);
    // ew, then li, then ewli take the pieces that new and lines would need.
    assert_eq!(
        tokenizer.encode("newlinesx", false).unwrap(),
        [byte(b'n'), id("ewli"), id("nes"), byte(b'x')]
    );
    // The same vocabulary as merges, built the usual way, gives other ids.
    let merges = json!([
        ["e", "w"],
        ["l", "i"],
        ["ew", "li"],
        ["n", "ew"],
        ["n", "e"],
        ["e", "s"],
        ["n", "es"],
        ["ne", "s"]
    ]);
    let rebuilt = load(&tokenizer_json(&extra, merges, json!([])), None).unwrap();
    assert_eq!(rebuilt.encode("newlines", false).unwrap(), [byte(b'n'), id("ewli"), id("nes")]);

    let ids = tokenizer.encode("[BOS]newlines<|im_end|>", false).unwrap();
    assert_eq!(ids, [300, id("newlines"), 301]);
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "newlines");
    assert_eq!(tokenizer.token_bytes(id("newlines")).unwrap(), b"newlines");
    assert!(tokenizer.is_special(300) && !tokenizer.is_special(256));
    assert_eq!(tokenizer.vocab_size(), 302);
    assert_eq!(tokenizer.token_id("newlines"), Some(id("newlines")));
}

#[test]
fn rank_files_cut_text_by_the_class_of_the_tokenizer() {
    let extra = ["12", "123", "中文", "aB"];
    let encode = |class: &str, family, text: &str| {
        let mut config = rank_config();
        config["tokenizer_class"] = json!(class);
        let ranks = rank_file(&extra);
        let tokenizer =
            Tokenizer::from_ranks(ranks.as_bytes(), &config.to_string(), family).unwrap();
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        ids
    };
    let byte = |b: u8| u32::from(b);
    // Single digits, or runs of at most three.
    assert_eq!(encode("QWenTokenizer", None, "123"), [byte(b'1'), byte(b'2'), byte(b'3')]);
    assert_eq!(encode("TikTokenTokenizer", None, "1231"), [257, byte(b'1')]);
    assert_eq!(encode("Unheard", Some(Family::GlmMoeDsa), "1231"), [257, byte(b'1')]);
    // Chinese runs are cut from Latin ones, and words where case rises.
    assert_eq!(encode("TikTokenTokenizer", None, "a中文"), [byte(b'a'), 258]);
    assert_eq!(encode("TikTokenTokenizer", None, "aB"), [byte(b'a'), byte(b'B')]);
    assert_eq!(encode("QWenTokenizer", None, "aB"), [259]);
    // Long unbroken input stays fast.
    let long = "a".repeat(300_000);
    assert_eq!(encode("QWenTokenizer", None, &long).len(), 300_000);
}

#[test]
fn rank_files_without_their_special_tokens() {
    let ranks = rank_file(&[]);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("qwen.tiktoken"), &ranks).unwrap();
    let error = Tokenizer::load(dir.path()).unwrap_err();
    assert!(matches!(error, ContainerError::MissingSpecialTokens { .. }), "{error}");
    for (config, word) in [
        (json!({"tokenizer_class": "QWenTokenizer"}), "added_tokens_decoder"),
        (json!({"added_tokens_decoder": {"300": {"content": "<a>"}}, "eos_token": "<b>"}), "<b>"),
    ] {
        let error = Tokenizer::from_ranks(ranks.as_bytes(), &config.to_string(), None).unwrap_err();
        assert!(matches!(error, ContainerError::MissingSpecialTokens { .. }), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    let unknown = json!({"added_tokens_decoder": {"300": {"content": "<a>"}}});
    let error = Tokenizer::from_ranks(ranks.as_bytes(), &unknown.to_string(), None).unwrap_err();
    assert!(error.to_string().contains("tokenizer_class"), "{error}");
    let clash = json!({"added_tokens_decoder": {"97": {"content": "<a>"}}});
    let error = Tokenizer::from_ranks(ranks.as_bytes(), &clash.to_string(), None).unwrap_err();
    assert!(error.to_string().contains("which is a rank"), "{error}");
}

#[test]
fn broken_rank_files() {
    let config = rank_config().to_string();
    let good = rank_file(&[]);
    for (text, word) in [
        (String::new(), "256"),
        ("YQ==".to_owned(), "line 1"),
        ("YQ== x".to_owned(), "not a token id"),
        ("Y!== 1".to_owned(), "base64"),
        ("YQ== 99999999999".to_owned(), "not a token id"),
        (format!("{good}YQ== 999"), "twice"),
        (format!("{good}YWE= 97"), "rank 97"),
        ("\u{8}\u{1}".to_owned(), "SentencePiece"),
    ] {
        let error = Tokenizer::from_ranks(text.as_bytes(), &config, None).unwrap_err().to_string();
        assert!(error.contains(word), "{error} lacks {word:?}");
    }
}

#[test]
fn no_tokenizer_is_its_own_case() {
    let dir = tempfile::tempdir().unwrap();
    assert!(Tokenizer::load(dir.path()).unwrap().is_none());
    let error = Tokenizer::load_required(dir.path()).unwrap_err();
    assert!(matches!(error, ContainerError::NoTokenizer { .. }), "{error}");
}

#[test]
fn the_bundled_tokenizer_round_trips() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/hummingbird");
    if !dir.join("tokenizer.json").is_file() {
        eprintln!("SKIPPED: models/hummingbird has no tokenizer yet");
        return;
    }
    let tokenizer = Tokenizer::load_required(&dir).unwrap();
    for token in Family::GlmMoeDsa.row().scoring_prefix {
        assert!(tokenizer.is_special(tokenizer.token_id(token).unwrap()));
    }
    let text = "Hello, world! fn main() { println!(\"{}\", 3.14); } 你好，世界 \u{1F600}\r\n\t end";
    let ids = tokenizer.encode(text, false).unwrap();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap()).collect();
    assert_eq!(bytes, text.as_bytes());
}

#[test]
fn replacements_that_blow_a_text_up_are_refused() {
    let replace = |pattern: &str, content: &str| {
        let pattern = json!({ "String": pattern });
        json!({"type": "Replace", "pattern": pattern, "content": content})
    };
    let mut file = tokenizer_json(&[], json!([]), json!([]));
    file["normalizer"] = replace(" ", "\u{2581}");
    load(&file, None).unwrap();
    for bad in [
        replace("", "x"),
        replace("e", &"e".repeat(1000)),
        json!({"type": "Sequence", "normalizers": vec![replace("e", "eeee"); 4]}),
    ] {
        file["normalizer"] = bad;
        let error = load(&file, None).unwrap_err().to_string();
        assert!(error.contains("replacement"), "{error}");
    }
}

#[test]
fn an_added_token_keeps_the_id_of_the_file_or_is_refused() {
    let vocab = byte_vocab(&[]).as_object().unwrap().len() as u32;
    load(&tokenizer_json(&[], json!([]), json!([added(vocab, "<x>", true)])), None).unwrap();
    let far = tokenizer_json(&[], json!([]), json!([added(vocab + 7, "<x>", true)]));
    let error = load(&far, None).unwrap_err().to_string();
    assert!(error.contains("<x>"), "{error}");
}
