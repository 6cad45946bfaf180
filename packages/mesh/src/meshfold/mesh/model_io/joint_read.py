"""A rendezvous of ranks before a collective that a line of the user's own code asks for.

A collective that one rank alone calls does not end, or is taken for what the others call next. So the ranks wait in the store
until all have come. Where somebody watches (:mod:`meshfold.mesh.watchdog.monitor`), one that will not come is known within seconds.
"""

from __future__ import annotations

from typing import Any

from meshfold.mesh.errors import CollectiveError, LaunchError
from meshfold.mesh.processes import process_group
from meshfold.mesh.recording import flight_recorder
from meshfold.mesh.recording.flight_recorder import Call, shortened
from meshfold.mesh.recording.program_line import own_line
from meshfold.mesh.watchdog.rank_errors import report_errors

_times: dict[tuple[str, tuple[int, ...]], int] = {}  # that ranks have met, in this world
_of_world: Any = None


@report_errors
def come_to_read(what: str, ranks: tuple[int, ...]) -> None:
    """Return once all of these ranks have come to read the same. Alone, or in a world that is not there, at once.

    Args:
        what: is read, in words.
        ranks: global ranks, ascending.

    Raises:
        CollectiveError: if one of them does not come.
    """
    global _of_world
    if len(ranks) == 1:
        return
    if _of_world is not process_group.world_key():
        _times.clear()
        _of_world = process_group.world_key()
    before, name = _times.get((what, ranks), 0), f"{what}/{'-'.join(map(str, ranks))}"
    try:
        with flight_recorder.meeting(
            f"a meeting to read {what}", ranks, process_group.place()[0], name
        ) as call:
            process_group.meet_members(
                ranks, f"{name}/{before + 1}", lambda: _look(call), f"{name}/{before}" if before else ""
            )
    except (CollectiveError, LaunchError) as error:
        raise CollectiveError(
            f"{what} cannot be read at {own_line()}: ranks {shortened(ranks)} have a piece each, so all of them have to read, "
            f"and not all do.\n{error}\nRead on all ranks, and use what was read on one: bring the line in front of the "
            "'if rank == 0:' that it stands in"
        ) from None
    _times[what, ranks] = before + 1


def _look(call: Call | None) -> None:
    away = None if call is None else call.stays_away()
    if away is not None:
        raise CollectiveError(away)
