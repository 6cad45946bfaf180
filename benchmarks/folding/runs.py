"""Numbers of the starts of contestants: seconds, memory, energy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import median

Runs = Mapping[str, Sequence[dict[str, Any]]]


def seconds_of(runs: Runs) -> dict[str, float]:
    """Return the median over starts of the median step, of the contestants that came to their end."""
    found = {}
    for name, some in runs.items():
        middles = [median(run["seconds"]) for run in some if "error" not in run]
        if middles:
            found[name] = median(middles)
    return found


def fastest(times: Mapping[str, float], who: str) -> str | None:
    """Return somebody's fastest contestant."""
    return min((name for name in times if name.startswith(who)), key=times.__getitem__, default=None)


def peak_of(runs: Sequence[dict[str, Any]]) -> int:
    """Return the largest memory of a rank in bytes; 0 where none was measured."""
    return max((run["peak_bytes"] for run in runs if "error" not in run), default=0)


def energy(runs: Sequence[dict[str, Any]], seconds: float) -> tuple[str, str, str]:
    """Return cells: joules of so many seconds, watts of all GPUs and MHz of one; dashes where no power was sampled."""
    found = {key: [run[key] for run in runs if "error" not in run and key in run] for key in ("watts", "mhz")}
    if not found["watts"]:
        return "–", "–", "–"
    watts, mhz = (sum(values) / len(values) for values in found.values())
    return f"{watts * seconds:.2f}", f"{watts:.0f}", f"{mhz:.0f}"
