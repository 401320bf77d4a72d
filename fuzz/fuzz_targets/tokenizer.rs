//! Tokenizer files: the first byte says which, a NUL byte ends the first of two texts.
//!
//! Panics inside the tokenizer library that the crate turns into errors are no findings.

#![no_main]

use container::{Family, Tokenizer};
use libfuzzer_sys::fuzz_target;

const TEXT: &str = "Hello,  wörld 123 你好 <x>\n\t newlines\r\n \u{1F600}";

fuzz_target!(
    init: std::panic::set_hook(Box::new(|_| ())),
    |data: &[u8]| {
        let Some((kind, data)) = data.split_first() else { return };
        let mut texts = data.splitn(2, |b| *b == 0);
        let (file, config) = (texts.next().unwrap_or_default(), texts.next());
        let Ok(config) = config.map(std::str::from_utf8).transpose() else { return };
        let tokenizer = if kind % 2 == 0 {
            Tokenizer::from_json(file, config)
        } else {
            Tokenizer::from_ranks(file, config.unwrap_or("{}"), Some(Family::GlmMoeDsa))
        };
        let Ok(tokenizer) = tokenizer else { return };
        let Ok(ids) = tokenizer.encode(TEXT, false) else { return };
        for id in ids.iter().copied().chain([0, 1, 255, u32::MAX]) {
            assert!(!ids.contains(&id) || (id as usize) < tokenizer.vocab_size());
            let _ = tokenizer.token_bytes(id);
            let _ = tokenizer.is_special(id);
        }
        let _ = tokenizer.decode(&ids, true);
        if kind % 2 == 1 && tokenizer.encode("<", false).is_ok() {
            let bytes = ids.iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap_or_default());
            let _ = String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned();
        }
    }
);
