"""Counts of the calls in a step: units that backward still has to reach, and units that are called several times.

If backward has left a unit as often as it was called, the unit is not read again before the next step. Reentrant checkpointing
hides this number: forward calls its units without gradients, and backward *repeats* each of these hidden calls with gradients, in a
separate backward inside the running one. A recomputation comes between the beginning of backward of a call and its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshfold.mesh.model_io import tensors_in
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.runtime.units import Unit


class OpenCalls:
    """Counter of a step's calls of units, which gives the chunks that are no longer read.

    Attributes:
        chunks_of: the chunks that each unit's parameters are in.
        most_chunks: the most chunks that one unit has.
    """

    def __init__(self, chunks_of: Mapping[Unit, Sequence[Chunk]]) -> None:
        """Args:
        chunks_of: the chunks that each unit's parameters are in.
        """
        self.chunks_of = chunks_of
        self.most_chunks = max(map(len, chunks_of.values()), default=0)
        self._users: dict[Chunk, list[Unit]] = {}
        for unit, chunks in chunks_of.items():
            for chunk in chunks:
                self._users.setdefault(chunk, []).append(unit)
        self._open: Counter[Unit] = Counter()  # calls of this step that backward has not left
        self._unsure: set[Unit] = set()  # units called so that their number of backwards is unknown
        self._hidden: Counter[Unit] = Counter()  # calls of reentrant checkpointing in this step
        self._repeated: Counter[Unit] = Counter()  # of these, calls that backward has repeated
        self._repeating: set[Unit] = set()  # units called several times whose backward may still run
        self._repetition_ran = False  # a gradient came in that backward
        self._task: int | None = None  # autograd's id of the outer backward; None until it reaches a unit

    def clear(self) -> None:
        """Forget the step."""
        self._open.clear()
        self._unsure.clear()
        self._hidden.clear()
        self._repeated.clear()
        self._end_repetition()
        self._task = None

    # -- called by the hooks -------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Note that the backward in which this is called is the outer one."""
        self._task = graph_task()

    def enter(self, unit: Unit, args: Any, kwargs: Any) -> bool:
        """Count a call of a unit, given these arguments. Return True if backward has to leave it."""
        # No gradients inside a forward with gradients: reentrant checkpointing, or a call that backward never reaches.
        if not torch.is_grad_enabled():
            self._unsure.add(unit)
            # Inputs of checkpointing require gradients; inputs of `no_grad` code (recycling, a teacher) do not.
            self._hidden[unit] += graph_task() < 0 and any(
                tensor.requires_grad for tensor in tensors_in((args, kwargs))
            )
        elif graph_task() >= 0 and self._hidden[unit] > self._repeated[unit]:
            self._repeated[unit] += 1
            if self._repetition_ran:
                self._end_repetition()
            if self._hidden[unit] > 1:
                self._repeating.add(unit)
        is_open = torch.is_grad_enabled() and graph_task() < 0  # False in a recomputation
        self._open[unit] += is_open
        return is_open

    def leave(self, unit: Unit) -> bool:
        """Note that backward has left a call that is open. Return True if it was the unit's last one."""
        self._open[unit] -= 1
        return not self._open[unit]

    def note_gradient(self) -> bool:
        """Record that a parameter's gradient comes. Return True if it comes in a backward inside the outer one."""
        is_inner = self._task not in (None, graph_task())
        if is_inner:
            self._repetition_ran = True
        elif self._repeating:
            self._end_repetition()
        return is_inner

    def _end_repetition(self) -> None:
        self._repeating.clear()
        self._repetition_ran = False

    # -- states of chunks ---------------------------------------------------------------------------------------

    def is_over(self, chunk: Chunk) -> bool:
        """Return True if no open call of this step can still read a chunk's parameters."""
        return not any(self._open[unit] or unit in self._unsure for unit in self._users.get(chunk, ()))

    def is_unsure(self, chunk: Chunk) -> bool:
        """Return True if backward may reach a unit of a chunk in ways that forward did not show."""
        return any(unit in self._unsure for unit in self._users.get(chunk, ()))

    def will_be_repeated(self, chunk: Chunk) -> bool:
        """Return True if backward still has to repeat a call of a unit of the chunk, or repeats it now: it will add gradients."""
        return any(
            self._hidden[unit] > self._repeated[unit] or unit in self._repeating for unit in self._users.get(chunk, ())
        )


def graph_task() -> int:
    """Return autograd's number of the backward in which this is called; below zero outside of one."""
    return int(torch._C._current_graph_task_id())
