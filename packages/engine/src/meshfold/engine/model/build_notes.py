"""Warnings, given once when a model is built, about modules that compute other numbers on several ranks than on one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

from torch import nn

from meshfold.engine.world.world import World

_BALANCE = re.compile(
    r"(router_)?aux(iliary)?_loss.*|router_z_loss.*|(load_)?balanc\w*_(loss|coef|weight)\w*"
)
"""Names of coefficients of a mixture of experts' own loss."""


def tell(model: nn.Module, world: World) -> None:
    """Warn, on rank 0, of batch norms and of balance losses whose batch is split.

    Args:
        model: the whole model, before it is split.
        world: where it will lie.
    """
    if world.mesh.rank != 0 or not (world.data_size > 1 or world.pipelined):
        return
    parts = "micro-batch" if world.data_size == 1 else "data rank"
    for note in (_batch_norms(model, parts), _balance_losses(model, parts)):
        if note:
            warnings.warn(note, stacklevel=2)


def _batch_norms(model: nn.Module, parts: str) -> str:
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    ]
    if not found:
        return ""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"{found[0]}{more}: a batch norm takes mean and variance of the rows of its own {parts}, not of the global batch, as "
        "under torch's DistributedDataParallel; losses differ from those of one process. nn.GroupNorm and nn.LayerNorm have no "
        "such statistics"
    )


def _balance_losses(model: nn.Module, parts: str) -> str:
    found = next(_coefficients(model), None)
    if found is None:
        return ""
    name, value = found
    return (
        f"{name}={value}: a mixture of experts' own balance loss is taken of each {parts}'s tokens and then averaged; it is no "
        "mean over tokens, so it differs a little from that of the global batch. The rest of the loss does not"
    )


def _coefficients(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield what scales a balance loss that the model computes, by name."""
    config = getattr(model, "config", None)
    silent = getattr(config, "output_router_logits", True) is False  # transformers' then compute none
    for place in (*(() if silent else (config,)), *model.modules()):
        for name, value in getattr(place, "__dict__", {}).items():
            if _BALANCE.fullmatch(name) and isinstance(value, float) and value > 0:
                yield name, value
