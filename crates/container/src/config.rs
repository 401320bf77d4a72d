//! The typed configuration of a model, as the rest of the program sees it.
//!
//! Values here have been checked: they are positive, below the limits of this module, and every
//! product that a tensor shape or a cache needs fits in 64 bits. Reading `config.json` and
//! filling in defaults happens in a private module.

use std::path::Path;

use crate::config_file;
use crate::error::ContainerError;
use crate::family::Family;

/// Largest vocabulary; token ids are u32 and real ones stay below 300,000.
pub const MAX_VOCAB: usize = 1 << 24;
/// Largest model width, intermediate size or projection width; the largest known is 18,432 for
/// a width and 131,072 for `heads x head_dim`.
pub const MAX_WIDTH: usize = 1 << 22;
/// Most layers.
pub const MAX_LAYERS: usize = 1024;
/// Most attention or index heads.
pub const MAX_HEADS: usize = 1 << 14;
/// Most routed experts of a layer.
pub const MAX_EXPERTS: usize = 1 << 16;
/// Most routed experts of a model (layers x experts): ten times the largest known model.
pub const MAX_ROUTED_EXPERTS: usize = 1 << 18;
/// Most experts per token; the integer combine is proved for 64 contributions.
pub const MAX_TOP_K: usize = 64;
/// Longest context.
pub const MAX_POSITIONS: usize = 1 << 26;
/// Most numbers in one matrix.
pub const MAX_ELEMENTS: usize = 1 << 40;
/// Most shared experts.
pub const MAX_SHARED_EXPERTS: usize = 1024;
/// Most multi-token-prediction layers.
pub const MAX_MTP_LAYERS: usize = 8;

/// First half of the BLAKE3 of some bytes.
pub fn half_hash(bytes: &[u8]) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
    half
}

/// A checked model configuration.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// Model family.
    pub family: Family,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers, MTP layers not counted.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Longest context in tokens.
    pub max_position: usize,
    /// Epsilon of the RMS norms that follow the configuration.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the head is the embedding.
    pub tie_embeddings: bool,
    /// Attention.
    pub attention: Attention,
    /// Width of dense feed-forward layers; unused when every layer is sparse.
    pub dense_intermediate: usize,
    /// Kind of each decoder layer; `layers` entries.
    pub mlp_layer_types: Vec<LayerKind>,
    /// Routed and shared experts.
    pub moe: MoeConfig,
    /// Multi-token-prediction layers after the decoder layers.
    pub mtp_layers: usize,
    /// Ids that end a text: union of `config.json` and `generation_config.json`, ascending. Ids
    /// outside the vocabulary are left out, they cannot be produced.
    pub stop_ids: Vec<u32>,
    /// Beginning-of-text id, when stated.
    pub bos: Option<u32>,
    /// Padding id, when stated.
    pub pad: Option<u32>,
}

/// Feed-forward kind of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LayerKind {
    /// One feed-forward network.
    Dense,
    /// Router and experts.
    Sparse,
}

/// Attention of a family.
#[derive(Clone, PartialEq, Debug)]
pub enum Attention {
    /// Multi-head latent attention.
    Mla {
        /// Rank of the query latent.
        q_lora: usize,
        /// Rank of the key/value latent.
        kv_lora: usize,
        /// Head numbers without position.
        nope: usize,
        /// Head numbers with rotary position (even).
        rope: usize,
        /// Value numbers per head.
        v_dim: usize,
        /// Sparse-attention indexer.
        indexer: Option<IndexerConfig>,
    },
    /// Grouped-query attention.
    Gqa {
        /// Key/value heads; divides the query heads.
        kv_heads: usize,
        /// Numbers per head (even).
        head_dim: usize,
        /// Whether queries and keys are normalised over the whole projection.
        qk_norm: bool,
    },
}

/// Sparse-attention indexer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IndexerConfig {
    /// Index heads.
    pub heads: usize,
    /// Numbers per index head; the first `rope` of them rotate.
    pub head_dim: usize,
    /// Keys kept per query.
    pub topk: usize,
    /// Kind of each decoder layer; `layers` entries, the first is `Full`.
    pub types: Vec<IndexerKind>,
}

/// Where a layer's key selection comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IndexerKind {
    /// The layer has its own indexer.
    Full,
    /// The layer reuses the selection of the last `Full` layer before it.
    Shared,
}

/// Routed and shared experts.
#[derive(Clone, PartialEq, Debug)]
pub struct MoeConfig {
    /// Routed experts per sparse layer.
    pub experts: usize,
    /// Experts per token, at most [`MAX_TOP_K`].
    pub top_k: usize,
    /// Width of one routed expert.
    pub expert_intermediate: usize,
    /// Shared experts; their joint width is this times `expert_intermediate`. May be 0.
    pub shared_experts: usize,
    /// Groups the experts are cut into.
    pub n_group: usize,
    /// Groups kept per token.
    pub topk_group: usize,
    /// Whether the chosen weights are normalised to sum to one.
    pub norm_topk_prob: bool,
    /// Factor on the weights.
    pub routed_scaling: f32,
    /// Score function.
    pub scoring: Scoring,
}

/// Function from router logits to scores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scoring {
    /// Each expert for itself; a stored bias takes part in the choice only.
    Sigmoid,
    /// Over all experts.
    Softmax,
}

impl Config {
    /// Reads and checks `config.json` and, when present, `generation_config.json` of a directory.
    pub fn load(dir: &Path) -> Result<Config, ContainerError> {
        config_file::load(dir)
    }

    /// Checks a configuration given as text: `config.json` and perhaps `generation_config.json`.
    pub fn from_json(config: &str, generation: Option<&str>) -> Result<Config, ContainerError> {
        config_file::parse(
            config,
            Path::new("config.json"),
            generation,
            Path::new("generation_config.json"),
        )
    }

    /// Decoder and MTP layers together.
    pub fn all_layers(&self) -> usize {
        self.layers + self.mtp_layers
    }

    /// Whether `layer` is a multi-token-prediction layer.
    pub fn is_mtp(&self, layer: usize) -> bool {
        layer >= self.layers && layer < self.all_layers()
    }

    /// Feed-forward kind of a layer; MTP layers are sparse. `None` beyond the last layer.
    pub fn layer_kind(&self, layer: usize) -> Option<LayerKind> {
        if self.is_mtp(layer) {
            Some(LayerKind::Sparse)
        } else {
            self.mlp_layer_types.get(layer).copied()
        }
    }

    /// Indexer kind of a layer; MTP layers have their own. `None` without an indexer.
    pub fn indexer_kind(&self, layer: usize) -> Option<IndexerKind> {
        let Attention::Mla { indexer: Some(indexer), .. } = &self.attention else { return None };
        if self.is_mtp(layer) { Some(IndexerKind::Full) } else { indexer.types.get(layer).copied() }
    }

    /// Numbers cached per token and layer, index keys not counted.
    pub fn kv_width(&self) -> usize {
        match self.attention {
            Attention::Mla { kv_lora, rope, .. } => kv_lora + rope,
            Attention::Gqa { kv_heads, head_dim, .. } => 2 * kv_heads * head_dim,
        }
    }

    /// Joint width of the shared experts; 0 without any.
    pub fn shared_intermediate(&self) -> usize {
        self.moe.shared_experts * self.moe.expert_intermediate
    }

    /// Hash of everything that changes the mathematics: the first half of a BLAKE3. The longest
    /// context and the ids that begin, pad and end texts are not in it.
    pub fn identity(&self) -> [u8; 16] {
        half_hash(self.identity_text().as_bytes())
    }

    /// Everything that changes the mathematics, as text that no change of this struct's order or
    /// of a number's printing moves. Part of the model's identity.
    pub(crate) fn identity_text(&self) -> String {
        let moe = &self.moe;
        let mut text = format!(
            "family {}\nvocab {}\nhidden {}\nlayers {}\nheads {}\neps {:08x}\ntheta {:016x}\ntied {}\n\
             dense {}\nexperts {}\ntop_k {}\nwidth {}\nshared {}\ngroups {} {}\nnorm {}\nscale {:08x}\n\
             scoring {}\nmtp {}\n",
            self.family.row().model_types.first().copied().unwrap_or_default(),
            self.vocab_size,
            self.hidden_size,
            self.layers,
            self.heads,
            self.rms_norm_eps.to_bits(),
            self.rope_theta.to_bits(),
            self.tie_embeddings,
            self.dense_intermediate,
            moe.experts,
            moe.top_k,
            moe.expert_intermediate,
            moe.shared_experts,
            moe.n_group,
            moe.topk_group,
            moe.norm_topk_prob,
            moe.routed_scaling.to_bits(),
            match moe.scoring {
                Scoring::Sigmoid => "sigmoid",
                Scoring::Softmax => "softmax",
            },
            self.mtp_layers,
        );
        text.push_str("layers ");
        text.extend(self.mlp_layer_types.iter().map(|kind| match kind {
            LayerKind::Dense => 'd',
            LayerKind::Sparse => 's',
        }));
        match &self.attention {
            Attention::Mla { q_lora, kv_lora, nope, rope, v_dim, indexer } => {
                text += &format!("\nmla {q_lora} {kv_lora} {nope} {rope} {v_dim}\n");
                if let Some(indexer) = indexer {
                    text += &format!(
                        "indexer {} {} {} ",
                        indexer.heads, indexer.head_dim, indexer.topk
                    );
                    text.extend(indexer.types.iter().map(|kind| match kind {
                        IndexerKind::Full => 'f',
                        IndexerKind::Shared => 's',
                    }));
                    text.push('\n');
                }
            }
            Attention::Gqa { kv_heads, head_dim, qk_norm } => {
                text += &format!("\ngqa {kv_heads} {head_dim} {qk_norm}\n");
            }
        }
        text
    }
}
