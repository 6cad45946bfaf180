"""α–β of every collective, fitted as ``meshfold calibrate`` does, and how far it is from sizes that the fit has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.report import read_csv
from meshfold.mesh import moved_bytes
from meshfold.planner import find_machine
from meshfold.planner.calibration import MessageSample, fit_link

FOLDER = Path(__file__).resolve().parent
RANKS, MACHINE = 4, "h200x8"


def everything() -> dict[str, Any]:
    """All numbers."""
    machine = find_machine(MACHINE)
    return {
        "links": [link_of(kind, samples) for kind, samples in measured().items()],
        "preset": {"latency": machine.latency, "rate": machine.inside},
    }


def measured() -> dict[str, list[MessageSample]]:
    """Samples by kind."""
    found: dict[str, list[MessageSample]] = {}
    for row in read_csv(FOLDER / "measured_nccl.csv"):
        for kind, rate in row.items():
            if kind != "mib":
                sent = float(moved_bytes(kind, int(row["mib"]) * 2**20, RANKS))  # type: ignore[arg-type]
                found.setdefault(kind, []).append(
                    MessageSample(kind=kind, sent=sent, seconds=sent / (1e9 * float(rate)))
                )
    return found


def link_of(kind: str, samples: Sequence[MessageSample]) -> dict[str, Any]:
    """α–β of all samples, each beside it; ``unseen``: the largest error of a fit to every second size for the sizes between."""
    link = fit_link(samples)
    return {
        "kind": kind,
        "latency": link.latency,
        "rate": link.rate,
        "unseen": link.error,
        "samples": [
            {"sent": sample.sent, "seconds": sample.seconds, "fitted": link.seconds(sample.sent)} for sample in samples
        ],
    }
