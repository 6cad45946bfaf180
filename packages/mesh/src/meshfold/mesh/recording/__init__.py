"""Records of what this process communicates: bytes by collective, and the flight recorder of the watchdog."""

from __future__ import annotations

from meshfold.mesh.recording.comm_log import Entry, Log, record
from meshfold.mesh.recording.flight_recorder import at_step
from meshfold.mesh.recording.traffic import KINDS, Kind, moved_bytes

__all__ = [
    "KINDS",
    "Entry",
    "Kind",
    "Log",
    "at_step",
    "moved_bytes",
    "record",
]
