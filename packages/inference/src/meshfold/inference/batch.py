"""The rows of one forward: which token each row has, and where its keys go.

Ranks may share the rows of a batch in attention. Every part of the rows then has the tokens of its own sequences: running ones
first, then chunks of prompts, then rows that fill it up to the length of the longest part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfold.inference.requests import Span, Step
from meshfold.kernels import PagedChunk, PagedRows


@dataclass(frozen=True)
class RowParts:
    """Split of a batch's rows over the ranks of a model.

    Attributes:
        part: of this rank in attention.
        parts: there are.
        multiple: batches have a multiple of so many rows.
    """

    part: int
    parts: int
    multiple: int

    @property
    def split(self) -> bool:
        """True if a batch cannot have any number of rows."""
        return self.multiple > 1 or self.parts > 1

    def each(self, rows: int) -> int:
        """Return the rows of a part, where the longest needs ``rows``."""
        unit = self.multiple // self.parts if self.multiple % self.parts == 0 else self.multiple
        return -(-rows // unit) * unit

    def mine(self, rows: int) -> slice:
        """Return this rank's rows of a batch of so many."""
        each = rows // self.parts
        return slice(self.part * each, (self.part + 1) * each)

    def longest(self, spans: Sequence[Span], *, tokens: bool) -> int:
        """Return the largest number of sequences of any part, or of their tokens."""
        counts = [0] * self.parts
        for span in spans:
            counts[span.request.part] += span.count if tokens else 1
        return max(counts)

    def places(self, spans: Sequence[Span], each: int) -> list[int]:
        """Return the first row of every span, where parts have ``each`` rows and spans follow one another in them."""
        free, found = [part * each for part in range(self.parts)], []
        for span in spans:
            found.append(free[span.request.part])
            free[span.request.part] += span.count
        return found


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a forward; tensors on the device.

    Attributes:
        ids, positions: int64 ``t``, of all rows.
        rows: of this rank's part, as attention sees them.
        last: int64, the rows that sample, in the order of the spans.
    """

    ids: Tensor
    positions: Tensor
    rows: PagedRows
    last: Tensor


def listed_rows(step: Step, parts: RowParts, each: int, size: int, spare: int) -> tuple[Tensor, list[int]]:
    """Return ids, positions, pages and offsets of all rows, int64 ``4 t`` on the host, and the first row of every span.

    Args:
        step: what it computes.
        parts: how ranks share rows.
        each: rows of a part.
        size: tokens of a page.
        spare: the page for rows that fill up.
    """
    listed = torch.zeros(4, each * parts.parts, dtype=torch.int64)
    listed[2] = spare
    places = parts.places(step.spans, each)
    if step.decode:
        at = [(s.request.slice(s.start, s.stop)[0], s.start, s.request.pages[s.start // size]) for s in step.decode]
        listed[:3, places[: len(at)]] = torch.tensor(at).T
    for span, row in zip(step.prefill, places[len(step.decode) :], strict=True):
        here, positions = slice(row, row + span.count), torch.arange(span.start, span.stop)
        listed[0, here] = torch.tensor(span.request.slice(span.start, span.stop))
        listed[1, here] = positions
        listed[2, here] = torch.tensor(span.request.pages)[positions // size]
    listed[3] = listed[1] % size
    return listed, places


def lay_out(step: Step, parts: RowParts, size: int, spare: int, device: torch.device) -> Batch:
    """Return the batch of a step.

    Args:
        step: what it computes.
        parts: how ranks share rows.
        size: tokens of a page.
        spare: the page for rows that fill up.
        device: of the tensors.
    """
    each = parts.each(parts.longest(step.spans, tokens=True))
    listed, places = listed_rows(step, parts, each, size, spare)
    last = [row + span.count - 1 for span, row in zip(step.spans, places, strict=True) if span.samples]
    numbers = listed.to(device)
    mine = parts.mine(each * parts.parts)
    singles = [span for span in step.decode if span.request.part == parts.part]
    width = max((len(span.request.pages) for span in singles), default=1)
    pages = [span.request.pages + [spare] * (width - len(span.request.pages)) for span in singles]
    tables = torch.tensor(pages, dtype=torch.int64).view(len(singles), width).to(device)
    chunks, row = [], len(singles)
    for span in step.prefill:
        if span.request.part == parts.part:
            known = span.request.pages[: -(-span.stop // size)]
            chunks.append(PagedChunk(row, span.count, span.start, torch.tensor(known).to(device)))
            row += span.count
    if row < each:
        chunks.append(PagedChunk(row, each - row, 0, torch.tensor([spare]).to(device)))
    rows = PagedRows(numbers[2, mine], numbers[3, mine], numbers[1, mine], tables, tuple(chunks))
    return Batch(numbers[0], numbers[1], rows, torch.tensor(last, dtype=torch.int64).to(device))
