"""Memory that is accounted: every byte of chunks comes from an arena, which may have a budget.

An arena hands out *blocks*; the bytes it accounts are the bytes of the blocks' storages, no more and no less. On a
machine without a GPU, an arena with a budget stands for the compute device, so that plans can be executed anywhere.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from meshfold.zero_gemini.errors import ArenaError, MemoryPlanError, OutOfBudget

# What the CUDA allocator rounds to: storages are made that large, so that its count is ours (but for up to 1 MiB that
# it leaves to a block rather than split a cached segment).
ROUND_BYTES = 512

# Host memory is locked in pages, and so is direct I/O done.
PAGE_BYTES = 4096

_HUGE_PAGE_BYTES = 2**21
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every CUDA context of the process


class Block:
    """A piece of an arena; comes from :meth:`Arena.allocate` or a :class:`Pool`.

    Attributes:
        arena: where it lies.
        nbytes: bytes of its storage: those of the tensor, rounded up.
        purpose: what it is for, as :class:`OutOfBudget` will tell.
    """

    __slots__ = ("_pool", "_tensor", "arena", "nbytes", "purpose")

    def __init__(self, arena: Arena, tensor: Tensor, nbytes: int, purpose: str) -> None:
        self.arena = arena
        self.nbytes = nbytes
        self.purpose = purpose
        self._tensor: Tensor | None = tensor
        self._pool: Pool | None = None

    @property
    def tensor(self) -> Tensor:
        """Flat, ``numel``; its contents are undefined at first.

        Raises:
            ArenaError: after :meth:`free`.
        """
        if self._tensor is None:
            raise ArenaError(f"{self} was freed: its tensor is gone")
        return self._tensor

    @property
    def freed(self) -> bool:
        """Whether its memory was given back."""
        return self._tensor is None

    def empty(self) -> None:
        """Give the memory back and keep the tensor: it has no storage until :meth:`restore`. Nothing if it has none.

        Raises:
            ArenaError: after :meth:`free`.
        """
        storage = self.tensor.untyped_storage()
        if storage.nbytes():
            storage.resize_(0)
            self.arena._returned(self.nbytes)

    def restore(self) -> None:
        """Have memory again after :meth:`empty`, of undefined contents. Nothing if it has some.

        Raises:
            OutOfBudget: if the arena has not as much left.
            ArenaError: after :meth:`free`.
        """
        storage = self.tensor.untyped_storage()
        if not storage.nbytes():
            self.arena._taken(self.nbytes)
            try:
                storage.resize_(self.nbytes)
            except RuntimeError as error:
                self.arena._refused(self.nbytes, error)

    def free(self) -> None:
        """Give the memory back. The caller lets go of all views; they would keep the storage alive, unaccounted.

        Device memory returns to torch's allocator in the order of the current stream: work on another stream must
        have been waited for, and so must a copy to or from a pinned block.

        Raises:
            ArenaError: if it was freed before, or belongs to a pool.
        """
        if self._pool is not None:
            raise ArenaError(f"{self} belongs to a pool: release it there")
        self.arena._give_back(self)

    def __repr__(self) -> str:
        of = f" for {self.purpose}" if self.purpose else ""
        return f"block of {self.nbytes:,} bytes{of} in arena {self.arena.name!r}"


class Arena:
    """Accounted memory on one device.

    Args:
        name: what to call it in errors: "gpu", "host", ...
        device: where its memory lies.
        budget_bytes: how much may be in use at once; None for what the device has. May be changed at any time.
        pinned: page-locked host memory, for copies that overlap with computation; every page is touched at once, by
            all of torch's threads. Without CUDA the same memory, not locked.

    Raises:
        MemoryPlanError: for a negative budget, or pinned memory on a device.

    Safe to use from several threads.
    """

    def __init__(
        self, name: str, device: torch.device | str, budget_bytes: int | None = None, pinned: bool = False
    ) -> None:
        self.name = name
        self.device = torch.device(device)
        self.pinned = pinned
        if pinned and self.device.type != "cpu":
            raise MemoryPlanError(
                f"arena {name!r}: only host memory can be pinned, and it is on {self.device}; use device='cpu'"
            )
        if budget_bytes is not None and budget_bytes < 0:
            raise MemoryPlanError(
                f"arena {name!r}: a budget of {budget_bytes} bytes; it must be at least 0, or None"
            )
        self.budget_bytes = budget_bytes
        self._round_bytes = PAGE_BYTES if pinned else ROUND_BYTES
        self._used = 0
        self._peak = 0
        self._blocks: dict[int, Block] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        return self._used

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were in use at once, since the start or :meth:`reset_peak`."""
        return self._peak

    @property
    def free_bytes(self) -> int | None:
        """Bytes that the budget still allows, never negative; None without a budget."""
        return None if self.budget_bytes is None else max(0, self.budget_bytes - self._used)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks in use, oldest first."""
        with self._lock:
            return tuple(self._blocks.values())

    def reset_peak(self) -> None:
        """Measure the peak anew, from what is in use now."""
        with self._lock:
            self._peak = self._used

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """The bytes that a block of ``numel`` elements takes."""
        return -(-numel * dtype.itemsize // self._round_bytes) * self._round_bytes

    def fits(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether the budget still allows a block of ``numel`` elements."""
        free = self.free_bytes
        return free is None or self.nbytes(numel, dtype) <= free

    def allocate(self, numel: int, dtype: torch.dtype, purpose: str = "") -> Block:
        """A flat block of ``numel`` elements, aligned to 64 bytes at least (to a page, if pinned), undefined contents.

        Args:
            numel: elements.
            dtype: of the elements.
            purpose: what it is for, in a word or two: shown when memory runs out.

        Raises:
            OutOfBudget: if the budget or the device has not as much left; nothing has changed then.
            ArenaError: if ``numel`` is not positive.
        """
        if numel <= 0:
            raise ArenaError(f"arena {self.name!r}: a block of {numel} elements; it must have at least 1")
        nbytes = self.nbytes(numel, dtype)
        with self._lock:
            if self.budget_bytes is not None and self._used + nbytes > self.budget_bytes:
                raise self._exhausted(nbytes, "")
            self._used += (
                nbytes  # claimed before it is made, so that threads cannot exceed the budget together
            )
        try:
            with _disable_current_modes():  # whoever counts what a model's operators make does not mean this
                storage = self._storage(nbytes)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
            with self._lock:
                self._used -= nbytes
                if not _is_out_of_memory(error):
                    raise
                reason = str(error).strip().splitlines()[0]
                raise self._exhausted(nbytes, f"{self.device} itself has no more: {reason}") from error
        block = Block(self, storage.view(dtype)[:numel], nbytes, purpose)
        with self._lock:
            self._blocks[id(block)] = block
            self._peak = max(self._peak, self._used)
        return block

    def count(self, tensor: Tensor, purpose: str = "") -> Block:
        """Account for a tensor that somebody else made, until the block is freed.

        Raises:
            OutOfBudget: if the budget has not as much left.
        """
        nbytes = self.nbytes(tensor.numel(), tensor.dtype)
        self._taken(nbytes)
        block = Block(self, tensor, nbytes, purpose)
        with self._lock:
            self._blocks[id(block)] = block
        return block

    def holders(self, most: int = 3) -> list[tuple[str, int]]:
        """The purposes that hold most: ``(purpose, bytes)``, largest first."""
        return self._holders(self.blocks, most)

    def _storage(self, nbytes: int) -> Tensor:
        if self.pinned:
            return _page_locked(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _give_back(self, block: Block) -> None:
        with self._lock:
            if self._blocks.pop(id(block), None) is not block:
                raise ArenaError(f"{block} was freed before")
            if block.tensor.untyped_storage().nbytes():
                self._used -= block.nbytes
            block._tensor = None

    def _taken(self, nbytes: int) -> None:
        with self._lock:
            if self.budget_bytes is not None and self._used + nbytes > self.budget_bytes:
                raise self._exhausted(nbytes, "")
            self._used += nbytes
            self._peak = max(self._peak, self._used)

    def _returned(self, nbytes: int) -> None:
        with self._lock:
            self._used -= nbytes

    def _refused(self, nbytes: int, error: RuntimeError) -> NoReturn:
        """The device had no more after all."""
        with self._lock:
            self._used -= nbytes
            if not _is_out_of_memory(error):
                raise error
            reason = str(error).strip().splitlines()[0]
            raise self._exhausted(nbytes, f"{self.device} itself has no more: {reason}") from error

    @staticmethod
    def _holders(blocks: tuple[Block, ...], most: int) -> list[tuple[str, int]]:
        held: Counter[str] = Counter()
        for block in blocks:
            if block.tensor.untyped_storage().nbytes():
                held[block.purpose or "(no purpose given)"] += block.nbytes
        return held.most_common(most)

    def _exhausted(self, wanted: int, reason: str) -> OutOfBudget:
        """The error to raise; the lock is held."""
        if self.budget_bytes is None:
            budget = "there is no budget"
        else:
            budget = f"the budget is {_size(self.budget_bytes)}, {_size(max(0, self.budget_bytes - self._used))} are free"
        holders = self._holders(tuple(self._blocks.values()), 3)
        held = (
            "; most is held by " + ", ".join(f"{name}: {_size(size)}" for name, size in holders)
            if holders
            else ""
        )
        because = f" ({reason})" if reason else ""
        return OutOfBudget(
            f"arena {self.name!r} has no {_size(wanted)} left{because}: {_size(self._used)} are in use, {budget}{held}",
            wanted_bytes=wanted,
            used_bytes=self._used,
            budget_bytes=self.budget_bytes,
        )

    def __repr__(self) -> str:
        budget = "" if self.budget_bytes is None else f" of {_size(self.budget_bytes)}"
        return (
            f"Arena({self.name!r}, {self.device}, {_size(self._used)}{budget} in {len(self._blocks)} blocks)"
        )


class Pool:
    """A fixed number of buffers of one size, allocated once and used again and again: for gathered chunks.

    Args:
        arena: where the buffers lie.
        numel: elements of each; take ``block.tensor[:n]`` for less.
        dtype: of the elements.
        count: buffers.
        purpose: what free buffers are accounted for.

    Raises:
        OutOfBudget: if the arena cannot hold them all; it then holds none.
        ArenaError: if ``count`` is not positive.
    """

    def __init__(
        self, arena: Arena, numel: int, dtype: torch.dtype, count: int, purpose: str = "pool"
    ) -> None:
        if count <= 0:
            raise ArenaError(f"a pool of {count} buffers in arena {arena.name!r}; it must have at least 1")
        self.arena = arena
        self.numel = numel
        self.dtype = dtype
        self.purpose = purpose
        self._blocks: list[Block] = []
        try:
            for _ in range(count):
                self._blocks.append(arena.allocate(numel, dtype, purpose))
        except OutOfBudget:
            for block in self._blocks:
                block.free()
            raise
        for block in self._blocks:
            block._pool = self
        # First in, first out: the buffer taken is the one whose last user has had most time to finish.
        self._free = deque(self._blocks)

    @property
    def count(self) -> int:
        """All its buffers."""
        return len(self._blocks)

    @property
    def free_count(self) -> int:
        """Buffers that can be acquired."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all its buffers."""
        return sum(block.nbytes for block in self._blocks)

    def acquire(self, purpose: str = "") -> Block:
        """A buffer; the one that was released first.

        Work of its last user that is still queued on another stream must be waited for before it is written.

        Raises:
            OutOfBudget: if all are in use; says for what.
        """
        if not self._free:
            users = ", ".join(block.purpose for block in self._blocks) or "nobody: the pool is closed"
            raise OutOfBudget(
                f"all {self.count} buffers of pool {self.purpose!r} in arena {self.arena.name!r} are in use, by {users}",
                wanted_bytes=self.arena.nbytes(self.numel, self.dtype),
                used_bytes=self.arena.used_bytes,
                budget_bytes=self.arena.budget_bytes,
            )
        block = self._free.popleft()
        block.purpose = purpose or self.purpose
        return block

    def release(self, block: Block) -> None:
        """Take a buffer back.

        Raises:
            ArenaError: if it is not of this pool, or was released before.
        """
        if block._pool is not self:
            raise ArenaError(f"{block} is not of pool {self.purpose!r} in arena {self.arena.name!r}")
        if block in self._free:
            raise ArenaError(f"{block} was released to pool {self.purpose!r} before")
        block.purpose = self.purpose
        self._free.append(block)

    def close(self) -> None:
        """Give all buffers back to the arena.

        Raises:
            ArenaError: if some are in use; all stay as they are then.
        """
        if len(self._free) < len(self._blocks):
            users = ", ".join(block.purpose for block in self._blocks if block not in self._free)
            raise ArenaError(
                f"pool {self.purpose!r} in arena {self.arena.name!r} is still in use, by {users}: release first"
            )
        for block in self._blocks:
            block._pool = None
            block.free()
        self._blocks.clear()
        self._free.clear()


class _Pages(mmap.mmap):
    """Pages that are unlocked just before they are unmapped, which is when nothing refers to them any more."""

    _unlock: Callable[[int], object] | None = None
    _address = 0
    _process = 0

    def advise(self, advice: str) -> None:
        with contextlib.suppress(OSError):  # a kernel that does not know it does as well without
            if hasattr(mmap, advice):
                self.madvise(getattr(mmap, advice))

    def lock(self, address: int) -> None:
        # A fork (the workers of a data loader) would copy locked pages one by one: children do without them.
        self.advise("MADV_DONTFORK")
        runtime = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, len(self), _PORTABLE))
        if status:
            raise OSError(
                f"CUDA could not lock {len(self):,} bytes of host memory (error {status}); ask for less, or raise the "
                "limit of locked memory (ulimit -l)"
            )
        self._unlock, self._address, self._process = runtime.cudaHostUnregister, address, os.getpid()

    def __del__(self) -> None:
        if self._unlock is not None and self._process == os.getpid():
            self._unlock(self._address)


def _page_locked(nbytes: int) -> Tensor:
    """Zeros, uint8 ``nbytes``, on pages of their own, locked if there is CUDA.

    ``torch.empty(..., pin_memory=True)`` rounds up to a power of two (17 GiB cost 32) and keeps in a cache what was
    freed. These are exact, and go back to the system with the last tensor on them.

    Raises:
        OSError: if the system has not as much memory, or does not let it be locked.
    """
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE_BYTES:
        pages.advise("MADV_HUGEPAGE")  # one page fault and one TLB entry for 2 MiB
    storage = torch.frombuffer(pages, dtype=torch.uint8)
    # The first write takes the memory from the system: slow, so all of torch's threads share it.
    storage.fill_(0)
    if torch.cuda.is_available():
        pages.lock(storage.data_ptr())
    return storage


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, OSError)):
        return True
    text = str(error)  # the CPU allocator raises a plain RuntimeError
    return "can't allocate memory" in text or "not enough memory" in text


def _size(nbytes: int) -> str:
    """Exact where a person would count, in GiB or MiB where not."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    if nbytes >= 2**20:
        return f"{nbytes / 2**20:.2f} MiB"
    return f"{nbytes:,} bytes"
