"""Steps of peers whose parameters are DTensors, of one mesh or of several: experts on one, everything else on another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return parameters in groups of one mesh each: an operation on a list of DTensors takes those of one mesh."""
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return [*groups.values()]


@torch.no_grad()
def clip(groups: list[list[Tensor]], most: float) -> Tensor:
    """Scale gradients so that the norm of all is at most so large, and return the norm."""
    norms = []
    for group in groups:
        norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, most, total)
    return total


def clipped_step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> Callable[[], Tensor]:
    """Return a step of a model of transformers on its ids ``rows length``: forward, backward, clipping, the optimizer."""

    def step() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def adamw_step(model: nn.Module, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a step: forward, backward, clipping by the norm, fused AdamW."""
    groups = by_mesh(model.parameters())
    optimizer = torch.optim.AdamW(
        [dict(params=group) for group in groups], lr=1e-6, weight_decay=0.01, fused=torch.cuda.is_available()
    )

    def step() -> Tensor:
        loss = forward()
        loss.backward()
        clip(groups, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
