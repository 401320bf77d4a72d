//! Matrix tiles: who may use them, and for how long.

use std::cell::Cell;
use std::marker::PhantomData;

use super::{BlockProducts, Panel, Simd, WORDS_MAX};

/// Leave to use matrix tiles: proof of the hardware's, from [`Isa::matrix_tiles`], or emulation.
///
/// [`Isa::matrix_tiles`]: crate::Isa::matrix_tiles
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MatrixTiles {
    /// The CPU has them and the system lets this process use them.
    Hardware(HardwareTiles),
    /// Products made one by one, for tests of the way that leads to them.
    Emulated,
}

/// Proof that the hardware's tiles may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HardwareTiles(());

impl HardwareTiles {
    /// Called where a level that has tiles was proved.
    pub(crate) const fn proved() -> HardwareTiles {
        HardwareTiles(())
    }
}

thread_local! {
    /// Whether this thread's tiles are in use.
    static IN_USE: Cell<bool> = const { Cell::new(false) };
}

/// The tiles of this thread, shaped for blocks of one length until this is dropped.
pub struct TileSession<S: Simd> {
    simd: S,
    tiles: MatrixTiles,
    words: usize,
    /// Tile registers belong to the thread.
    _thread: PhantomData<*const ()>,
}

impl<S: Simd> TileSession<S> {
    /// Shapes the tiles for blocks of `words` words.
    ///
    /// # Panics
    /// When this thread has a session already.
    #[inline(always)]
    pub fn begin(simd: S, tiles: MatrixTiles, words: usize) -> TileSession<S> {
        assert!((1..=WORDS_MAX).contains(&words));
        assert!(!IN_USE.replace(true), "this thread's tiles are in use");
        if S::MATRIX_TILES
            && let MatrixTiles::Hardware(_) = tiles
        {
            // SAFETY: the proof says that tiles may be used.
            unsafe { simd.tiles_begin(words) };
        }
        TileSession { simd, tiles, words, _thread: PhantomData }
    }

    /// `out[p][r][l]` = the exact sum over the block's words of the products of the signed bytes of
    /// panel `p` for output `l` with row `r` of `x`. Rows have `4 words` bytes; they are
    /// [`TILE_ROWS`](super::TILE_ROWS) or [`TILE_ROWS_MAX`](super::TILE_ROWS_MAX) in number.
    #[inline(always)]
    pub fn products(&self, panels: &[Panel; 2], x: &[i8], out: &mut BlockProducts) {
        match self.tiles {
            MatrixTiles::Hardware(_) if S::MATRIX_TILES => {
                // SAFETY: the session began with these words and lasts; nobody else shapes the
                // thread's tiles meanwhile.
                unsafe { self.simd.block_products(self.words, panels, x, out) }
            }
            MatrixTiles::Hardware(_) | MatrixTiles::Emulated => {
                emulated_products(self.words, panels, x, out);
            }
        }
    }
}

impl<S: Simd> Drop for TileSession<S> {
    #[inline(always)]
    fn drop(&mut self) {
        if S::MATRIX_TILES
            && let MatrixTiles::Hardware(_) = self.tiles
        {
            // SAFETY: the proof says that tiles may be used.
            unsafe { self.simd.tiles_end() };
        }
        IN_USE.set(false);
    }
}

/// [`TileSession::products`], one product after the other.
fn emulated_products(words: usize, panels: &[Panel; 2], x: &[i8], out: &mut BlockProducts) {
    for (panel, out) in panels.iter().zip(out) {
        for (x, out) in x.chunks_exact(4 * words).zip(out) {
            *out = [0; 16];
            for (word, four) in panel.iter().zip(x.as_chunks::<4>().0) {
                for (out, weights) in out.iter_mut().zip(word.as_chunks::<4>().0) {
                    for (weight, x) in weights.iter().zip(four) {
                        *out += i32::from(*weight as i8) * i32::from(*x);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Portable, TILE_ROWS, TILE_ROWS_MAX};
    use crate::{Isa, Level};

    #[test]
    #[should_panic(expected = "tiles are in use")]
    fn a_thread_has_one_session_at_a_time() {
        let _first = TileSession::begin(Portable::<true>, MatrixTiles::Emulated, 16);
        let _second = TileSession::begin(Portable::<true>, MatrixTiles::Emulated, 8);
    }

    #[test]
    fn the_tiles_of_the_hardware_multiply_as_the_emulation() {
        #[cfg(target_arch = "x86_64")]
        {
            let Some(tiles) = Isa::at(Level::Amx).and_then(Isa::matrix_tiles) else {
                println!("SKIPPED: this CPU has no {}", Level::Amx);
                return;
            };
            // SAFETY: the level comes with all of AVX-512 VNNI.
            let simd = unsafe { crate::simd::x86::Avx512Vnni::assume() };
            let byte = |i: usize| ((i * 7919) >> 3) as u8;
            for words in [4, 8, 12, 16] {
                for rows in [TILE_ROWS, TILE_ROWS_MAX] {
                    let mut panels = [[[0; 64]; WORDS_MAX]; 2];
                    for (at, word) in panels.iter_mut().flatten().enumerate() {
                        word.iter_mut().enumerate().for_each(|(b, to)| *to = byte(at * 64 + b));
                    }
                    let x: Vec<i8> =
                        (0..rows * 4 * words).map(|i| byte(i * 31 + 5) as i8).collect();
                    let zero = [[[0; 16]; TILE_ROWS_MAX]; 2];
                    let (mut got, mut want) = (zero, zero);
                    TileSession::begin(simd, tiles, words).products(&panels, &x, &mut got);
                    emulated_products(words, &panels, &x, &mut want);
                    assert_eq!(got, want, "{words} words, {rows} rows");
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        println!("SKIPPED: {} and {:?} are of x86-64", Level::Amx, Isa::SCALAR);
    }
}
