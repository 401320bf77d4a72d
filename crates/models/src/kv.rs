//! The key/value state that attention needs, as pages of 512 positions.

use container::{Attention, IndexerKind, Model, Presence};
use numerics::attention::KEY_BLOCK;

/// Positions per page: the key block of the attention rule, so pages never cut a block.
pub const PAGE: usize = KEY_BLOCK;

/// What a page holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvKind {
    /// Keys; for latent attention the latent followed by the rotary key.
    Key,
    /// Values; unused by latent attention, whose values are the latents.
    Value,
    /// Index keys of sparse attention.
    Index,
}

/// Numbers per position and layer of each kind; 0 where a layer keeps none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvShape {
    /// Per layer: key, value and index widths.
    pub layers: Vec<[usize; 3]>,
}

impl KvShape {
    /// The shape of a model's state. Index keys are kept by layers that have their own indexer.
    pub fn of(model: &Model) -> KvShape {
        let config = &model.config;
        let stored = model.report().indexer == Presence::Present;
        let has_indexer = |layer| stored && config.indexer_kind(layer) == Some(IndexerKind::Full);
        let layers = (0..config.layers).map(|layer| match &config.attention {
            Attention::Mla { kv_lora, rope, indexer, .. } => {
                let index = indexer.as_ref().filter(|_| has_indexer(layer));
                [kv_lora + rope, 0, index.map_or(0, |indexer| indexer.head_dim)]
            }
            Attention::Gqa { kv_heads, head_dim, .. } => {
                [kv_heads * head_dim, kv_heads * head_dim, 0]
            }
        });
        KvShape { layers: layers.collect() }
    }

    /// Width of a kind in a layer.
    pub fn width(&self, layer: usize, kind: KvKind) -> usize {
        self.layers[layer][kind as usize]
    }

    /// Bytes per position over all layers.
    pub fn bytes_per_position(&self) -> usize {
        self.attended_bytes(1, 1)
    }

    /// Bytes that a token at `positions` reads over all layers: every index key, and of the other
    /// keys and values those of `chosen` positions.
    pub fn attended_bytes(&self, positions: usize, chosen: usize) -> usize {
        let layers = self.layers.iter();
        let numbers = layers.map(|[key, value, index]| (key + value) * chosen + index * positions);
        numbers.sum::<usize>() * size_of::<f32>()
    }
}

/// Key/value state of the sequences of a step.
pub trait KvStore: Sync {
    /// Writes one position of a sequence. Positions are written in ascending order.
    fn write(
        &mut self,
        sequence: usize,
        layer: usize,
        kind: KvKind,
        position: usize,
        values: &[f32],
    );

    /// The page `page` of a sequence: `[PAGE, width]`, of which the written positions are valid.
    fn page(&self, sequence: usize, layer: usize, kind: KvKind, page: usize) -> &[f32];
}
