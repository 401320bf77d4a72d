//! The scale search that integer encoders share.

/// Candidate divisors around `levels` that are tried for the extreme value.
const STEPS: i32 = 9;
/// Distance of neighbouring candidates.
const STEP: f32 = 0.1;

/// Finds a scale for codes in `-levels ..= levels - 1` that makes the squared error small, and
/// writes the codes plus `levels`.
///
/// Each candidate puts the value of largest magnitude near `-levels`; its least-squares scale is
/// kept if it explains more of the energy. A group of zeros gets scale 0. Values must be finite.
pub fn symmetric(values: &[f32], levels: i32, codes: &mut [u8]) -> f32 {
    let extreme = values.iter().fold(0.0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
    let low = -levels as f32;
    let high = (levels - 1) as f32;
    // A group too small for its scale's inverse to be finite rounds to zero.
    if extreme.abs() < f32::MIN_POSITIVE * 16.0 {
        codes.fill(levels as u8);
        return 0.0;
    }
    let mut best = (f32::NEG_INFINITY, 0.0, 0.0);
    for step in -STEPS..=STEPS {
        let inverse = (low - step as f32 * STEP) / extreme;
        let (mut cross, mut square) = (0.0f64, 0.0f64);
        for &value in values {
            let code = f64::from((value * inverse).round_ties_even().clamp(low, high));
            cross += code * f64::from(value);
            square += code * code;
        }
        if square > 0.0 {
            let gain = (cross * cross / square) as f32;
            if gain > best.0 {
                best = (gain, (cross / square) as f32, inverse);
            }
        }
    }
    let (_, scale, inverse) = best;
    for (code, &value) in codes.iter_mut().zip(values) {
        *code = ((value * inverse).round_ties_even().clamp(low, high) as i32 + levels) as u8;
    }
    scale
}
