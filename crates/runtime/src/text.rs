//! Streaming bytes as text without ever cutting a character.

/// Holds back the bytes of an unfinished character.
#[derive(Debug, Default)]
pub struct TextStream {
    pending: Vec<u8>,
}

impl TextStream {
    /// Adds bytes and returns the text that is complete. Bytes that can never become a character
    /// come out as U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut out = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(text) => {
                    out.push_str(text);
                    self.pending.clear();
                    return out;
                }
                Err(error) => {
                    let (valid, rest) = self.pending.split_at(error.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        None => {
                            self.pending = rest.to_vec();
                            return out;
                        }
                        Some(invalid) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            self.pending = rest[invalid..].to_vec();
                        }
                    }
                }
            }
        }
    }

    /// What is left at the end; an unfinished character comes out as U+FFFD.
    pub fn finish(&mut self) -> String {
        let rest = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&rest).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cut_anywhere_comes_out_whole() {
        let text = "a é 題詩 🐦 z";
        for size in 1..text.len() {
            let mut stream = TextStream::default();
            let mut out = String::new();
            for piece in text.as_bytes().chunks(size) {
                let part = stream.push(piece);
                assert!(!part.contains(char::REPLACEMENT_CHARACTER));
                out.push_str(&part);
            }
            out.push_str(&stream.finish());
            assert_eq!(out, text, "pieces of {size}");
        }
    }

    #[test]
    fn impossible_bytes_are_replaced_and_the_rest_goes_on() {
        let mut stream = TextStream::default();
        assert_eq!(stream.push(b"a\xffb\xe9"), "a\u{fffd}b");
        assert_eq!(stream.push(b"\xa1\x8c"), "\u{984c}");
        assert_eq!(stream.push(b"\xe9"), "");
        assert_eq!(stream.finish(), "\u{fffd}");
    }
}
