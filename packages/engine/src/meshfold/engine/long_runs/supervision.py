"""The watchdog over an engine's collectives: what of ``Engine(watchdog=..., check_collectives=...)`` means what."""

from __future__ import annotations

import math

from meshfold.engine.world.world import World
from meshfold.mesh import SpecError
from meshfold.mesh.processes import watchdog_settings
from meshfold.mesh.watchdog import Watch, watch, watchdog_limit


def check(watchdog: object, check_collectives: object) -> tuple[float | None, bool]:
    """The two settings; what is None is left to the environment.

    Raises:
        SpecError: for a limit that is no number from 0 up, or a switch that is no bool.
    """
    if watchdog is not None and (
        isinstance(watchdog, bool) or not isinstance(watchdog, int | float) or not 0 <= watchdog < math.inf
    ):
        raise SpecError(
            f"watchdog={watchdog!r}: seconds after which a collective that does not finish ends the job, such as 600; "
            "0 for no watchdog"
        )
    if check_collectives is not None and not isinstance(check_collectives, bool):
        raise SpecError(
            f"check_collectives={check_collectives!r}: True to compare calls between ranks, or False"
        )
    return (None if watchdog is None else float(watchdog)), bool(check_collectives)


def watch_over(world: World, watchdog: float | None, compare: bool) -> Watch:
    """Watch from now on; all ranks must call. Alone there is nothing to watch."""
    if world.mesh.world_size == 1:
        return Watch(None)
    _, also = watchdog_settings()
    return watch(watchdog_limit(watchdog), compare=compare or also)
