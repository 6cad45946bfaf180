"""The watchdog: a collective that does not finish ends the job and says which rank is missing and where it is."""

from __future__ import annotations

from meshfold.mesh.watchdog.monitor import Watch, watch, watchdog_limit
from meshfold.mesh.watchdog.rank_errors import report_errors

__all__ = [
    "Watch",
    "report_errors",
    "watch",
    "watchdog_limit",
]
