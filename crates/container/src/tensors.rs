//! Tensor names and shapes: one table per family, and the list of what a model needs.
//!
//! Names of tensors are written here and nowhere else in the program; everything else asks for a
//! [`Role`]. Whether and how a tensor is stored is found out in [`crate::source`].

use crate::config::{Attention, Config, IndexerKind, LayerKind};
use crate::family::{Family, Role};

/// One tensor that a model needs or may have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorSpec {
    /// Name in the checkpoint (of the expert's own tensor, when experts are stored fused).
    pub name: String,
    /// Role.
    pub role: Role,
    /// Layer; `None` for tensors of the whole model.
    pub layer: Option<usize>,
    /// Routed expert.
    pub expert: Option<usize>,
    /// Outputs; 1 for vectors.
    pub rows: usize,
    /// Inputs; the length of a vector.
    pub cols: usize,
    /// Whether a model without it can run: MTP layers and the indexer.
    pub optional: bool,
}

/// A 3-D tensor that holds one matrix role of all experts of a layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FusedSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Rows per expert in the tensor.
    pub rows: usize,
    /// First of them that belongs to the role asked for.
    pub first_row: usize,
    /// Inputs.
    pub cols: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// The suffix is the whole name.
    Model,
    /// The layer's prefix precedes the suffix.
    Layer,
    /// The layer's and the expert's prefix precede the suffix.
    Expert,
}

/// Which models and layers have a tensor.
#[derive(Clone, Copy)]
enum When {
    Always,
    Untied,
    Dense,
    Sparse,
    SharedExpert,
    FullIndexer,
    Mtp,
}

struct TensorRow {
    role: Role,
    scope: Scope,
    when: When,
    suffix: &'static str,
    shape: fn(&Config) -> (usize, usize),
}

const fn row(
    role: Role,
    scope: Scope,
    when: When,
    suffix: &'static str,
    shape: fn(&Config) -> (usize, usize),
) -> TensorRow {
    TensorRow { role, scope, when, suffix, shape }
}

const LAYER_PREFIX: &str = "model.layers.";
const EXPERT_PREFIX: &str = "mlp.experts.";
/// A fused tensor may carry the ending that a module's weight has.
const FUSED_ENDINGS: [&str; 2] = ["", ".weight"];

use Scope::{Expert, Layer, Model};
use When::{Always, Dense, FullIndexer, Mtp, SharedExpert, Sparse, Untied};

static GLM_MOE_DSA: &[TensorRow] = &[
    row(Role::Embedding, Model, Always, "model.embed_tokens.weight", embedding),
    row(Role::FinalNorm, Model, Always, "model.norm.weight", hidden),
    row(Role::Head, Model, Untied, "lm_head.weight", embedding),
    row(Role::MtpEnorm, Layer, Mtp, "enorm.weight", hidden),
    row(Role::MtpHnorm, Layer, Mtp, "hnorm.weight", hidden),
    row(Role::MtpEhProj, Layer, Mtp, "eh_proj.weight", |c| (c.hidden_size, 2 * c.hidden_size)),
    row(Role::InputNorm, Layer, Always, "input_layernorm.weight", hidden),
    row(Role::QA, Layer, Always, "self_attn.q_a_proj.weight", |c| (mla(c).q_lora, c.hidden_size)),
    row(Role::QANorm, Layer, Always, "self_attn.q_a_layernorm.weight", |c| (1, mla(c).q_lora)),
    row(Role::QB, Layer, Always, "self_attn.q_b_proj.weight", |c| {
        (c.heads * (mla(c).nope + mla(c).rope), mla(c).q_lora)
    }),
    row(Role::KvA, Layer, Always, "self_attn.kv_a_proj_with_mqa.weight", |c| {
        (mla(c).kv_lora + mla(c).rope, c.hidden_size)
    }),
    row(Role::KvANorm, Layer, Always, "self_attn.kv_a_layernorm.weight", |c| (1, mla(c).kv_lora)),
    row(Role::KvB, Layer, Always, "self_attn.kv_b_proj.weight", |c| {
        (c.heads * (mla(c).nope + mla(c).v_dim), mla(c).kv_lora)
    }),
    row(Role::O, Layer, Always, "self_attn.o_proj.weight", |c| {
        (c.hidden_size, c.heads * mla(c).v_dim)
    }),
    row(Role::IndexerQB, Layer, FullIndexer, "self_attn.indexer.wq_b.weight", |c| {
        (mla(c).index_heads * mla(c).index_dim, mla(c).q_lora)
    }),
    row(Role::IndexerK, Layer, FullIndexer, "self_attn.indexer.wk.weight", |c| {
        (mla(c).index_dim, c.hidden_size)
    }),
    row(Role::IndexerKNormWeight, Layer, FullIndexer, "self_attn.indexer.k_norm.weight", |c| {
        (1, mla(c).index_dim)
    }),
    row(Role::IndexerKNormBias, Layer, FullIndexer, "self_attn.indexer.k_norm.bias", |c| {
        (1, mla(c).index_dim)
    }),
    row(Role::IndexerWeights, Layer, FullIndexer, "self_attn.indexer.weights_proj.weight", |c| {
        (mla(c).index_heads, c.hidden_size)
    }),
    row(Role::PostAttentionNorm, Layer, Always, "post_attention_layernorm.weight", hidden),
    row(Role::DenseGate, Layer, Dense, "mlp.gate_proj.weight", dense_in),
    row(Role::DenseUp, Layer, Dense, "mlp.up_proj.weight", dense_in),
    row(Role::DenseDown, Layer, Dense, "mlp.down_proj.weight", |c| {
        (c.hidden_size, c.dense_intermediate)
    }),
    row(Role::Router, Layer, Sparse, "mlp.gate.weight", router),
    row(Role::RouterBias, Layer, Sparse, "mlp.gate.e_score_correction_bias", |c| {
        (1, c.moe.experts)
    }),
    row(Role::SharedGate, Layer, SharedExpert, "mlp.shared_experts.gate_proj.weight", shared_in),
    row(Role::SharedUp, Layer, SharedExpert, "mlp.shared_experts.up_proj.weight", shared_in),
    row(Role::SharedDown, Layer, SharedExpert, "mlp.shared_experts.down_proj.weight", |c| {
        (c.hidden_size, c.shared_intermediate())
    }),
    row(Role::ExpertGate, Expert, Sparse, "gate_proj.weight", expert_in),
    row(Role::ExpertUp, Expert, Sparse, "up_proj.weight", expert_in),
    row(Role::ExpertDown, Expert, Sparse, "down_proj.weight", expert_out),
    row(Role::MtpSharedHeadNorm, Layer, Mtp, "shared_head.norm.weight", hidden),
];

static OLMOE: &[TensorRow] = &[
    row(Role::Embedding, Model, Always, "model.embed_tokens.weight", embedding),
    row(Role::FinalNorm, Model, Always, "model.norm.weight", hidden),
    row(Role::Head, Model, Untied, "lm_head.weight", embedding),
    row(Role::InputNorm, Layer, Always, "input_layernorm.weight", hidden),
    row(Role::Q, Layer, Always, "self_attn.q_proj.weight", |c| (c.hidden_size, c.hidden_size)),
    row(Role::K, Layer, Always, "self_attn.k_proj.weight", |c| (kv_width(c), c.hidden_size)),
    row(Role::V, Layer, Always, "self_attn.v_proj.weight", |c| (kv_width(c), c.hidden_size)),
    row(Role::QNorm, Layer, Always, "self_attn.q_norm.weight", hidden),
    row(Role::KNorm, Layer, Always, "self_attn.k_norm.weight", |c| (1, kv_width(c))),
    row(Role::O, Layer, Always, "self_attn.o_proj.weight", |c| (c.hidden_size, c.hidden_size)),
    row(Role::PostAttentionNorm, Layer, Always, "post_attention_layernorm.weight", hidden),
    row(Role::Router, Layer, Sparse, "mlp.gate.weight", router),
    row(Role::ExpertGate, Expert, Sparse, "gate_proj.weight", expert_in),
    row(Role::ExpertUp, Expert, Sparse, "up_proj.weight", expert_in),
    row(Role::ExpertDown, Expert, Sparse, "down_proj.weight", expert_out),
];

fn table(family: Family) -> &'static [TensorRow] {
    match family {
        Family::GlmMoeDsa => GLM_MOE_DSA,
        Family::Olmoe => OLMOE,
    }
}

#[derive(Default)]
struct MlaDims {
    q_lora: usize,
    kv_lora: usize,
    nope: usize,
    rope: usize,
    v_dim: usize,
    index_heads: usize,
    index_dim: usize,
}

/// The MLA numbers; zeros for another attention, whose table does not ask for them.
fn mla(config: &Config) -> MlaDims {
    let Attention::Mla { q_lora, kv_lora, nope, rope, v_dim, indexer } = &config.attention else {
        return MlaDims::default();
    };
    let (index_heads, index_dim) = indexer.as_ref().map_or((0, 0), |i| (i.heads, i.head_dim));
    MlaDims {
        q_lora: *q_lora,
        kv_lora: *kv_lora,
        nope: *nope,
        rope: *rope,
        v_dim: *v_dim,
        index_heads,
        index_dim,
    }
}

/// Width of keys or values in grouped-query attention.
fn kv_width(config: &Config) -> usize {
    match config.attention {
        Attention::Gqa { kv_heads, head_dim, .. } => kv_heads * head_dim,
        Attention::Mla { .. } => 0,
    }
}

fn embedding(config: &Config) -> (usize, usize) {
    (config.vocab_size, config.hidden_size)
}

fn hidden(config: &Config) -> (usize, usize) {
    (1, config.hidden_size)
}

fn dense_in(config: &Config) -> (usize, usize) {
    (config.dense_intermediate, config.hidden_size)
}

fn shared_in(config: &Config) -> (usize, usize) {
    (config.shared_intermediate(), config.hidden_size)
}

fn router(config: &Config) -> (usize, usize) {
    (config.moe.experts, config.hidden_size)
}

fn expert_in(config: &Config) -> (usize, usize) {
    (config.moe.expert_intermediate, config.hidden_size)
}

fn expert_out(config: &Config) -> (usize, usize) {
    (config.hidden_size, config.moe.expert_intermediate)
}

impl TensorRow {
    fn applies(&self, config: &Config, layer: Option<usize>) -> bool {
        let kind = layer.and_then(|layer| config.layer_kind(layer));
        match self.when {
            When::Always => true,
            When::Untied => !config.tie_embeddings,
            When::Dense => kind == Some(LayerKind::Dense),
            When::Sparse => kind == Some(LayerKind::Sparse),
            When::SharedExpert => kind == Some(LayerKind::Sparse) && config.moe.shared_experts > 0,
            When::FullIndexer => {
                layer.and_then(|layer| config.indexer_kind(layer)) == Some(IndexerKind::Full)
            }
            When::Mtp => layer.is_some_and(|layer| config.is_mtp(layer)),
        }
    }

    fn spec(&self, config: &Config, layer: Option<usize>, expert: Option<usize>) -> TensorSpec {
        let name = match (layer, expert) {
            (Some(layer), Some(expert)) => {
                format!("{LAYER_PREFIX}{layer}.{EXPERT_PREFIX}{expert}.{}", self.suffix)
            }
            (Some(layer), None) => format!("{LAYER_PREFIX}{layer}.{}", self.suffix),
            (None, _) => self.suffix.to_owned(),
        };
        let (rows, cols) = (self.shape)(config);
        let optional = self.role.is_indexer() || layer.is_some_and(|layer| config.is_mtp(layer));
        TensorSpec { name, role: self.role, layer, expert, rows, cols, optional }
    }
}

/// Tensors of the whole model: embedding, final norm and, unless tied, the head.
pub fn model_specs(config: &Config) -> Vec<TensorSpec> {
    let rows = table(config.family).iter().filter(|row| row.scope == Scope::Model);
    rows.filter(|row| row.applies(config, None)).map(|row| row.spec(config, None, None)).collect()
}

/// Tensors of one layer (decoder or MTP) except its routed experts; empty beyond the last layer.
pub fn layer_specs(config: &Config, layer: usize) -> Vec<TensorSpec> {
    if layer >= config.all_layers() {
        return Vec::new();
    }
    let rows = table(config.family).iter().filter(|row| row.scope == Scope::Layer);
    rows.filter(|row| row.applies(config, Some(layer)))
        .map(|row| row.spec(config, Some(layer), None))
        .collect()
}

/// Gate, up and down of one routed expert; `None` when there is no such expert.
pub fn expert_specs(config: &Config, layer: usize, expert: usize) -> Option<[TensorSpec; 3]> {
    let one = |role| spec(config, role, Some(layer), Some(expert));
    Some([one(Role::ExpertGate)?, one(Role::ExpertUp)?, one(Role::ExpertDown)?])
}

/// The tensor of a role at a place; `None` when the model has none there.
///
/// `layer` must be given exactly for roles that belong to a layer, `expert` exactly for those of
/// a routed expert.
pub fn spec(
    config: &Config,
    role: Role,
    layer: Option<usize>,
    expert: Option<usize>,
) -> Option<TensorSpec> {
    let row = table(config.family).iter().find(|row| row.role == role)?;
    let fits = match (row.scope, layer, expert) {
        (Scope::Model, None, None) => true,
        (Scope::Layer, Some(layer), None) => layer < config.all_layers(),
        (Scope::Expert, Some(layer), Some(expert)) => {
            layer < config.all_layers() && expert < config.moe.experts
        }
        _ => false,
    };
    (fits && row.applies(config, layer)).then(|| row.spec(config, layer, expert))
}

/// Everything a model has, in layer order: whole-model tensors first, then layer by layer, the
/// routed experts of a layer last; MTP layers follow the decoder layers.
pub fn tensor_specs(config: &Config) -> Vec<TensorSpec> {
    let mut specs = model_specs(config);
    for layer in 0..config.all_layers() {
        specs.extend(layer_specs(config, layer));
        if config.layer_kind(layer) == Some(LayerKind::Sparse) {
            for expert in 0..config.moe.experts {
                specs.extend(expert_specs(config, layer, expert).into_iter().flatten());
            }
        }
    }
    specs
}

/// Names under which a layer's experts may be stored in 3-D tensors `[experts, rows, cols]`, for
/// a role of a routed expert; empty for other roles.
pub fn fused_specs(config: &Config, role: Role, layer: usize) -> Vec<FusedSpec> {
    let inner = config.moe.expert_intermediate;
    let outer = config.hidden_size;
    let choices: &[(&str, usize, usize, usize)] = match role {
        Role::ExpertGate => {
            &[("gate_up_proj", 2 * inner, 0, outer), ("gate_proj", inner, 0, outer)]
        }
        Role::ExpertUp => {
            &[("gate_up_proj", 2 * inner, inner, outer), ("up_proj", inner, 0, outer)]
        }
        Role::ExpertDown => &[("down_proj", outer, 0, inner)],
        _ => &[],
    };
    let mut specs = Vec::with_capacity(4);
    for &(stem, rows, first_row, cols) in choices {
        for ending in FUSED_ENDINGS {
            let name = format!("{LAYER_PREFIX}{layer}.{EXPERT_PREFIX}{stem}{ending}");
            specs.push(FusedSpec { name, rows, first_row, cols });
        }
    }
    specs
}

/// The layer that a tensor's name places it in.
pub fn layer_of(name: &str) -> Option<usize> {
    let (layer, _) = name.strip_prefix(LAYER_PREFIX)?.split_once('.')?;
    layer.parse().ok()
}
