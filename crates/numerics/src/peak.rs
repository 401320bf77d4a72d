//! The rates that bound the kernels: reading memory, and multiplying int8 numbers that need not be
//! loaded.

use crate::Isa;
use crate::multiversion;
use crate::simd::Simd;

/// Independent sums, enough to fill the multipliers' pipelines.
const SUMS: usize = 12;

#[inline(always)]
fn multiply_kernel<S: Simd>(simd: S, iterations: u64) -> u64 {
    let weights: [S::I; 4] =
        std::array::from_fn(|i| simd.splat(std::hint::black_box(0x0102_0304 + i as u32)));
    let one = simd.splat(0x0101_0101);
    let mut x = simd.splat(std::hint::black_box(0x0403_0201));
    let mut sums = [simd.splat(0); SUMS];
    for _ in 0..iterations {
        // Inputs that change keep the products inside the loop.
        x = simd.xor(x, one);
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = simd.dot_u8(*sum, weights[i % 4], x);
        }
    }
    let mut all = sums[0];
    for sum in sums {
        all = simd.xor(all, sum);
    }
    let mut bytes = [0; 64];
    simd.store(all, &mut bytes);
    std::hint::black_box(bytes);
    iterations * (SUMS * 64) as u64
}

/// Bytes ahead of those read that are asked for, as the kernels do.
const PREFETCH_BYTES: usize = 4096;

#[inline(always)]
fn read_kernel<S: Simd>(simd: S, bytes: &[u8]) -> u32 {
    let mut sums = [simd.splat(0); 4];
    for lines in bytes.as_chunks::<64>().0.as_chunks::<4>().0 {
        for (sum, line) in sums.iter_mut().zip(lines) {
            simd.prefetch(line.as_ptr().wrapping_add(PREFETCH_BYTES));
            *sum = simd.xor(*sum, simd.load(line));
        }
    }
    let all = simd.xor(simd.xor(sums[0], sums[1]), simd.xor(sums[2], sums[3]));
    simd.fold_max_u32(all)
}

multiversion! {
    /// Reads bytes as fast as one thread can, and returns something that depends on all of them
    /// but the last few.
    pub fn read_loop(isa, bytes: &[u8]) -> u32 => read_kernel;
    fn multiply(isa, iterations: u64) -> u64 => multiply_kernel;
}

/// Multiplies int8 numbers that stay in registers, in matrix tiles where the level has them and
/// `matrix_tiles` asks for them, and returns how many products were made.
pub fn multiply_loop(isa: Isa, matrix_tiles: bool, iterations: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if isa.matrix_tiles().is_some() && matrix_tiles {
        // SAFETY: the level has matrix tiles.
        return unsafe { crate::simd::amx::multiply_loop(iterations) };
    }
    let _ = matrix_tiles;
    multiply(isa, iterations)
}

#[inline(always)]
fn multiply_f32_kernel<S: Simd>(simd: S, iterations: u64) -> u64 {
    let factor = simd.splat_f32(std::hint::black_box(0.999));
    let x = simd.splat_f32(std::hint::black_box(1e-3));
    let mut sums = [simd.splat_f32(0.5); SUMS];
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = simd.fma(*sum, factor, x);
        }
    }
    let mut lanes = [0.0; 16];
    for sum in sums {
        simd.store_f32(sum, &mut lanes);
        std::hint::black_box(lanes);
    }
    iterations * (SUMS * 16) as u64
}

multiversion! {
    /// [`multiply_loop`] of f32 numbers, each product added by one fused multiply-add.
    pub fn multiply_f32_loop(isa, iterations: u64) -> u64 => multiply_f32_kernel;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loop_runs_at_every_level() {
        for isa in Isa::available() {
            for matrix_tiles in [false, true] {
                assert!(multiply_loop(isa, matrix_tiles, 3) >= 3 * 64, "{isa:?}");
            }
            assert_eq!(multiply_f32_loop(isa, 3), 3 * 16 * SUMS as u64);
            assert_eq!(read_loop(isa, &[7; 1024]), 0);
        }
    }
}
