"""The planes that Adam keeps beside the weights, as tables: what they are called, their dtypes, how many bytes they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from meshfold.kernels import AdamState, QuantizedState, SplitState, WholeState

BLOCK_ELEMS = 256
"""Elements that share the scale of an 8-bit moment."""

_LINE_BYTES = 64
_SCALE = "_scale"

MOMENTS = ("exp_avg", "exp_avg_sq")


class Plane(NamedTuple):
    """One tensor of a chunk's state.

    Attributes:
        name: as in the state of :mod:`meshfold.kernels`.
        dtype: of its values.
        each: consecutive elements of the chunk that share a value.
    """

    name: str
    dtype: torch.dtype
    each: int = 1

    def numel(self, elements: int) -> int:
        """Values that so many elements of a chunk have."""
        return -(-elements // self.each)

    @property
    def is_of_moments(self) -> bool:
        """Return whether the first half of a step leaves it as it was."""
        return self.name.removesuffix(_SCALE) in MOMENTS


def planes_of(dtype: torch.dtype, regime: str) -> tuple[Plane, ...]:
    """Return the planes that are kept beside the weights of a model that computes in ``dtype``."""
    wide = (Plane("exp_avg", torch.float32), Plane("exp_avg_sq", torch.float32))
    if dtype == torch.float32:
        return wide
    if dtype == torch.float16:
        return (Plane("parameter", torch.float32), *wide)
    lo = Plane("lo", torch.int16)
    if regime == "A":
        return (lo, *wide)
    if regime == "B":
        return (lo, *(Plane(name, torch.bfloat16) for name in MOMENTS))
    codes = (Plane(name, torch.uint8) for name in MOMENTS)
    scales = (Plane(f"{name}{_SCALE}", torch.float32, BLOCK_ELEMS) for name in MOMENTS)
    return (lo, *codes, *scales)


def lie(planes: tuple[Plane, ...], elements: int) -> tuple[list[tuple[Plane, int, int]], int]:
    """Planes in one flat buffer, one after the other: from and to which byte each goes, and the bytes of all."""
    found, at = [], 0
    for plane in planes:
        begin = -(-at // _LINE_BYTES) * _LINE_BYTES
        at = begin + plane.numel(elements) * plane.dtype.itemsize
        found.append((plane, begin, at))
    return found, at


def views(buffer: Tensor, planes: tuple[Plane, ...], elements: int) -> dict[str, Tensor]:
    """Planes that lie so in a buffer of bytes."""
    return {plane.name: buffer[begin:end].view(plane.dtype) for plane, begin, end in lie(planes, elements)[0]}


def state_of(weights: Tensor, planes: Mapping[str, Tensor]) -> AdamState:
    """Return the state that the kernels take, from weights and the planes beside them."""
    if weights.dtype == torch.float32:
        return WholeState(parameter=weights, **planes)
    if weights.dtype == torch.float16:
        return WholeState(copy=weights, **planes)
    if "exp_avg_scale" in planes:
        return QuantizedState(hi=weights, **planes)
    return SplitState(hi=weights, **planes)


def cut(planes: tuple[Plane, ...], tensors: Mapping[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """The elements from ``begin`` up to ``end`` of all planes: views."""
    return {plane.name: tensors[plane.name][begin // plane.each : plane.numel(end)] for plane in planes}
