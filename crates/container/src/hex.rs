//! Bytes as hexadecimal digits.

use std::fmt::Write;

/// Two lower-case digits for each byte.
pub fn encode(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut digits, byte| {
        // Writing to a string does not fail.
        let _ = write!(digits, "{byte:02x}");
        digits
    })
}

/// The bytes of pairs of digits; `None` for anything else.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let byte = |[high, low]: &[u8; 2]| Some(digit(*high)? << 4 | digit(*low)?);
    rest.is_empty().then(|| pairs.iter().map(byte).collect())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_those_of_the_bytes_and_nothing_else_is_read() {
        assert_eq!(encode(&[0, 0x0a, 0xff]), "000aff");
        assert_eq!(decode("000AfF"), Some(vec![0, 0x0a, 0xff]));
        assert_eq!(decode(""), Some(Vec::new()));
        for text in ["0", "0g", "+1", "é0", "00 "] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
