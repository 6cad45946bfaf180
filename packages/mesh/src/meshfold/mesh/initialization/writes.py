"""Writes of a recorded initialisation: which elements of which storage, by which operator, in order.

Views and tied parameters share a storage, and so its list of writes. :mod:`meshfold.mesh.initialization.trace` records them,
:mod:`meshfold.mesh.initialization.replay` computes the values later, of those elements that a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
TRUNCATED_NORMAL = "trunc_normal_"
EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_OVERWRITE = {"fill_", "zero_", "copy_"}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes, strides and offset of a tensor in its storage, in elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.size).numel()

    def covers(self, nbytes: int) -> bool:
        """Return True if each byte of a storage of this size belongs to exactly one element."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.numel * self.dtype.itemsize == nbytes


@dataclass(frozen=True, slots=True)
class Ref:
    """A recorded tensor at one moment: its storage after a number of writes, seen through a geometry."""

    storage: int
    writes: int
    geometry: Geometry


class Target:
    """Placeholder, among the arguments of an in-place operation, for the tensor that it writes."""


TARGET = Target()


@dataclass(frozen=True, eq=False, slots=True)
class Write:
    """One write into a storage.

    Attributes:
        func: the operator, or `TRUNCATED_NORMAL`.
        args: its arguments: `Ref` for a recorded tensor, `TARGET` for the one written, a copy of a real tensor.
        kwargs: the same.
        target: the elements that are written.
        output: for an operator that makes its result, which of its results this is; None if it writes in place.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Geometry
    output: int | None

    @property
    def name(self) -> str:
        """The operator's name without overload: ``"normal_"``."""
        return self.func if isinstance(self.func, str) else str(self.func._schema.name).removeprefix("aten::")

    @property
    def random(self) -> bool:
        """True if the write draws random numbers."""
        return isinstance(self.func, str) or torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def overwrites(self) -> bool:
        """True if the new values do not depend on the old ones."""
        into_out = self.output is None and not self.name.endswith("_")
        return self.name not in EMPTY and (
            self.output is not None or self.name in _OVERWRITE or self.random or into_out
        )

    @property
    def refs(self) -> list[Ref]:
        """Traced tensors among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)]


@dataclass(slots=True)
class Log:
    """The writes into one storage. Holds the storage, so that its address stays its own."""

    storage: torch.UntypedStorage
    writes: list[Write] = field(default_factory=list)

    def live(self, count: int) -> list[Write]:
        """Return the writes that still count among the first ``count``: from the last one that replaced every element."""
        nbytes = self.storage.nbytes()
        for start in range(count - 1, 0, -1):
            if self.writes[start].overwrites and self.writes[start].target.covers(nbytes):
                return self.writes[start:count]
        return self.writes[:count]

    def defined(self, count: int) -> bool:
        """Return True if the first ``count`` writes have given every element a value."""
        live = self.live(count)
        if live and live[0].overwrites and live[0].output is not None:
            return True
        pieces = {write.target for write in live if write.overwrites}
        return sum(piece.numel * piece.dtype.itemsize for piece in pieces) >= self.storage.nbytes()


class Recording:
    """The lists of writes of all storages, by storage."""

    def __init__(self) -> None:
        self._logs: dict[int, Log] = {}

    def ref(self, tensor: Tensor) -> Ref:
        """Return the tensor with its present values."""
        storage = tensor.untyped_storage()
        return Ref(storage._cdata, len(self.log(storage).writes), Geometry.of(tensor))

    def knows(self, tensor: Tensor) -> bool:
        """Return True if the tensor was made, or written, under this recording."""
        return tensor.device == META and tensor.untyped_storage()._cdata in self._logs

    def log(self, storage: torch.UntypedStorage) -> Log:
        """Return the writes into a storage, which may be none yet."""
        return self._logs.setdefault(storage._cdata, Log(storage))

    def log_of(self, ref: Ref) -> Log:
        """Return the writes into the storage that a reference names."""
        return self._logs[ref.storage]

    def write(
        self,
        target: Tensor,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        output: int | None = None,
    ) -> None:
        """Record a write whose args and kwargs hold refs."""
        log = self.log(target.untyped_storage())
        log.writes.append(Write(func, tuple(args), kwargs, Geometry.of(target), output))


@dataclass(frozen=True, slots=True)
class Window:
    """Elements of a tensor that a write reaches: along each dim ``count`` indices from ``start`` in steps of ``step``.

    ``dims`` gives, for each dim of the written values, the dim of the tensor it runs along, None for one of size 1.
    """

    starts: tuple[int, ...]
    steps: tuple[int, ...]
    counts: tuple[int, ...]
    dims: tuple[int | None, ...]

    @classmethod
    def of(cls, written: Geometry, base: Geometry) -> Window | None:
        """Return the window of ``base`` that ``written`` is, if it is one."""
        if written.dtype != base.dtype or written.offset < base.offset:
            return None
        rest = written.offset - base.offset
        starts, steps, counts = [0] * len(base.size), [1] * len(base.size), [1] * len(base.size)
        order = sorted((d for d, size in enumerate(base.size) if size > 1), key=lambda d: -base.stride[d])
        for d in order:
            if base.stride[d] == 0:
                return None
            starts[d], rest = divmod(rest, base.stride[d])
        dims: list[int | None] = []
        for size, stride in zip(written.size, written.stride, strict=True):
            along = next((d for d in order if stride and stride % base.stride[d] == 0), None) if size > 1 else None
            if size > 1 and (along is None or along in dims):
                return None
            if along is not None:
                steps[along], counts[along] = stride // base.stride[along], size
            dims.append(along)
        inside = all(starts[d] + (counts[d] - 1) * steps[d] < base.size[d] for d in order)
        if rest or not inside:
            return None
        return cls(tuple(starts), tuple(steps), tuple(counts), tuple(dims))

    @classmethod
    def all(cls, base: Geometry) -> Window:
        """Return every element of a tensor."""
        n = len(base.size)
        return cls((0,) * n, (1,) * n, base.size, tuple(range(n)))

    def positions(self, dim: int, points: Tensor, size: int) -> slice | Tensor:
        """Return the window's positions along a dim of a block; padding belongs to a window of the whole dim."""
        if self.starts[dim] == 0 and self.steps[dim] == 1 and self.counts[dim] == size:
            return slice(None)
        distance = points - self.starts[dim]
        step = self.steps[dim]
        inside = (distance >= 0) & (distance % step == 0) & (distance < self.counts[dim] * step)
        return inside.nonzero().flatten()
