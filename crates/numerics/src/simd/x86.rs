//! The x86-64 levels. Each type can only be made by [`assume`](Avx2::assume), whose caller proves
//! that the CPU has the instructions; that proof makes the methods safe.

use core::arch::x86_64::*;

use super::{BlockProducts, Panel, SLOTS, Simd, WINDOW, amx};
use crate::fill;

macro_rules! level_type {
    ($($(#[$meta:meta])* $name:ident),*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy)]
        pub struct $name(());

        impl $name {
            /// Makes the level's value.
            ///
            /// # Safety
            /// The CPU must have every instruction set of the level.
            #[inline(always)]
            pub unsafe fn assume() -> Self {
                $name(())
            }
        }
    )*};
}

level_type!(
    /// AVX2, FMA, F16C, POPCNT.
    Avx2,
    /// AVX2, FMA, F16C, POPCNT, AVX-VNNI.
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL, and all of [`Avx2`].
    Avx512,
    /// AVX-512 F, BW, DQ, VL, VNNI, and all of [`Avx2`].
    Avx512Vnni
);

/// Plain old data: any bytes are a value.
trait Pod: Copy {}
impl Pod for u64 {}
impl Pod for __m128i {}
impl Pod for __m256i {}
impl Pod for __m512i {}
impl Pod for __m256 {}
impl Pod for __m512 {}

/// Reads a vector at byte `at` of an array, inside it.
#[inline(always)]
fn read<V: Pod, A: Copy>(from: &A, at: usize) -> V {
    assert!(at + size_of::<V>() <= size_of::<A>());
    // SAFETY: the read stays inside the array, as asserted, and any bytes are a `V`.
    unsafe { (from as *const A).cast::<u8>().add(at).cast::<V>().read_unaligned() }
}

/// For each set of eight lanes, in byte `l`: how many lanes of the set precede lane `l`.
static RANKS: [u64; 256] = {
    let mut ranks = [0; 256];
    let mut set = 0u32;
    while set < 256 {
        let mut lane = 1;
        while lane < 8 {
            let before = (set & ((1 << lane) - 1)).count_ones() as u64;
            ranks[set as usize] |= before << (8 * lane);
            lane += 1;
        }
        set += 1;
    }
    ranks
};

/// Evaluates intrinsics in a method of a level's type.
macro_rules! proved {
    ($($body:tt)*) => {{
        // SAFETY: `self` proves that the CPU has the level's instructions.
        unsafe { $($body)* }
    }};
}

/// The same intrinsics on both registers of a method of a 256-bit level.
macro_rules! two {
    ($values:expr, |$value:ident| { $($body:tt)* }) => {{
        let [low, high] = $values;
        let low = {
            let $value = low;
            proved! { $($body)* }
        };
        let high = {
            let $value = high;
            proved! { $($body)* }
        };
        [low, high]
    }};
}

/// A 256-bit level: two registers hold the 16 lanes.
macro_rules! impl_256 {
    ($name:ident, $s8_bias:expr, $dot:ident, $dot_s8:ident) => {
        impl Simd for $name {
            type I = [__m256i; 2];
            type F = [__m256; 2];
            const S8_BIAS: i32 = $s8_bias;
            const ROWS: usize = 4;

            #[inline(always)]
            fn prefetch(self, at: *const u8) {
                // SAFETY: a prefetch of any address is allowed.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
            }
            #[inline(always)]
            fn load(self, from: &[u8; 64]) -> Self::I {
                [read::<__m256i, _>(from, 0), read::<__m256i, _>(from, 32)]
            }
            #[inline(always)]
            fn load_f32(self, from: &[f32; 16]) -> Self::F {
                [read::<__m256, _>(from, 0), read::<__m256, _>(from, 32)]
            }
            #[inline(always)]
            fn load_f32_le(self, from: &[u8; 64]) -> Self::F {
                [read::<__m256, _>(from, 0), read::<__m256, _>(from, 32)]
            }
            #[inline(always)]
            fn load_bf16(self, from: &[u8; 32]) -> Self::F {
                two!([read::<__m128i, _>(from, 0), read::<__m128i, _>(from, 16)], |half| {
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
                })
            }
            #[inline(always)]
            fn load_f16(self, from: &[u8; 32]) -> Self::F {
                two!([read::<__m128i, _>(from, 0), read::<__m128i, _>(from, 16)], |half| {
                    _mm256_cvtph_ps(half)
                })
            }
            #[inline(always)]
            fn load_e4m3(self, from: &[u8; 16]) -> Self::F {
                two!([read::<u64, _>(from, 0), read::<u64, _>(from, 8)], |eight| {
                    let wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight as i64));
                    let low = _mm256_and_si256(wide, _mm256_set1_epi32(0x7f));
                    let sign = _mm256_slli_epi32::<24>(_mm256_xor_si256(wide, low));
                    let scaled = _mm256_mul_ps(
                        _mm256_castsi256_ps(_mm256_slli_epi32::<20>(low)),
                        _mm256_set1_ps(f32::from_bits(0x7b80_0000)),
                    );
                    _mm256_or_ps(scaled, _mm256_castsi256_ps(sign))
                })
            }
            #[inline(always)]
            fn load_ue8m0(self, from: &[u8; 16]) -> Self::F {
                two!([read::<u64, _>(from, 0), read::<u64, _>(from, 8)], |eight| {
                    let wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight as i64));
                    let zero = _mm256_cmpeq_epi32(wide, _mm256_setzero_si256());
                    let subnormal = _mm256_and_si256(zero, _mm256_set1_epi32(0x0040_0000));
                    _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32::<23>(wide), subnormal))
                })
            }
            #[inline(always)]
            fn load_i32(self, from: &[i32; 16]) -> Self::I {
                [read::<__m256i, _>(from, 0), read::<__m256i, _>(from, 32)]
            }
            #[inline(always)]
            fn store(self, value: Self::I, to: &mut [u8; 64]) {
                let [low, high] = value;
                // SAFETY: `self` proves the level; the array has the 64 bytes written.
                unsafe {
                    _mm256_storeu_si256(to.as_mut_ptr().cast(), low);
                    _mm256_storeu_si256(to.as_mut_ptr().add(32).cast(), high);
                }
            }
            #[inline(always)]
            fn fold16(self, values: &[Self::F; 16]) -> Self::F {
                proved! {
                    let eight: [__m256; 16] = fill!(values[0][0]; |i| {
                        _mm256_add_ps(values[i][0], values[i][1])
                    });
                    // Values i and i + 8 share a register, one in each half.
                    let four: [__m256; 8] = fill!(values[0][0]; |i| {
                        let (a, b) = (eight[i], eight[i + 8]);
                        _mm256_add_ps(
                            _mm256_permute2f128_ps::<0x20>(a, b),
                            _mm256_permute2f128_ps::<0x31>(a, b),
                        )
                    });
                    let two: [__m256; 4] = fill!(values[0][0]; |i| {
                        let (a, b) = (four[i], four[i + 4]);
                        _mm256_add_ps(
                            _mm256_shuffle_ps::<0x44>(a, b),
                            _mm256_shuffle_ps::<0xee>(a, b),
                        )
                    });
                    // Values i, i + 4, i + 2, i + 6; the same from i + 8 on in the upper half.
                    let one: [__m256; 2] = fill!(values[0][0]; |i| {
                        let (a, b) = (two[i], two[i + 2]);
                        _mm256_add_ps(
                            _mm256_shuffle_ps::<0x88>(a, b),
                            _mm256_shuffle_ps::<0xdd>(a, b),
                        )
                    });
                    let low = _mm256_unpacklo_ps(one[0], one[1]);
                    let high = _mm256_unpackhi_ps(one[0], one[1]);
                    let first = _mm256_shuffle_ps::<0x44>(low, high);
                    let second = _mm256_shuffle_ps::<0xee>(low, high);
                    [
                        _mm256_permute2f128_ps::<0x20>(first, second),
                        _mm256_permute2f128_ps::<0x31>(first, second),
                    ]
                }
            }
            #[inline(always)]
            fn store_f32(self, value: Self::F, to: &mut [f32; 16]) {
                // SAFETY: `self` proves the level; both halves of the array are written.
                unsafe {
                    _mm256_storeu_ps(to.as_mut_ptr(), value[0]);
                    _mm256_storeu_ps(to.as_mut_ptr().add(8), value[1]);
                }
            }
            #[inline(always)]
            fn splat(self, value: u32) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_set1_epi32(value as i32); 2] }
            }
            #[inline(always)]
            fn splat_f32(self, value: f32) -> Self::F {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_set1_ps(value); 2] }
            }
            #[inline(always)]
            fn and(self, a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])] }
            }
            #[inline(always)]
            fn or(self, a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
            }
            #[inline(always)]
            fn xor(self, a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_xor_si256(a[0], b[0]), _mm256_xor_si256(a[1], b[1])] }
            }
            #[inline(always)]
            fn shr(self, a: Self::I, bits: u32) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe {
                    let count = _mm256_set1_epi32(bits as i32);
                    [_mm256_srlv_epi32(a[0], count), _mm256_srlv_epi32(a[1], count)]
                }
            }
            #[inline(always)]
            fn shl(self, a: Self::I, bits: u32) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe {
                    let count = _mm256_set1_epi32(bits as i32);
                    [_mm256_sllv_epi32(a[0], count), _mm256_sllv_epi32(a[1], count)]
                }
            }
            #[inline(always)]
            fn add(self, a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
            }
            #[inline(always)]
            fn sub(self, a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_sub_epi32(a[0], b[0]), _mm256_sub_epi32(a[1], b[1])] }
            }
            #[inline(always)]
            fn gather_slots(self, table: &[u32; SLOTS], lanes: Self::I) -> Self::I {
                // An index below `SLOTS` is inside the table.
                two!(lanes, |lane| {
                    let slots = _mm256_and_si256(lane, _mm256_set1_epi32(SLOTS as i32 - 1));
                    _mm256_i32gather_epi32::<4>(table.as_ptr().cast(), slots)
                })
            }
            #[inline(always)]
            fn rans_step(
                self,
                table: &[u32; SLOTS],
                states: Self::I,
                window: &[u8; WINDOW],
                at: usize,
            ) -> (Self::I, Self::I, usize) {
                let slots = self.gather_slots(table, states);
                let mut taken = 0;
                let states = fill!(states[0]; |half| {
                    let (state, slot) = (states[half], slots[half]);
                    proved! {
                        let number = _mm256_and_si256(
                            _mm256_srli_epi32::<8>(slot),
                            _mm256_set1_epi32(SLOTS as i32 - 1),
                        );
                        let share = _mm256_srli_epi32::<20>(slot);
                        let product = _mm256_mullo_epi32(share, _mm256_srli_epi32::<12>(state));
                        let moved = _mm256_add_epi32(product, number);
                        let high = _mm256_srli_epi32::<16>(moved);
                        let low = _mm256_cmpeq_epi32(high, _mm256_setzero_si256());
                        let set = _mm256_movemask_ps(_mm256_castsi256_ps(low)) as u8;
                        let words = _mm256_cvtepu16_epi32(read::<__m128i, _>(window, at + taken));
                        let ranks = _mm_cvtsi64_si128(RANKS[usize::from(set)] as i64);
                        let next = _mm256_permutevar8x32_epi32(words, _mm256_cvtepu8_epi32(ranks));
                        let refilled = _mm256_or_si256(_mm256_slli_epi32::<16>(moved), next);
                        taken += 2 * set.count_ones() as usize;
                        _mm256_blendv_epi8(moved, refilled, low)
                    }
                });
                (states, slots, taken)
            }
            #[inline(always)]
            fn add_bytes(self, a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_add_epi8(a[0], b[0]), _mm256_add_epi8(a[1], b[1])] }
            }
            #[inline(always)]
            fn sub_bytes(self, a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_sub_epi8(a[0], b[0]), _mm256_sub_epi8(a[1], b[1])] }
            }
            #[inline(always)]
            fn dot_u8(self, acc: Self::I, codes: Self::I, x: Self::I) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe { [$dot(acc[0], codes[0], x[0]), $dot(acc[1], codes[1], x[1])] }
            }
            #[inline(always)]
            fn dot_s8(self, acc: Self::I, w: Self::I, x: Self::I) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe { [$dot_s8(acc[0], w[0], x[0]), $dot_s8(acc[1], w[1], x[1])] }
            }
            #[inline(always)]
            fn lookup_bytes(self, table: &[u8; 16], bytes: Self::I) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe {
                    let table = _mm256_broadcastsi128_si256(read::<__m128i, _>(table, 0));
                    [_mm256_shuffle_epi8(table, bytes[0]), _mm256_shuffle_epi8(table, bytes[1])]
                }
            }
            #[inline(always)]
            fn lookup_lanes(self, table: &[u32; 16], lanes: Self::I) -> Self::I {
                let (low, high) = (read::<__m256i, _>(table, 0), read::<__m256i, _>(table, 32));
                // The permutation looks at the low three bits of
                // a lane; bit 3, moved to the sign, selects the half of the table.
                two!(lanes, |lane| {
                    let from_low = _mm256_permutevar8x32_epi32(low, lane);
                    let from_high = _mm256_permutevar8x32_epi32(high, lane);
                    let select = _mm256_slli_epi32::<28>(lane);
                    _mm256_castps_si256(_mm256_blendv_ps(
                        _mm256_castsi256_ps(from_low),
                        _mm256_castsi256_ps(from_high),
                        _mm256_castsi256_ps(select),
                    ))
                })
            }
            #[inline(always)]
            fn gather(self, table: &[u32; 256], indices: &[u8; 16]) -> Self::I {
                // An index of 8 bits is inside the 256 entries.
                two!([read::<u64, _>(indices, 0), read::<u64, _>(indices, 8)], |eight| {
                    let lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight as i64));
                    _mm256_i32gather_epi32::<4>(table.as_ptr().cast(), lanes)
                })
            }
            #[inline(always)]
            fn expand_bits(self, mask: u64, value: u8) -> Self::I {
                // Each 32-bit half of the mask is repeated, byte
                // b/8 is moved to byte b, and its bit b%8 tested.
                two!([mask as u32, (mask >> 32) as u32], |half| {
                    let spread = _mm256_shuffle_epi8(
                        _mm256_set1_epi32(half as i32),
                        _mm256_setr_epi8(
                            0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2,
                            3, 3, 3, 3, 3, 3, 3, 3,
                        ),
                    );
                    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
                    let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
                    _mm256_and_si256(set, _mm256_set1_epi8(value as i8))
                })
            }
            #[inline(always)]
            fn max_u32(self, a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_max_epu32(a[0], b[0]), _mm256_max_epu32(a[1], b[1])] }
            }
            #[inline(always)]
            fn bits(self, a: Self::F) -> Self::I {
                two!(a, |half| { _mm256_castps_si256(half) })
            }
            #[inline(always)]
            fn to_i32(self, a: Self::F) -> Self::I {
                two!(a, |half| { _mm256_cvtps_epi32(half) })
            }
            #[inline(always)]
            fn store_i8(self, a: Self::I, to: &mut [i8; 16]) {
                let [low, high] = a;
                // SAFETY: `self` proves the level; the array has the 16 bytes written.
                unsafe {
                    // Packing works within halves of registers; the permutation mends the order.
                    let words = _mm256_packs_epi32(low, high);
                    let words = _mm256_permute4x64_epi64::<0xd8>(words);
                    let low = _mm256_castsi256_si128(words);
                    let high = _mm256_extracti128_si256::<1>(words);
                    _mm_storeu_si128(to.as_mut_ptr().cast(), _mm_packs_epi16(low, high));
                }
            }
            #[inline(always)]
            fn to_f32(self, a: Self::I) -> Self::F {
                two!(a, |half| { _mm256_cvtepi32_ps(half) })
            }
            #[inline(always)]
            fn add_f32(self, a: Self::F, b: Self::F) -> Self::F {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
            }
            #[inline(always)]
            fn mul_f32(self, a: Self::F, b: Self::F) -> Self::F {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
            }
            #[inline(always)]
            fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
                // SAFETY: `self` proves the level.
                unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
            }
        }
    };
}

/// Exact under the pair bound: `vpmaddubsw` sums two products in 16 bits.
#[inline(always)]
unsafe fn dot_u8_avx2(acc: __m256i, codes: __m256i, x: __m256i) -> __m256i {
    // SAFETY: called from a level that has AVX2.
    unsafe {
        let pairs = _mm256_maddubs_epi16(codes, x);
        _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }
}

/// |w| times x with the sign of w: the pair bound is 2·128·127 = 32,512.
#[inline(always)]
unsafe fn dot_s8_avx2(acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: called from a level that has AVX2.
    unsafe { dot_u8_avx2(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) }
}

#[inline(always)]
unsafe fn dot_u8_avx_vnni(acc: __m256i, codes: __m256i, x: __m256i) -> __m256i {
    // SAFETY: called from a level that has AVX-VNNI.
    unsafe { _mm256_dpbusd_avx_epi32(acc, codes, x) }
}

/// w + 128 as an unsigned byte; the caller subtracts 128·Σx.
#[inline(always)]
unsafe fn dot_s8_avx_vnni(acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: called from a level that has AVX-VNNI.
    unsafe { _mm256_dpbusd_avx_epi32(acc, _mm256_xor_si256(w, _mm256_set1_epi8(-128)), x) }
}

impl_256!(Avx2, 0, dot_u8_avx2, dot_s8_avx2);
impl_256!(AvxVnni, 128, dot_u8_avx_vnni, dot_s8_avx_vnni);

/// A 512-bit level: one register holds the 16 lanes.
macro_rules! impl_512 {
    ($name:ident, $s8_bias:expr, $dot:ident, $dot_s8:ident $(, $more:item)*) => {
        impl Simd for $name {
            type I = __m512i;
            type F = __m512;
            const S8_BIAS: i32 = $s8_bias;
            const ROWS: usize = 8;
            $($more)*

            #[inline(always)]
            fn prefetch(self, at: *const u8) {
                // SAFETY: a prefetch of any address is allowed.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
            }
            #[inline(always)]
            fn load(self, from: &[u8; 64]) -> __m512i {
                read::<__m512i, _>(from, 0)
            }
            #[inline(always)]
            fn load_f32(self, from: &[f32; 16]) -> __m512 {
                read::<__m512, _>(from, 0)
            }
            #[inline(always)]
            fn load_f32_le(self, from: &[u8; 64]) -> __m512 {
                read::<__m512, _>(from, 0)
            }
            #[inline(always)]
            fn load_bf16(self, from: &[u8; 32]) -> __m512 {
                // SAFETY: `self` proves the level.
                unsafe {
                    let wide = _mm512_cvtepu16_epi32(read::<__m256i, _>(from, 0));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                }
            }
            #[inline(always)]
            fn load_f16(self, from: &[u8; 32]) -> __m512 {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_cvtph_ps(read::<__m256i, _>(from, 0)) }
            }
            #[inline(always)]
            fn load_e4m3(self, from: &[u8; 16]) -> __m512 {
                // SAFETY: `self` proves the level.
                unsafe {
                    let wide = _mm512_cvtepu8_epi32(read::<__m128i, _>(from, 0));
                    let low = _mm512_and_si512(wide, _mm512_set1_epi32(0x7f));
                    let sign = _mm512_slli_epi32::<24>(_mm512_xor_si512(wide, low));
                    let scaled = _mm512_mul_ps(
                        _mm512_castsi512_ps(_mm512_slli_epi32::<20>(low)),
                        _mm512_set1_ps(f32::from_bits(0x7b80_0000)),
                    );
                    _mm512_or_ps(scaled, _mm512_castsi512_ps(sign))
                }
            }
            #[inline(always)]
            fn load_ue8m0(self, from: &[u8; 16]) -> __m512 {
                // SAFETY: `self` proves the level.
                unsafe {
                    let wide = _mm512_cvtepu8_epi32(read::<__m128i, _>(from, 0));
                    let zero = _mm512_cmpeq_epi32_mask(wide, _mm512_setzero_si512());
                    _mm512_castsi512_ps(_mm512_mask_blend_epi32(
                        zero,
                        _mm512_slli_epi32::<23>(wide),
                        _mm512_set1_epi32(0x0040_0000),
                    ))
                }
            }
            #[inline(always)]
            fn load_i32(self, from: &[i32; 16]) -> __m512i {
                read::<__m512i, _>(from, 0)
            }
            #[inline(always)]
            fn store(self, value: __m512i, to: &mut [u8; 64]) {
                // SAFETY: `self` proves the level; the array has the 64 bytes written.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
            }
            #[inline(always)]
            fn fold16(self, values: &[__m512; 16]) -> __m512 {
                proved! {
                    // Values i and i + 8 share a register, one in each half.
                    let eight: [__m512; 8] = fill!(values[0]; |i| {
                        let (a, b) = (values[i], values[i + 8]);
                        _mm512_add_ps(
                            _mm512_shuffle_f32x4::<0x44>(a, b),
                            _mm512_shuffle_f32x4::<0xee>(a, b),
                        )
                    });
                    let four: [__m512; 4] = fill!(values[0]; |i| {
                        let (a, b) = (eight[i], eight[i + 4]);
                        _mm512_add_ps(
                            _mm512_shuffle_f32x4::<0x88>(a, b),
                            _mm512_shuffle_f32x4::<0xdd>(a, b),
                        )
                    });
                    let two: [__m512; 2] = fill!(values[0]; |i| {
                        let (a, b) = (four[i], four[i + 2]);
                        _mm512_add_ps(
                            _mm512_shuffle_ps::<0x44>(a, b),
                            _mm512_shuffle_ps::<0xee>(a, b),
                        )
                    });
                    let one = _mm512_add_ps(
                        _mm512_shuffle_ps::<0x88>(two[0], two[1]),
                        _mm512_shuffle_ps::<0xdd>(two[0], two[1]),
                    );
                    // Quarters hold values k, k + 2, k + 1, k + 3 for k = 0, 8, 4, 12.
                    let order =
                        _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
                    _mm512_permutexvar_ps(order, one)
                }
            }
            #[inline(always)]
            fn store_f32(self, value: __m512, to: &mut [f32; 16]) {
                // SAFETY: `self` proves the level; the array has the 64 bytes written.
                unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
            }
            #[inline(always)]
            fn splat(self, value: u32) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_set1_epi32(value as i32) }
            }
            #[inline(always)]
            fn splat_f32(self, value: f32) -> __m512 {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_set1_ps(value) }
            }
            #[inline(always)]
            fn and(self, a: __m512i, b: __m512i) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_and_si512(a, b) }
            }
            #[inline(always)]
            fn or(self, a: __m512i, b: __m512i) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_or_si512(a, b) }
            }
            #[inline(always)]
            fn xor(self, a: __m512i, b: __m512i) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_xor_si512(a, b) }
            }
            #[inline(always)]
            fn shr(self, a: __m512i, bits: u32) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_srlv_epi32(a, _mm512_set1_epi32(bits as i32)) }
            }
            #[inline(always)]
            fn shl(self, a: __m512i, bits: u32) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_sllv_epi32(a, _mm512_set1_epi32(bits as i32)) }
            }
            #[inline(always)]
            fn add(self, a: __m512i, b: __m512i) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_add_epi32(a, b) }
            }
            #[inline(always)]
            fn sub(self, a: __m512i, b: __m512i) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_sub_epi32(a, b) }
            }
            #[inline(always)]
            fn gather_slots(self, table: &[u32; SLOTS], lanes: __m512i) -> __m512i {
                // SAFETY: `self` proves the level; an index below `SLOTS` is inside the table.
                unsafe {
                    let slots = _mm512_and_si512(lanes, _mm512_set1_epi32(SLOTS as i32 - 1));
                    _mm512_i32gather_epi32::<4>(slots, table.as_ptr().cast())
                }
            }
            #[inline(always)]
            fn rans_step(
                self,
                table: &[u32; SLOTS],
                states: __m512i,
                window: &[u8; WINDOW],
                at: usize,
            ) -> (__m512i, __m512i, usize) {
                let slots = self.gather_slots(table, states);
                // SAFETY: `self` proves the level.
                unsafe {
                    let number = _mm512_and_si512(
                        _mm512_srli_epi32::<8>(slots),
                        _mm512_set1_epi32(SLOTS as i32 - 1),
                    );
                    let share = _mm512_srli_epi32::<20>(slots);
                    let product = _mm512_mullo_epi32(share, _mm512_srli_epi32::<12>(states));
                    let moved = _mm512_add_epi32(product, number);
                    let low = _mm512_cmplt_epu32_mask(moved, _mm512_set1_epi32(1 << 16));
                    let words = _mm512_cvtepu16_epi32(read::<__m256i, _>(window, at));
                    let next = _mm512_maskz_expand_epi32(low, words);
                    let shifted = _mm512_mask_slli_epi32::<16>(moved, low, moved);
                    (_mm512_or_si512(shifted, next), slots, 2 * low.count_ones() as usize)
                }
            }
            #[inline(always)]
            fn add_bytes(self, a: __m512i, b: __m512i) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_add_epi8(a, b) }
            }
            #[inline(always)]
            fn sub_bytes(self, a: __m512i, b: __m512i) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_sub_epi8(a, b) }
            }
            #[inline(always)]
            fn dot_u8(self, acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { $dot(acc, codes, x) }
            }
            #[inline(always)]
            fn dot_s8(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { $dot_s8(acc, w, x) }
            }
            #[inline(always)]
            fn lookup_bytes(self, table: &[u8; 16], bytes: __m512i) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe {
                    let table = _mm512_broadcast_i32x4(read::<__m128i, _>(table, 0));
                    _mm512_shuffle_epi8(table, bytes)
                }
            }
            #[inline(always)]
            fn lookup_lanes(self, table: &[u32; 16], lanes: __m512i) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_permutexvar_epi32(lanes, read::<__m512i, _>(table, 0)) }
            }
            #[inline(always)]
            fn gather(self, table: &[u32; 256], indices: &[u8; 16]) -> __m512i {
                // SAFETY: `self` proves the level; an index of 8 bits is inside the 256 entries.
                unsafe {
                    let lanes = _mm512_cvtepu8_epi32(read::<__m128i, _>(indices, 0));
                    _mm512_i32gather_epi32::<4>(lanes, table.as_ptr().cast())
                }
            }
            #[inline(always)]
            fn expand_bits(self, mask: u64, value: u8) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_maskz_set1_epi8(mask, value as i8) }
            }
            #[inline(always)]
            fn max_u32(self, a: __m512i, b: __m512i) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_max_epu32(a, b) }
            }
            #[inline(always)]
            fn fold_max_u32(self, a: __m512i) -> u32 {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_reduce_max_epu32(a) }
            }
            #[inline(always)]
            fn fold_add(self, a: __m512i) -> u32 {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_reduce_add_epi32(a) as u32 }
            }
            #[inline(always)]
            fn bits(self, a: __m512) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_castps_si512(a) }
            }
            #[inline(always)]
            fn to_i32(self, a: __m512) -> __m512i {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_cvtps_epi32(a) }
            }
            #[inline(always)]
            fn store_i8(self, a: __m512i, to: &mut [i8; 16]) {
                // SAFETY: `self` proves the level; the array has the 16 bytes written.
                unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(a)) }
            }
            #[inline(always)]
            fn to_f32(self, a: __m512i) -> __m512 {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_cvtepi32_ps(a) }
            }
            #[inline(always)]
            fn add_f32(self, a: __m512, b: __m512) -> __m512 {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_add_ps(a, b) }
            }
            #[inline(always)]
            fn mul_f32(self, a: __m512, b: __m512) -> __m512 {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_mul_ps(a, b) }
            }
            #[inline(always)]
            fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
                // SAFETY: `self` proves the level.
                unsafe { _mm512_fmadd_ps(a, b, c) }
            }
        }
    };
}

/// Exact under the pair bound: `vpmaddubsw` sums two products in 16 bits.
#[inline(always)]
unsafe fn dot_u8_avx512(acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
    // SAFETY: called from a level that has AVX-512 BW.
    unsafe {
        let pairs = _mm512_maddubs_epi16(codes, x);
        _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
    }
}

/// |w| times x with the sign of w: the pair bound is 2·128·127 = 32,512.
#[inline(always)]
unsafe fn dot_s8_avx512(acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
    // SAFETY: called from a level that has AVX-512 BW.
    unsafe {
        let signed = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
        dot_u8_avx512(acc, _mm512_abs_epi8(w), signed)
    }
}

#[inline(always)]
unsafe fn dot_u8_vnni(acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
    // SAFETY: called from a level that has AVX-512 VNNI.
    unsafe { _mm512_dpbusd_epi32(acc, codes, x) }
}

/// w + 128 as an unsigned byte; the caller subtracts 128·Σx.
#[inline(always)]
unsafe fn dot_s8_vnni(acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
    // SAFETY: called from a level that has AVX-512 VNNI.
    unsafe { _mm512_dpbusd_epi32(acc, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x) }
}

impl_512!(Avx512, 0, dot_u8_avx512, dot_s8_avx512);
impl_512!(
    Avx512Vnni,
    128,
    dot_u8_vnni,
    dot_s8_vnni,
    const MATRIX_TILES: bool = true;,
    #[inline(always)]
    unsafe fn tiles_begin(self, words: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { amx::begin(words) }
    },
    #[inline(always)]
    unsafe fn tiles_end(self) {
        // SAFETY: the caller's promise, passed on.
        unsafe { amx::end() }
    },
    #[inline(always)]
    unsafe fn block_products(
        self,
        words: usize,
        panels: &[Panel; 2],
        x: &[i8],
        out: &mut BlockProducts,
    ) {
        // SAFETY: the caller's promise, passed on.
        unsafe { amx::block_products(words, panels, x, out) }
    }
);
#[cfg(test)]
mod tests {
    use crate::{Isa, lanes};

    #[test]
    fn the_portable_code_gives_the_same_bits_with_and_without_the_fma_instruction() {
        #[target_feature(enable = "fma")]
        fn with_fma(a: &[f32], b: &[f32]) -> f32 {
            lanes::dot_in(crate::simd::Portable::<false>, a, b)
        }
        if !is_x86_feature_detected!("fma") {
            println!("SKIPPED: this CPU has no fma");
            return;
        }
        let a: Vec<f32> = (0..999).map(|i| ((i * 31) as f32).sin() * 1e3).collect();
        let b: Vec<f32> = (0..999).map(|i| ((i * 17) as f32).cos() * 1e-3).collect();
        // SAFETY: the CPU has the instruction, as just asked.
        let hardware = unsafe { with_fma(&a, &b) };
        assert_eq!(hardware.to_bits(), lanes::dot(Isa::SCALAR, &a, &b).to_bits());
    }
}
