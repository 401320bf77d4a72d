//! The portable level: arrays and scalar operations, the definition of every result bit.

use std::hint::select_unpredictable;

use super::{SLOTS, Simd, WINDOW};

/// Portable vectors. With `TILES`, kernels take the way of levels that have matrix tiles, so that
/// it can be tested on every CPU.
#[derive(Clone, Copy)]
pub struct Portable<const TILES: bool>;

#[inline(always)]
fn map2<T: Copy, const N: usize>(a: [T; N], b: [T; N], f: impl Fn(T, T) -> T) -> [T; N] {
    let mut out = a;
    for lane in 0..N {
        out[lane] = f(a[lane], b[lane]);
    }
    out
}

#[inline(always)]
fn bytes(v: [u32; 16]) -> [u8; 64] {
    let mut out = [0; 64];
    for (to, lane) in out.chunks_exact_mut(4).zip(v) {
        to.copy_from_slice(&lane.to_le_bytes());
    }
    out
}

/// Widens an IEEE half exactly. A half's bits moved to f32 position are its value times 2^-112,
/// subnormals included, so one exact multiplication restores it.
#[inline(always)]
pub fn f16_to_f32(half: u16) -> f32 {
    let magnitude = u32::from(half & 0x7fff) << 13;
    let sign = u32::from(half & 0x8000) << 16;
    let finite = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
    let bits = if magnitude >= 0x0f80_0000 { magnitude | 0x7f80_0000 } else { finite.to_bits() };
    f32::from_bits(bits | sign)
}

/// Widens an e4m3 byte exactly; the NaN codes give 480, callers refuse them beforehand.
#[inline(always)]
pub fn e4m3_to_f32(byte: u8) -> f32 {
    let magnitude = f32::from_bits(u32::from(byte & 0x7f) << 20) * f32::from_bits(0x7b80_0000);
    f32::from_bits(magnitude.to_bits() | u32::from(byte & 0x80) << 24)
}

/// 2^(byte - 127): the byte is the exponent field, except that 0 is the subnormal 2^-127.
#[inline(always)]
pub fn ue8m0_to_f32(byte: u8) -> f32 {
    f32::from_bits(if byte == 0 { 0x0040_0000 } else { u32::from(byte) << 23 })
}

impl<const TILES: bool> Simd for Portable<TILES> {
    type I = [u32; 16];
    type F = [f32; 16];
    const S8_BIAS: i32 = 0;
    const MATRIX_TILES: bool = TILES;
    const ROWS: usize = 2;

    #[inline(always)]
    fn load(self, from: &[u8; 64]) -> [u32; 16] {
        let mut out = [0; 16];
        for (lane, four) in out.iter_mut().zip(from.as_chunks::<4>().0) {
            *lane = u32::from_le_bytes(*four);
        }
        out
    }
    #[inline(always)]
    fn load_f32(self, from: &[f32; 16]) -> [f32; 16] {
        *from
    }
    #[inline(always)]
    fn load_f32_le(self, from: &[u8; 64]) -> [f32; 16] {
        self.load(from).map(f32::from_bits)
    }
    #[inline(always)]
    fn load_bf16(self, from: &[u8; 32]) -> [f32; 16] {
        let mut out = [0.0; 16];
        for (lane, two) in out.iter_mut().zip(from.as_chunks::<2>().0) {
            *lane = f32::from_bits(u32::from(u16::from_le_bytes(*two)) << 16);
        }
        out
    }
    #[inline(always)]
    fn load_f16(self, from: &[u8; 32]) -> [f32; 16] {
        let mut out = [0.0; 16];
        for (lane, two) in out.iter_mut().zip(from.as_chunks::<2>().0) {
            *lane = f16_to_f32(u16::from_le_bytes(*two));
        }
        out
    }
    #[inline(always)]
    fn load_e4m3(self, from: &[u8; 16]) -> [f32; 16] {
        from.map(e4m3_to_f32)
    }
    #[inline(always)]
    fn load_ue8m0(self, from: &[u8; 16]) -> [f32; 16] {
        from.map(ue8m0_to_f32)
    }
    #[inline(always)]
    fn load_i32(self, from: &[i32; 16]) -> [u32; 16] {
        from.map(|lane| lane as u32)
    }
    #[inline(always)]
    fn store(self, value: [u32; 16], to: &mut [u8; 64]) {
        *to = bytes(value);
    }
    #[inline(always)]
    fn store_f32(self, value: [f32; 16], to: &mut [f32; 16]) {
        *to = value;
    }
    #[inline(always)]
    fn splat(self, value: u32) -> [u32; 16] {
        [value; 16]
    }
    #[inline(always)]
    fn splat_f32(self, value: f32) -> [f32; 16] {
        [value; 16]
    }
    #[inline(always)]
    fn and(self, a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        map2(a, b, |a, b| a & b)
    }
    #[inline(always)]
    fn or(self, a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        map2(a, b, |a, b| a | b)
    }
    #[inline(always)]
    fn xor(self, a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        map2(a, b, |a, b| a ^ b)
    }
    #[inline(always)]
    fn shr(self, a: [u32; 16], bits: u32) -> [u32; 16] {
        map2(a, a, |a, _| a >> bits)
    }
    #[inline(always)]
    fn shl(self, a: [u32; 16], bits: u32) -> [u32; 16] {
        map2(a, a, |a, _| a << bits)
    }
    #[inline(always)]
    fn add(self, a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        map2(a, b, u32::wrapping_add)
    }
    #[inline(always)]
    fn sub(self, a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        map2(a, b, u32::wrapping_sub)
    }
    #[inline(always)]
    fn add_bytes(self, a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        self.load(&map2(bytes(a), bytes(b), u8::wrapping_add))
    }
    #[inline(always)]
    fn sub_bytes(self, a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        self.load(&map2(bytes(a), bytes(b), u8::wrapping_sub))
    }
    #[inline(always)]
    fn dot_u8(self, acc: [u32; 16], codes: [u32; 16], x: [u32; 16]) -> [u32; 16] {
        let mut out = acc;
        for lane in 0..16 {
            for byte in 0..4 {
                let code = (codes[lane] >> (8 * byte)) as u8 as i32;
                let value = (x[lane] >> (8 * byte)) as i8 as i32;
                out[lane] = out[lane].wrapping_add((code * value) as u32);
            }
        }
        out
    }
    #[inline(always)]
    fn dot_s8(self, acc: [u32; 16], w: [u32; 16], x: [u32; 16]) -> [u32; 16] {
        let mut out = acc;
        for lane in 0..16 {
            for byte in 0..4 {
                let weight = (w[lane] >> (8 * byte)) as i8 as i32;
                let value = (x[lane] >> (8 * byte)) as i8 as i32;
                out[lane] = out[lane].wrapping_add((weight * value) as u32);
            }
        }
        out
    }
    #[inline(always)]
    fn lookup_bytes(self, table: &[u8; 16], input: [u32; 16]) -> [u32; 16] {
        self.load(&bytes(input).map(|byte| table[usize::from(byte & 15)]))
    }
    #[inline(always)]
    fn lookup_lanes(self, table: &[u32; 16], lanes: [u32; 16]) -> [u32; 16] {
        lanes.map(|lane| table[(lane & 15) as usize])
    }
    #[inline(always)]
    fn gather(self, table: &[u32; 256], indices: &[u8; 16]) -> [u32; 16] {
        indices.map(|index| table[usize::from(index)])
    }
    #[inline(always)]
    fn gather_slots(self, table: &[u32; SLOTS], lanes: [u32; 16]) -> [u32; 16] {
        map2(lanes, lanes, |lane, _| table[lane as usize % SLOTS])
    }
    #[inline(always)]
    fn rans_step(
        self,
        table: &[u32; SLOTS],
        states: [u32; 16],
        window: &[u8; WINDOW],
        at: usize,
    ) -> ([u32; 16], [u32; 16], usize) {
        let words = &window[at..at + 32];
        let (mut out, mut slots, mut taken) = (states, states, 0);
        for lane in 0..16 {
            let state = states[lane];
            let slot = table[state as usize % SLOTS];
            let moved = (slot >> 20).wrapping_mul(state >> 12).wrapping_add(slot >> 8 & 0xfff);
            // At most one word for each of the lanes before this one has been taken.
            let word = u32::from(u16::from_le_bytes([words[taken & 30], words[taken & 30 | 1]]));
            let low = moved < 1 << 16;
            out[lane] = select_unpredictable(low, moved << 16 | word, moved);
            slots[lane] = slot;
            taken += 2 * usize::from(low);
        }
        (out, slots, taken)
    }
    #[inline(always)]
    fn expand_bits(self, mask: u64, value: u8) -> [u32; 16] {
        let mut out = [0; 64];
        for (bit, byte) in out.iter_mut().enumerate() {
            *byte = if mask >> bit & 1 == 1 { value } else { 0 };
        }
        self.load(&out)
    }
    #[inline(always)]
    fn max_u32(self, a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        map2(a, b, u32::max)
    }
    #[inline(always)]
    fn bits(self, a: [f32; 16]) -> [u32; 16] {
        a.map(f32::to_bits)
    }
    #[inline(always)]
    fn to_i32(self, a: [f32; 16]) -> [u32; 16] {
        /// Adding 1.5·2^23 rounds a number below 2^22 to an integer in its low bits.
        const ROUND: f32 = 12_582_912.0;
        a.map(|value| (value + ROUND).to_bits().wrapping_sub(ROUND.to_bits()))
    }
    #[inline(always)]
    fn store_i8(self, a: [u32; 16], to: &mut [i8; 16]) {
        *to = a.map(|lane| lane as i8);
    }
    #[inline(always)]
    fn to_f32(self, a: [u32; 16]) -> [f32; 16] {
        a.map(|lane| lane as i32 as f32)
    }
    #[inline(always)]
    fn add_f32(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn mul_f32(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn fma(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        let mut out = c;
        for lane in 0..16 {
            out[lane] = a[lane].mul_add(b[lane], c[lane]);
        }
        out
    }
}
