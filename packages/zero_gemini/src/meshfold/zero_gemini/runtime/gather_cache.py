"""Cache of gathered chunks: those that stay between two uses, where memory is left.

A step of many micro-batches comes to each chunk many times. What stays gathered until its next use need not be gathered
for it; what is used again last goes first (Belady 1966), which is known from the step before. All ranks that share the
chunks must be given the same bytes and see the same steps: gathering is a collective.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from meshfold.zero_gemini.chunks.chunk import Chunk


class GatherCache:
    """Chooses among chunks that nobody computes with at the moment.

    Attributes:
        most_bytes: that they may take together, on the compute device; 0: all go.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self._uses: dict[Chunk, list[int]] = {}

    def learn(self, steps: Sequence[Sequence[Chunk]]) -> None:
        """The chunks that were wanted at every place of the last step, in order."""
        self._uses = {}
        for place, chunks in enumerate(steps):
            for chunk in chunks:
                self._uses.setdefault(chunk, []).append(place)

    def evicted(self, chunks: Sequence[Chunk], place: int) -> list[Chunk]:
        """Those that go.

        Args:
            chunks: that are gathered.
            place: of the step, that comes next.
        """
        if not self.most_bytes:
            return [*chunks]
        known = [(self._next(chunk, place), number) for number, chunk in enumerate(chunks)]
        left, stays = self.most_bytes, set()
        for _, number in sorted((at, number) for at, number in known if at is not None):
            left -= chunks[number].gathered_bytes
            if left < 0:
                break
            stays.add(number)
        return [chunk for number, chunk in enumerate(chunks) if number not in stays]

    def _next(self, chunk: Chunk, place: int) -> int | None:
        """When a chunk is wanted again; None: not in this step."""
        uses = self._uses.get(chunk, [])
        at = bisect_left(uses, place)
        return uses[at] if at < len(uses) else None
