"""What the pipeline raises on purpose."""

from __future__ import annotations

from meshfold.mesh.errors import MeshfoldError


class ScheduleError(MeshfoldError, ValueError):
    """A schedule that cannot be made, read or run: what is wrong, where it stands, what to change."""
