//! The floating-point environment every compute thread must have: rounding to nearest,
//! subnormal numbers neither flushed on output nor zeroed on input.

/// Panics if this thread would round or flush differently from the contract. Rust code never
/// changes the environment; a foreign library in the process might.
pub fn assert_default() {
    // A product that is subnormal, and a sum that shows the rounding direction; `black_box` keeps
    // the compiler from computing them itself.
    let tiny = std::hint::black_box(f32::MIN_POSITIVE);
    let half = std::hint::black_box(0.5f32);
    let one = std::hint::black_box(1.0f32);
    let ulp = std::hint::black_box(f32::EPSILON);
    let subnormal = tiny * half;
    assert!(
        subnormal.to_bits() == 0x0040_0000 && (subnormal * 2.0).to_bits() == tiny.to_bits(),
        "subnormal numbers are flushed on this thread; results would differ from other machines"
    );
    // 1 + ulp/2 is a tie and goes to even (1); 1 + 3/4 ulp goes up; the negatives mirror it.
    let nearest = one + ulp * half == one
        && one + ulp * 0.75 == one + ulp
        && -one - ulp * half == -one
        && -one - ulp * 0.75 == -one - ulp;
    assert!(nearest, "this thread does not round to nearest; results would differ");
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_default_environment_passes() {
        super::assert_default();
    }
}
