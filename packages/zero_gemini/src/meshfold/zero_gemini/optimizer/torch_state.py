"""State that an optimizer of torch makes by itself, accounted for where it is once it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.memory.arena import Arena, Block, MemoryTier

STATE = "optimizer state"


class CountedState:
    """The tensors that an optimizer has of some chunks."""

    def __init__(
        self, tensors_of: Callable[[Chunk], Iterable[Tensor]], places: Mapping[Chunk, MemoryTier]
    ) -> None:
        """Args:
        tensors_of: those of a chunk.
        places: where each chunk's are; may change.
        """
        self._tensors_of, self._places = tensors_of, places
        self._blocks: dict[int, Block] = {}  # by identity of the tensor

    def missing(self, places: Mapping[Chunk, MemoryTier]) -> Iterator[tuple[Tensor, Arena]]:
        """Yield the tensors to account for, with the arena of each, if chunks had these placements."""
        for chunk, place in places.items():
            arena = chunk.memory.arena(place)
            for value in self._tensors_of(chunk):
                known = self._blocks.get(id(value))
                if known is None or known.arena is not arena:
                    yield value, arena

    def update(self) -> None:
        """Account for what is there now, and no more for what is not.

        Raises:
            OutOfBudget: if the optimizer took more than there was left.
        """
        there = {id(value) for chunk in self._places for value in self._tensors_of(chunk)}
        missing = {id(value): (value, arena) for value, arena in self.missing(self._places)}
        for key in [key for key in self._blocks if key not in there or key in missing]:
            self._blocks.pop(key).free()
        for key, (value, arena) in missing.items():
            self._blocks[key] = arena.count(value, STATE)
