"""The states of a parameter in a chunk, and which may follow which.

One iteration of a parameter::

    HOLD → COMPUTE → HOLD_AFTER_FWD → COMPUTE → HOLD_AFTER_BWD → READY_FOR_REDUCE → HOLD
           forward                    backward                    gradient is whole   chunk is reduced

This is a specification: nothing in the package keeps such states. :class:`Tracker` watches beside chunks in tests, where a
chunk must be gathered while any of its parameters is COMPUTE, and can be reduced when all are READY_FOR_REDUCE.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType

from meshfold.mesh.errors import did_you_mean
from meshfold.zero_gemini.errors import ChunkError


class State(Enum):
    """What a parameter is doing."""

    FREE = "FREE"  # has no values yet
    HOLD = "HOLD"  # idle
    COMPUTE = "COMPUTE"  # some operator reads it: its chunk is gathered on the compute device
    HOLD_AFTER_FWD = "HOLD_AFTER_FWD"  # idle, a backward is to come
    HOLD_AFTER_BWD = "HOLD_AFTER_BWD"  # idle, its backward has run, its gradient is not whole
    READY_FOR_REDUCE = "READY_FOR_REDUCE"  # its gradient waits for those of its chunk-mates


_S = State

TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        _S.FREE: frozenset(
            {
                _S.HOLD,  # its values were made; nothing leads back, and what has no values cannot be computed with
            }
        ),
        _S.HOLD: frozenset(
            {
                _S.COMPUTE,  # a forward, in training or evaluation; a second backward over a graph that was kept
                _S.READY_FOR_REDUCE,  # unused in this backward: zeros at its end; or a gradient that needed no values
            }
        ),
        _S.COMPUTE: frozenset(
            {
                _S.HOLD,  # evaluation: no backward will come; the end of a frozen one's backward; an abandoned use
                _S.HOLD_AFTER_FWD,  # the forward is over, or its recomputation in backward
                _S.HOLD_AFTER_BWD,  # the backward is over
                _S.READY_FOR_REDUCE,  # autograd runs the accumulation of a gradient before a module's backward hook
            }
        ),
        _S.HOLD_AFTER_FWD: frozenset(
            {
                _S.COMPUTE,  # backward, recomputation of an activation checkpoint, next use of a tied parameter
                _S.READY_FOR_REDUCE,  # a gradient that needs no values (embedding, bias); zeros: its output led nowhere
                _S.HOLD,  # the forward was abandoned, or the backward did not need a frozen one
            }
        ),
        _S.HOLD_AFTER_BWD: frozenset(
            {
                _S.READY_FOR_REDUCE,  # the gradient of the last use is in
                _S.COMPUTE,  # another use of a tied parameter has its backward, or its recomputation, still to come
                _S.HOLD,  # frozen, or nobody wanted its gradient; an abandoned backward
            }
        ),
        _S.READY_FOR_REDUCE: frozenset(
            {
                _S.HOLD,  # its chunk was reduced, or the backward was abandoned
                _S.READY_FOR_REDUCE,  # more of the gradient: a second loss, a use in another re-entrant checkpoint
                _S.COMPUTE,  # its chunk-mates are not ready, and another loss or checkpoint uses it again
            }
        ),
    }
)


class Tracker:
    """The states of all parameters of one chunk, with a count for each state.

    Uses may nest: when the backward of a module has begun, activation checkpointing recomputes the forward of the
    same module; siblings that share a parameter may overlap. ``begin`` and ``end`` count them, and only the last
    end leaves COMPUTE.

    Args:
        names: the parameters.
        state: the state of all of them, FREE before their values are made.
        frozen: they want no gradient, so READY_FOR_REDUCE is illegal.
        chunk: what to call the chunk in errors.
    """

    __slots__ = ("_chunk", "_counts", "_frozen", "_states", "_uses")

    def __init__(
        self, names: Iterable[str], *, state: State = State.FREE, frozen: bool = False, chunk: str = "a chunk"
    ) -> None:
        """Raises:
        ChunkError: for no names, a name that is given twice, or a start in COMPUTE or READY_FOR_REDUCE.
        """
        listed = list(names)
        self._chunk = chunk
        self._frozen = frozen
        self._states = dict.fromkeys(listed, state)
        self._uses = dict.fromkeys(listed, 0)
        self._counts = dict.fromkeys(State, 0)
        self._counts[state] = len(self._states)
        if not listed:
            raise ChunkError(f"{chunk} has no parameters to track")
        if len(self._states) < len(listed):
            twice = next(name for name in listed if listed.count(name) > 1)
            raise ChunkError(f"parameter {twice!r} is given twice to {chunk}; give tied parameters once")
        if state not in (State.FREE, State.HOLD):
            raise ChunkError(f"the parameters of {chunk} cannot start in {state.name}: start in FREE or HOLD")

    def __len__(self) -> int:
        return len(self._states)

    def state(self, name: str) -> State:
        """The state of a parameter.

        Raises:
            ChunkError: if the chunk has no such parameter.
        """
        try:
            return self._states[name]
        except KeyError:
            raise ChunkError(f"{self._chunk} has no parameter {name!r}.{did_you_mean(name, self._states)}") from None

    def uses(self, name: str) -> int:
        """How many uses of a parameter are open; 0 unless it is COMPUTE."""
        self.state(name)
        return self._uses[name]

    def count(self, *states: State) -> int:
        """How many parameters are in one of these states."""
        return sum(self._counts[state] for state in set(states))

    def all_in(self, *states: State) -> bool:
        """Whether each parameter is in one of these states."""
        return self.count(*states) == len(self._states)

    def any_in(self, *states: State) -> bool:
        """Whether some parameter is in one of these states."""
        return any(self._counts[state] for state in states)

    def names_in(self, *states: State) -> list[str]:
        """The parameters in one of these states, in order."""
        return [name for name, state in self._states.items() if state in states]

    def legal(self, name: str, to: State) -> bool:
        """Whether :meth:`move` would go through."""
        return to in self._successors(self.state(name))

    def move(self, name: str, to: State, operation: str) -> None:
        """Put a parameter into another state; out of COMPUTE this closes all its uses.

        Raises:
            ChunkError: if the transition is illegal: names the parameter, both states and ``operation``. Nothing has
                changed then.
        """
        state = self.state(name)
        if to not in self._successors(state):
            raise ChunkError(self._refusal(name, state, to, operation))
        self._counts[state] -= 1
        self._counts[to] += 1
        self._states[name] = to
        self._uses[name] = int(to is State.COMPUTE)

    def move_all(self, to: State, operation: str) -> None:
        """Put every parameter into another state, or none if that is illegal for one of them.

        Raises:
            ChunkError: as for :meth:`move`, for the first parameter that cannot go.
        """
        for name, state in self._states.items():
            if to not in self._successors(state):
                raise ChunkError(self._refusal(name, state, to, operation))
        for name in self._states:
            self.move(name, to, operation)

    def begin(self, name: str, operation: str) -> bool:
        """A use begins: the parameter is COMPUTE from now on. Returns whether it was not before.

        Raises:
            ChunkError: if it cannot be computed with.
        """
        if self.state(name) is State.COMPUTE:
            self._uses[name] += 1
            return False
        self.move(name, State.COMPUTE, operation)
        return True

    def end(self, name: str, to: State, operation: str) -> bool:
        """A use ends; the last open one puts the parameter into ``to``. Returns whether this was the last.

        Raises:
            ChunkError: if no use is open (a gradient that came in has closed it: ask :meth:`uses`), or ``to`` cannot
                follow.
        """
        state = self.state(name)
        if state is not State.COMPUTE or to is State.COMPUTE or to not in self._successors(state):
            raise ChunkError(self._refusal(name, state, to, operation))
        if self._uses[name] > 1:
            self._uses[name] -= 1
            return False
        self.move(name, to, operation)
        return True

    def reset(self, operation: str) -> None:
        """All parameters that have values become HOLD: the iteration was abandoned.

        Unlike :meth:`move`, HOLD stays HOLD and FREE stays FREE without an error.
        """
        for name, state in self._states.items():
            if state not in (State.FREE, State.HOLD):
                self.move(name, State.HOLD, operation)

    def _successors(self, state: State) -> frozenset[State]:
        after = TRANSITIONS[state]
        return after - {State.READY_FOR_REDUCE} if self._frozen else after

    def _refusal(self, name: str, state: State, to: State, operation: str) -> str:
        after = ", ".join(other.name for other in State if other in self._successors(state))
        why = ""
        if self._frozen and to is State.READY_FOR_REDUCE:
            why = "; it is frozen, so it has no gradient to reduce"
        return (
            f"{operation}: parameter {name!r} of {self._chunk} cannot go from {state.name} to {to.name}{why}. "
            f"From {state.name} it can go to {after}"
        )

    def __repr__(self) -> str:
        counts = ", ".join(f"{state.name} {count}" for state, count in self._counts.items() if count)
        return f"Tracker({self._chunk}: {counts})"
