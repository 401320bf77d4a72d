//! Attention of several queries over keys that they share, by blocks of 512 ranks.

use std::array;

use container::{Attention, Config};
use numerics::attention::{KEY_BLOCK, Running};
use numerics::{Compute, NumericError, products};

use crate::kv::{KvKind, KvStore, PAGE};
use crate::mla;

/// Queries of one call: enough to share the loading of keys, few enough for their scores to stay
/// in cache.
pub const QUERIES_MAX: usize = 16;

/// f32 numbers of working memory that one thread's attention takes, for steps of `rows` rows.
pub fn attention_scratch(config: &Config, rows: usize) -> usize {
    // Scores and block outputs of one call, and what brings queries into the keys' space.
    match &config.attention {
        Attention::Mla { kv_lora, nope, rope, v_dim, indexer, .. } => {
            let scores = QUERIES_MAX * (KEY_BLOCK + kv_lora);
            let index = indexer.as_ref().map_or(0, |indexer| indexer.heads * PAGE);
            let rows = mla::ROW_CHUNK.min(rows);
            let latents = rows * QUERIES_MAX * (2 * kv_lora + rope);
            let head = nope.max(v_dim) * kv_lora + rows * kv_lora.max(v_dim);
            scores + latents + head + index
        }
        Attention::Gqa { head_dim, .. } => QUERIES_MAX * (KEY_BLOCK + 2 * head_dim),
    }
}

/// The keys that queries attend to.
#[derive(Clone, Copy)]
pub enum Selection<'a> {
    /// Positions from 0 on.
    First,
    /// These positions, ascending.
    Listed(&'a [u32]),
}

/// One head of one row.
#[derive(Clone, Copy, Default)]
pub struct Query<'a> {
    /// The query, as long as a key's part.
    pub values: &'a [f32],
    /// Keys of the selection that it attends to, from the first.
    pub count: usize,
    /// Its row of the batch, for errors.
    pub row: usize,
}

/// The rows of a block of keys or values: room that calls of [`attend`] use one after the other.
pub struct BlockRows<'a>([&'a [f32]; KEY_BLOCK]);

impl Default for BlockRows<'_> {
    fn default() -> Self {
        BlockRows([&[]; KEY_BLOCK])
    }
}

/// Part of the rows of one kind of a sequence's state: the kind, its width and the first column.
#[derive(Clone, Copy)]
pub struct Part {
    /// Keys or values.
    pub kind: KvKind,
    /// Numbers per position.
    pub width: usize,
    /// First of the numbers meant.
    pub first: usize,
}

/// The keys and values of a head in a sequence's state.
#[derive(Clone, Copy)]
pub struct HeadState<'a> {
    /// The state.
    pub kv: &'a dyn KvStore,
    /// The sequence.
    pub sequence: usize,
    /// The layer.
    pub layer: usize,
    /// The keys.
    pub key: Part,
    /// The values.
    pub value: Part,
    /// Those that count.
    pub selection: Selection<'a>,
    /// Factor of the scores.
    pub scale: f32,
}

impl<'a> HeadState<'a> {
    /// The numbers from the first of `part` on, of ranks `start ..` of the selection.
    fn block(&self, part: Part, start: usize, block: &mut [&'a [f32]]) {
        let Part { kind, width, first } = part;
        let page = |page| self.kv.page(self.sequence, self.layer, kind, page);
        match self.selection {
            // Pages are as long as blocks, so a block is the beginning of a page.
            Selection::First => {
                let rows = page(start / PAGE).chunks_exact(width);
                assert!(rows.len() >= block.len(), "a page with fewer rows than are attended to");
                block.iter_mut().zip(rows).for_each(|(to, row)| *to = &row[first..]);
            }
            Selection::Listed(list) => {
                let list = &list[start..][..block.len()];
                for (to, position) in block.iter_mut().zip(list) {
                    let position = *position as usize;
                    let row = &page(position / PAGE)[position % PAGE * width..][..width];
                    *to = &row[first..];
                }
            }
        }
    }
}

/// Attends with up to [`QUERIES_MAX`] queries; `out` gets `width` value numbers for each. A raw
/// score that is not finite is an error that names the query's row.
pub fn attend<'a>(
    compute: &Compute,
    state: &HeadState<'a>,
    block: &mut BlockRows<'a>,
    queries: &[Query<'_>],
    width: usize,
    out: &mut [f32],
) -> Result<(), NumericError> {
    assert!(queries.len() <= QUERIES_MAX && out.len() == queries.len() * width);
    let isa = compute.isa;
    let longest = queries.iter().map(|query| query.count).max().unwrap_or(0);
    let values: [&[f32]; QUERIES_MAX] =
        array::from_fn(|at| queries.get(at).map_or(&[][..], |query| query.values));
    let mut running = [Running::default(); QUERIES_MAX];
    let mut scores = compute.scratch.filled_later(queries.len() * KEY_BLOCK.min(longest));
    let mut block_out = compute.scratch.filled_later(out.len());
    let block = &mut block.0;
    out.fill(0.0);
    for start in (0..longest).step_by(KEY_BLOCK) {
        let len = KEY_BLOCK.min(longest - start);
        // Keys of the block that a query attends to.
        let of_query = |query: &Query<'_>| query.count.saturating_sub(start).min(len);
        state.block(state.key, start, &mut block[..len]);
        let scores = &mut scores[..queries.len() * len];
        products::dots(isa, &values[..queries.len()], &block[..len], state.scale, scores);
        let mut sums = [(0.0, 0.0); QUERIES_MAX];
        for ((query, scores), sum) in
            queries.iter().zip(scores.chunks_exact_mut(len)).zip(&mut sums)
        {
            let weights = &mut scores[..of_query(query)];
            *sum = Running::weigh(isa, weights).map_err(|rank| NumericError::NonFinite {
                what: "attention scores",
                row: query.row,
                element: start + rank,
            })?;
        }
        let weights: [&[f32]; QUERIES_MAX] = array::from_fn(|at| match queries.get(at) {
            Some(query) => &scores[at * len..][..of_query(query)],
            None => &[],
        });
        state.block(state.value, start, &mut block[..len]);
        block_out.fill(0.0);
        let weights = &weights[..queries.len()];
        products::weighted_sums(isa, weights, &block[..len], width, &mut block_out);
        let outs = out.chunks_exact_mut(width).zip(block_out.chunks_exact(width));
        for (at, (out, block_out)) in outs.enumerate() {
            if !weights[at].is_empty() {
                running[at].merge(isa, sums[at], block_out, out);
            }
        }
    }
    for (running, out) in running.into_iter().zip(out.chunks_exact_mut(width)) {
        running.finish(isa, out);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use numerics::{Activations, Isa, Team, function, lanes};

    use super::*;

    /// One kind of rows of one sequence.
    struct Rows {
        pages: Vec<Vec<f32>>,
    }

    impl KvStore for Rows {
        fn write(&mut self, _: usize, _: usize, _: KvKind, _: usize, _: &[f32]) {}

        fn page(&self, _: usize, _: usize, _: KvKind, page: usize) -> &[f32] {
            &self.pages[page]
        }
    }

    /// Rule 6 as its words say it.
    fn reference(query: &[f32], rows: &[&[f32]], scale: f32, width: usize) -> Vec<f32> {
        let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; width]);
        for block in rows.chunks(KEY_BLOCK) {
            let mut weights: Vec<f32> = block
                .iter()
                .map(|row| lanes::dot(Isa::SCALAR, query, &row[..query.len()]) * scale)
                .collect();
            let block_max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            weights.iter_mut().for_each(|weight| *weight = function::exp(*weight - block_max));
            let block_sum = lanes::sum(Isa::SCALAR, &weights);
            let new_max = max.max(block_max);
            let (keep, take) = (function::exp(max - new_max), function::exp(block_max - new_max));
            sum = block_sum.mul_add(take, sum * keep);
            max = new_max;
            for (column, out) in out.iter_mut().enumerate() {
                let pairs = weights.iter().zip(block);
                let block_out =
                    pairs.fold(0.0, |acc, (weight, row)| f32::mul_add(*weight, row[column], acc));
                *out = block_out.mul_add(take, *out * keep);
            }
        }
        out.iter().map(|out| out / sum).collect()
    }

    #[test]
    fn queries_with_different_numbers_of_keys_over_several_blocks_follow_the_rule() {
        let (width, value_width, positions) = (40, 24, 1100);
        let value = |i: usize| ((i * 7919 % 4001) as f32 - 2000.0) * 1e-3;
        let pages = positions / PAGE + 1;
        let kv = Rows {
            pages: (0..pages)
                .map(|page| (0..PAGE * width).map(|i| value(page * 65_537 + i)).collect())
                .collect(),
        };
        let all: Vec<&[f32]> =
            kv.pages.iter().flat_map(|page| page.chunks_exact(width)).take(positions).collect();
        let list: Vec<u32> = (0..positions as u32).filter(|at| at % 7 != 3).collect();
        let listed: Vec<&[f32]> = list.iter().map(|at| all[*at as usize]).collect();
        let queries: Vec<Vec<f32>> =
            (0..5).map(|q| (0..32).map(|i| value(q * 977 + i)).collect()).collect();
        let part = Part { kind: KvKind::Key, width, first: 0 };
        let team = Arc::new(Team::new(1).unwrap());
        let mut block = BlockRows::default();
        for isa in Isa::available() {
            let compute = Compute::new(isa, team.clone(), Activations::F32);
            for (selection, rows) in [(Selection::First, &all), (Selection::Listed(&list), &listed)]
            {
                let counts = [1, 511, 512, 513, rows.len()];
                let group: Vec<Query<'_>> = queries
                    .iter()
                    .zip(counts)
                    .map(|(values, count)| Query { values, count, row: 0 })
                    .collect();
                let mut out = vec![9.0; group.len() * value_width];
                let (kv, key, value, scale) = (&kv, part, part, 0.3);
                let state = HeadState { kv, sequence: 0, layer: 0, key, value, selection, scale };
                attend(&compute, &state, &mut block, &group, value_width, &mut out).unwrap();
                for (query, got) in group.iter().zip(out.chunks_exact(value_width)) {
                    let want = reference(query.values, &rows[..query.count], 0.3, value_width);
                    assert_eq!(got, want, "{isa:?}, {} keys", query.count);
                }
            }
        }
    }
}
