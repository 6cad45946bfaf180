"""Snapshot of where Adam's state lies, to be copied later: its tensors, and the functions that turn them into values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from meshfold.kernels import QuantizedState, join_master
from meshfold.mesh.parameters import StoredValue
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.optimizer.state_planes import Plane


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkSnapshot:
    """The state of a chunk that is in memory.

    Attributes:
        dtype: in which the model computes.
        weights: of the shard.
        planes: what is kept beside them, by name; none of state on a disk.
    """

    dtype: torch.dtype
    weights: Tensor
    planes: Mapping[str, tuple[Plane, Tensor]]

    def parts(self, begin: int, end: int, key: str | None) -> StoredValue:
        """The elements from ``begin`` up to ``end`` of one of the moments, or for None of the master weights: views."""
        if key is None and self.dtype == torch.float32:
            return StoredValue((self.weights[begin:end],))
        planes = self._cut(begin, end, ("parameter", "lo") if key is None else (key, f"{key}_scale"))
        if key is None:
            if self.dtype == torch.float16:
                return StoredValue(planes)
            return StoredValue((self.weights[begin:end], *planes), _master)
        if len(planes) > 1:
            return StoredValue(planes, partial(_moment, key))
        return StoredValue(planes) if planes[0].dtype == torch.float32 else StoredValue(planes, _widened)

    def _cut(self, begin: int, end: int, names: Collection[str]) -> tuple[Tensor, ...]:
        found = (self.planes[name] for name in names if name in self.planes)
        return tuple(tensor[begin // plane.each : plane.numel(end)] for plane, tensor in found)


@dataclass(frozen=True, kw_only=True, eq=False)
class AdamSnapshot:
    """The state of all chunks, none of it on a disk.

    Attributes:
        chunks: by chunk.
        chunk_of: each parameter's, by name.
        steps: of each parameter.
    """

    chunks: Mapping[Chunk, ChunkSnapshot]
    chunk_of: Mapping[str, Chunk]
    steps: Mapping[str, int]

    def parts(self, name: str, key: str | None) -> StoredValue:
        """This rank's elements of one of a parameter's moments, or for None of its true value; ``"step"`` is a number."""
        if key == "step":
            return StoredValue((torch.tensor(float(self.steps[name])),))
        chunk = self.chunk_of[name]
        return self.chunks[chunk].parts(*chunk.span(name), key)


def _master(planes: Sequence[Tensor]) -> Tensor:
    """Master weights of their two planes."""
    return join_master(*planes)


def _moment(key: str, planes: Sequence[Tensor]) -> Tensor:
    """A moment of its codes and scales."""
    return QuantizedState.decoded(key, *planes)


def _widened(planes: Sequence[Tensor]) -> Tensor:
    """A moment that is kept in fewer bits."""
    return planes[0].float()
