//! One head's attention over selected keys of a sequence, by blocks of 512 ranks.

use numerics::attention::{self, KEY_BLOCK, Running};
use numerics::{Isa, NumericError};

use crate::kv::{KvKind, KvStore, PAGE};

/// The keys that a query attends to.
#[derive(Clone, Copy)]
pub enum Selection<'a> {
    /// Positions `0..count`.
    First(usize),
    /// These positions, ascending.
    Listed(&'a [u32]),
}

/// Where a head's keys and values lie in a sequence's state.
pub struct HeadState<'a> {
    /// The state.
    pub kv: &'a dyn KvStore,
    /// The sequence.
    pub sequence: usize,
    /// The layer.
    pub layer: usize,
    /// Kind, row width and first column of the keys.
    pub key: (KvKind, usize, usize),
    /// Kind, row width and first column of the values.
    pub value: (KvKind, usize, usize),
}

/// Attends with `query` over the selected keys; `out` gets the value numbers. A raw score that is
/// not finite is an error that names `row`, the query's row of the batch.
pub fn attend(
    isa: Isa,
    state: &HeadState<'_>,
    query: &[f32],
    scale: f32,
    row: usize,
    selection: Selection<'_>,
    out: &mut [f32],
) -> Result<(), NumericError> {
    let count = match selection {
        Selection::First(count) => count,
        Selection::Listed(list) => list.len(),
    };
    let numbers = |(kind, width, first): (KvKind, usize, usize), rank: usize, len: usize| {
        let position = match selection {
            Selection::First(_) => rank,
            Selection::Listed(list) => list[rank] as usize,
        };
        let page = state.kv.page(state.sequence, state.layer, kind, position / PAGE);
        &page[position % PAGE * width + first..][..len]
    };
    let mut running = Running::default();
    let mut block_out = vec![0.0; out.len()];
    let mut weights = vec![0.0; KEY_BLOCK.min(count)];
    let mut rows: Vec<&[f32]> = Vec::with_capacity(KEY_BLOCK.min(count));
    out.fill(0.0);
    for start in (0..count).step_by(KEY_BLOCK) {
        let end = (start + KEY_BLOCK).min(count);
        let weights = &mut weights[..end - start];
        rows.clear();
        rows.extend((start..end).map(|rank| numbers(state.key, rank, query.len())));
        attention::scores(isa, query, &rows, scale, weights);
        let block = Running::weigh(isa, weights).map_err(|rank| NumericError::NonFinite {
            what: "attention scores",
            row,
            element: start + rank,
        })?;
        rows.clear();
        rows.extend((start..end).map(|rank| numbers(state.value, rank, out.len())));
        attention::weighted_sum(isa, weights, &rows, &mut block_out);
        running.merge(isa, block, &block_out, out);
    }
    running.finish(isa, out);
    Ok(())
}
