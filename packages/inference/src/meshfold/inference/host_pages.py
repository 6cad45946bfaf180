"""Pages on the host: keys and values of sequences that had to give theirs back, until there is room again.

A page is one run of bytes there, of all layers of this rank. Copies are queued on the device's own stream after the work that wrote
a page and before the work that uses it again, so nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshfold.inference.cache import Pool


class HostPages:
    """Room for a number of pages in pinned memory of the host.

    Attributes:
        count: pages there is room for.
    """

    def __init__(self, pool: Pool, count: int, *, here: bool = True) -> None:
        """Args:
        pool: of the device.
        count: pages.
        here: False for a part of the rows that other ranks have: places are counted, as there, and nothing is copied.
        """
        self.count, self._device, self._here = count, pool.device, here
        self._parts = [part for layer in pool.layers for part in layer.parts]
        self._sizes = [part[:, 0].numel() * part.itemsize for part in self._parts]
        pinned = here and pool.device.type == "cuda"
        self._bytes = torch.empty(count if here else 0, sum(self._sizes), dtype=torch.uint8, pin_memory=pinned)
        self._free = list(range(count - 1, -1, -1))

    @property
    def bytes(self) -> int:
        """Bytes on the host; they are allocated once."""
        return self._bytes.nbytes

    @property
    def used(self) -> int:
        """Pages that hold something."""
        return self.count - len(self._free)

    def save(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Copy pages of the pool to the host; return their places there, none if there is no room for all."""
        if len(pages) > len(self._free):
            return ()
        slots = tuple(self._free.pop() for _ in pages)
        for page, slot in zip(pages, slots, strict=True) if self._here else ():
            made = torch.cat([part[:, page].contiguous().view(torch.uint8).flatten() for part in self._parts])
            self._bytes[slot].copy_(made, non_blocking=True)
        return slots

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy from places on the host into pages of the pool."""
        for slot, page in zip(slots, pages, strict=True) if self._here else ():
            pieces = self._bytes[slot].to(self._device, non_blocking=True).split(self._sizes)
            for part, piece in zip(self._parts, pieces, strict=True):
                there = part[:, page].view(torch.uint8)
                there.copy_(piece.view(there.shape))

    def free(self, slots: Sequence[int]) -> None:
        """Give places back."""
        self._free.extend(reversed(slots))
