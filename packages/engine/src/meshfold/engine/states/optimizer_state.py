"""The optimizer's state in whole tensors, by parameter name, as in checkpoints; conversion between whole tensors and shards."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.checkpoint import CheckpointError
from meshfold.engine.world import World
from meshfold.mesh import metadata

_MOMENTS = {
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "sum",
    "prev",
}
"""State of torch's optimizers and ours that has its parameter's shape."""

# These say how a step is computed, not its result, so they are not loaded.
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}


class OptimizerState:
    """Reader and writer of the state of a torch optimizer over blocks of tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer, targets: Mapping[str, Tensor]) -> None:
        """Args:
        optimizer: of the targets, in one or more groups.
        targets: name to the tensor that the optimizer updates.
        """
        self._optimizer, self._targets = optimizer, dict(targets)

    def noted(self) -> NotedState:
        """Return the state that is kept of each parameter now."""
        state = self._optimizer.state
        return NotedState([(name, target, dict(state.get(target, ()))) for name, target in self._targets.items()])

    def description(self) -> dict[str, Any]:
        """Return class, groups and everything but tensors, in a form that JSON supports."""
        names = {target: name for name, target in self._targets.items()}
        groups = [
            {"parameters": [names[p] for p in group["params"]], **plain_settings(group)}
            for group in self._optimizer.param_groups
        ]
        values = {
            f"{name}/{key}": value
            for name, target in self._targets.items()
            for key, value in self._optimizer.state.get(target, {}).items()
            if not isinstance(value, Tensor)
        }
        return {"class": type(self._optimizer).__name__, "groups": groups, "values": values}

    def check(self, description: Mapping[str, Any], entries: Iterable[str]) -> None:
        """Check that :meth:`load` would accept a state with these entries; change nothing.

        Raises:
            CheckpointError: for the state of another optimizer, or of other parameters.
        """
        check(self._optimizer, description)
        check_names(entries, self._targets)

    def load(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors and settings; as in torch, settings such as the learning rate are the saved ones.

        Raises:
            CheckpointError: for the state of another optimizer, or of other parameters.
        """
        self.check(description, (*tensors, *description["values"]))
        groups = self._optimizer.state_dict()["param_groups"]
        number = {
            p: place
            for group, found in zip(groups, self._optimizer.param_groups, strict=True)
            for place, p in zip(group["params"], found["params"], strict=True)
        }
        state: dict[int, dict[str, Any]] = {}
        entries = {**{name: tensors[name] for name in tensors}, **description["values"]}
        for entry, value in entries.items():
            name, _, key = entry.rpartition("/")
            target = self._targets[name]
            if entry in tensors:
                value = local_shard_of(value, target)
            state.setdefault(number[target], {})[key] = value
        restored = [{**group, **settings_of(saved)} for group, saved in zip(groups, description["groups"], strict=True)]
        self._optimizer.load_state_dict({"state": state, "param_groups": restored})


@dataclass(frozen=True)
class NotedState:
    """Optimizer state at one time: the tensors themselves, even if the optimizer has replaced them since.

    Attributes:
        entries: name, the parameter, and its state by key.
    """

    entries: Sequence[tuple[str, Tensor, Mapping[str, Any]]]

    def tensors(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Yield ``parameter/state`` with the tensor, and the parameter if it has its shape and placement."""
        for name, target, state in self.entries:
            for key, value in sorted(state.items()):
                if isinstance(value, Tensor):
                    yield f"{name}/{key}", (value, target)


def check(optimizer: torch.optim.Optimizer, description: Mapping[str, Any]) -> None:
    """Raise a CheckpointError if a description is of another optimizer."""
    own, groups = type(optimizer).__name__, len(optimizer.param_groups)
    if description["class"] != own:
        raise CheckpointError(
            f"the checkpoint has the state of {description['class']}, but this engine has {own}: use {description['class']}, or "
            "load(path, weights_only=True)"
        )
    if groups != len(description["groups"]):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(description['groups'])} parameter groups, but this one has "
            f"{groups}: give the optimizer the same settings, or load(path, weights_only=True)"
        )

    for number, (own_group, saved) in enumerate(zip(optimizer.param_groups, description["groups"], strict=True)):
        for key, value in plain_settings(own_group).items():
            if key in saved and not _is_like(saved[key], value):
                raise CheckpointError(
                    f"the checkpoint's optimizer has {key}={saved[key]!r} in group {number}, but here it is {value!r}: the "
                    "checkpoint is damaged, or from another version of the optimizer. load(path, weights_only=True) takes "
                    "its weights"
                )


def check_shapes(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a CheckpointError for a moment of another shape than its parameter's.

    Args:
        tensors: by ``parameter/state``.
        shapes: of whole parameters, by name.
    """
    for entry, value in tensors.items():
        name, _, key = entry.rpartition("/")
        if key in _MOMENTS and tuple(value.shape) != shapes.get(name, tuple(value.shape)):
            raise CheckpointError(
                f"the checkpoint's optimizer has {key} of shape {tuple(value.shape)} for {name!r}, which is {shapes[name]} here"
            )


def _is_like(saved: Any, own: Any) -> bool:
    """Return True if a setting can replace another: both numbers, or sequences of equal length."""
    if isinstance(own, bool) or own is None or isinstance(saved, bool) or saved is None:
        return isinstance(saved, bool) == isinstance(own, bool) or own is None or saved is None
    if isinstance(own, int | float):
        return isinstance(saved, int | float) and math.isfinite(saved)
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and len(saved) == len(own) and all(map(_is_like, saved, own))
    return isinstance(saved, type(own)) or not isinstance(own, str | dict)


def check_names(entries: Iterable[str], trained: Container[str]) -> None:
    """Raise a CheckpointError if an entry, ``parameter/state``, is of a parameter that is not trained."""
    for entry in entries:
        name = entry.rpartition("/")[0]
        if name not in trained:
            raise CheckpointError(f"the checkpoint's optimizer has state of {name!r}, which is not trained here")


def plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings in a form that JSON supports."""
    return {key: _plain(value) for key, value in group.items() if key not in _HOW}


def settings_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings from a description of it."""
    return {key: _tuples(value) for key, value in saved.items() if key != "parameters"}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def _tuples(value: Any) -> Any:
    """Convert lists to tuples: JSON has no tuples, and torch's settings (betas) are tuples."""
    return tuple(value) if isinstance(value, list) else value


def global_shape(local: Tensor, like: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor of which ``local`` is this rank's shard, placed like ``like``."""
    meta = metadata(like)
    return tuple(local.shape) if meta is None or local.shape != like.shape else meta.placement.shape


def gather(local: Tensor, like: Tensor, world: World) -> Tensor:
    """Return the whole of a tensor that is placed like another; one of another shape unchanged.

    All ranks of one data coordinate must call.
    """
    meta = metadata(like)
    if meta is None or local.shape != like.shape:
        return local.detach()
    return meta.placement.gather(local.detach(), world.mesh)


@torch.no_grad()
def put(whole: Tensor, into: Tensor, like: Tensor) -> None:
    """Copy this rank's shard of a whole tensor into a local one that is placed like another."""
    meta = metadata(like)
    if meta is None or into.shape != like.shape:
        into.copy_(whole)
    else:
        into.copy_(meta.placement.shard(whole, meta.mesh))


def local_shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor as a new tensor on the CPU; all of it if it is not placed like the other."""
    meta = metadata(like)
    if meta is None or tuple(whole.shape) != meta.placement.shape:
        return whole.clone()
    return meta.placement.shard(whole, meta.mesh)
