"""Initial values of parameters on the meta device, one at a time, for a model that is never whole on any rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from meshfold.mesh.errors import MeshfoldError
from meshfold.mesh.initialization.api import InitTrace
from meshfold.mesh.parameters.parameter_meta import metadata

ParameterInit: TypeAlias = Callable[[str, nn.Parameter, torch.dtype], Tensor]
"""From a parameter's name, the parameter and a dtype to this rank's block of its first values."""

_ATTRIBUTE = "_meshfold_origin"
# Making random numbers takes about 75 bytes per element. Smaller parts would be bound by launches on a GPU.
_AT_ONCE, _AT_ONCE_ON_DEVICE = 2**20, 2**22


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueSource:
    """Source of the values of a model on the meta device.

    Attributes:
        trace: of its initialization.
        seed: of the random numbers.
    """

    trace: InitTrace
    seed: int


def set_value_source(parameter: Tensor, origin: ValueSource) -> None:
    """Attach the source of its values to a parameter or buffer."""
    setattr(parameter, _ATTRIBUTE, origin)


def find_value_source(model: nn.Module, *, buffers: bool = False) -> ValueSource | None:
    """Return the source of a model's meta parameters, its trace bound to the model; None if none was set.

    Args:
        model: whole, or some of its stages.
        buffers: return the values of its meta buffers instead.

    Raises:
        MeshfoldError: for a model whose parts were built under several traces.
    """
    found: dict[ValueSource, str] = {}
    for name, tensor in model.named_buffers() if buffers else model.named_parameters():
        origin = getattr(tensor, _ATTRIBUTE, None)
        if isinstance(origin, ValueSource) and tensor.is_meta:
            found.setdefault(origin, name)
    if len(found) > 1:
        one, other, *_ = found.values()
        raise MeshfoldError(
            f"{one!r} and {other!r} were built under different initialisations: build the whole model under one"
        )
    for origin in found:
        origin.trace.bind(model)
        return origin
    return None


def shard_coordinates(tensor: Tensor) -> list[Tensor] | None:
    """Return the global coordinates of this rank's block of a tensor, one vector per dim; None for one without metadata."""
    meta = metadata(tensor)
    if meta is None:
        return None
    return [meta.placement.coordinates(meta.mesh, dim) for dim in range(len(meta.placement.shape))]


def parameter_init(trace: InitTrace, seed: int, device: torch.device) -> TracedInit:
    """Return what makes this rank's shard of any parameter of the model that the trace is bound to."""
    return TracedInit(trace=trace, seed=seed, device=device)


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedInit:
    """A :data:`ParameterInit` of recorded initializations.

    Large blocks are made some rows at a time, so that making one takes little more memory than the block.

    Attributes:
        trace: of the initialization, bound to the model.
        seed: of the random numbers.
        device: where values are made.
    """

    trace: InitTrace
    seed: int
    device: torch.device

    def __call__(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        return self.part(name, parameter, dtype, None)

    def part(self, name: str, parameter: nn.Parameter, dtype: torch.dtype, needed: range | None) -> Tensor:
        """Return this rank's block of a parameter, in which some elements may have no values.

        Args:
            name: of the parameter.
            parameter: itself.
            dtype: of the block.
            needed: range of flat elements of the block that are read; None: all.
        """
        meta = metadata(parameter)
        shape = self.trace.shape_of(name) if meta is None else meta.placement.local_shape(meta.mesh)
        coordinates = shard_coordinates(parameter) or [torch.arange(size) for size in shape]
        local = torch.empty(shape, dtype=dtype, device=self.device)
        at_once = _AT_ONCE_ON_DEVICE if local.is_cuda else _AT_ONCE
        if local.dim() > 1 and local.numel() > at_once:
            try:
                return _by_rows(self.trace, name, local, coordinates, self.seed, at_once, needed)
            except MeshfoldError:  # the initialisation needs the whole tensor
                pass
        return self.trace.materialize(name, local, coordinates, seed=self.seed)


def make_needed(values: ParameterInit, name: str, parameter: nn.Parameter, dtype: torch.dtype, needed: range) -> Tensor:
    """Return a parameter's block in which at least the needed elements have their values.

    Ranks that share a chunk then draw its random numbers once, not each all of them.

    Args:
        values: makes blocks; one with a method ``part`` may leave out elements, see :meth:`TracedInit.part`.
        name, parameter, dtype: its arguments.
        needed: range of flat elements of the block that are read.
    """
    part = getattr(values, "part", None)
    made: Tensor = values(name, parameter, dtype) if part is None else part(name, parameter, dtype, needed)
    return made


def _by_rows(
    trace: InitTrace,
    name: str,
    local: Tensor,
    coordinates: list[Tensor],
    seed: int,
    at_once: int,
    needed: range | None,
) -> Tensor:
    """Return the initial values of a large block, computed in parts of ``at_once`` elements: the rows that are needed."""
    inner = local.numel() // local.shape[0]
    first, end = (0, local.shape[0]) if needed is None else (needed.start // inner, -(-needed.stop // inner))
    rows = max(1, at_once // inner)
    for start in range(first, end, rows):
        some = slice(start, min(start + rows, end))
        trace.materialize(name, local[some], [coordinates[0][some], *coordinates[1:]], seed=seed)
    return local
