"""The bundled model in PyTorch: a small `glm_moe_dsa` with one multi-token-prediction layer.

The module and parameter names follow transformers' `GlmMoeDsaForCausalLM`, so that the export is a
renaming and nothing else. The DSA indexer is not part of training: the context never exceeds
`index_topk`, so every position attends to all earlier ones and the indexer is never the limit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LORA_NORM_EPS = 1e-6
"""RMSNorm epsilon of `q_a_layernorm` and `kv_a_layernorm`; every other norm uses `rms_norm_eps`."""

CAPACITY_FACTOR = 1.6
"""While training, an expert takes at most this multiple of the mean load; the rest is dropped."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model, with the field names of `config.json`."""

    vocab_size: int = 6144
    hidden_size: int = 256
    intermediate_size: int = 768
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 7
    first_k_dense_replace: int = 1
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    n_routed_experts: int = 24
    num_experts_per_tok: int = 4
    n_shared_experts: int = 1
    q_lora_rank: int = 128
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    head_dim: int = 32
    index_topk: int = 2048
    index_head_dim: int = 64
    index_n_heads: int = 2
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies (written to `rope_parameters`)."""
        return 10000.0

    def to_dict(self) -> dict[str, int | float | bool]:
        """The fields as they stand in `config.json`."""
        return asdict(self)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias, as every projection of this family."""
    return nn.Linear(inputs, outputs, bias=False)


def apply_interleaved_rope(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3) ... of the last dimension."""
    even, odd = vectors[..., 0::2], vectors[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


class RmsNorm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form (keys and values are built per head)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        heads, nope, rope = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
        )
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RmsNorm(config.q_lora_rank, LORA_NORM_EPS)
        self.q_b_proj = linear(config.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.kv_lora_rank + rope)
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, LORA_NORM_EPS)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (nope + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config = self.config
        batch, length, _ = hidden.shape
        heads, nope, rope = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
        )
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        query = query.view(batch, length, heads, nope + rope).transpose(1, 2)
        query_nope, query_rope = query.split([nope, rope], -1)
        latent, key_rope = self.kv_a_proj_with_mqa(hidden).split([config.kv_lora_rank, rope], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent))
        expanded = expanded.view(batch, length, heads, nope + config.v_head_dim).transpose(1, 2)
        key_nope, value = expanded.split([nope, config.v_head_dim], -1)
        key_rope = apply_interleaved_rope(key_rope, cos, sin)[:, None]
        key_rope = key_rope.expand(batch, heads, length, rope)
        query_rope = apply_interleaved_rope(query_rope, cos, sin)
        query = torch.cat((query_nope, query_rope.to(query.dtype)), -1)
        key = torch.cat((key_nope, key_rope.to(key_nope.dtype)), -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """Gated feed-forward network: dense layers and shared experts."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class MixtureOfExperts(nn.Module):
    """Routed experts with a sigmoid router and a selection bias, plus one shared expert.

    The bias chooses experts but does not weigh them. It is not trained by gradient: after each
    step `balance` moves it against the load (loss-free load balancing).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        experts, hidden, inner = (
            config.n_routed_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        )
        self.gate = linear(hidden, experts)
        self.register_buffer("bias", torch.zeros(experts))
        self.shared_experts = Mlp(hidden, inner)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5 * 0.3)
        self.load: Tensor | None = None

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and normalised weights [tokens, k] of each token, in float32."""
        with torch.autocast("cpu", enabled=False):
            scores = torch.sigmoid(self.gate(tokens.float()))
        chosen = (scores + self.bias).topk(self.config.num_experts_per_tok, -1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20)

    def forward(self, hidden: Tensor) -> Tensor:
        experts, per_token = self.config.n_routed_experts, self.config.num_experts_per_tok
        tokens = hidden.reshape(-1, hidden.shape[-1])
        chosen, weights = self.route(tokens)
        assigned = chosen.reshape(-1)
        order = assigned.argsort(stable=True)
        load = torch.bincount(assigned, minlength=experts)
        self.load = load.detach()
        capacity = int(load.max())
        if self.training:
            capacity = min(capacity, int(CAPACITY_FACTOR * assigned.numel() / experts) + 1)
        first = load.cumsum(0) - load
        rank = torch.arange(assigned.numel()) - first[assigned[order]]
        order, rank = order[rank < capacity], rank[rank < capacity]
        slot = assigned[order] * capacity + rank
        source = order // per_token
        rows = torch.zeros(experts * capacity, tokens.shape[-1], dtype=torch.bfloat16)
        rows = rows.index_copy(0, slot, tokens[source].bfloat16()).view(experts, capacity, -1)
        gate, up = torch.bmm(rows, self.gate_up.bfloat16().transpose(1, 2)).chunk(2, -1)
        result = torch.bmm(F.silu(gate) * up, self.down.bfloat16().transpose(1, 2))
        result = result.view(experts * capacity, -1)[slot].float()
        result = result * weights.reshape(-1)[order][:, None]
        routed = torch.zeros_like(tokens, dtype=torch.float32).index_add(0, source, result)
        return routed.view(hidden.shape) + self.shared_experts(hidden)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Raise the bias of experts below the mean load, lower that of the others."""
        load = self.load.float()
        self.bias += rate * torch.sign(load.mean() - load)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, dense: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = Mlp(hidden, config.intermediate_size) if dense else MixtureOfExperts(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Model(nn.Module):
    """The language model and its MTP layer, which predicts the token after the next one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed = nn.Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList(
            Layer(config, dense=index < config.first_k_dense_replace)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RmsNorm(hidden, eps)
        self.lm_head = linear(hidden, config.vocab_size)
        self.enorm = RmsNorm(hidden, eps)
        self.hnorm = RmsNorm(hidden, eps)
        self.eh_proj = linear(2 * hidden, hidden)
        self.mtp = Layer(config, dense=False)
        self.mtp_norm = RmsNorm(hidden, eps)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        rope = config.qk_rope_head_dim
        frequencies = config.rope_theta ** (-torch.arange(0, rope, 2).float() / rope)
        angles = torch.arange(config.max_position_embeddings).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @property
    def mixtures(self) -> list[MixtureOfExperts]:
        """The expert layers, the MTP layer's included."""
        layers = [*self.layers, self.mtp]
        return [layer.mlp for layer in layers if isinstance(layer.mlp, MixtureOfExperts)]

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        return self.lm_head(self.norm(self.backbone(ids)))

    def backbone(self, ids: Tensor) -> Tensor:
        """Hidden states after the last layer, before the final norm."""
        length = ids.shape[1]
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden, self.cos[:length], self.sin[:length])
        return hidden

    def forward_with_mtp(self, ids: Tensor, mtp_rows: int) -> tuple[Tensor, Tensor]:
        """Logits of the next token, and for the first `mtp_rows` rows those of the one after it.

        The MTP input at position i joins the embedding of token i + 1 and the normed hidden state
        of position i; the second result is one position shorter than the first.
        """
        hidden = self.norm(self.backbone(ids))
        logits = self.lm_head(hidden)
        ids, hidden = ids[:mtp_rows], hidden[:mtp_rows]
        joined = torch.cat((self.enorm(self.embed(ids[:, 1:])), self.hnorm(hidden[:, :-1])), -1)
        length = ids.shape[1] - 1
        ahead = self.mtp(self.eh_proj(joined), self.cos[:length], self.sin[:length])
        return logits, self.lm_head(self.mtp_norm(ahead))
