"""The list of fixtures: what each one is for, its configuration and how it is stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from checkpoint import Storage
from families import GLM_BASE, OLMOE_BASE

EXPERTS = "*.mlp.experts.*"
DENSE_PROJECTIONS = [
    ("*.indexer.weights_proj.weight", "bf16"),
    ("*.self_attn.*_proj.weight", "int8-row"),
    ("*.self_attn.kv_a_proj_with_mqa.weight", "int8-row"),
    ("*.self_attn.indexer.wq_b.weight", "int8-row"),
    ("*.self_attn.indexer.wk.weight", "int8-row"),
    ("*.mlp.shared_experts.*", "int8-row"),
    ("*.mlp.gate_proj.weight", "int8-row"),
    ("*.mlp.up_proj.weight", "int8-row"),
    ("*.mlp.down_proj.weight", "int8-row"),
    ("lm_head.weight", "int8-row"),
    ("model.embed_tokens.weight", "int8-row"),
]
"""int8 for everything that is neither norm, router, index head weights nor routed expert; the
rule of the routed experts must come before these."""

SHARED_INT8 = ("*.mlp.shared_experts.*", "int8-row")

FP8_PROJECTIONS = [
    ("*.indexer.weights_proj.weight", "bf16"),
    ("*.mlp.gate.weight", "bf16"),
    ("*.mlp.gate.e_score_correction_bias", "f32"),
    ("*norm*", "bf16"),
    ("*.self_attn.*", "fp8-checkpoint"),
    ("*.mlp.*", "fp8-checkpoint"),
]
"""What original FP8 checkpoints quantise: the projections of attention, indexer and MLPs."""


@dataclass
class Fixture:
    """One fixture directory."""

    name: str
    purpose: str
    config: dict[str, Any]
    storage: Storage = field(default_factory=Storage)
    prompt: int = 40
    generated: int = 16
    omit_indexer: bool = False
    """Leave the indexer's tensors out of the files."""
    omit_config: tuple[str, ...] = ()
    """Keys that config.json lacks although the reference uses them."""
    generation_config: dict[str, Any] | None = None


def glm(**changes: Any) -> dict[str, Any]:
    """The GLM base configuration with changes."""
    return GLM_BASE | changes


def olmoe(**changes: Any) -> dict[str, Any]:
    """The OLMoE base configuration with changes."""
    return OLMOE_BASE | changes


def experts(format_name: str, **settings: Any) -> Storage:
    """bf16 with quantised routed experts."""
    return Storage(rules=[(EXPERTS, format_name)], **settings)


WIDE_EXPERTS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 48,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
E8_SHAPE: dict[str, Any] = WIDE_EXPERTS | {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 32,
    "n_routed_experts": 3,
}
FP8_SHAPE: dict[str, Any] = WIDE_EXPERTS | {
    "vocab_size": 96,
    "hidden_size": 136,
    "moe_intermediate_size": 130,
    "n_routed_experts": 3,
}

FLOAT_FIXTURES = [
    Fixture(
        "glm-dense",
        "context below index_topk, f32, per-expert tensors",
        glm(vocab_size=128, index_topk=64, n_routed_experts=4, moe_intermediate_size=24),
        Storage("f32"),
        prompt=32,
    ),
    Fixture(
        "glm-dsa",
        "context longer than index_topk in prefill and decode, bf16",
        glm(num_hidden_layers=3, index_topk=8, n_routed_experts=4),
        prompt=48,
        generation_config={"eos_token_id": [0, 4, 6], "bos_token_id": 2, "pad_token_id": 0},
    ),
    Fixture(
        "glm-dsa-shared",
        "indexer_types with shared layers after a full one, two full layers",
        glm(
            num_hidden_layers=5,
            moe_intermediate_size=16,
            index_topk=12,
            first_k_dense_replace=2,
            indexer_types=["full", "shared", "shared", "full", "shared"],
            n_routed_experts=3,
            num_experts_per_tok=2,
        ),
        prompt=52,
    ),
    Fixture(
        "glm-dsa-pattern",
        "index_topk_pattern as a string, first_k_dense_replace without mlp_layer_types",
        glm(
            num_hidden_layers=3,
            index_topk=10,
            index_topk_pattern="FSF",
            n_routed_experts=4,
            num_experts_per_tok=2,
        ),
        prompt=48,
    ),
    Fixture(
        "glm-dsa-freq",
        "index_topk_freq and index_skip_topk_offset",
        glm(
            num_hidden_layers=4,
            moe_intermediate_size=16,
            index_topk=16,
            index_topk_freq=3,
            index_skip_topk_offset=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
        ),
        prompt=56,
    ),
    Fixture(
        "glm-groups",
        "four expert groups of which two may be used, DSA active",
        glm(n_group=4, topk_group=2, n_routed_experts=12, moe_intermediate_size=24),
        prompt=48,
    ),
    Fixture(
        "glm-odd-dims",
        "no dimension a multiple of 64, many odd",
        glm(
            vocab_size=211,
            hidden_size=72,
            intermediate_size=101,
            moe_intermediate_size=37,
            num_attention_heads=3,
            num_key_value_heads=3,
            q_lora_rank=27,
            kv_lora_rank=19,
            qk_nope_head_dim=11,
            qk_rope_head_dim=6,
            v_head_dim=13,
            index_head_dim=10,
            index_n_heads=17,
            n_shared_experts=2,
            n_routed_experts=5,
        ),
        prompt=48,
    ),
    Fixture(
        "glm-fused",
        "fused 3-D expert tensors, bf16",
        glm(index_topk=64),
        Storage(fused=True),
    ),
    Fixture(
        "glm-f16",
        "f16 checkpoint",
        glm(),
        Storage("f16"),
        prompt=48,
    ),
    Fixture(
        "glm-sharded",
        "three shards with model.safetensors.index.json",
        glm(n_routed_experts=5),
        Storage(shards=3),
        prompt=48,
    ),
    Fixture(
        "glm-fp8-checkpoint",
        "original FP8 checkpoint: weight and weight_scale_inv, partial 128x128 blocks",
        glm(
            vocab_size=96,
            hidden_size=136,
            intermediate_size=136,
            moe_intermediate_size=130,
            n_routed_experts=3,
            num_experts_per_tok=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=40,
            quantization_config={
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
        ),
        Storage(rules=FP8_PROJECTIONS),
        prompt=48,
    ),
    Fixture(
        "glm-tied",
        "tied embeddings: no lm_head.weight",
        glm(index_topk=64, tie_word_embeddings=True),
    ),
    Fixture(
        "glm-unnormalised",
        "norm_topk_prob false, other scaling factor and rope base",
        glm(
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        prompt=48,
    ),
    Fixture(
        "glm-mtp",
        "an MTP layer after the last layer, six experts",
        glm(n_routed_experts=6, moe_intermediate_size=16, num_nextn_predict_layers=1),
        prompt=48,
    ),
    Fixture(
        "glm-no-indexer",
        "no indexer tensors; the context stays within index_topk",
        glm(index_topk=96),
        omit_indexer=True,
    ),
    Fixture("olmoe-mha", "MHA, norm_topk_prob false, bf16, per-expert", olmoe()),
    Fixture(
        "olmoe-mha-norm",
        "MHA, norm_topk_prob true, fused experts, f32",
        olmoe(
            vocab_size=128,
            norm_topk_prob=True,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=1,
        ),
        Storage("f32", fused=True),
    ),
    Fixture(
        "olmoe-gqa",
        "GQA, norm_topk_prob true, per-expert",
        olmoe(num_key_value_heads=2, norm_topk_prob=True, eos_token_id=[0, 3]),
    ),
    Fixture(
        "olmoe-gqa-fused",
        "one key-value head, norm_topk_prob false, fused experts, odd dims",
        olmoe(
            hidden_size=72,
            num_attention_heads=6,
            num_key_value_heads=1,
            intermediate_size=41,
            num_experts=4,
        ),
        Storage(fused=True),
    ),
]

QUANTISED_FIXTURES = [
    Fixture(
        "glm-int8-row",
        "int8-row experts, stamped",
        glm(**WIDE_EXPERTS),
        experts("int8-row", stamped=True),
        prompt=48,
    ),
    Fixture(
        "glm-int4-row",
        "int4-row experts, unstamped and flat, odd intermediate",
        glm(**WIDE_EXPERTS | {"moe_intermediate_size": 57}),
        experts("int4-row", flat=True),
        prompt=48,
    ),
    Fixture(
        "glm-int2-row",
        "int2-row experts, stamped, intermediate not a multiple of 4",
        glm(**WIDE_EXPERTS | {"moe_intermediate_size": 62}),
        experts("int2-row", stamped=True),
        prompt=48,
    ),
    Fixture(
        "glm-int4-g32",
        "int4-g32 experts, unstamped: the group follows from the scale count",
        glm(**WIDE_EXPERTS),
        experts("int4-g32"),
        prompt=48,
    ),
    Fixture(
        "glm-int4-g64",
        "int4-g64 experts, stamped, with int8-row dense projections, embedding and head",
        glm(**WIDE_EXPERTS | {"moe_intermediate_size": 96}),
        Storage(rules=[(EXPERTS, "int4-g64"), *DENSE_PROJECTIONS], stamped=True),
        prompt=48,
    ),
    Fixture(
        "glm-int8-dense",
        "int8-row for everything that may be, unstamped and flat, shared indexer layer",
        glm(
            **WIDE_EXPERTS
            | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
        ),
        Storage(rules=[(EXPERTS, "int8-row"), *DENSE_PROJECTIONS], flat=True),
        prompt=48,
    ),
    Fixture(
        "olmoe-int4-g48",
        "int4-g48 experts, unstamped",
        olmoe(
            vocab_size=128,
            hidden_size=96,
            intermediate_size=144,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=1,
        ),
        experts("int4-g48"),
    ),
    Fixture(
        "olmoe-int4-g96",
        "int4-g96 experts, stamped, inputs not a multiple of the group",
        olmoe(
            vocab_size=128,
            hidden_size=128,
            intermediate_size=112,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=1,
        ),
        experts("int4-g96", stamped=True),
    ),
    Fixture(
        "glm-int3-g64",
        "int3-g64 experts, unstamped and flat, intermediate not a multiple of 64",
        glm(**WIDE_EXPERTS | {"hidden_size": 104, "moe_intermediate_size": 80}),
        experts("int3-g64", flat=True),
        prompt=48,
    ),
    Fixture(
        "glm-e8",
        "e8-iq3 experts, stamped, whole blocks, int8-row dense projections",
        glm(**E8_SHAPE | {"moe_intermediate_size": 256}),
        Storage(rules=[(EXPERTS, "e8-iq3"), *DENSE_PROJECTIONS], stamped=True),
        prompt=48,
    ),
    Fixture(
        "glm-e8-tail",
        "e8-iq3 experts, stamped; rows of 192 and 80 inputs end in a padded block",
        glm(**E8_SHAPE | {"hidden_size": 192, "moe_intermediate_size": 80}),
        Storage(rules=[(EXPERTS, "e8-iq3"), SHARED_INT8], stamped=True),
        prompt=48,
    ),
    Fixture(
        "olmoe-e8",
        "e8-iq3 experts, unstamped and flat: recognised by the tag; rows of two blocks",
        olmoe(
            vocab_size=96,
            hidden_size=256,
            intermediate_size=512,
            num_experts=3,
            num_experts_per_tok=2,
            num_hidden_layers=1,
            num_key_value_heads=1,
        ),
        Storage(rules=[(EXPERTS, "e8-iq3"), *DENSE_PROJECTIONS], flat=True),
    ),
    Fixture(
        "glm-mxfp4",
        "mxfp4 experts with U8 scales, stamped",
        glm(**WIDE_EXPERTS | {"moe_intermediate_size": 72}),
        experts("mxfp4", stamped=True, scales_dtype="U8"),
        prompt=48,
    ),
    Fixture(
        "olmoe-mxfp4",
        "mxfp4 experts with F8_E8M0 scales, unstamped",
        olmoe(num_key_value_heads=2, norm_topk_prob=True),
        experts("mxfp4", scales_dtype="F8_E8M0"),
    ),
    Fixture(
        "glm-fp8",
        "fp8-e4m3-b128 experts with F32 scales, stamped, partial blocks",
        glm(**FP8_SHAPE),
        Storage(rules=[(EXPERTS, "fp8-e4m3-b128"), SHARED_INT8], stamped=True),
        prompt=48,
    ),
    Fixture(
        "glm-fp8-ue8m0",
        "fp8-e4m3-b128 experts with UE8M0 scales, unstamped",
        glm(**FP8_SHAPE | {"moe_intermediate_size": 40}),
        experts("fp8-e4m3-b128", scales_dtype="F8_E8M0"),
        prompt=48,
    ),
]  # fmt: skip

FIXTURES = FLOAT_FIXTURES + QUANTISED_FIXTURES
