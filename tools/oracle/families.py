"""Tiny configurations and random weights of the two families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]

GLM_BASE: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 512,
    "bos_token_id": 2,
    "eos_token_id": [0, 4],
    "pad_token_id": 0,
}

OLMOE_BASE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "clip_qkv": None,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}

SPECIAL_IDS = 8
"""Prompts avoid the ids below this, so that no stop id occurs in them."""


@dataclass
class Sampler:
    """Random tensors whose scale keeps activations of order one."""

    rng: np.random.Generator

    def matrix(self, outputs: int, inputs: int, gain: float = 1.0) -> np.ndarray:
        """Normal with variance gain^2 / inputs."""
        values = self.rng.standard_normal((outputs, inputs)) * gain / np.sqrt(inputs)
        return values.astype(np.float32)

    def norm(self, size: int) -> np.ndarray:
        """Norm weights around one."""
        return self.rng.uniform(0.6, 1.4, size).astype(np.float32)

    def vector(self, size: int, scale: float) -> np.ndarray:
        """Small normal numbers."""
        return (self.rng.standard_normal(size) * scale).astype(np.float32)


def mlp(sampler: Sampler, prefix: str, hidden: int, inner: int, gain: float) -> Weights:
    """The three matrices of a gated feed-forward network."""
    return {
        f"{prefix}.gate_proj.weight": sampler.matrix(inner, hidden, 1.5),
        f"{prefix}.up_proj.weight": sampler.matrix(inner, hidden, 1.5),
        f"{prefix}.down_proj.weight": sampler.matrix(hidden, inner, gain),
    }


def indexer_types(config: dict[str, Any]) -> list[str]:
    """The indexer type of each layer, from whichever field of the configuration states it."""
    layers = config["num_hidden_layers"]
    if config.get("indexer_types") is not None:
        return config["indexer_types"]
    if (pattern := config.get("index_topk_pattern")) is not None:
        return [{"F": "full", "S": "shared"}.get(entry, entry) for entry in pattern]
    frequency = max(config.get("index_topk_freq", 1), 1)
    offset = config.get("index_skip_topk_offset", 2)
    return [
        "full" if max(layer - offset + 1, 0) % frequency == 0 else "shared"
        for layer in range(layers)
    ]


def glm_attention(sampler: Sampler, prefix: str, config: dict[str, Any], indexer: bool) -> Weights:
    """One MLA block, with or without its own indexer."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = (
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    weights = {
        f"{prefix}.q_a_proj.weight": sampler.matrix(q_rank, hidden),
        f"{prefix}.q_a_layernorm.weight": sampler.norm(q_rank),
        f"{prefix}.q_b_proj.weight": sampler.matrix(heads * (nope + rope), q_rank, 1.8),
        f"{prefix}.kv_a_proj_with_mqa.weight": sampler.matrix(kv_rank + rope, hidden, 1.5),
        f"{prefix}.kv_a_layernorm.weight": sampler.norm(kv_rank),
        f"{prefix}.kv_b_proj.weight": sampler.matrix(heads * (nope + value), kv_rank, 1.5),
        f"{prefix}.o_proj.weight": sampler.matrix(hidden, heads * value, 1.5),
    }
    if indexer:
        size, index_heads = config["index_head_dim"], config["index_n_heads"]
        weights |= {
            f"{prefix}.indexer.wq_b.weight": sampler.matrix(index_heads * size, q_rank, 2.0),
            f"{prefix}.indexer.wk.weight": sampler.matrix(size, hidden),
            f"{prefix}.indexer.k_norm.weight": sampler.norm(size),
            f"{prefix}.indexer.k_norm.bias": sampler.vector(size, 0.2),
            f"{prefix}.indexer.weights_proj.weight": sampler.matrix(index_heads, hidden, 3.0),
        }
    return weights


def glm_sparse_mlp(sampler: Sampler, prefix: str, config: dict[str, Any]) -> Weights:
    """Router, selection bias, shared expert and routed experts."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts = config["n_routed_experts"]
    weights = {
        f"{prefix}.gate.weight": sampler.matrix(experts, hidden, 2.0),
        f"{prefix}.gate.e_score_correction_bias": sampler.vector(experts, 0.1),
    }
    shared = inner * config["n_shared_experts"]
    weights |= mlp(sampler, f"{prefix}.shared_experts", hidden, shared, 1.0)
    for expert in range(experts):
        weights |= mlp(sampler, f"{prefix}.experts.{expert}", hidden, inner, 1.5)
    return weights


def glm_layer(sampler: Sampler, config: dict[str, Any], layer: int, indexer: bool) -> Weights:
    """One decoder layer; layers at and after `num_hidden_layers` are sparse."""
    prefix, hidden = f"model.layers.{layer}", config["hidden_size"]
    weights = {
        f"{prefix}.input_layernorm.weight": sampler.norm(hidden),
        f"{prefix}.post_attention_layernorm.weight": sampler.norm(hidden),
    }
    weights |= glm_attention(sampler, f"{prefix}.self_attn", config, indexer)
    if layer < config["first_k_dense_replace"]:
        inner = config["intermediate_size"]
        return weights | mlp(sampler, f"{prefix}.mlp", hidden, inner, 1.5)
    return weights | glm_sparse_mlp(sampler, f"{prefix}.mlp", config)


def ends(sampler: Sampler, config: dict[str, Any]) -> Weights:
    """Embedding, final norm and output projection (absent when tied)."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    tied = config["tie_word_embeddings"]
    scale = 1.5 if tied else np.sqrt(hidden)
    weights = {
        "model.embed_tokens.weight": sampler.matrix(vocab, hidden, scale),
        "model.norm.weight": sampler.norm(hidden),
    }
    if not tied:
        weights["lm_head.weight"] = sampler.matrix(vocab, hidden, 3.0)
    return weights


def glm_weights(config: dict[str, Any], seed: int) -> Weights:
    """All tensors of a GLM model, the MTP layer's included if the config announces one."""
    sampler = Sampler(np.random.default_rng(seed))
    weights = ends(sampler, config)
    for layer, kind in enumerate(indexer_types(config)):
        weights |= glm_layer(sampler, config, layer, kind == "full")
    if config.get("num_nextn_predict_layers"):
        layer, hidden = config["num_hidden_layers"], config["hidden_size"]
        prefix = f"model.layers.{layer}"
        weights |= glm_layer(sampler, config, layer, True)
        weights |= {
            f"{prefix}.enorm.weight": sampler.norm(hidden),
            f"{prefix}.hnorm.weight": sampler.norm(hidden),
            f"{prefix}.eh_proj.weight": sampler.matrix(hidden, 2 * hidden),
            f"{prefix}.shared_head.norm.weight": sampler.norm(hidden),
        }
    return weights


def olmoe_weights(config: dict[str, Any], seed: int) -> Weights:
    """All tensors of an OLMoE model."""
    sampler = Sampler(np.random.default_rng(seed))
    weights = ends(sampler, config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    key_rows = hidden // heads * config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        weights |= {
            f"{prefix}.input_layernorm.weight": sampler.norm(hidden),
            f"{prefix}.post_attention_layernorm.weight": sampler.norm(hidden),
            f"{attention}.q_proj.weight": sampler.matrix(hidden, hidden),
            f"{attention}.k_proj.weight": sampler.matrix(key_rows, hidden),
            f"{attention}.v_proj.weight": sampler.matrix(key_rows, hidden, 1.5),
            f"{attention}.o_proj.weight": sampler.matrix(hidden, hidden, 1.5),
            f"{attention}.q_norm.weight": sampler.norm(hidden),
            f"{attention}.k_norm.weight": sampler.norm(key_rows),
            f"{prefix}.mlp.gate.weight": sampler.matrix(config["num_experts"], hidden, 2.0),
        }
        for expert in range(config["num_experts"]):
            inner = config["intermediate_size"]
            weights |= mlp(sampler, f"{prefix}.mlp.experts.{expert}", hidden, inner, 2.5)
    return weights
