"""Table of a result: times, ratios, memory, energy, and the verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import median
from benchmarks.reports import met, read_bars, table

BARS = read_bars("folding", ("eager", "dap", "memory"))
JUDGED = dict(blocks=12, narrower=1, dtype="bfloat16")
"""The blocks that the bars are for."""
HEAD = ("contestant", "ms a step", "ms a block", "its time ÷ ours", "peak GiB", "J a step", "W", "MHz", "loss", "note")
Runs = Mapping[str, Sequence[dict[str, Any]]]


def report(path: Path) -> None:
    """Write the table beside a result, and print it."""
    found = json.loads(path.read_text())
    lines = [
        f"Measured on: {', '.join(f'{key} {value}' for key, value in found['machine'].items() if value is not None)}."
    ]
    for case in found["cases"].values():
        lines += ["", *of_case(case, found["cases"])]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def of_case(case: dict[str, Any], cases: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return heading, table and verdicts of one work."""
    work, runs = case["work"], case["runs"]
    times = seconds_of(runs)
    best = fastest(times, "ours")
    recompute = "blocks recomputed" if work["recompute"] == "blocks" else "nothing recomputed"
    lines = [
        f"**{work['blocks']} blocks, {work['sequences']} sequences × {work['residues']} residues, {work['ranks']} rank"
        f"{'s' * (work['ranks'] > 1)}, {work['dtype']}, {recompute}"
        f"; forward and backward**",
        "",
        *table(HEAD, [_row(name, runs[name], times, work, best) for name in runs]),
        "",
    ]
    if best is None:
        return lines
    judged = work["ranks"] if all(work[name] == value for name, value in JUDGED.items()) else -1
    rival = "OpenFold eager"
    if rival in times:
        lines.append(BARS["eager"].line(times[rival] / times[best], judged, best=best, rival=rival))
    alone = next((one for one in cases.values() if one["work"] == {**work, "ranks": 1}), None)
    one_gpu = seconds_of(alone["runs"]) if alone is not None and work["ranks"] > 1 else {}
    before = fastest(one_gpu, "ours")
    if alone is not None and before is not None:
        lines.append(BARS["dap"].line(one_gpu[before] / times[best], judged, best=best))
        if peak_of(alone["runs"][before]):
            share = peak_of(runs[best]) / peak_of(alone["runs"][before])
            bar = BARS["memory"]
            aim = f" (bar {bar.most:g}): {met(bar.met(share))}" if bar.judged(judged) else ""
            lines.append(f"- {bar.what.format(best=best)}: {share:.3f}{aim}")
    return lines


def _row(
    name: str, runs: Sequence[dict[str, Any]], times: Mapping[str, float], work: Mapping[str, Any], best: str | None
) -> tuple[str, ...]:
    if name not in times:
        return (name, *["–"] * (len(HEAD) - 2), runs[-1]["error"])
    good = [run for run in runs if "error" not in run]
    watts = [run["watts"] for run in good if "watts" in run]
    clocks = [run["mhz"] for run in good if "mhz" in run]
    peak = peak_of(runs)
    return (
        name,
        f"{1e3 * times[name]:.2f}",
        f"{1e3 * times[name] / work['blocks']:.3f}",
        f"{times[name] / times[best]:.3f}" if best else "–",
        f"{peak / 2**30:.2f}" if peak else "–",
        f"{sum(watts) / len(watts) * times[name]:.2f}" if watts else "–",
        f"{sum(watts) / len(watts):.0f}" if watts else "–",
        f"{sum(clocks) / len(clocks):.0f}" if clocks else "–",
        f"{good[0]['losses'][0]:.5f}",
        "",
    )


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
