"""The watchdog of a process, shared by all who asked for it."""

from __future__ import annotations

from typing import Any

from meshfold.mesh.processes import process_group
from meshfold.mesh.processes.environment import watchdog_settings
from meshfold.mesh.recording import flight_recorder
from meshfold.mesh.watchdog.diagnosis import DEFAULT_LIMIT_S
from meshfold.mesh.watchdog.monitor import Watchdog

_running: tuple[Any, Watchdog] | None = None  # and the world it is of


def watchdog_limit(watchdog: float | None) -> float:
    """Return the seconds that other ranks are waited for: those given, else ``MESHFOLD_WATCHDOG``, else the default.

    Raises:
        LaunchError: for a variable that is no number.
    """
    limit, _ = watchdog_settings()
    if watchdog is not None:
        return watchdog
    return DEFAULT_LIMIT_S if limit is None else limit


class Watch:
    """Handle of a running watchdog; :meth:`close` ends it."""

    def __init__(self, dog: Watchdog | None) -> None:
        self._dog = dog

    def close(self) -> None:
        """End it, unless others use it. May be called twice."""
        dog, self._dog = self._dog, None
        if dog is None:
            return
        dog.users -= 1
        if dog.users == 0 and flight_recorder.active is dog.flight:
            flight_recorder.active = flight_recorder.limit = None
            process_group.limit_groups(None)


def watch(limit_s: float, *, compare: bool = False) -> Watch:
    """Watch over the collectives of this process from now on; all ranks must call, at the same place of the program.

    Alone, or in a world that is not there, nothing is watched. Of several in one process the newest limit counts.

    Args:
        limit_s: seconds after which a collective that does not finish is an error. 0 for none.
        compare: compare every collective between its ranks before it runs (slow: for finding a fault).
    """
    global _running
    key = process_group.world_key()
    if limit_s <= 0 and not compare:
        return Watch(None)
    if _running is None or _running[0] is not key:
        store = process_group.own_store()
        if store is None:
            return Watch(None)
        _running = (key, Watchdog(*process_group.place(), store, process_group.own_store()))
    dog = _running[1]
    dog.users += 1
    dog.set_limit(limit_s or DEFAULT_LIMIT_S, compare)
    flight_recorder.active = dog.flight
    return Watch(dog)
