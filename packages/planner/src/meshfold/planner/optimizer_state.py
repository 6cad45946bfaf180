"""State of an optimizer as plans count it: by numbers an element, or for whole matrices by the shapes of all parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshfold.engine.optimizers import Factory, Trial, optimizer_factory
from meshfold.mesh.parameters import metadata, state_bytes

if TYPE_CHECKING:
    from torch import nn

    from meshfold.engine.precision import Precision
    from meshfold.engine.world import World
    from meshfold.mesh.spec import ZeroSpec
    from meshfold.zero_gemini.optimizer import StateSize

MOMENTS: dict[str, int | None] = {
    "adamw": 2,
    "adam": 2,
    "sgd": 0,
    "lion": 1,
    "lamb": 2,
    "lars": 1,
    "adafactor": None,
    "adafactor_hf": None,
    "came": None,
    "muon": None,
    "galore_adamw": None,
    "galore_adafactor": None,
}
"""Numbers that an optimizer keeps for an element, each as wide as the master weight; None: it depends on shapes and roles.

With default settings: SGD without momentum, LARS with it.
"""
CHUNK_BY_CHUNK = ("adamw", "adam")
"""Optimizers that ``zero`` steps chunk by chunk, with kernels of its own."""
NORMS = ("lamb", "lars")
"""Optimizers that need norms of whole tensors."""
ELEMENTS = (*CHUNK_BY_CHUNK, "sgd", "lion")
"""Optimizers of elements, which ``zero`` can step chunk by chunk with a disk."""


def steps_early(optimizer: str, precision: str, *, disk: bool) -> bool:
    """Return True if ``zero`` can step a chunk once its gradient is complete; if not, it steps after the backward.

    Args:
        optimizer: a key of :data:`MOMENTS`.
        precision: of the model.
        disk: the entry ``zero`` has an ``offload_path``.
    """
    return optimizer in ELEMENTS if disk else optimizer in CHUNK_BY_CHUNK and precision != "fp64"


def kept_bytes(optimizer: str, masters: Iterable[Tensor]) -> int:
    """Return the bytes that an optimizer keeps for master weights, without ``zero``.

    Args:
        optimizer: a key of :data:`MOMENTS`.
        masters: on any device, with their roles, and their metadata if they are blocks.
    """
    weights, moments = list(masters), MOMENTS[optimizer]
    if moments is not None:
        return moments * sum(master.nbytes for master in weights)
    trial = Trial.of(_factory(optimizer), weights)
    whole: dict[Tensor, tuple[int, ...]] = {
        stand_in: _whole_shape(master) for master, stand_in in trial.stand_ins.items()
    }
    kept: dict[torch.dtype, dict[Tensor, int]] = {}
    total = 0
    for master, stand_in in trial.stand_ins.items():
        if master.dtype not in kept:
            kept[master.dtype] = state_bytes(
                trial.optimizer, master.dtype, lambda parameter: whole.get(parameter, tuple(parameter.shape))
            )
        total += kept[master.dtype][stand_in]
    return total


def kept_by(optimizer: str, moments: float) -> StateSize:
    """Return what a plan of ``zero`` counts of an optimizer's state.

    Args:
        optimizer: a key of :data:`MOMENTS`.
        moments: numbers an element of an optimizer whose number depends on shapes.
    """
    from meshfold.zero_gemini.optimizer import StateSize  # a plan without zero needs no zero_gemini

    known = MOMENTS[optimizer]
    return StateSize(
        moments if known is None else known,
        ours=optimizer in CHUNK_BY_CHUNK,
        disk_reads=2 if optimizer in NORMS else 1,
    )


def kept_under_zero(optimizer: str, model: nn.Module, world: World, precision: Precision, spec: ZeroSpec) -> StateSize:
    """Return what a plan of ``zero`` counts of an optimizer's state.

    Args:
        optimizer: a key of :data:`MOMENTS`.
        model: a rank's part; its parameters carry their metadata and roles.
        world: its ranks.
        precision: of the model.
        spec: the entry.
    """
    from meshfold.engine.zero import kept_state

    if MOMENTS[optimizer] is not None:
        return kept_by(optimizer, 0.0)
    return kept_state(Trial.of(_factory(optimizer), model.parameters()), model, world, precision, spec)


def _factory(optimizer: str) -> Factory:
    make = optimizer_factory({"name": optimizer}, whole=True)
    assert make is not None  # None is for evaluation
    return make


def _whole_shape(parameter: Tensor) -> tuple[int, ...]:
    meta = metadata(parameter)
    return tuple(parameter.shape) if meta is None else meta.placement.shape
