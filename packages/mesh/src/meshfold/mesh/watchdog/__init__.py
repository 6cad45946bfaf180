"""The watchdog: a collective that does not finish ends the job and says which rank is missing and where it is."""

from __future__ import annotations

from meshfold.mesh.watchdog.rank_errors import told_to_all
from meshfold.mesh.watchdog.shared import Watch, limit_of, watch

__all__ = [
    "Watch",
    "limit_of",
    "told_to_all",
    "watch",
]
