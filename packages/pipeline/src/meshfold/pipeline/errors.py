"""Errors of the pipeline."""

from __future__ import annotations

from meshfold.mesh import LayoutError, MeshfoldError


class ScheduleError(MeshfoldError, ValueError):
    """A schedule that cannot be made, read or run. The message names the mistake, its place, and the change to make."""


class ChainError(LayoutError):
    """Blocks that do not form a chain: called out of order, or with another shape than they return."""


class ExampleError(LayoutError):
    """An example batch that the model does not accept.

    Attributes:
        what: the problem, without the change to make.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. Give example=((arguments), dict(keywords)) that it can be called with")
        self.what = what
