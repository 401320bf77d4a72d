//! Mistakes that can be switched on, to see that the parity gate finds them. Only in builds with
//! the feature `mutations`, which no released program has.

use std::sync::atomic::{AtomicU8, Ordering};

use experts::cache::Key;
use experts::load::ExpertTable;
use formats::Format;
use numerics::Compute;
use numerics::hadamard::Rotation;

/// A mistake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Mutation {
    /// A worker leaves the rotation of an e8 expert's input out.
    NoRotation = 1,
    /// A coordinator adds what workers answer as f32, in their order.
    FloatSums = 2,
}

static CURRENT: AtomicU8 = AtomicU8::new(0);

/// Switches a mistake on in this process, or all off.
pub fn set(mutation: Option<Mutation>) {
    CURRENT.store(mutation.map_or(0, |mutation| mutation as u8), Ordering::SeqCst);
}

/// Switches the mistake of a name on.
pub fn set_by_name(name: &str) {
    set(Some(match name {
        "no-rotation" => Mutation::NoRotation,
        "float-sums" => Mutation::FloatSums,
        _ => panic!("no mutation {name:?}"),
    }));
}

/// The name of the mistake that is on.
pub fn name() -> Option<&'static str> {
    if is(Mutation::NoRotation) {
        Some("no-rotation")
    } else if is(Mutation::FloatSums) {
        Some("float-sums")
    } else {
        None
    }
}

/// Whether a mistake is made.
pub(crate) fn is(mutation: Mutation) -> bool {
    CURRENT.load(Ordering::SeqCst) == mutation as u8
}

/// Undoes what an e8 expert will do to its input first.
pub(crate) fn rotate_back(table: &ExpertTable, key: Key, compute: &Compute, rows: &mut [f32]) {
    let is_e8 = table.get(key).is_some_and(|source| source.desc.gate.format() == Format::E8Iq3);
    if is(Mutation::NoRotation) && is_e8 {
        let width = table.expert(key).desc.gate.cols();
        let rotation = Rotation::shared(width);
        rows.chunks_exact_mut(width).for_each(|row| rotation.invert(compute.isa, row));
    }
}

/// Adds what one worker brought, `[rows, hidden]` on the integer grid, as numbers of single
/// precision.
pub(crate) fn add_as_floats(sum: &mut [i64], before: &[i64]) {
    for (sum, before) in sum.iter_mut().zip(before) {
        *sum = ((*before as f32) + ((*sum - *before) as f32)) as i64;
    }
}
