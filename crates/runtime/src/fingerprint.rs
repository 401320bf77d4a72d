//! The fingerprint of a run: BLAKE3 over raw logits, so that equal tokens cannot hide unequal
//! numbers.

/// Collects the raw, pre-penalty logits of each position a token is chosen from, in order.
#[derive(Default)]
pub struct Fingerprint {
    hasher: blake3::Hasher,
}

impl Fingerprint {
    /// Adds the logits of one position (full vocabulary), as little-endian f32.
    pub fn add(&mut self, logits: &[f32]) {
        let mut bytes = Vec::with_capacity(size_of_val(logits));
        for logit in logits {
            bytes.extend_from_slice(&logit.to_le_bytes());
        }
        self.hasher.update(&bytes);
    }

    /// The fingerprint so far, in hex.
    pub fn hex(&self) -> String {
        self.hasher.finalize().to_hex().to_string()
    }
}
