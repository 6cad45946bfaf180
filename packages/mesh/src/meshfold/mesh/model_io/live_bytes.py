"""Bytes that are alive, counted operator by operator, on meta tensors or any device."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


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

    @property
    def bytes(self) -> int:
        """Alive now."""
        return self._now

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
        for given in tree_iter((args, kwargs)):
            if isinstance(given, Tensor):
                self._see(given, counts=False)
        made = func(*args, **kwargs)
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
                self._see(tensor, counts=True)
        return made

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
