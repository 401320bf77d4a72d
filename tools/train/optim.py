"""The optimizer: Muon for the matrices inside the layers, AdamW for everything else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
UPDATE_SCALE = 0.2
"""Brings the size of a Muon update near that of AdamW, so that both share one learning rate."""


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix of each [..., rows, columns], by Newton-Schulz."""
    first, second, third = NEWTON_SCHULZ
    result = matrices.bfloat16()
    tall = result.shape[-2] > result.shape[-1]
    if tall:
        result = result.mT
    result = result / (result.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = result @ result.mT
        result = first * result + (second * gram + third * gram @ gram) @ result
    return result.mT if tall else result


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix. A fused parameter may hold several matrices:
    `parts` is how many lie on top of each other in dimension -2 (2 for gate and up)."""

    def __init__(
        self, params: list[dict], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # noqa: D102
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"]
                average.lerp_(parameter.grad, 1 - group["momentum"])
                nesterov = parameter.grad.lerp(average, group["momentum"])
                columns = nesterov.shape[-1]
                rows = nesterov.shape[-2] // group["parts"]
                update = orthogonalise(nesterov.reshape(-1, rows, columns))
                scale = UPDATE_SCALE * max(rows, columns) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.view_as(parameter).float(), alpha=-group["lr"] * scale)


def build_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon and AdamW over all parameters; the caller sets the learning rate before each step."""
    fused, matrices, tables, vectors = [], [], [], []
    for name, parameter in model.named_parameters():
        if name.endswith("gate_up"):
            fused.append(parameter)
        elif parameter.dim() < 2:
            vectors.append(parameter)
        elif name.endswith(("embed.weight", "lm_head.weight", "mlp.gate.weight")):
            tables.append(parameter)
        else:
            matrices.append(parameter)
    muon = Muon([{"params": matrices, "parts": 1}, {"params": fused, "parts": 2}], lr=0.0)
    adam = torch.optim.AdamW(
        [
            {"params": tables, "weight_decay": 0.05},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=(0.9, 0.95),
        fused=True,
    )
    return [muon, adam]
