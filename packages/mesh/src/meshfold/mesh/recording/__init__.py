"""Records of what this process communicates: bytes by collective, and the flight recorder of the watchdog."""

from __future__ import annotations

from meshfold.mesh.recording.comm_log import (
    KINDS,
    Entry,
    Kind,
    Log,
    moved_bytes,
    record,
    recorded_times,
    unrecorded,
    weight_gradients,
)
from meshfold.mesh.recording.flight_recorder import at_step

__all__ = [
    "KINDS",
    "Entry",
    "Kind",
    "Log",
    "at_step",
    "moved_bytes",
    "record",
    "recorded_times",
    "unrecorded",
    "weight_gradients",
]
