"""Weights to and from the Hugging Face layout."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import Model, ModelConfig

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
]
CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FLOAT32_SUFFIXES = ("mlp.gate.weight", "e_score_correction_bias")
"""Tensors stored as float32; all others are bfloat16."""


def hf_name(name: str, layers: int) -> str:
    """Checkpoint name of a model parameter (fused experts keep their own suffix)."""
    if name.startswith("mtp."):
        name = f"layers.{layers}.{name.removeprefix('mtp.')}"
    elif name.split(".")[0] in ("enorm", "hnorm", "eh_proj"):
        name = f"layers.{layers}.{name}"
    name = name.replace("mlp.bias", "mlp.gate.e_score_correction_bias")
    special = {
        "embed.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
        "mtp_norm.weight": f"model.layers.{layers}.shared_head.norm.weight",
    }
    return special.get(name, f"model.{name}")


def indexer_weights(config: ModelConfig, layer: int) -> dict[str, Tensor]:
    """Random indexer weights of one layer.

    The indexer is never the limit (top-k equals the longest context) and so never trained; its
    tensors are present so that the layout is complete.
    """
    generator = torch.Generator().manual_seed(layer)
    size, heads = config.index_head_dim, config.index_n_heads
    shapes = {
        "wq_b": (heads * size, config.q_lora_rank),
        "wk": (size, config.hidden_size),
        "weights_proj": (heads, config.hidden_size),
    }
    prefix = f"model.layers.{layer}.self_attn.indexer."
    weights = {
        f"{prefix}{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    weights[f"{prefix}k_norm.weight"] = torch.ones(size)
    weights[f"{prefix}k_norm.bias"] = torch.zeros(size)
    return weights


def to_hf(model: Model) -> dict[str, Tensor]:
    """All tensors of the checkpoint, experts one by one."""
    config = model.config
    layers, inner = config.num_hidden_layers, config.moe_intermediate_size
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        target = hf_name(name, layers)
        if name.endswith("mlp.gate_up"):
            base = target.removesuffix("gate_up")
            for expert, matrix in enumerate(tensor):
                weights[f"{base}experts.{expert}.gate_proj.weight"] = matrix[:inner]
                weights[f"{base}experts.{expert}.up_proj.weight"] = matrix[inner:]
        elif name.endswith("mlp.down"):
            base = target.removesuffix("down")
            for expert, matrix in enumerate(tensor):
                weights[f"{base}experts.{expert}.down_proj.weight"] = matrix
        else:
            weights[target] = tensor
    for layer in range(layers + 1):
        weights.update(indexer_weights(config, layer))
    return {
        name: tensor.to(torch.float32 if name.endswith(FLOAT32_SUFFIXES) else torch.bfloat16)
        .contiguous()
        .clone()
        for name, tensor in weights.items()
    }


def load_hf(model: Model, folder: Path) -> None:
    """Load a checkpoint that `export` wrote."""
    weights = load_file(folder / "model.safetensors")
    layers, experts = model.config.num_hidden_layers, model.config.n_routed_experts
    state = {}
    for name in model.state_dict():
        source = hf_name(name, layers)
        if name.endswith("mlp.gate_up"):
            base = source.removesuffix("gate_up")
            state[name] = torch.stack(
                [
                    torch.cat(
                        [weights[f"{base}experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]
                    )
                    for e in range(experts)
                ]
            )
        elif name.endswith("mlp.down"):
            base = source.removesuffix("down")
            state[name] = torch.stack(
                [weights[f"{base}experts.{e}.down_proj.weight"] for e in range(experts)]
            )
        else:
            state[name] = weights[source]
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})


def config_json(config: ModelConfig) -> dict:
    """The contents of config.json."""
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    return config.to_dict() | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "num_nextn_predict_layers": 1,
        "indexer_types": ["full"] * layers,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "bos_token_id": 2,
        "eos_token_id": [0, 4],
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def export(model: Model, tokenizer: Path, training: dict, out: Path) -> None:
    """Write the model, its configuration, tokenizer and training record.

    The folder is written beside `out` and renamed over it.
    """
    folder = out.with_name(out.name + ".new")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(to_hf(model), folder / "model.safetensors", {"format": "pt"})
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    files = {
        "config.json": config_json(model.config),
        "generation_config.json": {"eos_token_id": [0, 4, 6], "bos_token_id": 2, "pad_token_id": 0},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<sop>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": SPECIAL_TOKENS[1:],
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": model.config.max_position_embeddings,
        },
        "training.json": training,
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(folder, out)
