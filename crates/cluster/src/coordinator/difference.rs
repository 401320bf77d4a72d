//! What a wrong output looks like.

use std::fmt;

/// An output that is not this machine's.
#[derive(Clone, Copy, Debug)]
pub(super) enum Difference {
    /// Outputs of an expert.
    Expert {
        layer: usize,
        expert: u32,
        /// Largest over the rows of the largest difference over the largest number.
        relative: f64,
    },
    /// A sum over several.
    Sum { layer: usize },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Expert { layer, expert, relative } => write!(
                f,
                "its output of layer {layer}, expert {expert} differs from this machine's by \
                 {relative:.1e} of its size"
            ),
            Difference::Sum { layer } => {
                write!(f, "its sum of outputs of layer {layer} differs from this machine's")
            }
        }
    }
}

/// Largest difference, of an expert's size, with which a peer counts as nearly exact.
const NEARLY: f64 = 1e-4;

impl Difference {
    /// Whether it is as small as another order of additions makes it.
    pub fn is_small(&self) -> bool {
        matches!(self, Difference::Expert { relative, .. } if *relative <= NEARLY)
    }

    /// The difference of two lists of rows, if there is any.
    pub fn between(
        layer: usize,
        expert: u32,
        theirs: &[f32],
        ours: &[f32],
        hidden: usize,
    ) -> Option<Difference> {
        let same = theirs.len() == ours.len()
            && theirs.iter().zip(ours).all(|(a, b)| a.to_bits() == b.to_bits());
        if same {
            return None;
        }
        let largest = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
        let of_row = |(theirs, ours): (&[f32], &[f32])| {
            let mut apart = theirs.iter().zip(ours).map(|(a, b)| f64::from(a - b).abs());
            let mut size = ours.iter().map(|b| f64::from(b.abs()));
            largest(&mut apart) / largest(&mut size).max(f64::MIN_POSITIVE)
        };
        let rows = theirs.chunks_exact(hidden).zip(ours.chunks_exact(hidden));
        let relative = largest(&mut rows.map(of_row));
        Some(Difference::Expert { layer, expert, relative })
    }
}
