"""Errors of a model's memory, and how one rank reports its own to all ranks before any waits for it forever.

A rank whose disk fails while the others compute cannot raise at once: they wait for it in a collective. It *keeps* the error and
continues through the same collectives, with NaN instead of the lost values. All ranks raise together where they next *agree*, at
the latest before the optimizer's next step. Until then lost values are NaN, never a valid number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshfold.mesh import Group, MeshfoldError, all_reduce
from meshfold.mesh.collectives import all_gather_object


class ChunkError(MeshfoldError, RuntimeError):
    """An operation that a chunk's state does not allow: names the parameter, both states and the operation."""


class MemoryPlanError(MeshfoldError, ValueError):
    """A model cannot be placed within the limits: names the smallest limit that works, and the change to make."""


class ChunkLayoutError(MeshfoldError, ValueError):
    """Parameters that cannot be laid out in chunks, or a request to a layout for a parameter that it does not hold."""


class ArenaError(MeshfoldError, RuntimeError):
    """Invalid use of an arena's memory: freed twice, or read after it was freed."""


class OutOfBudget(MeshfoldError, RuntimeError):
    """An arena has fewer bytes left than requested.

    Attributes:
        wanted_bytes: requested, as accounted.
        used_bytes: in use.
        budget_bytes: allowed; None if the device itself had no more, without a budget.
    """

    def __init__(
        self, message: str, *, wanted_bytes: int = 0, used_bytes: int = 0, budget_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.wanted_bytes = wanted_bytes
        self.used_bytes = used_bytes
        self.budget_bytes = budget_bytes


class RankError(MeshfoldError, RuntimeError):
    """Failure on one of several ranks, raised on all of them: names the rank and the cause."""


class DiskError(MeshfoldError, OSError):
    """An unusable folder or file for offloading: says which, why, and how to change it."""


_KINDS: dict[str, type[MeshfoldError]] = {
    kind.__name__: kind for kind in (ArenaError, ChunkError, ChunkLayoutError, DiskError, MemoryPlanError, OutOfBudget)
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
        self._reported: tuple[int, dict[str, Any]] | None = None

    def keep(self, action: Callable[[], object]) -> bool:
        """Run an action, and keep its error until all agree; return True if it succeeded."""
        try:
            action()
        except Exception as error:
            self._mine = self._mine or error
            if self._everyone is None:
                raise
            return False
        return True

    @property
    def is_reported(self) -> bool:
        """Return True if an error has been reported to all ranks."""
        return self._reported is not None or (self._everyone is None and self._mine is not None)

    def check(self) -> None:
        """Raise, without communication, the error that was reported to all ranks: training cannot resume after it."""
        if self._reported is not None:
            raise self._error(*self._reported, self._mine)

    def check_own(self) -> None:
        """Raise this rank's error, reported or not, for callers that report it themselves."""
        self.check()
        if self._mine is not None and self._everyone is not None:
            raise self._mine

    def agree(self) -> None:
        """Raise on all ranks the error that any has kept, now and at each later check. All must call."""
        self.check()
        self._reported = self._worst(self._mine)
        self.check()

    @contextmanager
    def raised_on_all(self) -> Iterator[None]:
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
        """Return the first rank with an error, and the error's description; None without errors."""
        if self._everyone is None:
            return None
        flag = torch.tensor([mine is not None], dtype=torch.int32, device=self._device)
        if not int(all_reduce(flag, self._everyone, "max")):
            return None
        described = all_gather_object(None if mine is None else _described(mine), self._everyone, self._device)
        index = next(index for index, one in enumerate(described) if one is not None)
        return self._everyone.ranks[index], described[index]

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
