//! Parts of messages that come in pieces.

/// A part of fixed length, gathered from pieces.
#[derive(Clone, Debug)]
pub(super) struct Part<const N: usize> {
    bytes: [u8; N],
    have: usize,
}

impl<const N: usize> Default for Part<N> {
    fn default() -> Self {
        Part { bytes: [0; N], have: 0 }
    }
}

impl<const N: usize> Part<N> {
    /// Takes what is missing from the front of `input`. Returns the part once it is whole, and
    /// begins the next one.
    pub fn take(&mut self, input: &mut &[u8]) -> Option<[u8; N]> {
        let wanted = (N - self.have).min(input.len());
        let (taken, rest) = input.split_at(wanted);
        self.bytes[self.have..self.have + wanted].copy_from_slice(taken);
        self.have += wanted;
        *input = rest;
        if self.have < N {
            return None;
        }
        self.have = 0;
        Some(self.bytes)
    }

    /// Whether some of a part has come, and not all.
    pub fn is_begun(&self) -> bool {
        self.have > 0
    }
}

/// Little-endian f32 numbers, gathered from pieces.
#[derive(Clone, Debug, Default)]
pub(super) struct Floats {
    left: usize,
    split: Part<4>,
    out: Vec<f32>,
}

/// Numbers for which memory is taken before they come: a small batch needs no second allocation.
const RESERVED: usize = 64 << 10;

impl Floats {
    /// Begins to gather `count` numbers.
    pub fn begin(&mut self, count: usize) {
        self.left = count;
        self.out = Vec::with_capacity(count.min(RESERVED));
    }

    /// Takes numbers from the front of `input`. Returns all of them once the last has come.
    pub fn take(&mut self, input: &mut &[u8]) -> Option<Vec<f32>> {
        while self.left > 0 {
            if self.split.is_begun() || input.len() < 4 {
                let number = self.split.take(input)?;
                self.out.push(f32::from_le_bytes(number));
                self.left -= 1;
                continue;
            }
            let (numbers, _) = input.as_chunks::<4>();
            let count = numbers.len().min(self.left);
            self.out.extend(numbers[..count].iter().map(|number| f32::from_le_bytes(*number)));
            self.left -= count;
            *input = &input[4 * count..];
        }
        Some(std::mem::take(&mut self.out))
    }
}

/// Appends numbers as little-endian bytes.
pub(super) fn put_floats(out: &mut Vec<u8>, numbers: &[f32]) {
    if cfg!(target_endian = "little") {
        out.extend_from_slice(bytemuck::cast_slice(numbers));
    } else {
        numbers.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
    }
}

/// Writes numbers as little-endian bytes to the front of `out`, which has room for them.
pub(crate) fn put_floats_at(out: &mut [u8], numbers: &[f32]) {
    for (to, number) in out.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
        *to = number.to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_pieces_of_every_size() {
        let numbers: Vec<f32> = (0..37).map(|at| at as f32 * 0.37 - 5.0).collect();
        let mut bytes = Vec::new();
        put_floats(&mut bytes, &numbers);
        bytes.extend_from_slice(b"rest");
        for piece in 1..bytes.len() {
            let mut floats = Floats::default();
            floats.begin(numbers.len());
            let mut found = None;
            let mut rest = 0;
            for piece in bytes.chunks(piece) {
                let mut piece = piece;
                if found.is_none() {
                    found = floats.take(&mut piece);
                }
                rest += if found.is_some() { piece.len() } else { 0 };
            }
            assert_eq!(found.as_ref(), Some(&numbers), "{piece}");
            assert_eq!(rest, 4, "{piece}");
        }
    }
}
