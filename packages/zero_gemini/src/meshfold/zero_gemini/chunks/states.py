"""States of a chunk and of its gradient, their legal transitions, and the role of a backward in its step.

Chunks and gradients change their state only by their ``_to`` method, which checks these tables.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeVar

from meshfold.zero_gemini.errors import ChunkError


class ChunkState(Enum):
    """State of a chunk's memory and values."""

    SHARDED = "sharded"
    """Every rank has its shard; no memory is taken for the gathered tensor."""
    GATHERING = "gathering"
    """An all-gather is under way; the parameters may be used after ``wait``."""
    GATHERED = "gathered"
    """The parameters can be computed with. A resident chunk rests here."""
    STEP_PENDING = "step pending"
    """The optimizer has promised new values of the shard; nothing is gathered."""
    STALE = "stale"
    """As ``STEP_PENDING``, while the gathered tensor still holds the values before that step."""


CHUNK_TRANSITIONS: dict[ChunkState, frozenset[ChunkState]] = {
    ChunkState.SHARDED: frozenset({ChunkState.GATHERING, ChunkState.GATHERED, ChunkState.STEP_PENDING}),
    ChunkState.GATHERING: frozenset({ChunkState.GATHERED}),
    ChunkState.GATHERED: frozenset({ChunkState.SHARDED, ChunkState.GATHERING, ChunkState.STALE}),
    ChunkState.STEP_PENDING: frozenset({ChunkState.SHARDED}),
    ChunkState.STALE: frozenset({ChunkState.STEP_PENDING, ChunkState.GATHERED}),
}
"""Legal transitions. A sharded chunk is gathered at once where a move makes it resident."""


class GradState(Enum):
    """State of a chunk's gradient from one optimizer step to the next."""

    EMPTY = "empty"
    """No gradient has come since the last step."""
    ACCUMULATING = "accumulating"
    """Some of what came is not summed over the group yet."""
    REDUCING = "reducing"
    """The sum over the group is under way."""
    REDUCED = "reduced"
    """All that came is in the shard; more may come."""
    SETTLED = "settled"
    """As ``REDUCED``, and all ranks know that no more comes before the next step."""
    CONSUMED = "consumed"
    """The optimizer has it."""


GRAD_TRANSITIONS: dict[GradState, frozenset[GradState]] = {
    GradState.EMPTY: frozenset({GradState.ACCUMULATING, GradState.REDUCING}),
    GradState.ACCUMULATING: frozenset({GradState.REDUCING, GradState.EMPTY}),
    GradState.REDUCING: frozenset({GradState.REDUCED, GradState.SETTLED, GradState.EMPTY}),
    GradState.REDUCED: frozenset({GradState.ACCUMULATING, GradState.REDUCING, GradState.CONSUMED, GradState.EMPTY}),
    GradState.SETTLED: frozenset({GradState.CONSUMED, GradState.EMPTY}),
    GradState.CONSUMED: frozenset({GradState.EMPTY}),
}
"""Legal transitions. A gradient that no rank has is reduced from ``EMPTY``; a step without a second sum consumes ``REDUCED``."""

State = TypeVar("State", bound=Enum)


def check_transition(who: object, transitions: dict[State, frozenset[State]], before: State, after: State) -> None:
    """Raise if a table of legal transitions does not have one.

    Raises:
        ChunkError: names the object and both states.
    """
    if after not in transitions[before]:
        raise ChunkError(f"{who}: illegal transition from {before.value!r} to {after.value!r}")


BackwardRole = Literal["more", "apart", "last", "final"]
"""Role of a backward within its optimizer step.

``"more"``: others follow before the step; reductions happen as the stage does them.
``"apart"``: others follow, and nothing is sent to other ranks until then.
``"last"``: probably the last: gradients are complete after it.
``"final"``: certainly the last, and nothing needs all gradients before the step: chunks are stepped during it.
"""
