"""The published time of training, from the time of a step and the number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.fastfold.settings import FOLDER, Phase
from experiments.report import read_csv


def everything(phases: Sequence[Phase]) -> dict[str, dict[str, Any]]:
    """Hours and device hours of each implementation; the published ones beside them."""
    steps = {phase.name: phase.steps for phase in phases}
    found: dict[str, dict[str, Any]] = {}
    for row in read_csv(FOLDER / "published_training.csv"):
        one = found.setdefault(
            row["implementation"],
            {
                "hours": 0.0,
                "device hours": 0.0,
                "published days": float(row["days"]),
                "published device hours": float(row["device_hours"]),
            },
        )
        hours = steps[row["phase"]] * float(row["step_seconds"]) / 3600
        one["hours"] += hours
        one["device hours"] += hours * int(row["devices"])
    return found
