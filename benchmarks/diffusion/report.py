"""Table of a result: times, ratios, memory, energy, and the verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import median
from benchmarks.diffusion.cases import CASES, GIB, SMALL_STATE
from benchmarks.reports import met, read_bars, table

BARS = read_bars("diffusion", ("capped", "diffusers", "dit", "flux"))
RIVALS = {
    "sd2": ("diffusers", "diffusers"),
    "dit-xl": ("dit", "FSDP2"),
    "flux-12b": ("flux", "FSDP2"),
    "flux-6b": ("flux", "FSDP2"),
}
"""The bar of each case, and the peer that it is against."""
HEAD = (
    "contestant",
    "s a step",
    "images/s",
    "its time ÷ ours",
    "peak GiB",
    "J an image",
    "mean MHz",
    "first step s",
    "loss",
    "note",
)


def report(path: Path) -> str:
    """Write the table beside a result, and return it."""
    found = json.loads(path.read_text())
    words = ", ".join(f"{key} {value}" for key, value in found["machine"].items() if value is not None)
    lines = [f"Measured on: {words}."]
    for name, case in found["cases"].items():
        lines += ["", *of_case(name, case)]
    lines += ["", *of_limits(found["cases"])]
    made = "\n".join(lines).rstrip()
    path.with_suffix(".md").write_text(made + "\n", encoding="utf-8")
    return made


def of_case(name: str, case: Mapping[str, Any]) -> list[str]:
    """Return heading, table and verdict of a case."""
    work, times = case["work"], times_of(case)
    best = fastest(times, "ours")
    ours = None if best is None else times[best]
    recompute = {
        "none": "nothing recomputed",
        "blocks": "every block recomputed",
        "auto": "blocks recomputed as the plan chooses",
    }[work["recompute"]]
    micro = "" if work["micro_steps"] == 1 else f", in {work['micro_steps']} micro-steps"
    limit = "" if work["limit"] is None else f", {work['limit']:g} GiB of GPU memory"
    lines = [
        f"**{name}: {case['about']}; {work['ranks']} ranks, {work['rows']} images a step{micro}, {work['dtype']}, "
        f"{recompute}{limit}**",
        "",
        *table(HEAD, [_row(who, runs, work, times, ours) for who, runs in case["runs"].items()]),
        "",
    ]
    if best is None:
        return lines
    if (pair := RIVALS.get(name)) is not None and (rival := fastest(times, pair[1])) is not None:
        ranks = work["ranks"] if is_judged(name, work) else -1
        lines.append(BARS[pair[0]].line(times[rival] / times[best], ranks, best=best, rival=rival))
    if work["limit"] is not None and (peak := peak_of(case["runs"][best])):
        lines.append(f"- trains under {work['limit']:g} GiB: {peak / GIB:.2f}: {met(peak <= work['limit'] * GIB)}")
    return lines


def of_limits(cases: Mapping[str, Any]) -> list[str]:
    """Return the verdicts on the speed under 11 GiB, if it and that without a limit were measured in one call: of exact state,
    and, if they ran, of those that keep Adam's moments in fewer bits."""
    free, capped = cases.get("sd2"), cases.get("sd2-11")
    if free is None or capped is None:
        return []
    times, small = times_of(capped), {}
    for who in SMALL_STATE:
        if who in times:
            small[who] = times.pop(who)
    whole = times_of(free)
    judged = is_judged("sd2", free["work"]) and is_judged("sd2-11", capped["work"])
    without, lines = fastest(whole, "ours"), []
    for found, kept in ((times, "in 32 bits"), (small, "in 16 or 8 bits")):
        best = fastest(found, "ours")
        if without is not None and best is not None:
            lines.append(BARS["capped"].line(whole[without] / found[best], 1 if judged else -1, kept=kept, best=best))
    return lines


def is_judged(name: str, work: Mapping[str, Any]) -> bool:
    """Return whether the work is the case's own, which the bars are for."""
    case = CASES[name]
    return bool(
        work["dtype"] == "bfloat16" and work["rows"] == case.rows and work["config"].keys() == case.config.keys()
    )


def times_of(case: Mapping[str, Any]) -> dict[str, float]:
    """Return the median over starts of the median step of each contestant that came to its end, in seconds."""
    good = {who: [median(run["seconds"]) for run in runs if "error" not in run] for who, runs in case["runs"].items()}
    return {who: median(values) for who, values in good.items() if values}


def fastest(times: Mapping[str, float], who: str) -> str | None:
    """Return somebody's fastest contestant."""
    names = [name for name in times if name.partition(",")[0] == who]
    return min(names, key=times.__getitem__, default=None)


def peak_of(runs: Sequence[Mapping[str, Any]]) -> int:
    """Return the largest memory of a rank in bytes; 0 where none was measured."""
    return max((run["peak_bytes"] for run in runs if "error" not in run), default=0)


def _row(
    who: str, runs: Sequence[dict[str, Any]], work: Mapping[str, Any], times: Mapping[str, float], ours: float | None
) -> tuple[str, ...]:
    begun = [run["first_step_s"] for run in runs if "first_step_s" in run]
    first_step = f"{median(begun):.0f}" if begun else "–"
    if who not in times:
        return (who, *["–"] * 6, first_step, "–", runs[-1]["error"])
    seconds, good = times[who], [run for run in runs if "error" not in run]
    watts = [run["watts"] for run in good if "watts" in run]
    clocks = [run["mhz"] for run in good if "mhz" in run]
    peak = peak_of(runs)
    return (
        who,
        f"{seconds:.4f}",
        f"{work['rows'] / seconds:.1f}",
        f"{seconds / ours:.3f}" if ours else "–",
        f"{peak / GIB:.2f}" if peak else "–",
        f"{sum(watts) / len(watts) * seconds / work['rows']:.1f}" if watts else "–",
        f"{sum(clocks) / len(clocks):.0f}" if clocks else "–",
        first_step,
        f"{good[0]['losses'][0]:.3f} → {good[0]['losses'][-1]:.3f}",
        "",
    )
