"""Steps with few tokens, chunks of prompts among them: on a GPU one CUDA graph for each number of rows.

Launched one by one, the kernels of a short prompt take the host several times as long as the GPU. Here every token is a row with a
table of its sequence's pages, like the token of a running sequence, so a step of any sequences is described by buffers of fixed
sizes. Keys and values of all rows are written before any are read. A row reads all keys before it, so this is for few tokens that
do not see many (:func:`short_rows`). The first step with a number of rows runs without a graph, the second one captures it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.inference.batch import RowParts, listed_rows
from meshfold.inference.requests import Span, Step
from meshfold.kernels import PagedRows

Logits = Callable[[Tensor, Tensor, PagedRows, Tensor], Tensor]
"""ids and positions ``t``, what attention needs of this rank's rows, and the rows that sample -> logits ``samples v``"""
_LEAST, _UNIT, _MOST = 16, 64, 512
_MOST_SEEN = 1 << 18
_SAMPLES = (1, 8, 64)
"""Rows that sample, at most. A single one is multiplied with a packed head's codes; for more the head is unpacked."""


def short_rows(spans: Sequence[Span], longest: int) -> tuple[int, int] | None:
    """Return the rows of a part and the rows that sample, both rounded up; None for a step that is not short.

    Args:
        spans: of the step.
        longest: tokens of the part with the most.
    """
    samples = next((most for most in _SAMPLES if most >= sum(span.samples for span in spans)), 0)
    seen = sum(span.count * span.stop for span in spans)
    if longest > _MOST or not samples or seen > _MOST_SEEN:
        return None
    rows = max(1 << (longest - 1).bit_length(), _LEAST) if longest <= _UNIT else -(-longest // _UNIT) * _UNIT
    return rows, samples


@dataclass
class GraphMemory:
    """Memory that graphs share, of one model.

    Attributes:
        handle: of torch; None: no graphs, on another device or after one could not be captured.
    """

    handle: Any = None

    @classmethod
    def on(cls, device: torch.device) -> GraphMemory:
        """Return memory for graphs on a device."""
        return cls(torch.cuda.graph_pool_handle() if device.type == "cuda" else None)


class ShortSteps:
    """Buffers of steps with so many rows, and the graph over them."""

    def __init__(
        self,
        each: int,
        samples: int,
        width: int,
        size: int,
        spare: int,
        device: torch.device,
        *,
        parts: RowParts,
        memory: GraphMemory,
    ) -> None:
        """Args:
        each: rows of a part.
        samples: most rows that sample.
        width: pages of the longest sequence.
        size: tokens of a page.
        spare: the page for rows that fill up.
        device: of the buffers.
        parts: how ranks share rows.
        memory: of the graph.
        """
        self._each, self._width, self._size, self._spare, self._parts = each, width, size, spare, parts
        self._mine, rows = parts.mine(each * parts.parts), each * parts.parts
        lengths = (4 * rows, each * width, samples)
        self._host = torch.zeros(sum(lengths), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
        self._numbers, tables, self._last = self._device.split(lengths)
        self._numbers, tables = self._numbers.view(4, rows), tables.view(each, width)
        ids, positions, page, offset = self._numbers
        mine = self._mine
        self._given = (ids, positions, PagedRows(page[mine], offset[mine], positions[mine], tables, together=True))
        self._memory, self._uses = memory, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: Tensor | None = None

    def load(self, step: Step) -> None:
        """Fill the buffers."""
        if self._host.is_pinned():
            torch.cuda.current_stream(self._device.device).synchronize()  # the copy before may still read them
        listed, places = listed_rows(step, self._parts, self._each, self._size, self._spare)
        numbers, tables, last = self._host.split((self._numbers.numel(), self._each * self._width, self._last.numel()))
        numbers.copy_(listed.view(-1))
        tables, first = tables.view(self._each, self._width), self._mine.start
        tables.fill_(self._spare)
        rows = []
        for span, place in zip(step.spans, places, strict=True):
            if span.request.part == self._parts.part:
                pages = span.request.pages[: self._width]
                tables[place - first : place - first + span.count, : len(pages)] = torch.tensor(pages)
            if span.samples:
                rows.append(place + span.count - 1)
        last.zero_()
        last[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
        self._device.copy_(self._host, non_blocking=True)

    @property
    def captured(self) -> bool:
        """True if there is a graph."""
        return self._graph is not None

    def run(self, logits: Logits | None) -> Tensor:
        """Return logits ``samples v`` of what was loaded, which the next step overwrites; ``logits``: None if there is a graph."""
        self._uses += 1
        if self._graph is None and logits is not None and self._memory.handle is not None and self._uses > 1:
            self._capture(logits)
        if self._graph is not None and self._found is not None:
            self._graph.replay()
            return self._found
        assert logits is not None
        return logits(*self._given, self._last)

    def _capture(self, logits: Logits) -> None:
        """Make the graph; a model that cannot run in one keeps running without."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._memory.handle, capture_error_mode="thread_local"
            ):  # other threads watch ranks
                self._found = logits(*self._given, self._last)
        except RuntimeError as error:
            self._memory.handle = None
            reason = (str(error) or type(error).__name__).split("\n")[0]
            warnings.warn(f"no CUDA graph of a short step, which is slower: {reason}", stacklevel=2)
            return
        self._graph = graph
