"""Cache of gathered chunks: some stay gathered between two uses, in memory that is free.

A step of many micro-batches uses each chunk many times. A chunk that stays gathered until its next use saves an all-gather. The
chunk with the latest next use is evicted first (Belady 1966), by the order of the previous step. All ranks that share chunks must
have the same limit and see the same steps: gathering is a collective.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from meshfold.zero_gemini.chunks.chunk import Chunk


class GatherCache:
    """Choice of the chunks to keep gathered, of those that are not in use.

    Attributes:
        most_bytes: limit of their bytes on the compute device; 0 keeps none.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self._uses: dict[Chunk, list[int]] = {}

    def learn(self, steps: Sequence[Sequence[Chunk]]) -> None:
        """Set the chunks that each unit of the last step used, in order."""
        self._uses = {}
        for place, chunks in enumerate(steps):
            for chunk in chunks:
                self._uses.setdefault(chunk, []).append(place)

    def evicted(self, chunks: Sequence[Chunk], place: int) -> list[Chunk]:
        """Return the chunks to release.

        Args:
            chunks: gathered and not in use.
            place: index of the step's next unit.
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
        """Return the index of the next unit that uses a chunk; None if no unit does in this step."""
        uses = self._uses.get(chunk, [])
        at = bisect_left(uses, place)
        return uses[at] if at < len(uses) else None
