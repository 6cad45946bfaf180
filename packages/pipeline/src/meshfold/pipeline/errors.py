"""Errors of the pipeline."""

from __future__ import annotations

from meshfold.mesh import LayoutError, MeshfoldError


class ScheduleError(MeshfoldError, ValueError):
    """A schedule that cannot be made, read or run: what is wrong, where it stands, what to change."""


class ChainError(LayoutError):
    """Blocks that are no chain: called in another order than they stand in, or with another shape than they return."""


class ExampleError(LayoutError):
    """An example batch that the model cannot be called with.

    Attributes:
        what: happened, without what to change.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. Give example=((arguments), dict(keywords)) that it can be called with")
        self.what = what
