//! Experts with rows of their own, as messages have them, computed by the experts of this machine.

use experts::{ExpertError, LocalExperts, Route, RoutedBatch};
use formats::Input;
use numerics::{Compute, NumericError, function};
use smallvec::SmallVec;

use crate::wire::Shape;
use crate::wire::v1::Item;

/// Name of the rows in errors.
const ROWS: &str = "rows of the request";

/// Computes items of a layer. `deliver` gets each row's number, counted through all items, and its
/// output, unweighted, in no particular order.
pub(crate) fn compute_items(
    experts: &LocalExperts,
    compute: &Compute,
    shape: Shape,
    layer: usize,
    items: &[Item],
    deliver: &mut dyn FnMut(usize, &[f32]),
) -> Result<(), ExpertError> {
    let hidden = shape.hidden as usize;
    let total: usize = items.iter().map(|item| item.rows.len() / hidden).sum();
    let mut input = compute.scratch.filled_later(total * hidden);
    let mut routes: SmallVec<[Route; 64]> = SmallVec::with_capacity(total);
    for item in items {
        if let Some(at) = function::first_non_finite(compute.isa, &item.rows) {
            let (what, row, element) = (ROWS, at / hidden, at % hidden);
            let source = NumericError::NonFinite { what, row, element };
            return Err(ExpertError::Numeric { layer, expert: item.expert, source });
        }
        input[routes.len() * hidden..][..item.rows.len()].copy_from_slice(&item.rows);
        let route = Route { expert: item.expert, weight: 1.0 };
        routes.extend(std::iter::repeat_n(route, item.rows.len() / hidden));
    }
    let input = Input::new(ROWS, input, hidden);
    let batch = RoutedBatch::new(&compute.scratch, &input, &routes, 1, shape.experts as usize);
    experts.outputs(compute, layer, &batch, &mut |rows, outputs| {
        for (row, output) in rows.rows.iter().zip(outputs.chunks_exact(hidden)) {
            deliver(*row as usize, output);
        }
    })
}
