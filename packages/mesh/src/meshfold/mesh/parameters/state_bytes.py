"""Bytes of state that an optimizer of whole matrices keeps for each parameter: a twin of it steps on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh.parameters.optimizer_probe import OptimizerProbeError, twin_of

Shape = tuple[int, ...]


def state_bytes(
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype,
    whole_shape: Callable[[Tensor], Shape] = lambda parameter: tuple(parameter.shape),
) -> dict[Tensor, int]:
    """Return the bytes that an optimizer keeps for each of its parameters once they are stepped, without single numbers.

    A parameter's values are not read: it may be a stand-in of the right shape. One of each shape and group is stepped.

    Args:
        optimizer: with its groups; it is not changed and does not step.
        dtype: of the parameters that it will step.
        whole_shape: the shape of the whole tensor, where parameters are blocks.

    Raises:
        OptimizerProbeError: if it cannot step on meta tensors and has made no state before it failed.
    """
    found: dict[Tensor, int] = {}
    for group in optimizer.param_groups:
        known: dict[tuple[Shape, Shape], int] = {}
        for parameter in group["params"]:
            key = tuple(parameter.shape), tuple(whole_shape(parameter))
            if key not in known:
                known[key] = _kept(optimizer, group, dtype, *key)
            found[parameter] = known[key]
    return found


def _kept(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, own: Shape, whole: Shape
) -> int:
    """Return the bytes that are kept for a parameter of a shape, a block of a tensor of another."""
    parameter = nn.Parameter(torch.empty(own, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    twin: Any = twin_of(optimizer, group, [parameter])
    vars(twin).pop("kernels", None)  # they take no meta tensors
    if hasattr(twin, "blocks"):
        twin.blocks = _BlocksOfShapes(parameter, whole)
    try:
        twin.step()
    except Exception as error:  # such as reading a number; torch's own make their state before
        if not twin.state.get(parameter):
            raise OptimizerProbeError(
                f"{type(optimizer).__name__} could not be tried out on a parameter of shape {own} without values "
                f"({type(error).__name__}: {error}), which shows what it keeps"
            ) from error
    return sum(value.nbytes for value in tensors_of_state(twin.state.get(parameter, {})) if value.numel() > 1)


def tensors_of_state(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in what an optimizer keeps for a parameter, or in a part of it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for below in value.values() if isinstance(value, dict) else value:
            yield from tensors_of_state(below)


class _BlocksOfShapes:
    """Answers of the right shapes for the block of one parameter: see ``Blocks`` of ``meshfold.optimizers``."""

    bucket_elements = 1 << 62

    def __init__(self, parameter: Tensor, whole: Shape) -> None:
        self._parameter, self._whole = parameter, whole

    def shape(self, parameter: Tensor) -> Shape:
        return self._whole if parameter is self._parameter else tuple(parameter.shape)

    def whole(self, parameters: Sequence[Tensor]) -> bool:
        return all(self.shape(parameter) == tuple(parameter.shape) for parameter in parameters)

    def families(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        return [list(parameters)] if parameters else []

    def sums(self, wanted: Iterable[tuple[Any, ...]]) -> list[Tensor]:
        return [self._sum(*one) for one in wanted]

    def _sum(self, parameter: Tensor, values: Tensor, *how: Any) -> Tensor:
        """Return a sum, of which the dims that it keeps are given, or a product: of another matrix, summed over a dim."""
        shape = self.shape(parameter)
        if len(how) == 1:
            return values.new_empty([shape[dim] for dim in how[0]])
        factor, dim = how
        return values.new_empty(shape[1 - dim], factor.shape[1])

    def cut(self, whole: Tensor, parameter: Tensor, dims: Sequence[int]) -> Tensor:
        return whole.new_empty([parameter.shape[dim] for dim in dims] + [*whole.shape[len(dims) :]])

    def of_whole(
        self,
        parameters: Sequence[Tensor],
        values: Sequence[Tensor],
        function: Callable[[Tensor], Tensor],
        shapes: Sequence[Shape],
    ) -> list[Tensor]:
        return [value.new_empty(shape) for value, shape in zip(values, shapes, strict=True)]

    def through_whole(
        self, parameters: Sequence[Tensor], values: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        return [torch.empty_like(value) for value in values]
