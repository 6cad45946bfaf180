"""Arenas: accounted memory for every byte of chunks, with budgets.

An arena allocates *blocks* and accounts for exactly the bytes of their storages. On a machine without
a GPU, an arena with a budget simulates the compute device, so plans can be executed anywhere.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from meshfold.mesh import with_old_names
from meshfold.zero_gemini.errors import ArenaError, MemoryPlanError, OutOfBudget
from meshfold.zero_gemini.memory.copies import Waiting
from meshfold.zero_gemini.memory.pinned import PAGE_BYTES, page_locked

# The CUDA allocator's rounding. Storages have rounded sizes, so that its count equals ours, except for up to 1 MiB that it
# leaves in a block rather than split a cached segment.
ROUND_BYTES = 512


class Block:
    """Part of an arena, made by :meth:`Arena.allocate` or :meth:`Arena.count`.

    A block does not keep its arena alive; its memory is no longer accounted for when the arena is gone.

    Attributes:
        nbytes: bytes of its storage: the tensor's, rounded up.
        purpose: of the memory, shown by :class:`OutOfBudget`.
    """

    __slots__ = ("_arena", "_tensor", "nbytes", "purpose")

    def __init__(self, arena: Arena, tensor: Tensor, nbytes: int, purpose: str) -> None:
        self._arena = ref(arena)
        self.nbytes = nbytes
        self.purpose = purpose
        self._tensor: Tensor | None = tensor

    @property
    def arena(self) -> Arena | None:
        """The arena that accounts for it; None if that is gone."""
        return self._arena()

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
        """Return True if its memory was given back."""
        return self._tensor is None

    def empty(self) -> None:
        """Release the memory and keep the tensor: it has no storage until :meth:`restore`. Does nothing if it has none.

        Raises:
            ArenaError: after :meth:`free`.
        """
        storage = self.tensor.untyped_storage()
        if storage.nbytes():
            storage.resize_(0)
            if (arena := self._arena()) is not None:
                arena._returned(self.nbytes)

    def restore(self) -> None:
        """Allocate memory again after :meth:`empty`, of undefined contents. Does nothing if it has some.

        Raises:
            OutOfBudget: if the arena has less left.
            ArenaError: after :meth:`free`.
        """
        storage, arena = self.tensor.untyped_storage(), self._arena()
        if storage.nbytes():
            return
        if arena is not None:
            arena._taken(self.nbytes)
        try:
            storage.resize_(self.nbytes)
        except RuntimeError as error:
            if arena is None:
                raise
            arena._refused(self.nbytes, error)

    def free(self) -> None:
        """Release the memory. The caller must drop all views, which would keep the storage alive, unaccounted.

        Device memory returns to torch's allocator in the order of the current stream. First wait for work on other streams, and for
        copies to or from a pinned block.

        Raises:
            ArenaError: if it was freed before.
        """
        if (arena := self._arena()) is not None:
            arena._give_back(self)
        else:
            self._tensor = None

    def __repr__(self) -> str:
        of, arena = f" for {self.purpose}" if self.purpose else "", self._arena()
        return f"block of {self.nbytes:,} bytes{of}{'' if arena is None else f' in arena {arena.name!r}'}"


class Arena:
    """Accounted memory on one device.

    Args:
        name: what to call it in errors: "gpu", "host", ...
        device: where its memory lies.
        budget_bytes: the most that may be in use at once; None for all of the device. May be changed at any time.
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
            raise MemoryPlanError(f"arena {name!r}: a budget of {budget_bytes} bytes; it must be at least 0, or None")
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
        """Most bytes in use at once since the start or :meth:`reset_peak`."""
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
        """Restart the peak measurement from the memory in use now."""
        with self._lock:
            self._peak = self._used

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes that a block of ``numel`` elements takes."""
        return -(-numel * dtype.itemsize // self._round_bytes) * self._round_bytes

    def fits(self, numel: int, dtype: torch.dtype) -> bool:
        """Return True if the budget still allows a block of ``numel`` elements."""
        free = self.free_bytes
        return free is None or self.nbytes(numel, dtype) <= free

    def allocate(self, numel: int, dtype: torch.dtype, purpose: str = "") -> Block:
        """Return a flat block of ``numel`` elements, aligned to 64 bytes at least (to a page, if pinned), undefined contents.

        Args:
            numel: elements.
            dtype: of the elements.
            purpose: of the memory, in a word or two, shown when memory runs out.

        Raises:
            OutOfBudget: if the budget or the device has less left; nothing has changed then.
            ArenaError: if ``numel`` is not positive.
        """
        if numel <= 0:
            raise ArenaError(f"arena {self.name!r}: a block of {numel} elements; it must have at least 1")
        nbytes = self.nbytes(numel, dtype)
        with self._lock:
            self._claim(nbytes)  # before allocating, so that threads together stay within the budget
        try:
            with _disable_current_modes():  # hidden from modes that count a model's allocations
                storage = self._storage(nbytes)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
            self._refused(nbytes, error)
        block = Block(self, storage.view(dtype)[:numel], nbytes, purpose)
        with self._lock:
            self._blocks[id(block)] = block
            self._peak = max(self._peak, self._used)
        return block

    def count(self, tensor: Tensor, purpose: str = "") -> Block:
        """Account for a tensor made elsewhere, until the block is freed.

        Raises:
            OutOfBudget: if the budget has less left.
        """
        nbytes = self.nbytes(tensor.numel(), tensor.dtype)
        self._taken(nbytes)
        block = Block(self, tensor, nbytes, purpose)
        with self._lock:
            self._blocks[id(block)] = block
        return block

    def holders(self, most: int = 3) -> list[tuple[str, int]]:
        """Return the purposes that hold most: ``(purpose, bytes)``, largest first."""
        return self._holders(self.blocks, most)

    def _storage(self, nbytes: int) -> Tensor:
        if self.pinned:
            return page_locked(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _give_back(self, block: Block) -> None:
        with self._lock:
            if self._blocks.pop(id(block), None) is not block:
                raise ArenaError(f"{block} was freed before")
            if block.tensor.untyped_storage().nbytes():
                self._used -= block.nbytes
            block._tensor = None

    def _claim(self, nbytes: int) -> None:
        """Count bytes as used if the budget allows it; the caller holds the lock."""
        if self.budget_bytes is not None and self._used + nbytes > self.budget_bytes:
            raise self._exhausted(nbytes, "")
        self._used += nbytes

    def _taken(self, nbytes: int) -> None:
        with self._lock:
            self._claim(nbytes)
            self._peak = max(self._peak, self._used)

    def _returned(self, nbytes: int) -> None:
        with self._lock:
            self._used -= nbytes

    def _refused(self, nbytes: int, error: Exception) -> NoReturn:
        """Withdraw a claim and raise the device's error; out of memory becomes :class:`OutOfBudget`."""
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
        """Return the error to raise; the caller holds the lock."""
        if self.budget_bytes is None:
            budget = "there is no budget"
        else:
            budget = (
                f"the budget is {_size(self.budget_bytes)}, {_size(max(0, self.budget_bytes - self._used))} are free"
            )
        holders = self._holders(tuple(self._blocks.values()), 3)
        held = "; most is held by " + ", ".join(f"{name}: {_size(size)}" for name, size in holders) if holders else ""
        because = f" ({reason})" if reason else ""
        return OutOfBudget(
            f"arena {self.name!r} has no {_size(wanted)} left{because}: {_size(self._used)} are in use, {budget}{held}",
            wanted_bytes=wanted,
            used_bytes=self._used,
            budget_bytes=self.budget_bytes,
        )

    def __repr__(self) -> str:
        budget = "" if self.budget_bytes is None else f" of {_size(self.budget_bytes)}"
        return f"Arena({self.name!r}, {self.device}, {_size(self._used)}{budget} in {len(self._blocks)} blocks)"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, OSError)):
        return True
    text = str(error)  # the CPU allocator raises a plain RuntimeError
    return "can't allocate memory" in text or "not enough memory" in text


def _size(nbytes: int) -> str:
    """Format a number of bytes: exact below 1 MiB, else in MiB or GiB."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    if nbytes >= 2**20:
        return f"{nbytes / 2**20:.2f} MiB"
    return f"{nbytes:,} bytes"


MemoryTier = Literal["device", "host", "disk"]
"""Memory that holds something between its uses; data on disk visits the host."""


@with_old_names({"home": "host_arena"})
class Memory:
    """Two arenas. Without a GPU both are the CPU's memory and differ only in their budgets.

    Attributes:
        compute: the arena where the model computes.
        host_arena: the arena of the host; page-locked if the model computes on a GPU.
        device: of ``compute``.
        host: of ``host_arena``.
        waiting: context manager around each wait for memory to be free again.
    """

    def __init__(self, device: torch.device, *, device_bytes: int | None = None, host_bytes: int | None = None) -> None:
        """Args:
        device: where the model computes.
        device_bytes: budget of chunks there; None for all it has.
        host_bytes: budget of the host.
        """
        self.device, self.host = device, torch.device("cpu")
        self.compute = Arena(f"compute device {device}", device, device_bytes)
        self.host_arena = Arena("host", self.host, host_bytes, pinned=device.type == "cuda")
        self.waiting = Waiting()

    def arena(self, place: MemoryTier) -> Arena:
        """Return the arena of a memory tier."""
        return self.compute if place == "device" else self.host_arena

    def allocate(self, elements: int, dtype: torch.dtype, place: MemoryTier, purpose: str) -> Block:
        """Return a flat block of undefined contents; the caller frees it.

        Raises:
            OutOfBudget: if less is left.
        """
        return self.arena(place).allocate(elements, dtype, purpose)

    def count(self, tensor: torch.Tensor, purpose: str) -> Block:
        """Account for a tensor of the compute device that was made elsewhere, until the block is freed."""
        return self.compute.count(tensor, purpose)
