"""References computed by transformers: greedy text, teacher-forced argmax, and the margins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM, OlmoeConfig, OlmoeForCausalLM

CLASSES = {
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
}


class Unsuitable(Exception):
    """These random weights prove too little; another seed is needed."""


def state_dict(values: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters under transformers' names: experts fused, the MTP layer left out."""
    mtp = f"model.layers.{config['num_hidden_layers']}."
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, value in values.items():
        if name.startswith(mtp):
            continue
        tensor = torch.from_numpy(np.ascontiguousarray(value))
        if ".mlp.experts." in name:
            prefix, rest = name.split(".experts.")
            expert, projection = rest.removesuffix(".weight").split(".")
            experts.setdefault(prefix, {})[int(expert), projection] = tensor
        else:
            state[name] = tensor
    for prefix, matrices in experts.items():
        count = 1 + max(expert for expert, _ in matrices)
        state[f"{prefix}.experts.gate_up_proj"] = torch.stack(
            [torch.cat((matrices[e, "gate_proj"], matrices[e, "up_proj"])) for e in range(count)]
        )
        state[f"{prefix}.experts.down_proj"] = torch.stack(
            [matrices[e, "down_proj"] for e in range(count)]
        )
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def build_model(config: dict[str, Any], values: dict[str, np.ndarray]) -> nn.Module:
    """The transformers model in float32 with eager attention and experts.

    Values may leave out the indexer: it keeps its random weights, which must not matter.
    """
    config_class, model_class = CLASSES[config["model_type"]]
    settings = config_class(**{k: v for k, v in config.items() if k != "architectures"})
    settings._attn_implementation = "eager"
    settings._experts_implementation = "eager"
    model = model_class(settings).float().eval()
    missing, unexpected = model.load_state_dict(state_dict(values, config), strict=False)
    missing = [name for name in missing if ".indexer." not in name]
    if missing or unexpected:
        raise RuntimeError(f"missing {missing}, unexpected {unexpected}")
    return model


@dataclass
class Gaps:
    """Smallest distances between what is selected and what is not, over all positions.

    `border` belongs to the DSA selection, `router` to the experts (and expert groups).
    """

    border: float | None = None
    router: float | None = None
    hooks: list = field(default_factory=list)

    def attach(self, model: nn.Module) -> None:
        """Watch every indexer and router of a model."""
        for module in model.modules():
            kind = type(module).__name__
            if kind == "GlmMoeDsaIndexer":
                self.hooks.append(module.register_forward_hook(self.indexer, with_kwargs=True))
            elif kind == "GlmMoeDsaTopkRouter":
                self.hooks.append(module.register_forward_hook(self.glm_router))
            elif kind == "OlmoeTopKRouter":
                self.hooks.append(module.register_forward_hook(self.olmoe_router))

    def detach(self) -> None:
        """Stop watching."""
        for hook in self.hooks:
            hook.remove()

    def indexer(self, module: nn.Module, args: tuple, kwargs: dict, selected: Tensor) -> None:
        """Recompute the index scores in float64 and compare the selection."""
        hidden, q_latent, (cos, sin) = args[0], args[1], args[2]
        scores = index_scores(module, hidden[0].double(), q_latent[0].double(), cos[0], sin[0])
        for query in range(scores.shape[0]):
            visible = scores[query, : query + 1]
            if len(visible) <= module.index_topk:
                continue
            order = visible.sort(descending=True)
            gap = (order.values[module.index_topk - 1] - order.values[module.index_topk]).item()
            self.border = gap if self.border is None else min(self.border, gap)
            ours = set(order.indices[: module.index_topk].tolist())
            if ours != set(selected[0, query].tolist()):
                raise Unsuitable("the selection differs from its float64 recomputation")

    def glm_router(self, module: nn.Module, args: tuple, output: tuple) -> None:
        """Gap between chosen and other experts, and between chosen and other groups."""
        scores = (
            args[0].reshape(-1, module.hidden_dim).double() @ module.weight.double().T
        ).sigmoid()
        choice = scores + module.e_score_correction_bias.double()
        groups = choice.view(len(choice), module.num_group, -1)
        if module.num_group > module.topk_group:
            strength = groups.topk(2, -1).values.sum(-1)
            self.router_gap(strength, module.topk_group)
            kept = strength.topk(module.topk_group, -1).indices
            mask = torch.zeros_like(strength, dtype=torch.bool).scatter(1, kept, True)
            choice = groups.masked_fill(~mask[..., None], -torch.inf).flatten(1)
        self.router_gap(choice, module.top_k)

    def olmoe_router(self, module: nn.Module, args: tuple, output: tuple) -> None:
        """Gap between chosen and other experts."""
        logits = args[0].reshape(-1, module.hidden_dim).double() @ module.weight.double().T
        self.router_gap(logits.softmax(-1), module.top_k)

    def router_gap(self, scores: Tensor, count: int) -> None:
        """Account for one selection of `count` columns per row."""
        if scores.shape[-1] <= count:
            return
        top = scores.topk(count + 1, -1).values
        gap = (top[:, count - 1] - top[:, count]).min().item()
        self.router = gap if self.router is None else min(self.router, gap)


def index_scores(
    module: nn.Module, hidden: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Scores [queries, keys] of the DSA indexer, written from its definition in float64."""
    rope, size, heads = module.qk_rope_head_dim, module.head_dim, module.n_heads
    cos, sin = cos[:, : rope // 2].double(), sin[:, : rope // 2].double()

    def rotated(vectors: Tensor) -> Tensor:
        angle_cos = cos.view(len(cos), *[1] * (vectors.dim() - 2), -1)
        angle_sin = sin.view(len(sin), *[1] * (vectors.dim() - 2), -1)
        even, odd = vectors[..., 0:rope:2], vectors[..., 1:rope:2]
        pairs = (even * angle_cos - odd * angle_sin, odd * angle_cos + even * angle_sin)
        return torch.cat((torch.stack(pairs, -1).flatten(-2), vectors[..., rope:]), -1)

    query = rotated((q_latent @ module.wq_b.weight.double().T).view(-1, heads, size))
    key = hidden @ module.wk.weight.double().T
    norm = module.k_norm
    key = nn.functional.layer_norm(key, (size,), norm.weight.double(), norm.bias.double(), norm.eps)
    key = rotated(key)
    per_head = torch.relu(torch.einsum("qhd,kd->qhk", query, key) * size**-0.5)
    weights = hidden @ module.weights_proj.weight.double().T * heads**-0.5
    return torch.einsum("qh,qhk->qk", weights, per_head)


@torch.no_grad()
def greedy(model: nn.Module, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
    """(prompt and greedy continuation, argmax after each position) with a KV cache: one prefill,
    then single tokens."""
    output = model(torch.tensor([prompt]), use_cache=True)
    predictions = output.logits[0].argmax(-1).tolist()
    ids = list(prompt)
    for _ in range(count):
        ids.append(predictions[-1])
        output = model(torch.tensor([ids[-1:]]), cache=output.cache, use_cache=True)
        predictions.append(output.logits[0, -1].argmax().item())
    return ids, predictions


def reference(
    model: nn.Module,
    config: dict[str, Any],
    prompt: list[int],
    count: int,
    stop_ids: set[int],
    least_margin: float,
    least_gap: float,
) -> dict[str, Any]:
    """The contents of ref.json, or `Unsuitable`."""
    full_ids, cached = greedy(model, prompt, count)
    if stop_ids & set(full_ids):
        raise Unsuitable("a stop id occurs")
    gaps = Gaps()
    gaps.attach(model)
    with torch.no_grad():
        logits = model(torch.tensor([full_ids]), use_cache=False).logits[0]
    gaps.detach()
    predictions = logits.argmax(-1).tolist()
    if predictions != cached:
        raise Unsuitable("the cached and the uncached pass differ")
    top = logits.topk(2, -1).values
    margin = (top[:, 0] - top[:, 1]).min().item()
    if margin < least_margin:
        raise Unsuitable(f"margin {margin:.1e}")
    if len(set(predictions)) * 3 < len(predictions):
        raise Unsuitable("the argmax varies too little")
    for kind, gap in (("border", gaps.border), ("router", gaps.router)):
        if gap is not None and gap < least_gap:
            raise Unsuitable(f"{kind} gap {gap:.1e}")
    result = {
        "prompt_ids": prompt,
        "full_ids": full_ids,
        "tf_pred": predictions,
        "margin": margin,
        "router_gap": gaps.router,
    }
    if config["model_type"] == "glm_moe_dsa" and len(full_ids) > config["index_topk"]:
        if gaps.border is None:
            raise RuntimeError("the context exceeds index_topk but no selection was seen")
        result["border_gap"] = gaps.border
    result["last_logits_head"] = [round(value, 5) for value in logits[-1, :8].tolist()]
    return result
