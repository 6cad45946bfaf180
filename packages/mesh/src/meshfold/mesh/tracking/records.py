"""Records of tensors: their layouts by memory, since autograd gives views a new Python object."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshfold.mesh.tracking.dims import Dims, axes_of, is_split, is_whole, size_of, whole, whole_dims

_Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass
class _Memory:
    """Layouts of the tensors in one storage, held weakly: its address is not reused, but its memory may be freed."""

    alive: StorageWeakRef
    dims: dict[_Geometry, Dims]
    views: dict[int, tuple[weakref.ref[Tensor], Dims]] = field(default_factory=dict)
    varies: bool = False
    summed: frozenset[str] = frozenset()


class Records:
    """Layouts of tensors. An unknown tensor counts as whole on every rank."""

    def __init__(
        self, parameter_dims: Callable[[Tensor], Dims | None] = lambda parameter: None, *, waiting: bool = False
    ) -> None:
        """Args:
        parameter_dims: returns the layout of a parameter that is sharded; None for one that is whole.
        waiting: logits that wait for their loss say how they lie.
        """
        self._memory: dict[int, _Memory] = {}
        self._parameter_dims, self._waiting = parameter_dims, waiting

    def dims(self, tensor: Tensor) -> Dims:
        """Return the layout of a tensor."""
        if _waits(tensor):
            return self._dims_later(tensor)
        memory = self._memory.get(_storage(tensor))
        # The type first: a parameter's own check of instances is slow.
        if (
            type(tensor) is not Tensor
            and isinstance(tensor, nn.Parameter)
            and (found := self._parameter_dims(tensor)) is not None
        ):
            return found
        if memory is None:
            return whole_dims(tensor.shape)
        if memory.views and (view := memory.views.get(id(tensor))) is not None and view[0]() is tensor:
            return view[1]
        found = memory.dims.get(_geometry(tensor))
        return whole_dims(tensor.shape) if found is None else found

    def _dims_later(self, logits: Any) -> Dims:
        """Return the layout of logits that wait, ``logits.rows`` being what their head will read, of all rows if it gathers.

        ``logits.moved``: stands for the rows of the head's output if it moves rows.
        """
        rows: Tensor = next(one for one in (logits.moved, logits.numbers, logits.rows) if one is not None)
        shape, known = logits.shape, logits.tracked_dims if self._waiting else ()
        lead = whole_dims(shape[:-1])
        if rows.shape[:-1] == shape[:-1]:
            lead = self.dims(rows)[:-1]
        elif len(known) == len(shape):
            lead = known[:-1]
        words = known[-1] if known and size_of(known[-1]) == shape[-1] else whole(shape[-1])
        return (*lead, words)

    def put(self, tensor: Tensor, dims: Dims) -> None:
        """Set the layout of a tensor."""
        if _waits(tensor):
            return
        if (known := self._memory.get(_storage(tensor))) is not None:
            known.views.pop(id(tensor), None)
        if not all(map(is_whole, dims)):
            self._at(tensor).dims[_geometry(tensor)] = dims
        elif (memory := self._memory.get(_storage(tensor))) is not None:
            memory.dims.pop(_geometry(tensor), None)

    def name(self, tensor: Tensor, dims: Dims | None = None) -> None:
        """Distinguish a view from others of the same shape: pieces of one element may be in another of its dims.

        Args:
            tensor: the view.
            dims: its layout; by default the last one recorded.
        """
        if _waits(tensor):
            return
        if 1 in tensor.shape and (dims is not None or _storage(tensor) in self._memory):
            memory = self._at(tensor)
            memory.views[id(tensor)] = weakref.ref(tensor), self.dims(tensor) if dims is None else dims
        elif dims is not None:
            self.put(tensor, dims)

    def put_into_base(self, tensor: Tensor, dims: Dims) -> None:
        """Set the layout of a tensor that was written into, and of the tensor that it is a view of."""
        self.put(tensor, dims)
        if (memory := self._memory.get(_storage(tensor))) is not None:
            memory.views.clear()
        base = tensor._base
        if base is None:
            return
        known = list(self.dims(base))
        have = {axis for dim in known for axis in axes_of(dim)}
        for place, dim in enumerate(dims):
            if not is_split(dim) or len(dim) != 1 or set(axes_of(dim)) <= have:
                continue
            size, stride = tensor.shape[place], tensor.stride(place)
            order = sorted(range(base.dim()), key=lambda at: at != place)
            for at in order:
                wide = base.shape[at]
                if base.stride(at) == stride and wide >= size > 0 and known[at] == whole(wide):
                    known[at] = (replace(dim[0], size=wide, parts=dim[0].parts if wide == size else ()),)
                    break
        self.put(base, tuple(known))

    def vary(self, tensors: Iterable[Tensor]) -> None:
        """Record tensors whose values differ between forwards: weights, batches, random numbers."""
        for tensor in tensors:
            if not _waits(tensor):
                self._at(tensor).varies = True

    def varies(self, tensor: Tensor) -> bool:
        """Return True if a tensor's values may differ in another forward, or on a rank with another batch."""
        if tensor.requires_grad or _waits(tensor):
            return True
        memory = self._memory.get(_storage(tensor))
        return memory is not None and memory.varies

    def sum_over(self, tensors: Iterable[Tensor], axes: Iterable[str]) -> None:
        """Record tensors whose gradients may come in parts, one per rank along these axes; their producer sums them."""
        for tensor in tensors:
            self._at(tensor).summed = frozenset(axes)

    def summed(self, tensor: Tensor) -> frozenset[str]:
        """Return the axes over which a tensor's producer sums parts of its gradient."""
        memory = None if _waits(tensor) else self._memory.get(_storage(tensor))
        return frozenset() if memory is None else memory.summed

    def is_alike(self, tensor: Tensor, number: int) -> bool:
        """Return True if a tensor is constant along a dim in every forward and on every rank; meta tensors count as such."""
        if tensor.is_meta or tensor.shape[number] < 2 or tensor.stride(number) == 0:
            return True
        with torch.no_grad():
            return not self.varies(tensor) and bool((tensor == tensor.narrow(number, 0, 1)).all())

    def _at(self, tensor: Tensor) -> _Memory:
        key = _storage(tensor)
        if key not in self._memory:
            self._memory[key] = _Memory(StorageWeakRef(tensor.untyped_storage()), {})
        return self._memory[key]


def _waits(tensor: Tensor) -> bool:
    """Return True for logits that wait for their loss: they have no memory."""
    return type(tensor) is not Tensor and getattr(type(tensor), "waits_for_loss", False)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _geometry(tensor: Tensor) -> _Geometry:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
