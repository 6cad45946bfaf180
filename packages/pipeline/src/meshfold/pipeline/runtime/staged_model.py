"""Turns the user's model into this rank's stages of it, with their values, on their device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh, SpecError, build_on_meta, materialize, retrace_initialization
from meshfold.mesh.initialization import find_value_source, shard_coordinates
from meshfold.pipeline.runtime.deferred_linear import defer_weight_gradients
from meshfold.pipeline.runtime.microbatch import Microbatch, Replicas
from meshfold.pipeline.runtime.partial_forward import TransferPlan
from meshfold.pipeline.runtime.partition import Partition, PartitionConfig, partition_model
from meshfold.pipeline.runtime.placeholders import agree_on_dtypes, signature
from meshfold.pipeline.runtime.side_effects import preserved_buffers
from meshfold.pipeline.runtime.stage import Stage, loss_in


@dataclass(frozen=True, kw_only=True)
class StagedModel:
    """A model in stages, ready to run.

    Attributes:
        partition: what this rank keeps.
        stages: this rank's, by number, ascending.
        device: where they run.
    """

    partition: Partition
    stages: dict[int, Stage]
    device: torch.device

    @property
    def module(self) -> nn.Module:
        """The model with only that in it."""
        return self.partition.model


def stage_model(
    model: nn.Module | Callable[[], nn.Module],
    mesh: Mesh,
    home: Sequence[int],
    config: PartitionConfig,
    *,
    batched_weights: bool = False,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
) -> StagedModel:
    """Cut a model in place, give what is left of it its values, and take its weight gradients apart.

    Args:
        model, mesh, batched_weights, loss_fn: as of :class:`meshfold.pipeline.Pipeline`.
        home: the rank of every stage, on the axis.
        config: how to cut, and the values.

    Raises:
        LayoutError: for a model that cannot be cut.
        SpecError: for what is no model, or ``fill`` with a function that makes one.
    """
    fill, seed = config.fill, config.seed
    built, trace, seed = _built(model, seed) if fill is None else (model, None, seed)
    if not isinstance(built, nn.Module):
        raise SpecError(f"fill=... goes with a module on the meta device, and model is {model!r}")
    place = _device(config.device, built)
    found = partition_model(built, mesh, home, replace(config, device=place))
    if fill is not None:
        fill(built)
    elif trace is not None:
        materialize(
            built,
            trace,
            seed=seed,
            device=place,
            dtype=config.dtype,
            placement_of=lambda name, tensor: shard_coordinates(tensor),
        )
    else:
        built.to(place)
    queue = defer_weight_gradients(built, batched=batched_weights)
    loss_of = partial(loss_in, loss_fn=loss_fn)
    stages = {number: Stage(found, number, queue, loss_of) for number in found.stages}
    return StagedModel(partition=found, stages=stages, device=place)


def _built(model: nn.Module | Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Any, int]:
    """(the model, its trace if it is on the meta device, the seed of its values)"""
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise SpecError(f"model={model!r}: an nn.Module, or a function without arguments that makes one")
        return (*build_on_meta(model), seed)
    if not any(p.is_meta for p in model.parameters()):
        return model, None, seed
    origin = find_value_source(model)
    return (
        (model, retrace_initialization(model), seed) if origin is None else (model, origin.trace, origin.seed)
    )


def _device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next((p.device for p in model.parameters() if not p.is_meta), None)
    if first is not None:
        return first
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


class TransferPlans:
    """Found out when a shape is first seen, by running the model's forward without values."""

    def __init__(self, staged: StagedModel, mesh: Mesh, axis: str, replicas: Replicas) -> None:
        """Args:
        staged: the model.
        mesh: where it lies.
        axis: of the pipeline; all its ranks must ask for the first plan.
        replicas: the other pipelines.
        """
        self._staged, self._mesh, self._axis, self._replicas = staged, mesh, axis, replicas
        self._known: dict[object, TransferPlan] = {}

    def of(self, work: Microbatch) -> TransferPlan:
        """Return the plan for a micro-batch of this shape."""
        partition = self._staged.partition
        if not self._known:  # dtypes may have been changed since the model was cut
            agree_on_dtypes(partition.outside_blocks, self._mesh.group(self._axis), self._staged.device)
        module = self._staged.module
        key = (module.training, signature(work.args, work.kwargs))
        if key not in self._known:
            with self._replicas.around_trial(), preserved_buffers(module):
                plan = partition.partial_forward.look(
                    lambda: module(*work.args, **work.kwargs), partition.loose()
                )
            plan.check(partition.bounds, partition.blocks.name)
            self._known[key] = plan
        return self._known[key]
