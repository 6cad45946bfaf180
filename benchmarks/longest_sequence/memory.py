"""How much memory a step takes, and a limit to it: the allocator's on a GPU, on a CPU a count of living storages."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OnGPU:
    """What torch's caching allocator says, held to a limit in bytes (0: none)."""

    def __init__(self, limit: int, device: torch.device) -> None:
        from meshfold.engine.zero.process_settings import grow_segments, limit_allocator

        self._held = grow_segments(device), limit_allocator(device, limit or None)
        self.limit = limit or torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)

    def begin(self) -> None:
        """Forget the peak, and what is free."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Bytes, since it began."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def around(self) -> AbstractContextManager[Any]:
        """Nothing is needed while a step runs."""
        return nullcontext()


class OnCPU(TorchDispatchMode):
    """Bytes of all storages that operations made and that live: to try the benchmark where there is no GPU.

    Raises:
        MemoryError: from the operation with which they are more than the limit.
    """

    def __init__(self, limit: int, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit, self._now, self._peak = limit, 0, 0
        self._known: set[int] = set()
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        if self.limit and self._now > self.limit:
            raise MemoryError(f"out of memory: {self._now} bytes live, and the limit is {self.limit}")
        return found

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._now += size
        self._peak = max(self._peak, self._now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size

    def begin(self) -> None:
        """Forget the peak."""
        self._peak = self._now

    def peak(self) -> int:
        """Bytes, since it began."""
        return self._peak

    def around(self) -> AbstractContextManager[Any]:
        """Counts inside."""
        return self


def is_refusal(error: BaseException) -> bool:
    """Whether a step failed for want of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error).lower()
