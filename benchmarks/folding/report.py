"""Tables of a result: times, ratios, memory, energy, and the verdicts; here those of the Evoformer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.folding import trunk_report
from benchmarks.folding.runs import energy, fastest, peak_of, seconds_of
from benchmarks.reports import read_bars, table

BARS = read_bars("folding", ("eager", "dap", "memory"))
JUDGED = dict(blocks=12, narrower=1, dtype="bfloat16")
"""The blocks that the bars are for."""
HEAD = ("contestant", "ms a step", "ms a block", "its time ÷ ours", "peak GiB", "J a step", "W", "MHz", "loss", "note")


def report(path: Path) -> None:
    """Write the table beside a result, and print it."""
    found = json.loads(path.read_text())
    lines = [
        f"Measured on: {', '.join(f'{key} {value}' for key, value in found['machine'].items() if value is not None)}."
    ]
    for case in found["cases"].values():
        of = of_case if case["work"].get("case", "evoformer") == "evoformer" else trunk_report.of_case
        lines += ["", *of(case, found["cases"])]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def of_case(case: dict[str, Any], cases: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return heading, table and verdicts of one work."""
    work, runs = case["work"], case["runs"]
    times = seconds_of(runs)
    best = fastest(times, "ours")
    recompute = "blocks recomputed" if work["recompute"] == "blocks" else "nothing recomputed"
    grid = ", a grid of {} × {}".format(*work["grid"]) if "grid" in work else ""
    lines = [
        f"**{work['blocks']} blocks, {work['sequences']} sequences × {work['residues']} residues, {work['ranks']} rank"
        f"{'s' * (work['ranks'] > 1)}{grid}, {work['dtype']}, {recompute}"
        f"; forward and backward**",
        "",
        *table(HEAD, [_row(name, runs[name], times, work, best) for name in runs]),
        "",
    ]
    if best is None:
        return lines
    judged = work["ranks"] if all(work[name] == value for name, value in JUDGED.items()) else -1
    gpus = {2: "two", 4: "four"}.get(work["ranks"], str(work["ranks"]))
    rival = "OpenFold eager"
    if rival in times:
        lines.append(BARS["eager"].line(times[rival] / times[best], judged, best=best, rival=rival))
    single = {name: value for name, value in work.items() if name != "grid"} | {"ranks": 1}
    alone = next((one for one in cases.values() if one["work"] == single), None)
    one_gpu = seconds_of(alone["runs"]) if alone is not None and work["ranks"] > 1 else {}
    before = fastest(one_gpu, "ours")
    if alone is not None and before is not None:
        lines.append(BARS["dap"].line(one_gpu[before] / times[best], judged, best=best, gpus=gpus))
        if peak_of(alone["runs"][before]):
            share = peak_of(runs[best]) / peak_of(alone["runs"][before])
            lines.append(BARS["memory"].line(share, judged, best=best, gpus=gpus))
    return lines


def _row(
    name: str, runs: Sequence[dict[str, Any]], times: Mapping[str, float], work: Mapping[str, Any], best: str | None
) -> tuple[str, ...]:
    if name not in times:
        return (name, *["–"] * (len(HEAD) - 2), runs[-1]["error"])
    good = [run for run in runs if "error" not in run]
    peak = peak_of(runs)
    return (
        name,
        f"{1e3 * times[name]:.2f}",
        f"{1e3 * times[name] / work['blocks']:.3f}",
        f"{times[name] / times[best]:.3f}" if best else "–",
        f"{peak / 2**30:.2f}" if peak else "–",
        *energy(runs, times[name]),
        f"{good[0]['losses'][0]:.5f}",
        "",
    )
