"""A plan over time: bytes on the GPU at every timestep, as data, as a picture and for chrome://tracing."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshfold.mesh import MeshfoldError, with_old_names
from meshfold.zero_gemini.planner.memory import KINDS, gpu_kinds, layer_bytes
from meshfold.zero_gemini.planner.result import Plan, options_of


@with_old_names({"moment": "index"}, arguments={"moment": "index"})
@dataclass(frozen=True, kw_only=True, slots=True)
class Timestep:
    """GPU memory in use at one timestep."""

    index: int
    phase: str
    """``forward`` or ``backward``"""
    seconds: float
    """when it starts, from the start of the step, as predicted"""
    kinds: dict[str, int]
    """bytes by kind"""
    bytes: int
    """their sum"""


def timeline(plan: Plan) -> list[Timestep]:
    """Return every timestep in order; the sums are the plan's ``gpu_bytes``."""
    workload, choice = plan.workload, options_of(plan)
    index = np.arange(len(choice.chunks))
    series = {kind: rows[index, choice.chunks].sum(0) for kind, rows in gpu_kinds(workload).items()}
    kept = layer_bytes(workload)[np.arange(len(choice.layers)), choice.layers].sum(0)
    series = {KINDS[0]: np.array(workload.non_model_bytes), KINDS[1]: kept, **series}
    starts = _starts(plan)
    found = []
    for t in range(workload.timesteps):
        kinds = {kind: int(values[t]) for kind, values in series.items()}
        phase = "forward" if t < workload.forward_timesteps else "backward"
        found.append(Timestep(index=t, phase=phase, seconds=starts[t], kinds=kinds, bytes=sum(kinds.values())))
    return found


def chrome_trace(plan: Plan) -> dict[str, Any]:
    """Return the plan for chrome://tracing or Perfetto: bytes as counters, timesteps, and the busy seconds of each resource.

    Times are in microseconds. The busy time of a resource in a phase is predicted; its position in the phase is not.
    """
    timesteps = timeline(plan)
    ends = [m.seconds for m in timesteps[1:]] + [_length(plan)]
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "pid": 0,
            "tid": 0,
            "name": "process_name",
            "args": {"name": f"plan of {plan.workload.name}"},
        }
    ]
    resources = {"timesteps": 0}
    for timestep, end in zip(timesteps, ends, strict=True):
        at, lasts = timestep.seconds * 1e6, (end - timestep.seconds) * 1e6
        name = f"{timestep.phase} {timestep.index}"
        events.append({"ph": "X", "pid": 0, "tid": 0, "name": name, "ts": at, "dur": lasts})
        events.append({"ph": "C", "pid": 0, "name": "GPU bytes", "ts": at, "args": dict(timestep.kinds)})
    for phase, start in _phase_starts(plan).items():
        for term in plan.terms:
            if term.phase != phase or term.seconds <= 0 or term.name == "exposed tail":
                continue
            tid = resources.setdefault(term.name, len(resources))
            args = {"phase": phase, "binds": term.binds}
            busy = {"ts": start * 1e6, "dur": term.seconds * 1e6, "args": args}
            events.append({"ph": "X", "pid": 0, "tid": tid, "name": term.name, **busy})
    for name, tid in resources.items():
        events.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(plan: Plan, path: str | Path) -> Path:
    """Draw the timeline, bytes on the GPU by kind against the limit; the ending decides the format (.svg, .png).

    Raises:
        MeshfoldError: if matplotlib is not installed, or the format is one it does not know.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MeshfoldError("pictures need matplotlib: pip install meshfold-zero-gemini[plot]")
    paint = importlib.import_module("meshfold.zero_gemini.planner.paint")
    where = Path(path)
    known = paint.formats()
    if where.suffix.removeprefix(".") not in known:
        raise MeshfoldError(f"{where.name!r}: give a name that ends in one of .{', .'.join(sorted(known))}")
    paint.timeline_figure(plan, timeline(plan)).savefig(where)
    return where


def _length(plan: Plan) -> float:
    """Return the seconds that the timeline shows: the step, or the first of several micro-steps."""
    if plan.workload.accumulation == 1:
        return plan.seconds
    return sum(seconds for name, _, seconds in plan.phases if name in _phase_starts(plan))


def _phase_starts(plan: Plan) -> dict[str, float]:
    """Return when each phase starts, seconds; for a speculative step, the likelier of its two forms."""
    seconds = {name: total for name, _, total in plan.phases}
    weights = {name: weight for name, weight, _ in plan.phases}
    if "step" in seconds and weights["step"] >= 0.5:
        return {"step": 0.0}
    return {"forward": 0.0, "backward": seconds["forward"]}


def _starts(plan: Plan) -> list[float]:
    """Return when each timestep starts: compute in order, stretched to the plan's seconds for its phase."""
    workload, half = plan.workload, plan.workload.forward_timesteps
    lasts = np.array(workload.timestep_seconds or np.zeros(workload.timesteps))
    for chunk in workload.chunks if workload.timestep_seconds is None else ():
        for (first, last), seconds in (
            (chunk.forward, chunk.forward_seconds),
            (chunk.backward, chunk.backward_seconds),
        ):
            lasts[first : last + 1] += seconds / (last - first + 1)
    for layer, made in zip(workload.layers, plan.layers, strict=True):
        if not made.kept:
            lasts[min(layer.last + 1, workload.timesteps - 1)] += layer.recompute_seconds
    lasts += 1e-12  # keep timesteps without compute in order
    starts = _phase_starts(plan)
    if "backward" in starts:
        whole = {name: total for name, _, total in plan.phases}
        lasts[:half] *= whole["forward"] / lasts[:half].sum()
        lasts[half:] *= whole["backward"] / lasts[half:].sum()
    if workload.accumulation == 1:
        lasts *= plan.seconds / lasts.sum()
    return [0.0, *np.cumsum(lasts)[:-1].tolist()]
