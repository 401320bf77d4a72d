//! The multiply rate of a level: what products of int8 could reach if no operand had to be loaded.

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

multiversion! {
    fn multiply(isa, iterations: u64) -> u64 => multiply_kernel;
}

/// Multiplies int8 numbers that stay in registers, in matrix tiles where the level has them, and
/// returns how many products were made.
pub fn multiply_loop(isa: Isa, iterations: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if isa.has_matrix_tiles() {
        // SAFETY: the level has matrix tiles.
        return unsafe { crate::simd::amx::multiply_loop(iterations) };
    }
    multiply(isa, iterations)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loop_runs_at_every_level() {
        for isa in Isa::available() {
            assert!(multiply_loop(isa, 3) >= 3 * 64, "{isa:?}");
        }
    }
}
