"""Base of sharded layers: their parameters are blocks that keep their metadata when they are copied or moved.

Under ``torch.autocast`` in a model's own forward they compute in the dtype that torch's layers compute in there:

========================= =================================================================
layer                     under autocast
========================= =================================================================
linear, patches           input, weight and bias in autocast's dtype; float64 stays
LayerNorm, RMSNorm        in float32, returned as torch returns it on the device
vocab-parallel loss       in float32
========================= =================================================================

Inside a layer nothing is cast, since some operations used for sums would be cast too.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import Tensor, nn

from meshfold.kernels import is_autocast
from meshfold.mesh import Mesh, ParameterMeta, Placement, annotate, metadata


class OnMesh:
    """An object on a mesh; a deep copy of it is on the same mesh."""

    mesh: Mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.mesh)] = self.mesh
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a module that was split over a mesh of running processes cannot be pickled (here {type(self).__name__}): save "
            f"its state_dict(), and load that into a newly split model"
        )


class StreamAdapter(OnMesh):
    """Hooks around modules: ``enter`` changes the input of the first, ``leave`` the output of the last.

    Subclasses define one or both; they get what they need at construction.
    """

    def attach(self, first: nn.Module, last: nn.Module | None = None, *, prepend: bool = False) -> None:
        """Register the hooks on one module, or around several consecutive ones.

        Args:
            prepend: enter before the hooks that the first module has already.
        """
        if type(self).enter is not StreamAdapter.enter:
            first.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=prepend)
        if type(self).leave is not StreamAdapter.leave:
            (first if last is None else last).register_forward_hook(self.leave)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments, positional and named, that the module gets."""
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output that the module's caller gets."""
        return output


class ShardedLayer(OnMesh, nn.Module):
    """A layer whose parameters are this rank's blocks.

    torch makes new parameters when a module is copied, or moved off the meta device: they get the metadata of the
    old ones here.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = super().__deepcopy__(memo)
        made._annotate_like(self._metadata())
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        known = self._metadata()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._annotate_like(known)
        return self

    def _metadata(self) -> dict[str, ParameterMeta]:
        found = {name: metadata(p) for name, p in self._parameters.items() if p is not None}
        return {name: meta for name, meta in found.items() if meta is not None}

    def _annotate_like(self, known: dict[str, ParameterMeta]) -> None:
        for name, meta in known.items():
            parameter = self._parameters[name]
            if parameter is not None and metadata(parameter) is None:
                annotate(parameter, meta)


@dataclass
class BatchShape:
    """Shape of the current forward's whole batch. One object for all parts of a split model, set before each forward.

    Attributes:
        rows: sequences, padding included; 0 where the input has none.
        given: sequences without padding.
        length: tokens of a sequence.
        gather_logits: heads return whole logits: the model computes no loss of split ones.
    """

    rows: int = 0
    given: int = 0
    length: int = 0
    gather_logits: bool = True


def shard_parameter(parameter: Tensor, placement: Placement, mesh: Mesh, *, turned: bool = False) -> nn.Parameter:
    """Return the local block of a whole parameter, real or meta, with its metadata: a new parameter.

    Args:
        turned: store a matrix transposed in memory (its shape is the same): no copies where its last dim is gathered.
    """
    if parameter.is_meta:
        local = torch.empty(placement.local_shape(mesh), dtype=parameter.dtype, device="meta")
    else:
        local = placement.shard(parameter.detach(), mesh)
    if turned:
        local = local.t().contiguous().t()
    block = nn.Parameter(local, requires_grad=parameter.requires_grad)
    annotate(block, ParameterMeta(mesh=mesh, placement=placement))
    return block


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of a matmul: autocast's, if autocast is on."""
    if not is_autocast(x) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Context manager: nothing inside is cast."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()


def to_norm_dtype(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of a layer norm: on a GPU, autocast computes and returns float32."""
    return x.float() if x.is_cuda and is_autocast(x) and x.dtype != torch.float64 else x
