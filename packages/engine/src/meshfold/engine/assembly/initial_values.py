"""First values of a model's tensors: the model's own, those that its initialization draws, or those of a folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from meshfold.engine.model.weight_source import SourceValues, WeightSource
from meshfold.engine.world import World, fail_together
from meshfold.mesh import SpecError, annotate, broadcast, metadata
from meshfold.mesh.initialization import InitTrace, ParameterInit, materialize, parameter_init, shard_coordinates
from meshfold.mesh.parameters import copy_parameter_hooks


@dataclass(frozen=True, kw_only=True)
class InitialValues:
    """First values of the tensors of a split model that are on the meta device.

    Attributes:
        trace: how the model initialises its tensors; None if it was given with its values.
        seed: for the trace.
        parameters: makes the parameters one by one, as for chunks or out of a folder; None: the trace makes all tensors.
        folder: weights that take the place of initial ones; None without.
        world: the ranks.
    """

    trace: InitTrace | None
    seed: int
    parameters: ParameterInit | None
    folder: SourceValues | None
    world: World

    @classmethod
    def of(cls, trace: InitTrace | None, seed: int, folder: SourceValues | None, world: World) -> Self:
        """Choose what makes parameters."""
        parameters: ParameterInit | None = None
        if trace is not None and (world.spec.zero is not None or folder is not None):
            parameters = parameter_init(trace, seed, world.device)
        if folder is not None and parameters is not None:
            parameters = folder.over(parameters, world.device)
        return cls(trace=trace, seed=seed, parameters=parameters, folder=folder, world=world)

    def fill(self, model: nn.Module) -> None:
        """Give the tensors of a model, or of a stage, their values, and move them to the device.

        Under ``zero`` only buffers and tied parameters: chunks are filled later.
        """
        in_chunks, device = self.world.spec.zero is not None, self.world.device
        if self.trace is not None:
            materialize(
                model,
                self.trace,
                seed=self.seed,
                device=device,
                # Tensors that are not meta were already cut.
                placement_of=lambda name, tensor: shard_coordinates(tensor) if tensor.is_meta else None,
                parameters=self.parameters is None,
            )
        if self.parameters is not None:
            _fill(model, self.parameters, tied=in_chunks)
        if self.folder is not None:
            self.folder.fill_buffers(model)
        _move(model, device, parameters=not in_chunks)


def read_folder(model: object, built: nn.Module, world: World) -> SourceValues | None:
    """Return the values of a folder's model, by its unsplit names; if one rank fails, all raise."""
    if not isinstance(model, WeightSource):
        return None
    model.check(world.spec)
    error: Exception | None = None
    found: SourceValues | None = None
    try:
        found = model.weights(built)
        model.verify(world.mesh.rank, world.mesh.world_size)
    except Exception as wrong:  # also a folder that only this rank cannot read
        error = wrong
    if isinstance(error, SpecError) and world.mesh.world_size == 1:
        raise error
    fail_together(world, error, f"cannot load {str(model.folder)!r}")
    if found is not None and world.mesh.rank == 0:
        found.warn()
    return found


@torch.no_grad()
def share(model: nn.Module, world: World) -> None:
    """Broadcast rank 0's weights and buffers one by one."""
    if world.mesh.world_size == 1:
        return
    seen: set[Tensor] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor not in seen and not tensor.is_meta:
            seen.add(tensor)
            tensor.copy_(broadcast(tensor.detach().to(world.device), world.everyone, 0))


@torch.no_grad()
def _fill(model: nn.Module, values: ParameterInit, *, tied: bool) -> None:
    """Fill parameters on the meta device; ``tied``: only those that other stages hold too.

    Tied parameters are not in chunks, since their gradients are handled separately.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for path, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            meta = None if parameter is None else metadata(parameter)
            if parameter is None or not parameter.is_meta:
                continue
            if tied and (meta is None or not (meta.tie and meta.only_at)):
                continue
            if parameter not in made:
                value = values(f"{path}.{leaf}" if path else leaf, parameter, parameter.dtype)
                made[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                made[parameter].__dict__.update(parameter.__dict__)
                copy_parameter_hooks(parameter, made[parameter])
            module._parameters[leaf] = made[parameter]


def _move(model: nn.Module, device: torch.device, *, parameters: bool) -> None:
    """Move the model to the device; parameters stay the same objects and keep their attributes."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameters:
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                meta = metadata(buffer)
                moved = module._buffers[name] = buffer.to(device)
                if meta is not None:
                    annotate(moved, meta)
