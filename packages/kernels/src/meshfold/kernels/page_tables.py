"""Tables of the pages of a batch's sequences: lists on the host, and the tensor on the device that attention reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PageTables:
    """The pages of the sequence in each row of a batch; rows without one have the spare page.

    Attributes:
        on_device: int64 ``rows width``.
    """

    def __init__(self, rows: int, width: int, spare: int, device: torch.device) -> None:
        """Args:
        rows: of the batch.
        width: pages of the longest sequence.
        spare: the page for keys and values that no sequence needs.
        device: of the tensor.
        """
        self.on_device: Tensor = torch.full((rows, width), spare, dtype=torch.int64, device=device)
        self._width, self._spare = width, spare
        self._pages = torch.full((rows, width), spare, dtype=torch.int64)
        # Of each row with a sequence: its pages, and how many are in the table.
        self._listed: dict[int, tuple[list[int], int]] = {}
        # The device may still copy one of two when the next is filled: at most two groups of tokens are being computed.
        self._copied = [self._pages.pin_memory() for _ in range(2)] if device.type == "cuda" else [self._pages]

    def fill(self, sequences: Sequence[list[int]], rows: Sequence[int]) -> None:
        """Fill the table, from what is new.

        Args:
            sequences: the pages of each. A list that is longer than before has new pages at its end; another list is another
                sequence, or one that was away.
            rows: the row of each.
        """
        gone = self._listed.keys() - set(rows)
        for row in gone:
            self._pages[row] = self._spare
            del self._listed[row]
        at: list[int] = []
        columns: list[int] = []
        new: list[int] = []
        for pages, row in zip(sequences, rows, strict=True):
            before, known = self._listed.get(row, ([], 0))
            count = min(len(pages), self._width)
            if known == count and pages is before:
                continue
            if pages is not before:
                self._pages[row] = self._spare
                known = 0
            at += [row] * (count - known)
            columns += range(known, count)
            new += pages[known:count]
            self._listed[row] = (pages, count)
        if at:
            self._pages.numpy()[at, columns] = new
        if at or gone:
            self._copied.reverse()
            self.on_device.copy_(self._copied[0].copy_(self._pages), non_blocking=True)
