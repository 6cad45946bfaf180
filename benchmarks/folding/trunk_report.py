"""Tables of ESMFold's trunk: times and memory beside transformers', the longest chain on two GPUs beside one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.folding.runs import energy, fastest, peak_of, seconds_of
from benchmarks.folding.trunk import CHUNKED
from benchmarks.reports import read_bars, table

BARS = read_bars("esmfold", ("memory", "speed", "longest"))
JUDGED = dict(narrower=1, dtype="bfloat16")
"""The blocks that the bars are for."""
LENGTH = 4096
"""The residues that memory and speed are judged for."""
HEAD = (
    "contestant",
    "ms a block",
    "its time ÷ ours",
    "peak GiB",
    "planned GiB",
    "J a block",
    "W",
    "MHz",
    "mean square",
    "note",
)


def of_case(case: Mapping[str, Any], cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return heading, table and verdicts of one work; ``cases``: all of the result."""
    work, runs = case["work"], case["runs"]
    times = seconds_of(runs)
    best = fastest(times, "ours")
    room = f", in {work['gib']:g} GiB of each GPU" if "gib" in work else ""
    lines = [
        f"**ESMFold's trunk, {work['blocks']} block{'s' * (work['blocks'] > 1)}, {work['residues']:,} residues, {work['ranks']} "
        f"rank{'s' * (work['ranks'] > 1)}, {work['dtype']}, inference{room}**",
        "",
        *table(HEAD, [_row(name, case, times, best) for name in runs]),
        "",
    ]
    return lines + (_longest(work, times, cases) if "gib" in work else _beside(case, times))


def _beside(case: Mapping[str, Any], times: Mapping[str, float]) -> list[str]:
    """Return the verdicts beside transformers: of the fastest of ours that takes little enough, or if none does, of the leanest."""
    work, runs = case["work"], case["runs"]
    ours = {name: peak_of(runs[name]) for name in times if name.startswith("ours")}
    if CHUNKED not in times or not ours:
        return []
    theirs = peak_of(runs[CHUNKED])
    lean = [name for name, peak in ours.items() if BARS["memory"].met(peak / theirs)] if theirs else list(ours)
    chosen = min(lean, key=times.__getitem__) if lean else min(ours, key=ours.__getitem__)
    named: dict[str, Any] = dict(ours=chosen, residues=work["residues"])
    judged = work["ranks"] if _is_judged(work) and work["residues"] == LENGTH else -1
    lines = [BARS["memory"].line(ours[chosen] / theirs, judged, **named)] if theirs else []
    return [*lines, BARS["speed"].line(times[CHUNKED] / times[chosen], judged, **named)]


def _longest(work: Mapping[str, Any], times: Mapping[str, float], cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the verdict on the longest chain of several ranks, if that of one was run in the same memory."""
    others = [
        one["work"]
        for one in cases.values()
        if {**one["work"], "residues": 0} == {**work, "ranks": 1, "residues": 0} and seconds_of(one["runs"])
    ]
    if work["ranks"] == 1 or not times or not others:
        return []
    judged = work["ranks"] if _is_judged(work) else -1
    return [BARS["longest"].line(work["residues"] / others[0]["residues"], judged, gib=work["gib"])]


def _is_judged(work: Mapping[str, Any]) -> bool:
    return all(work[name] == value for name, value in JUDGED.items())


def _row(name: str, case: Mapping[str, Any], times: Mapping[str, float], best: str | None) -> tuple[str, ...]:
    runs, blocks = case["runs"][name], case["work"]["blocks"]
    if name not in times:
        return (name, *["–"] * (len(HEAD) - 2), runs[-1]["error"])
    good = [run for run in runs if "error" not in run]
    peak, plan = peak_of(runs), good[-1]["plan"]
    return (
        name,
        f"{1e3 * times[name] / blocks:.1f}",
        f"{times[name] / times[best]:.3f}" if best else "–",
        f"{peak / 2**30:.2f}" if peak else "–",
        f"{plan['bytes'] / 2**30:.2f}" if plan else "–",
        *energy(runs, times[name] / blocks),
        f"{good[0]['losses'][0]:.5f}",
        plan.get("settings", ""),
    )
