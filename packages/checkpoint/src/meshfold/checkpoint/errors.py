"""Errors of files and folders of weights."""

from __future__ import annotations

from meshfold.mesh import MeshfoldError


class CheckpointError(MeshfoldError, RuntimeError):
    """A checkpoint that cannot be written or read, or that belongs to another model or optimizer."""


class InUseError(CheckpointError):
    """A folder in which another process is writing."""
