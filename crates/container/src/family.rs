//! Model families: one registry row each, and the roles that tensors play.
//!
//! Tensor names are in [`crate::tensors`]; what the tensors compute is not known here.

/// An implemented model family.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Family {
    /// GLM with latent attention, sparse-attention indexer and routed experts.
    GlmMoeDsa,
    /// OLMoE.
    Olmoe,
}

/// How rotary pairs are laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rope {
    /// Numbers 2i and 2i + 1 form a pair.
    Interleaved,
    /// Numbers i and i + n/2 form a pair.
    HalfSplit,
}

/// Texts around the reasoning part of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ThinkingFormat {
    /// Opens reasoning.
    pub open: &'static str,
    /// Closes reasoning.
    pub close: &'static str,
    /// Template variable that turns it on and off.
    pub switch: &'static str,
}

/// Texts around a tool call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ToolFormat {
    /// Opens a call; the function's name follows.
    pub open: &'static str,
    /// Closes a call.
    pub close: &'static str,
    /// Around an argument's name.
    pub key: (&'static str, &'static str),
    /// Around an argument's value.
    pub value: (&'static str, &'static str),
}

/// What is particular to a family beyond its tensors.
#[derive(Debug)]
pub struct FamilyRow {
    /// Name for people.
    pub name: &'static str,
    /// `model_type` spellings in `config.json`.
    pub model_types: &'static [&'static str],
    /// Tokens that precede a text that is scored, in order; each exactly once.
    pub scoring_prefix: &'static [&'static str],
    /// Layout of rotary pairs.
    pub rope: Rope,
    /// Reasoning, when the family has it.
    pub thinking: Option<ThinkingFormat>,
    /// Tool calls, when the family has a fixed form.
    pub tools: Option<ToolFormat>,
}

static GLM_MOE_DSA: FamilyRow = FamilyRow {
    name: "GLM MoE DSA",
    model_types: &["glm_moe_dsa"],
    scoring_prefix: &["[gMASK]", "<sop>"],
    rope: Rope::Interleaved,
    thinking: Some(ThinkingFormat {
        open: "<think>",
        close: "</think>",
        switch: "enable_thinking",
    }),
    tools: Some(ToolFormat {
        open: "<tool_call>",
        close: "</tool_call>",
        key: ("<arg_key>", "</arg_key>"),
        value: ("<arg_value>", "</arg_value>"),
    }),
};

static OLMOE: FamilyRow = FamilyRow {
    name: "OLMoE",
    model_types: &["olmoe"],
    scoring_prefix: &[],
    rope: Rope::HalfSplit,
    thinking: None,
    tools: None,
};

impl Family {
    /// Every family.
    pub const ALL: [Family; 2] = [Family::GlmMoeDsa, Family::Olmoe];

    /// The family of a `model_type`.
    pub fn from_model_type(model_type: &str) -> Option<Family> {
        Family::ALL.into_iter().find(|family| family.row().model_types.contains(&model_type))
    }

    /// The registry row.
    pub fn row(self) -> &'static FamilyRow {
        match self {
            Family::GlmMoeDsa => &GLM_MOE_DSA,
            Family::Olmoe => &OLMOE,
        }
    }
}

/// What a tensor is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[allow(missing_docs)]
pub enum Role {
    Embedding,
    Head,
    FinalNorm,
    InputNorm,
    PostAttentionNorm,
    QA,
    QANorm,
    QB,
    KvA,
    KvANorm,
    KvB,
    O,
    Q,
    K,
    V,
    QNorm,
    KNorm,
    IndexerQB,
    IndexerK,
    IndexerKNormWeight,
    IndexerKNormBias,
    IndexerWeights,
    DenseGate,
    DenseUp,
    DenseDown,
    Router,
    RouterBias,
    SharedGate,
    SharedUp,
    SharedDown,
    ExpertGate,
    ExpertUp,
    ExpertDown,
    /// Joins the normalised embedding and hidden state of an MTP layer: `[D, 2D]`.
    MtpEhProj,
    MtpEnorm,
    MtpHnorm,
    MtpSharedHeadNorm,
}

/// Tensors that conversion and activation modes treat alike.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[allow(missing_docs)]
pub enum TensorClass {
    Experts,
    SharedExpert,
    Attention,
    KvB,
    DenseMlp,
    Embedding,
    Head,
    Router,
    /// Every norm weight and bias; always vectors.
    Norm,
    Indexer,
    Mtp,
}

impl TensorClass {
    /// Name for people and command lines.
    pub const fn name(self) -> &'static str {
        match self {
            TensorClass::Experts => "experts",
            TensorClass::SharedExpert => "shared-expert",
            TensorClass::Attention => "attention",
            TensorClass::KvB => "kv-b",
            TensorClass::DenseMlp => "dense-mlp",
            TensorClass::Embedding => "embedding",
            TensorClass::Head => "head",
            TensorClass::Router => "router",
            TensorClass::Norm => "norm",
            TensorClass::Indexer => "indexer",
            TensorClass::Mtp => "mtp",
        }
    }
}

impl Role {
    /// The class of a role.
    pub const fn class(self) -> TensorClass {
        match self {
            Role::Embedding => TensorClass::Embedding,
            Role::Head => TensorClass::Head,
            Role::FinalNorm
            | Role::InputNorm
            | Role::PostAttentionNorm
            | Role::QANorm
            | Role::KvANorm
            | Role::QNorm
            | Role::KNorm
            | Role::IndexerKNormWeight
            | Role::IndexerKNormBias
            | Role::MtpEnorm
            | Role::MtpHnorm
            | Role::MtpSharedHeadNorm => TensorClass::Norm,
            Role::QA | Role::QB | Role::KvA | Role::O | Role::Q | Role::K | Role::V => {
                TensorClass::Attention
            }
            Role::KvB => TensorClass::KvB,
            Role::IndexerQB | Role::IndexerK | Role::IndexerWeights => TensorClass::Indexer,
            Role::DenseGate | Role::DenseUp | Role::DenseDown => TensorClass::DenseMlp,
            Role::Router | Role::RouterBias => TensorClass::Router,
            Role::SharedGate | Role::SharedUp | Role::SharedDown => TensorClass::SharedExpert,
            Role::ExpertGate | Role::ExpertUp | Role::ExpertDown => TensorClass::Experts,
            Role::MtpEhProj => TensorClass::Mtp,
        }
    }

    /// Whether the tensor is a vector; vectors are stored plain.
    pub const fn is_vector(self) -> bool {
        matches!(self.class(), TensorClass::Norm) || matches!(self, Role::RouterBias)
    }

    /// Whether the tensor belongs to the indexer of its layer.
    pub const fn is_indexer(self) -> bool {
        matches!(
            self,
            Role::IndexerQB
                | Role::IndexerK
                | Role::IndexerKNormWeight
                | Role::IndexerKNormBias
                | Role::IndexerWeights
        )
    }
}
