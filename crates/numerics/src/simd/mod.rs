//! Sixteen 32-bit lanes, the one vector shape that kernels are written in.
//!
//! A kernel is a generic function over [`Simd`]; `multiversion!` compiles it once per level. Every
//! method is defined by its result bits, so a kernel gives the same bits at each level by
//! construction; [`Portable`] is the reference. CPU-specific code exists in `x86` and
//! `amx` only.

#[cfg(target_arch = "x86_64")]
pub mod amx;
mod portable;
mod tiles;
#[cfg(target_arch = "x86_64")]
pub mod x86;

pub use portable::{Portable, e4m3_to_f32, f16_to_f32, ue8m0_to_f32};
pub use tiles::{HardwareTiles, MatrixTiles, TileSession};

/// Largest magnitude of the sum of two products in [`Simd::dot_u8`] below which every level is
/// exact: pairs are summed in 16 bits on levels without the integer dot product.
pub const PAIR_BOUND: i32 = i16::MAX as i32;

/// Words of 4 inputs in the largest activation block.
pub const WORDS_MAX: usize = crate::int8::BLOCK_MAX / 4;
/// The codes of a block for 16 outputs: word `w` holds inputs `4 w ..`, byte `4 l + b` being input
/// `4 w + b` of output `l`.
pub type Panel = [[u8; 64]; WORDS_MAX];
/// Rows of activations come in multiples of it where levels multiply in matrix tiles.
pub const TILE_ROWS: usize = 16;
/// Most rows of one call of [`TileSession::products`].
pub const TILE_ROWS_MAX: usize = 32;
/// Integer products of a block: per panel, row and output.
pub type BlockProducts = [[[i32; 16]; TILE_ROWS_MAX]; 2];

/// Slots of the tables of [`Simd::gather_slots`] and [`Simd::rans_step`].
pub const SLOTS: usize = 4096;
/// Bytes that [`Simd::rans_step`] is shown: words for 64 lanes.
pub const WINDOW: usize = 128;

/// A level's vector operations. A value of an implementing type proves that the CPU has the level.
pub trait Simd: Copy + Send + Sync + 'static {
    /// 16 lanes of 32 bits, or 64 bytes: byte `b` of lane `l` is byte `4 l + b`.
    type I: Copy;
    /// 16 lanes of f32.
    type F: Copy;
    /// [`Simd::dot_s8`] returns its sum plus this many times the sum of the inputs `x`.
    const S8_BIAS: i32;
    /// Whether kernels carry a way through matrix tiles ([`TileSession`]), to be taken where the
    /// level chosen has them.
    const MATRIX_TILES: bool = false;
    /// Rows of activations whose sums, beside the weights, fit the registers: 2, 4 or 8.
    const ROWS: usize;

    /// Asks for the cache line at an address, which need not be valid.
    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}
    /// Loads 64 bytes.
    fn load(self, from: &[u8; 64]) -> Self::I;
    /// Loads 16 numbers.
    fn load_f32(self, from: &[f32; 16]) -> Self::F;
    /// Loads 16 little-endian f32.
    fn load_f32_le(self, from: &[u8; 64]) -> Self::F;
    /// Loads 16 little-endian bfloat16, widened exactly.
    fn load_bf16(self, from: &[u8; 32]) -> Self::F;
    /// Loads 16 little-endian IEEE halves, widened exactly (infinities and NaN kept).
    fn load_f16(self, from: &[u8; 32]) -> Self::F;
    /// Loads 16 e4m3 bytes, widened exactly. The NaN codes 0x7f and 0xff must not occur.
    fn load_e4m3(self, from: &[u8; 16]) -> Self::F;
    /// Loads 16 UE8M0 bytes as 2^(byte - 127). 255 must not occur.
    fn load_ue8m0(self, from: &[u8; 16]) -> Self::F;
    /// Loads 16 signed numbers.
    fn load_i32(self, from: &[i32; 16]) -> Self::I;
    /// Stores 64 bytes.
    fn store(self, value: Self::I, to: &mut [u8; 64]);
    /// Stores 16 numbers.
    fn store_f32(self, value: Self::F, to: &mut [f32; 16]);
    /// The same 32 bits in every lane.
    fn splat(self, value: u32) -> Self::I;
    /// The same number in every lane.
    fn splat_f32(self, value: f32) -> Self::F;
    /// Bitwise and.
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise or.
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise exclusive or.
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    /// Logical right shift of each lane; `bits` < 32.
    fn shr(self, a: Self::I, bits: u32) -> Self::I;
    /// Logical left shift of each lane; `bits` < 32.
    fn shl(self, a: Self::I, bits: u32) -> Self::I;
    /// Wrapping addition of lanes.
    fn add(self, a: Self::I, b: Self::I) -> Self::I;
    /// Wrapping subtraction of lanes.
    fn sub(self, a: Self::I, b: Self::I) -> Self::I;
    /// Wrapping addition of bytes.
    fn add_bytes(self, a: Self::I, b: Self::I) -> Self::I;
    /// Wrapping subtraction of bytes.
    fn sub_bytes(self, a: Self::I, b: Self::I) -> Self::I;
    /// Per lane `acc + Σ codes[b]·x[b]` over its 4 bytes, codes unsigned, x signed. Exact when no
    /// pair of neighbouring products exceeds [`PAIR_BOUND`].
    fn dot_u8(self, acc: Self::I, codes: Self::I, x: Self::I) -> Self::I;
    /// Per lane `acc + Σ w[b]·x[b] + S8_BIAS·Σ x[b]`, both signed; x must not be -128.
    fn dot_s8(self, acc: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// Replaces each byte by `table[byte & 15]`; bits 4 to 7 of the bytes must be zero.
    fn lookup_bytes(self, table: &[u8; 16], bytes: Self::I) -> Self::I;
    /// Replaces each lane by `table[lane]`; lanes must be below 16.
    fn lookup_lanes(self, table: &[u32; 16], lanes: Self::I) -> Self::I;
    /// Lane `l` is `table[indices[l]]`.
    fn gather(self, table: &[u32; 256], indices: &[u8; 16]) -> Self::I;
    /// Lane `l` is `table[lanes[l] % SLOTS]`.
    fn gather_slots(self, table: &[u32; SLOTS], lanes: Self::I) -> Self::I;
    /// One step of 16 decoders of an entropy coder (rANS). A lane's slot is
    /// `table[state % SLOTS]`: a share of the slots in bits 20 to 31 and the slot's number within
    /// the share in bits 8 to 19. The new state is `share * (state / SLOTS) + number`, wrapping; if
    /// that is below 2^16, it moves up by 16 bits and takes the next of the little-endian 16-bit
    /// words that begin at byte `at` of the window, lane by lane.
    ///
    /// Returns the states, the slots and how many bytes were taken, at most 32. `at` must be at
    /// most `WINDOW - 32`.
    fn rans_step(
        self,
        table: &[u32; SLOTS],
        states: Self::I,
        window: &[u8; WINDOW],
        at: usize,
    ) -> (Self::I, Self::I, usize);
    /// Byte `b` is `value` where bit `b` of `mask` is set, else 0.
    fn expand_bits(self, mask: u64, value: u8) -> Self::I;
    /// The larger of two lanes, unsigned.
    fn max_u32(self, a: Self::I, b: Self::I) -> Self::I;
    /// The largest lane, unsigned.
    #[inline(always)]
    fn fold_max_u32(self, a: Self::I) -> u32 {
        let mut bytes = [0; 64];
        self.store(a, &mut bytes);
        bytes.as_chunks::<4>().0.iter().fold(0, |max, lane| max.max(u32::from_le_bytes(*lane)))
    }
    /// The wrapping sum of the lanes.
    #[inline(always)]
    fn fold_add(self, a: Self::I) -> u32 {
        let mut bytes = [0; 64];
        self.store(a, &mut bytes);
        let lanes = bytes.as_chunks::<4>().0.iter();
        lanes.fold(0u32, |sum, lane| sum.wrapping_add(u32::from_le_bytes(*lane)))
    }
    /// The bits of numbers.
    fn bits(self, a: Self::F) -> Self::I;
    /// Rounds to nearest, ties to even; magnitudes must be below 2^22, other numbers give any.
    fn to_i32(self, a: Self::F) -> Self::I;
    /// Stores the low byte of each lane.
    fn store_i8(self, a: Self::I, to: &mut [i8; 16]);
    /// Signed lanes to f32, rounded to nearest even.
    fn to_f32(self, a: Self::I) -> Self::F;
    /// `a + b`.
    fn add_f32(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul_f32(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;

    /// Lane `l` is the sum of the lanes of `values[l]`, folded 16 -> 8 -> 4 -> 2 -> 1, lane `j`
    /// plus lane `j + half`.
    #[inline(always)]
    fn fold16(self, values: &[Self::F; 16]) -> Self::F {
        let mut sums = [0.0; 16];
        for (sum, value) in sums.iter_mut().zip(values) {
            let mut lanes = [0.0; 16];
            self.store_f32(*value, &mut lanes);
            for half in [8, 4, 2, 1] {
                for lane in 0..half {
                    lanes[lane] += lanes[lane + half];
                }
            }
            *sum = lanes[0];
        }
        self.load_f32(&sums)
    }

    /// Shapes the thread's tiles for blocks of `words` words, at most [`WORDS_MAX`]; see
    /// [`TileSession`].
    ///
    /// # Safety
    /// The CPU and the system must let the process use matrix tiles, as a level of
    /// [`Isa::matrix_tiles`](crate::Isa::matrix_tiles) proves.
    #[inline(always)]
    unsafe fn tiles_begin(self, _words: usize) {}

    /// Ends what [`Simd::tiles_begin`] began.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn tiles_end(self) {}

    /// The products of a [`TileSession`] in tiles.
    ///
    /// # Safety
    /// As [`Simd::tiles_begin`], which must have been the last such call on this thread, with these
    /// `words`, and [`Simd::tiles_end`] not called since.
    #[inline(always)]
    unsafe fn block_products(
        self,
        _words: usize,
        _panels: &[Panel; 2],
        _x: &[i8],
        _out: &mut BlockProducts,
    ) {
    }
}

/// An array made element by element inside a kernel: `fill!(zero; |k| value)`. Closures given to
/// the array functions of the standard library are functions of their own, which the compiler may
/// leave without the level's instructions; this is a loop.
#[macro_export]
macro_rules! fill {
    ($zero:expr; |$k:ident| $value:expr) => {{
        let mut out = [$zero; _];
        #[allow(clippy::needless_range_loop)]
        for $k in 0..out.len() {
            out[$k] = $value;
        }
        out
    }};
}

/// Defines a function that runs a generic kernel at the level of its first argument.
///
/// `pub fn name(isa, a: A) -> R => kernel;` calls `kernel(simd, a)`, where `simd` is the level's
/// [`Simd`] value. The kernel must be `#[inline(always)]`, so that it is compiled with the
/// level's instructions.
#[macro_export]
macro_rules! multiversion {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident(isa $(, $arg:ident: $ty:ty)* $(,)?)
        $(-> $ret:ty)? => $kernel:ident;)*) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(isa: $crate::Isa $(, $arg: $ty)*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::simd::x86;
                #[target_feature(enable = "avx2,fma,f16c,popcnt")]
                #[allow(clippy::too_many_arguments)]
                fn avx2(simd: x86::Avx2 $(, $arg: $ty)*) $(-> $ret)? {
                    $kernel(simd $(, $arg)*)
                }
                #[target_feature(enable = "avx2,fma,f16c,popcnt,avxvnni")]
                #[allow(clippy::too_many_arguments)]
                fn avx_vnni(simd: x86::AvxVnni $(, $arg: $ty)*) $(-> $ret)? {
                    $kernel(simd $(, $arg)*)
                }
                #[target_feature(
                    enable = "avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512dq,avx512vl"
                )]
                #[allow(clippy::too_many_arguments)]
                fn avx512(simd: x86::Avx512 $(, $arg: $ty)*) $(-> $ret)? {
                    $kernel(simd $(, $arg)*)
                }
                #[target_feature(
                    enable = "avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
                )]
                #[allow(clippy::too_many_arguments)]
                fn avx512_vnni(simd: x86::Avx512Vnni $(, $arg: $ty)*) $(-> $ret)? {
                    $kernel(simd $(, $arg)*)
                }
                match isa.level() {
                    $crate::Level::Scalar => {}
                    $crate::Level::Avx2 => {
                        // SAFETY: an `Isa` of this level exists only where the CPU has it.
                        return unsafe { avx2(x86::Avx2::assume() $(, $arg)*) };
                    }
                    $crate::Level::AvxVnni => {
                        // SAFETY: as above.
                        return unsafe { avx_vnni(x86::AvxVnni::assume() $(, $arg)*) };
                    }
                    $crate::Level::Avx512 => {
                        // SAFETY: as above.
                        return unsafe { avx512(x86::Avx512::assume() $(, $arg)*) };
                    }
                    $crate::Level::Avx512Vnni | $crate::Level::Amx => {
                        // SAFETY: as above; AMX comes with all of AVX-512 VNNI.
                        return unsafe { avx512_vnni(x86::Avx512Vnni::assume() $(, $arg)*) };
                    }
                }
            }
            let _ = isa;
            $kernel($crate::simd::Portable::<false> $(, $arg)*)
        }
    )*};
}

#[cfg(test)]
mod tests {
    use super::{SLOTS, Simd, WINDOW};
    use crate::Isa;

    #[inline(always)]
    fn step_kernel<S: Simd>(
        simd: S,
        table: &[u32; SLOTS],
        states: &[u8; 64],
        window: &[u8; WINDOW],
        at: usize,
    ) -> ([[u8; 64]; 3], usize) {
        let states = simd.load(states);
        let (moved, slots, taken) = simd.rans_step(table, states, window, at);
        let values = [moved, slots, simd.gather_slots(table, states)];
        let mut out = [[0; 64]; 3];
        for (value, to) in values.into_iter().zip(&mut out) {
            simd.store(value, to);
        }
        (out, taken)
    }

    multiversion! {
        fn step(
            isa,
            table: &[u32; SLOTS],
            states: &[u8; 64],
            window: &[u8; WINDOW],
            at: usize,
        ) -> ([[u8; 64]; 3], usize) => step_kernel;
    }

    /// Tables and states of any bits, also those that no coder makes.
    #[test]
    fn steps_of_entropy_decoders_are_the_same_at_every_level() {
        let mut seed = 1u64;
        let mut random = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            (seed >> 32) as u32
        };
        let mut seen = [false; 33];
        for round in 0..2000 {
            // The more bits are cleared, the more lanes take a word.
            let table: [u32; SLOTS] = fill!(0; |k| random() >> (round % 32) ^ k as u32);
            let states: [u8; 64] = fill!(0; |k| if k % 4 < round % 5 { random() as u8 } else { 0 });
            let window: [u8; WINDOW] = fill!(0; |k| random() as u8 ^ k as u8);
            let at = round % 49 * 2;
            let want = step(Isa::SCALAR, &table, &states, &window, at);
            seen[want.1] = true;
            for isa in Isa::available() {
                assert!(step(isa, &table, &states, &window, at) == want, "{isa:?}");
            }
        }
        assert!(seen[0] && seen[32], "words taken: {seen:?}");
    }
}
