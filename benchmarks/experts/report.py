"""Table of a result of `--case model`: times, ratios, memory beside the plan, energy, and the verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import median
from benchmarks.reports import met, read_bars, table

BARS = read_bars("experts", ("dense", "transformers", "torchtitan", "memory"))
JUDGED = dict(shape="30B-A3B", dtype="bfloat16", recompute="none")
"""The work that the bars are for."""
HEAD = (
    "contestant",
    "s a step",
    "tokens/s a GPU",
    "its time ÷ ours",
    "peak GiB",
    "planned GiB",
    "mJ a token",
    "mean MHz",
    "loss",
    "note",
)


def report(path: Path) -> None:
    """Write the table beside a result, and print it."""
    found = json.loads(path.read_text())
    words = ", ".join(f"{key} {value}" for key, value in found["machine"].items() if value is not None)
    lines = [f"Measured on: {words}."]
    for case in found["cases"].values():
        lines += ["", *of_case(case)]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def of_case(case: dict[str, Any]) -> list[str]:
    """Return heading, table and verdicts of one work."""
    work, model = case["work"], case["model"]
    tokens = work["rows"] * work["length"]
    times = {name: seconds for name, runs in case["runs"].items() if (seconds := seconds_of(runs)) is not None}
    best = min((name for name in times if name.startswith("ours")), key=times.__getitem__, default=None)
    rows = [_row(name, runs, case, times, None if best is None else times[best]) for name, runs in case["runs"].items()]
    recompute = "every layer recomputed" if work["recompute"] == "blocks" else "nothing recomputed"
    lines = [
        f"**{model['num_hidden_layers']} layers, {model['num_experts']} experts of {model['moe_intermediate_size']}, top "
        f"{model['num_experts_per_tok']}, hidden {model['hidden_size']:,}; {work['ranks']} ranks, {work['rows']} × "
        f"{work['length']:,} = {tokens:,} tokens, {work['dtype']}, {recompute}**",
        "",
        *table(HEAD, rows),
        "",
    ]
    if best is None:
        return lines
    judged = all(work[name] == value for name, value in JUDGED.items())
    for rival in ("transformers", "torchtitan"):
        name = min((n for n in times if n.startswith(rival) and "alone" not in n), key=times.__getitem__, default=None)
        if name is not None:
            value = times[name] / times[best]
            lines.append(BARS[rival].line(value, work["ranks"] if judged else -1, best=best, rival=name))
    peak = peak_of(case["runs"][best])
    if peak:
        off, bar = abs(case["planned"][best] / peak - 1), BARS["memory"]
        lines.append(f"- {bar.what.format(best=best)}: {off:.1%} (bar {bar.most:.0%}): {met(bar.met(off))}")
    return lines


def _row(
    name: str, runs: Sequence[dict[str, Any]], case: dict[str, Any], times: dict[str, float], ours: float | None
) -> tuple[str, ...]:
    work = case["work"]
    if name not in times:
        return (name, *["–"] * 8, runs[-1]["error"])
    seconds, tokens = times[name], work["rows"] * work["length"]
    good = [run for run in runs if "error" not in run]
    watts = [run["watts"] for run in good if "watts" in run]
    clocks = [run["mhz"] for run in good if "mhz" in run]
    planned, peak = case["planned"].get(name), peak_of(runs)
    return (
        name,
        f"{seconds:.4f}",
        f"{tokens / work['ranks'] / seconds:,.0f}",
        f"{seconds / ours:.3f}" if ours else "–",
        f"{peak / 2**30:.2f}" if peak else "–",
        f"{planned / 2**30:.2f}" if planned else "–",
        f"{sum(watts) / len(watts) * seconds / tokens * 1e3:.2f}" if watts else "–",
        f"{sum(clocks) / len(clocks):.0f}" if clocks else "–",
        f"{good[0]['losses'][0]:.3f} → {good[0]['losses'][-1]:.3f}",
        "",
    )


def seconds_of(runs: Sequence[dict[str, Any]]) -> float | None:
    """Return the median over starts of the median step; None if no start came to its end."""
    middles = [median(run["seconds"]) for run in runs if "error" not in run]
    return median(middles) if middles else None


def peak_of(runs: Sequence[dict[str, Any]]) -> int:
    """Return the largest memory of a rank in bytes; 0 where none was measured."""
    return max((run["peak_bytes"] for run in runs if "error" not in run), default=0)
