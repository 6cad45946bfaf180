"""Errors of a model's memory."""

from __future__ import annotations

from meshfold.mesh import MeshfoldError


class ChunkError(MeshfoldError, RuntimeError):
    """A chunk was asked for what its state does not allow: names the parameter, from where, to where, and the operation."""


class MemoryPlanError(MeshfoldError, ValueError):
    """A model cannot be placed within the limits: says the least that it needs, and what to change."""


class ChunkLayoutError(MeshfoldError, ValueError):
    """Parameters that cannot be laid out in chunks, or a layout that was asked for what it does not hold."""


class ArenaError(MeshfoldError, RuntimeError):
    """Memory of an arena was used against its rules: freed twice, or read after it was freed."""


class OutOfBudget(MeshfoldError, RuntimeError):
    """An arena has not the bytes that were asked for.

    Attributes:
        wanted_bytes: what was asked for, as it is accounted.
        used_bytes: what was in use.
        budget_bytes: what may be in use; None if the device itself had no more, without a budget.
    """

    def __init__(
        self, message: str, *, wanted_bytes: int = 0, used_bytes: int = 0, budget_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.wanted_bytes = wanted_bytes
        self.used_bytes = used_bytes
        self.budget_bytes = budget_bytes


class RankError(MeshfoldError, RuntimeError):
    """Something failed on one of several ranks, which all of them are told: names the rank and the cause."""


class DiskError(MeshfoldError, OSError):
    """A folder or file for offloading cannot be used: says which, why, and what to change."""
