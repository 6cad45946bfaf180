"""Errors of the engine beside the SpecError of a wrong setting."""

from __future__ import annotations

from meshfold.mesh import MeshfoldError


class TrainingError(MeshfoldError, RuntimeError):
    """A training step that cannot be carried out, although its settings were right."""


class NonFiniteError(TrainingError):
    """A loss or a gradient that is nan or infinite, where ``nonfinite="error"``; says where it arose."""
