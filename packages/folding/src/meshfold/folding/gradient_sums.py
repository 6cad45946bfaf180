"""Sums of the gradients of split blocks' weights, whose list is found once and not walked for in every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from meshfold.folding.axial.axes import Axes
from meshfold.folding.esmfold2 import MSAEncoder
from meshfold.folding.esmfold_trunk import EsmFoldTrunk
from meshfold.folding.stack import Stack
from meshfold.mesh import all_reduce
from meshfold.mesh.recording import weight_gradients

WHOLE_TENSOR_STACKS = (Stack, EsmFoldTrunk, MSAEncoder)
"""Modules that split and gather tensors; their own layers get whole ones."""


def split_parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, Axes]]:
    """Return the parameters of split blocks by name, with the axes over which their gradients have to be summed.

    What is outside the blocks sees whole tensors, the last layer of a stack too: its gradients are the same on every rank.
    """
    found: dict[str, tuple[nn.Parameter, Axes]] = {}
    for prefix, module in model.named_modules():
        axes = getattr(module, "axes", None)
        if isinstance(axes, Axes) and not isinstance(module, WHOLE_TENSOR_STACKS):
            for name, parameter in module.named_parameters(prefix):
                found[name] = parameter, axes
    return found


def sum_gradients(model: nn.Module) -> None:
    """Sum the gradients of :func:`split_parameters` over the ranks, in place, once after each backward.

    Each rank has seen only its own blocks, so its gradient is one term of a sum. The sum is not divided by the number of ranks.
    """
    known = model.__dict__.get(_KNOWN)
    if known is None or not known.holds(model):
        known = model.__dict__[_KNOWN] = _Known(model)
    buckets: dict[tuple[Axes, torch.dtype, torch.device], list[Tensor]] = {}
    for axes, parameters in known.parameters.items():
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None:
                buckets.setdefault((axes, grad.dtype, grad.device), []).append(grad)
    for (axes, _, _), grads in buckets.items():
        with weight_gradients():
            total = all_reduce(_flatten(grads), axes.mesh.group(*axes.all), own=True)
        torch._foreach_copy_(grads, list(_unflatten(total, grads)))


_KNOWN = "_parameters_to_sum"
# One call each for all tensors: a model has a hundred of them in a block.
_flatten, _unflatten = torch._C._nn.flatten_dense_tensors, torch._C._nn.unflatten_dense_tensors


class _Known:
    """The parameters of a model whose gradients are summed, as long as its modules, their parameters and axes are the same.

    It is kept in the model's ``__dict__`` and holds neither the model nor a copy of it.

    Attributes:
        parameters: by the axes over which they are summed.
    """

    def __init__(self, model: nn.Module) -> None:
        """``model``: has split blocks."""
        self._below = [module for module in model.modules() if module is not model]
        self._seen = list(self._parts(model))
        self.parameters: dict[Axes, list[nn.Parameter]] = {}
        for parameter, axes in split_parameters(model).values():
            if axes.is_split:
                self.parameters.setdefault(axes, []).append(parameter)

    def holds(self, model: nn.Module) -> bool:
        """Return True if a walk through the model would find the same parameters and axes."""
        seen = iter(self._seen)
        return all(part is next(seen, self) for part in self._parts(model)) and next(seen, self) is self

    def _parts(self, model: nn.Module) -> Iterator[Any]:
        """Yield the axes, the children and the parameters of the model and of each module that it had."""
        for module in (model, *self._below):
            own = module.__dict__
            yield own.get("axes")
            yield from own["_modules"].values()
            yield from own["_parameters"].values()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self | None:
        return None  # a copy of the model has other parameters

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
