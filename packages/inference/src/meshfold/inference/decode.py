"""The step of running sequences, one token each, for a batch with a fixed number of rows: all of it stays on the device.

Ids, positions, page tables, settings and results are in buffers with fixed addresses. The device feeds a token's id back,
increments its position and looks up its page, so several tokens are computed in a row before the host reads any. On a GPU all of
this, from the embedding to the drawn token, is one CUDA graph for each number of rows and each combination of sampling steps. On
other devices the same code runs without a graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from meshfold.inference.requests import Request, Span
from meshfold.inference.sampling import Sampling, sample, sampling_rows
from meshfold.kernels import PagedRows, PageTables, TokenGraphs, TokenState
from meshfold.mesh.processes import start_copying
from meshfold.tensor_parallel.few_rows import SplitWords

Logits = Callable[[Tensor, Tensor, PagedRows], Tensor]
"""ids and positions ``b``, and what attention needs of this rank's rows -> logits ``b v``"""
Read = Callable[[], tuple[list[list[int]], list[list[float]]]]
"""Waits for tokens and log-probs, ``steps b``, and returns them."""
_IDLE = Sampling(temperature=0.0)


def bucket(rows: int) -> int:
    """Return the number of rows of a batch for this many sequences: a power of two, or a multiple of 8 from 16 on."""
    if rows > 16:
        return -(-rows // 8) * 8
    return 1 << (rows - 1).bit_length()


class DecodeBatch:
    """Buffers of a batch of so many rows, and the graphs over them."""

    def __init__(
        self,
        rows: int,
        longest: int,
        most: int,
        size: int,
        spare: int,
        device: torch.device,
        *,
        mine: slice,
        whole: bool,
        captures: bool,
        finds_places: bool = False,
    ) -> None:
        """Args:
        rows: of the batch.
        longest: tokens of the longest sequence.
        most: tokens that are computed in a row.
        size: tokens of a page.
        spare: the page for keys and values that no sequence needs.
        device: of the buffers.
        mine: the rows that this rank has in attention.
        captures: steps become CUDA graphs.
        whole: attention gets tables of one width always, for compiled code; a graph does anyway.
        finds_places: attention finds the places of new keys in the tables, and is not told.
        """
        self._rows, self._longest, self._most, self._size = rows, longest, most, size
        self._width = -(-longest // size)
        numbers = (torch.zeros(n, dtype=torch.int64, device=device) for n in (rows, rows, rows, 1))
        found = (torch.zeros(most, rows, dtype=dtype, device=device) for dtype in (torch.int64, torch.float64))
        self._state = TokenState(*numbers, *found)
        self._tables = PageTables(rows, self._width, spare, device)
        self._settings = sampling_rows([_IDLE] * rows, device)
        self._seen: Tensor | None = None
        self._next: list[tuple[Request, int]] = []  # the sequence of each row, and its next position
        self._graphs: dict[tuple[bool, bool, bool], torch.cuda.CUDAGraph] = {}
        self._mine, self._captures = mine, captures
        self._whole, self._finds_places = whole or self._captures, finds_places

    def load(self, spans: Sequence[Span], places: Sequence[int], steps: int, seen: Tensor | None) -> None:
        """Fill the buffers.

        Args:
            spans: the sequences, each with its last token.
            places: the row of each.
            steps: tokens that will be computed.
            seen: ``b v`` bool, words that the sequences have, if some have a penalty on them.
        """
        # A row that continues beyond its last page, because the host has not yet seen that it has ended, writes to the
        # spare page.
        used = min(max(-(-(span.start + steps) // self._size) for span in spans) + 1, self._width)
        self._tables.fill([span.request.pages for span in spans], places)
        self._used = self._width if self._whole else used
        goes_on = self._next == [(span.request, span.start) for span in spans]
        self._next = [(span.request, span.start + steps) for span in spans]
        if not goes_on:  # else the device has all of it
            self._fill(spans, places, seen)
        self._state.step.zero_()

    def _fill(self, spans: Sequence[Span], places: Sequence[int], seen: Tensor | None) -> None:
        """Fill the buffers that steps carry on, and the settings."""
        numbers, rows = torch.zeros(3, self._rows, dtype=torch.int64), [_IDLE] * self._rows
        numbers[:, places] = torch.tensor([(s.request.slice(s.start, s.stop)[0], s.start, 1) for s in spans]).T
        for span, row in zip(spans, places, strict=True):
            rows[row] = span.request.sampling
        for buffer, values in zip(self._state[:3], numbers, strict=True):
            buffer.copy_(values)
        given = sampling_rows(rows, torch.device("cpu"))
        for name, value in vars(given).items():
            if isinstance(value, Tensor):
                getattr(self._settings, name).copy_(value)
        self._settings = replace(
            self._settings, draws=given.draws, truncates=given.truncates, penalizes=given.penalizes
        )
        if seen is not None:
            if self._seen is None or self._seen.shape[1] != seen.shape[1]:
                self._seen = torch.zeros(self._rows, seen.shape[1], dtype=torch.bool, device=seen.device)
            self._seen[torch.tensor(places, device=seen.device)] = seen

    @property
    def captured(self) -> bool:
        """True if there is a graph for what was loaded."""
        return self._settings.parts in self._graphs

    @property
    def plain(self) -> bool:
        """True if the choice of the next tokens needs only this rank's words of the logits."""
        return self._settings.plain

    def run(
        self,
        steps: int,
        logits: Logits | None,
        words: SplitWords | None = None,
        agree: Callable[[bool], bool] | None = None,
    ) -> Read:
        """Compute tokens behind one another. A GPU may not have ended when this returns; the next can be computed by then.

        Args:
            steps: how many.
            logits: the model; None if there is a graph for what was loaded.
            words: the logits are of these; None: of all.
            agree: returns whether all ranks that share the model say yes; then graphs whose kernels begin early, and that fetch
                weights ahead, are tried too, and taken if they are faster and choose the same. None: it is not tried.

        Returns:
            What waits for them.
        """
        for _ in range(steps):
            graph = self._graphs.get(self._settings.parts)
            if graph is not None:
                graph.replay()
            elif logits is not None:
                advance = partial(self._advance, logits, words)
                before = [] if agree is None else self._copies()
                advance()
                if self._captures:
                    self._capture(advance, before, agree)
        copied = start_copying(self._state.tokens[:steps], self._state.logprobs[:steps])  # before those that follow
        return lambda: tuple(part.tolist() for part in copied())  # type: ignore[return-value]

    def _advance(self, logits: Logits, words: SplitWords | None) -> None:
        """Compute one token of every row."""
        (ids, positions), tables = self._state[:2], self._tables.on_device
        page = offset = positions
        if not self._finds_places:
            place = torch.div(positions, self._size, rounding_mode="floor")
            page, offset = tables.gather(1, place.unsqueeze(1)).squeeze(1), positions % self._size
        mine = self._mine
        rows = PagedRows(page[mine], offset[mine], positions[mine], tables[mine, : self._used])
        found = logits(ids, positions, rows)
        settings = self._settings
        after = positions + 1 if settings.draws else positions  # random numbers are of the token's own place
        tokens, logprobs = sample(found, after, settings, self._seen, words)
        if settings.penalizes and self._seen is not None:
            self._seen.scatter_(1, tokens.unsqueeze(1), True)
        self._state.record(tokens, logprobs, self._longest - 1)

    def _capture(self, advance: Callable[[], None], before: list[Tensor], agree: Callable[[bool], bool] | None) -> None:
        """Make a graph of a step; a model that cannot run in a graph keeps running step by step.

        Args:
            advance: the step, which has run once.
            before: the state before that.
            agree: as of :meth:`run`.
        """
        try:
            graph = TokenGraphs.capture(advance)
        except RuntimeError as error:
            self._captures = False
            reason = (str(error) or type(error).__name__).split("\n")[0]
            warnings.warn(f"no CUDA graph of a generated token, which is slower: {reason}", stacklevel=2)
            return
        if agree is not None:
            after = self._copies()
            graphs = TokenGraphs(advance, self._changing, before, self._state.ids, self._found, agree)
            graph = graphs.fastest(graph)
            for part, value in zip(self._changing, after, strict=True):
                part.copy_(value)
        self._graphs[self._settings.parts] = graph

    def _copies(self) -> list[Tensor]:
        """Return copies of what a step changes."""
        return [part.clone() for part in self._changing]

    def _found(self) -> Tensor:
        """Return all tokens and their log-probs."""
        return torch.cat((self._state.tokens.double(), self._state.logprobs))

    @property
    def _changing(self) -> list[Tensor]:
        parts = [part for part in self._state if part is not self._state.going]
        return parts if self._seen is None else [*parts, self._seen]
