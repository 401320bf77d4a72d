//! Sixteen 32-bit lanes, the one vector shape that kernels are written in.
//!
//! A kernel is a generic function over [`Simd`]; `multiversion!` compiles it once per level. Every
//! method is defined by its result bits, so a kernel gives the same bits at each level by
//! construction; [`Portable`] is the reference. CPU-specific code exists in `x86` only.

mod portable;
#[cfg(target_arch = "x86_64")]
pub mod x86;

pub use portable::{Portable, e4m3_to_f32, f16_to_f32, ue8m0_to_f32};

/// Largest magnitude of the sum of two products in [`Simd::dot_u8`] below which every level is
/// exact: pairs are summed in 16 bits on levels without the integer dot product.
pub const PAIR_BOUND: i32 = i16::MAX as i32;

/// A level's vector operations. A value of an implementing type proves that the CPU has the level.
pub trait Simd: Copy + Send + Sync + 'static {
    /// 16 lanes of 32 bits, or 64 bytes: byte `b` of lane `l` is byte `4 l + b`.
    type I: Copy;
    /// 16 lanes of f32.
    type F: Copy;
    /// [`Simd::dot_s8`] returns its sum plus this many times the sum of the inputs `x`.
    const S8_BIAS: i32;

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
    /// Byte `b` is `value` where bit `b` of `mask` is set, else 0.
    fn expand_bits(self, mask: u64, value: u8) -> Self::I;
    /// Signed lanes to f32, rounded to nearest even.
    fn to_f32(self, a: Self::I) -> Self::F;
    /// `a + b`.
    fn add_f32(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul_f32(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
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
                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments)]
                fn avx2(simd: x86::Avx2 $(, $arg: $ty)*) $(-> $ret)? {
                    $kernel(simd $(, $arg)*)
                }
                #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
                #[allow(clippy::too_many_arguments)]
                fn avx_vnni(simd: x86::AvxVnni $(, $arg: $ty)*) $(-> $ret)? {
                    $kernel(simd $(, $arg)*)
                }
                #[target_feature(
                    enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
                )]
                #[allow(clippy::too_many_arguments)]
                fn avx512(simd: x86::Avx512 $(, $arg: $ty)*) $(-> $ret)? {
                    $kernel(simd $(, $arg)*)
                }
                #[target_feature(
                    enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
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
                    $crate::Level::Avx512Vnni => {
                        // SAFETY: as above.
                        return unsafe { avx512_vnni(x86::Avx512Vnni::assume() $(, $arg)*) };
                    }
                }
            }
            let _ = isa;
            $kernel($crate::simd::Portable $(, $arg)*)
        }
    )*};
}
