"""Bytes that are alive, counted operator by operator, on meta tensors or any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.mesh.model_io.nested_tensors import tensors_in


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators create, each once, from creation to release; on meta, CPU or any device.

    Views are free. Existing tensors are left out: parameters, buffers, the batch. Memory inside an operator is not seen.

    Source: the technique of ``torch.distributed._tools.mem_tracker``: a Python storage object lives as long as the C++ one. A
    finalizer on it shows when memory is freed, including memory that only autograd keeps.
    """

    def __init__(self, *, base_bytes: int = 0, round_bytes: int = 1) -> None:
        """Args:
        base_bytes: always alive in addition, such as buffers, the batch, workspaces.
        round_bytes: each storage counts in multiples of this; the CUDA allocator's is 512.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._base, self.round_bytes = base_bytes, round_bytes
        self._known: dict[int, weakref.finalize[Any, Any]] = {}  # live storages, by address
        self._now = self._peak = base_bytes
        self._inside = 0  # kernels that run

    @property
    def bytes(self) -> int:
        """Alive now."""
        return self._now

    @property
    def is_in_kernel(self) -> bool:
        """True while a kernel runs, whose operators are not seen."""
        return bool(self._inside)

    def take(self) -> tuple[int, int]:
        """Return (peak since the last call, current), in bytes; the next peak starts now."""
        peak, self._peak = self._peak, self._now
        return peak, self._now

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for watcher in self._known.values():
            watcher.detach()
        self._known.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        self._see_all((args, kwargs), counts=False)
        made = func(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self._take_over(args[0], made)
        self._see_all(made, counts=True)
        return made

    def as_one(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as a kernel that holds its arguments and its results only, for ``count_kernels``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                self._see_all((args, kwargs), counts=False)
            self._inside += 1
            try:
                made = function(*args, **kwargs)
            finally:
                self._inside -= 1
            if not self._inside:
                self._see_all(made, counts=True)
            return made

        return run

    def _see_all(self, values: Any, *, counts: bool) -> None:
        for tensor in tensors_in(values):
            self._see(tensor, counts=counts)

    def _take_over(self, waited: Tensor, found: Tensor) -> None:
        """Count what a collective has made as its waited result: on the meta device alone these are two storages."""
        old, new = waited.untyped_storage(), found.untyped_storage()
        watcher = self._known.get(old._cdata)
        if old._cdata == new._cdata or watcher is None or (held := watcher.detach()) is None:
            return
        _, _, (key, size), _ = held
        self._known[key] = weakref.finalize(old, self._gone, key, 0)
        self._known[new._cdata] = weakref.finalize(new, self._gone, new._cdata, size)

    def _see(self, tensor: Tensor, *, counts: bool) -> None:
        """Record a storage if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // self.round_bytes) * self.round_bytes if counts else 0
        self._known[key] = weakref.finalize(storage, self._gone, key, size)
        self._now += size
        self._peak = max(self._peak, self._now)

    def _gone(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self._now -= size


def storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes of the storages of tensors on devices of one type, each storage once."""
    storages = [each.untyped_storage() for each in tensors if each.device.type == device.type]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
