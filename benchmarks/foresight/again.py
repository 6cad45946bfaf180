"""Measured configurations planned again, without a GPU: what a change of the planner or of a calibration does to its errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.foresight.configurations import Configuration, planned
from benchmarks.foresight.report import errors, verdict_lines
from meshfold.planner import Machine
from meshfold.planner.calibration import read_machine


def configuration_of(entries: Mapping[str, Any]) -> Configuration:
    """Return the configuration that a result has as JSON."""
    known = {field.name for field in fields(Configuration)}
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entries.items() if key in known
    }
    return Configuration(**given)


def calibrated(result: Mapping[str, Any], ranks: int, folder: Path) -> Machine:
    """Return the machine that a result was planned for, by its number of ranks."""
    path = folder / f"calibrated-{ranks}.json"
    path.write_text(json.dumps({"meshfold_machine": 1, **result["calibrated"][str(ranks)]}))
    return read_machine(path)


def planned_again(
    result: Mapping[str, Any], machine: Machine | None, only: Sequence[str] | None, folder: Path
) -> dict[str, Any]:
    """Return a result with new plans of the configurations that ran, and with no others.

    Args:
        result: of the benchmark.
        machine: to plan for; None: those that the result was planned for.
        only: names of configurations; None: all.
        folder: for files of models and machines.
    """
    found = copy.deepcopy(dict(result))
    ran = [name for name in errors(result) if only is None or name in only]
    found["configurations"] = {name: found["configurations"][name] for name in ran}
    machines: dict[int, Machine] = {}
    for name in ran:
        one = configuration_of(found["configurations"][name]["configuration"])
        if one.ranks not in machines:
            machines[one.ranks] = machine or calibrated(result, one.ranks, folder)
            found.setdefault("calibrated", {})[str(one.ranks)] = asdict(machines[one.ranks])
        foreseen = planned(one, machines[one.ranks], folder / name)
        found["configurations"][name]["planned"] = {
            "seconds": foreseen.seconds,
            "bytes": foreseen.bytes,
            **({"paced": foreseen.paced} if machines[one.ranks].kind == "cpu" else {}),
        }
    return found


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return a Markdown table of both plans of each configuration beside what was measured, and the bars of the second.

    ``spread``: slowest by fastest of all measured steps. Of a configuration that other work disturbed it is large.
    """
    earlier, later = errors(before), errors(after)
    rows = []
    for name, one in later.items():
        runs = [run["seconds"] for run in after["configurations"][name]["runs"] if "error" not in run]
        spread = max(map(max, runs)) / min(map(min, runs))
        plans = (result["configurations"][name]["planned"]["seconds"] for result in (before, after))
        shares = (f"{100 * errors[name]['time error']:+.1f} %" for errors in (earlier, later))
        rows.append((name, *(f"{plan:.4g}" for plan in plans), f"{one['seconds']:.4g}", *shares, f"{spread:.2f}"))
    head = ("configuration", "planned s", "again s", "measured s", "error", "error again", "spread")
    return "\n".join([*reports.table(head, rows), "", *(line for line, _ in verdict_lines(after))])
