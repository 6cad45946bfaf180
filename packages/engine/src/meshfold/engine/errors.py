"""Errors of the engine other than SpecError."""

from __future__ import annotations

from meshfold.mesh import MeshfoldError


class TrainingError(MeshfoldError, RuntimeError):
    """A training step that cannot run, although its settings are valid."""


class NonFiniteError(TrainingError):
    """A nan or infinite loss or gradient, under ``nonfinite="error"``; says where it arose."""
