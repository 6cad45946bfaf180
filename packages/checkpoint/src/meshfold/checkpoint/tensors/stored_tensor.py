"""Whole tensors that lie on a disk in rectangles: what is asked for is read, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.checkpoint.shards.rectangles import Window, narrowed, overlap


@dataclass(frozen=True, kw_only=True)
class StoredShard:
    """A rectangle of a tensor.

    Attributes:
        window: offsets and sizes in the whole tensor.
        load: maps it into memory.
    """

    window: Window
    load: Callable[[], Tensor]


class StoredTensor:
    """Stands for a tensor: shape and dtype are known, ``narrow`` gives another of its kind, all else reads it.

    Functions of torch take it where they take a tensor; ``local.copy_(stored.narrow(0, 2, 4))`` reads four rows.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        blocks: Sequence[StoredShard],
        window: Window | None = None,
    ) -> None:
        """Args:
        shape: of the whole.
        dtype: of its elements.
        blocks: rectangles that do not overlap, and together are the whole.
        window: what of it this one stands for; None: all.
        """
        self._whole, self.dtype, self._blocks = tuple(shape), dtype, blocks
        self._window = window or ((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> torch.Size:
        """In elements, per dim."""
        return torch.Size(self._window[1])

    def dim(self) -> int:
        """Return the number of dims."""
        return len(self._whole)

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def narrow(self, dim: int, start: int, length: int) -> StoredTensor:
        """Return a window along one dim, without reading it."""
        offsets, sizes = map(list, self._window)
        offsets[dim] += start
        sizes[dim] = length
        return StoredTensor(self._whole, self.dtype, self._blocks, (tuple(offsets), tuple(sizes)))

    def new_zeros(self, size: Sequence[int]) -> Tensor:
        """Return zeros in memory, of the same dtype."""
        return torch.zeros(tuple(size), dtype=self.dtype, device="cpu")

    def read(self) -> Tensor:
        """Read the tensor into memory."""
        found = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for block in self._blocks:
            both = overlap(self._window, block.window)
            if both is not None:
                offsets, sizes = both
                source = narrowed(block.load(), _less(offsets, block.window[0]), sizes)
                narrowed(found, _less(offsets, self._window[0]), sizes).copy_(source)
        return found

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        read = [one.read() if isinstance(one, cls) else one for one in args]
        return func(*read, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.read(), name)


def _less(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
