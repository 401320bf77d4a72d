//! What answers bring: adding it, and comparing it with this machine's own.

use experts::{ExpertBackend, ExpertError, RoutedBatch};
use numerics::combine;

use super::core::{Answered, Core, SUM_LIMIT};
use super::difference::Difference;
use crate::wire::v2::{Outputs, Status};

impl Core {
    /// Adds what an answer brought, weighted, unless an output leaves the grid.
    pub(super) fn add(
        &self,
        batch: &RoutedBatch<'_>,
        rows: &[u32],
        asked: &[usize],
        answered: &Answered,
        sum: &mut [i64],
    ) -> bool {
        let Core { compute, hello, .. } = self;
        let hidden = hello.shape.hidden as usize;
        let mut add_row = |row: u32, added: &[i64]| {
            let sum = &mut sum[row as usize * hidden..][..hidden];
            sum.iter_mut().zip(added).for_each(|(sum, added)| *sum = sum.wrapping_add(*added));
        };
        let outputs = match &answered.answer.outputs {
            Outputs::Sums(sums) => {
                if sums.iter().any(|sum| sum.unsigned_abs() >= SUM_LIMIT) {
                    return false;
                }
                rows.iter()
                    .zip(sums.chunks_exact(hidden))
                    .for_each(|(row, sum)| add_row(*row, sum));
                return true;
            }
            Outputs::Rows(outputs) => outputs_of(batch, asked, answered, outputs, hidden),
        };
        let total: usize = outputs.iter().map(|(_, outputs)| outputs.len()).sum();
        let mut weighted = compute.scratch.zeroed::<i64>(total);
        let mut sums = weighted.chunks_exact_mut(hidden);
        for (at, outputs) in &outputs {
            let weights = batch.rows_of(*at).weights.iter();
            let rows = weights.zip(outputs.chunks_exact(hidden)).zip(&mut sums).enumerate();
            for (row, ((weight, y), sum)) in rows {
                // A worker whose outputs leave the grid is not believed; if they are right, this
                // machine comes to the same and says so.
                if combine::add_weighted(compute.isa, row, *weight, y, sum).is_err() {
                    return false;
                }
            }
        }
        let mut added = weighted.chunks_exact(hidden);
        for (at, _) in &outputs {
            let rows = batch.rows_of(*at).rows.iter();
            rows.zip(&mut added).for_each(|(row, added)| add_row(*row, added));
        }
        true
    }

    /// The first output of an answer that is not what this machine computes.
    pub(super) fn difference(
        &self,
        batch: &RoutedBatch<'_>,
        layer: usize,
        rows: &[u32],
        asked: &[usize],
        answered: &Answered,
    ) -> Result<Option<Difference>, ExpertError> {
        let Core { compute, hello, local, .. } = self;
        let hidden = hello.shape.hidden as usize;
        let chosen = |expert: u32| answered.experts.iter().any(|at| batch.experts()[*at] == expert);
        let part = batch.part(&compute.scratch, chosen);
        match &answered.answer.outputs {
            Outputs::Sums(theirs) => {
                let mut ours = vec![0; batch.input.values().len()];
                local.compute(compute, layer, &part, &mut ours, &mut || {})?;
                let differs = |(row, theirs): (&u32, &[i64])| {
                    ours[*row as usize * hidden..][..hidden] != *theirs
                };
                let mut sums = rows.iter().zip(theirs.chunks_exact(hidden));
                Ok(sums.any(differs).then_some(Difference::Sum { layer }))
            }
            Outputs::Rows(outputs) => {
                let theirs = outputs_of(batch, asked, answered, outputs, hidden);
                let mut difference = None;
                local.outputs(compute, layer, &part, &mut |rows, ours| {
                    let of_expert =
                        |(at, _): &&(usize, &[f32])| batch.experts()[*at] == rows.expert;
                    let theirs = theirs.iter().find(of_expert).map_or(&[][..], |found| found.1);
                    let found = Difference::between(layer, rows.expert, theirs, ours, hidden);
                    // One that may not be tolerated counts before one that may.
                    if found.is_some() && difference.as_ref().is_none_or(Difference::is_small) {
                        difference = found;
                    }
                })?;
                Ok(difference)
            }
        }
    }
}

/// Outputs that count, with the places of their experts.
fn outputs_of<'a>(
    batch: &RoutedBatch<'_>,
    asked: &[usize],
    answered: &Answered,
    mut outputs: &'a [f32],
    hidden: usize,
) -> Vec<(usize, &'a [f32])> {
    let mut found = Vec::with_capacity(answered.experts.len());
    for (at, status) in asked.iter().zip(&answered.answer.statuses) {
        if *status == Status::Computed {
            let (of_expert, rest) = outputs.split_at(batch.rows_of(*at).rows.len() * hidden);
            outputs = rest;
            if answered.experts.contains(at) {
                found.push((*at, of_expert));
            }
        }
    }
    found
}
