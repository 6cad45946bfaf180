"""Waits of the host in the middle of a step, reported to a watcher.

Hooks of a backward wait for the optimizer's work of the step before, or for a place for a gradient. A device that is given
nothing meanwhile runs out of work: the time from one place of the step to the next is then no time of compute.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Watch = Callable[[str], AbstractContextManager[None]]
"""Goes round a wait; is told what for."""


class Waiting:
    """Goes round whatever the host may wait for: ``with waiting("the optimizer's step"): ...``.

    Attributes:
        watch: what goes round it; None: nobody watches.
    """

    def __init__(self) -> None:
        self.watch: Watch | None = None

    def __call__(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch(what)
