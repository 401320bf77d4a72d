//! Rule 10: the sign-flipped Walsh-Hadamard rotation of e8 inputs.
//!
//! The input dimension is tiled from the left by blocks of the lowest set bit of what remains.

use crate::Isa;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::multiversion;
use crate::simd::Simd;

/// Largest tile.
const TILE_MAX: usize = 32_768;
/// Seed of the sign generator, plus the tile's size.
const SIGN_SEED: u64 = 417;

/// The rotation of rows of a fixed length.
#[derive(Debug, Clone)]
pub struct Rotation {
    tiles: Vec<usize>,
    /// +1 or -1 per element.
    signs: Vec<f32>,
}

impl Rotation {
    /// The rotation of rows of `len` elements.
    pub fn new(len: usize) -> Rotation {
        let mut rotation = Rotation { tiles: Vec::new(), signs: Vec::with_capacity(len) };
        let mut rest = len;
        while rest > 0 {
            let tile = (1 << rest.trailing_zeros()).min(TILE_MAX);
            rotation.tiles.push(tile);
            rotation.signs.extend(signs(tile));
            rest -= tile;
        }
        rotation
    }

    /// The rotation of rows of `len` elements, made once per process; a model has few lengths.
    pub fn shared(len: usize) -> Arc<Rotation> {
        static MADE: OnceLock<Mutex<HashMap<usize, Arc<Rotation>>>> = OnceLock::new();
        let mut made =
            MADE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        made.entry(len).or_insert_with(|| Arc::new(Rotation::new(len))).clone()
    }

    /// Elements per row.
    pub fn len(&self) -> usize {
        self.signs.len()
    }

    /// Whether rows are empty.
    pub fn is_empty(&self) -> bool {
        self.signs.is_empty()
    }

    /// Rotates one row in place: signs, butterflies, one multiplication by 1/√n.
    pub fn apply(&self, isa: Isa, row: &mut [f32]) {
        assert_eq!(row.len(), self.len(), "a row of another length than the rotation");
        multiply(isa, row, &self.signs);
        self.transform(isa, row);
    }

    /// Undoes [`Rotation::apply`] up to rounding; only converters need it.
    pub fn invert(&self, isa: Isa, row: &mut [f32]) {
        assert_eq!(row.len(), self.len(), "a row of another length than the rotation");
        self.transform(isa, row);
        multiply(isa, row, &self.signs);
    }

    fn transform(&self, isa: Isa, row: &mut [f32]) {
        let mut start = 0;
        for &tile in &self.tiles {
            let scale = (1.0 / (tile as f64).sqrt()) as f32;
            walsh_hadamard(isa, &mut row[start..][..tile], scale);
            start += tile;
        }
    }
}

/// The sign vector of a tile: xorshift64* bytes, one per 8 elements, low bit first, set = -1.
fn signs(tile: usize) -> impl Iterator<Item = f32> {
    let mut state = SIGN_SEED + tile as u64;
    let mut byte = 0;
    (0..tile).map(move |i| {
        if i % 8 == 0 {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            byte = (state.wrapping_mul(2_685_821_657_736_338_717) >> 56) as u8;
        }
        if byte >> (i % 8) & 1 == 1 { -1.0 } else { 1.0 }
    })
}

#[inline(always)]
fn multiply_kernel<S: Simd>(_simd: S, row: &mut [f32], by: &[f32]) {
    for (value, by) in row.iter_mut().zip(by) {
        *value *= by;
    }
}

#[inline(always)]
fn walsh_hadamard_kernel<S: Simd>(_simd: S, row: &mut [f32], scale: f32) {
    let mut len = 1;
    while len < row.len() {
        for pair in row.chunks_exact_mut(2 * len) {
            let (low, high) = pair.split_at_mut(len);
            for (u, v) in low.iter_mut().zip(high) {
                (*u, *v) = (*u + *v, *u - *v);
            }
        }
        len *= 2;
    }
    for value in row {
        *value *= scale;
    }
}

multiversion! {
    fn multiply(isa, row: &mut [f32], by: &[f32]) => multiply_kernel;
    fn walsh_hadamard(isa, row: &mut [f32], scale: f32) => walsh_hadamard_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_are_tiled_by_the_lowest_set_bit() {
        assert_eq!(Rotation::new(6144).tiles, [2048, 4096]);
        assert_eq!(Rotation::new(768).tiles, [256, 512]);
        assert_eq!(Rotation::new(72).tiles, [8, 64]);
        assert_eq!(Rotation::new(65_536).tiles, [32_768, 32_768]);
    }

    #[test]
    fn the_rotation_keeps_length_inverts_and_is_the_same_at_every_level() {
        for len in [1, 6, 72, 256, 768] {
            let rotation = Rotation::new(len);
            let row: Vec<f32> = (0..len).map(|i| (i as f32 * 1.3).cos()).collect();
            let mut reference = row.clone();
            rotation.apply(Isa::SCALAR, &mut reference);
            let norm = |v: &[f32]| v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            assert!((norm(&row) - norm(&reference)).abs() < 1e-4 * norm(&row));
            for isa in Isa::available() {
                let mut rotated = row.clone();
                rotation.apply(isa, &mut rotated);
                assert_eq!(rotated, reference, "{isa:?}");
                rotation.invert(isa, &mut rotated);
                assert!(row.iter().zip(&rotated).all(|(a, b)| (a - b).abs() < 1e-5));
            }
        }
    }
}
