"""Errors of one rank, reported to all ranks before any of them waits for it for ever.

A rank whose disk fails while the others compute cannot just raise: they are in a collective with it, or will be in the
next. So it *keeps* what went wrong, goes on through the same collectives with NaN in place of what it has lost, and all
ranks raise together where they next *agree*, which is at the latest before the optimizer's next step. Until then nothing
that was lost can pass for a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshfold.mesh import Group, MeshfoldError, all_reduce
from meshfold.mesh.collectives import all_gather_object
from meshfold.zero_gemini.errors import (
    ArenaError,
    ChunkError,
    ChunkLayoutError,
    DiskError,
    MemoryPlanError,
    OutOfBudget,
    RankError,
)

_KINDS: dict[str, type[MeshfoldError]] = {
    kind.__name__: kind
    for kind in (ArenaError, ChunkError, ChunkLayoutError, DiskError, MemoryPlanError, OutOfBudget)
}


class Faults:
    """Errors of this rank, and those reported to all ranks. A single rank raises at once.

    An error that all raise names the rank and the cause. It is of the cause's class if that is one of this package's, else
    :class:`~meshfold.zero_gemini.errors.RankError`; on the rank itself it has the cause as ``__cause__``.
    """

    def __init__(self, everyone: Group | None = None, device: torch.device | None = None) -> None:
        """Args:
        everyone: the ranks that agree; None: this one is alone.
        device: where their collectives are.
        """
        self._device = device or torch.device("cpu")
        several = everyone is not None and everyone.size > 1 and self._device.type != "meta"
        self._everyone = everyone if several else None
        self._mine: Exception | None = None
        self._told: tuple[int, dict[str, Any]] | None = None

    def keep(self, action: Callable[[], object]) -> bool:
        """Do something, and keep what it raises until all agree. Whether it was done."""
        try:
            action()
        except Exception as error:
            self._mine = self._mine or error
            if self._everyone is None:
                raise
            return False
        return True

    @property
    def told(self) -> bool:
        """Return whether an error has been reported to all ranks."""
        return self._told is not None or (self._everyone is None and self._mine is not None)

    def check(self) -> None:
        """Raise, without communication, what all ranks were told before: training cannot go on from there."""
        if self._told is not None:
            raise self._error(*self._told, self._mine)

    def check_own(self) -> None:
        """Raise what went wrong on this rank, whether the others know or not: for those that tell them in their own way."""
        self.check()
        if self._mine is not None and self._everyone is not None:
            raise self._mine

    def agree(self) -> None:
        """Raise on all ranks what any has kept, now and whenever they are asked again. All must call."""
        self.check()
        self._told = self._worst(self._mine)
        self.check()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context manager: raise an error of one rank on all ranks at the end. All must enter; no collectives inside."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if self._everyone is None:
                raise
            error = raised
        worst = self._worst(error)
        if worst is not None:
            raise self._error(*worst, error)

    def _worst(self, mine: Exception | None) -> tuple[int, dict[str, Any]] | None:
        """The first rank that something went wrong on, and what; None if there is none."""
        if self._everyone is None:
            return None
        flag = torch.tensor([mine is not None], dtype=torch.int32, device=self._device)
        if not int(all_reduce(flag, self._everyone, "max")):
            return None
        told = all_gather_object(None if mine is None else _described(mine), self._everyone, self._device)
        place = next(place for place, one in enumerate(told) if one is not None)
        return self._everyone.ranks[place], told[place]

    @staticmethod
    def _error(rank: int, what: dict[str, Any], mine: Exception | None) -> Exception:
        error = _KINDS.get(what["kind"], RankError)(f"rank {rank}: {what['words']}")
        if isinstance(error, OSError):
            error.errno = what["errno"]
        error.__cause__ = mine
        return error


def _described(error: Exception) -> dict[str, Any]:
    known = isinstance(error, MeshfoldError)
    return {
        "kind": type(error).__name__,
        "words": str(error) if known else f"{type(error).__name__}: {error}",
        "errno": getattr(error, "errno", None),
    }
