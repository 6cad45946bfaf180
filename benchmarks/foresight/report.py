"""Table, bars and scatter plot of a result of the foresight benchmark."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.common import median
from benchmarks.foresight.first_choice import FirstChoice, first_choices

BARS = reports.read_bars("foresight", ("memory", "time", "all", "first"))
_MEMORY, _TIME, _ALL = 0.05, 0.10, 0.20


def report(path: Path) -> int:
    """Write the table and the plot next to a result; 1 if a bar is missed."""
    result = json.loads(path.read_text())
    reports.save(_drawn(result), [described(result)], path)
    print(described(result))
    return int(any(not ok for _, ok in verdict_lines(result)))


def errors(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return measured seconds and bytes (0: not counted) of each configuration that ran, and the plan's relative errors."""
    found = {}
    for name, one in result["configurations"].items():
        runs = [run for run in one["runs"] if "error" not in run]
        if not runs:
            continue
        seconds = seconds_of(runs, _usual(result, one), one["planned"].get("paced", 1.0))
        held = max(run["bytes"] for run in runs)
        found[name] = {
            "seconds": seconds,
            "bytes": held,
            "time error": one["planned"]["seconds"] / seconds - 1,
            **({"memory error": one["planned"]["bytes"] / held - 1} if held else {}),
        }
    return found


def _usual(result: Mapping[str, Any], one: Mapping[str, Any]) -> float:
    """Return the seconds of the matmuls beside a configuration's steps on the machine that was planned for; 0: not known."""
    found: float = result.get("calibrated", {}).get(str(one["configuration"]["ranks"]), {}).get("pace", 0.0)
    return found


def seconds_of(runs: Sequence[Mapping[str, Any]], usual: float, paced: float) -> float:
    """Return the seconds of a step that count.

    Args:
        runs: starts of a configuration.
        usual: seconds of the matmuls beside steps, on the machine that was planned for. With them steps are told at its speed, and
            the median of the starts' medians counts. 0: a start's median, and the fastest start: other work on the machine only
            slows one down.
        paced: share of the step that is slower where these matmuls are.
    """
    if not usual or any("pace" not in run for run in runs):
        return min(median(run["seconds"]) for run in runs)
    return median(
        [
            median(
                [
                    step / (paced * pace / usual + 1 - paced)
                    for step, pace in zip(run["seconds"], run["pace"], strict=True)
                ]
            )
            for run in runs
        ]
    )


def shares(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares of configurations that the bars judge; one that did not run counts as missed."""
    found = errors(result)
    times = [abs(one["time error"]) for one in found.values()]
    memory = [abs(one["memory error"]) for one in found.values() if "memory error" in one]
    failed = len(result["configurations"]) - len(found)

    def share(values: list[float], most: float) -> float:
        count = len(values) + failed
        return sum(value <= most for value in values) / count if count else 0.0

    return {"memory": share(memory, _MEMORY), "time": share(times, _TIME), "all": share(times, _ALL)}


def verdict_lines(result: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return a line for each bar, and whether it is met."""
    found = shares(result)
    if firsts := firsts_of(result):
        found["first"] = max(one.ratio for one in firsts)
    return [(bar.line(found[name], 0), bar.met(found[name])) for name, bar in BARS.items() if name in found]


def firsts_of(result: Mapping[str, Any]) -> list[FirstChoice]:
    """Return the first choice of plans for each model, batch and number of ranks that several specs were measured of."""
    return first_choices(result, {name: one["seconds"] for name, one in errors(result).items()})


def described(result: Mapping[str, Any]) -> str:
    """Return the result in Markdown: the bars, then every configuration."""
    m, found = result["machine"], errors(result)
    where = m.get("gpu") or f"CPU, {m['cpu_cores']} cores"
    counted = sum("memory error" in one for one in found.values())
    lines = [
        f"Plans beside one training of each configuration on {where}, torch {m['torch']}: {len(found)} of "
        f"{len(result['configurations'])} ran, memory is counted of {counted}. Seconds are of an optimizer step, from a "
        f"barrier to the end of the slowest rank: {_that_count(result)}. Memory is the fullest rank's. "
        "Errors are plan / measured − 1.",
        "",
        *(line for line, _ in verdict_lines(result)),
        "",
    ]
    rows, sampled = [], any("watts" in run for one in result["configurations"].values() for run in one["runs"])
    for name, one in result["configurations"].items():
        plan, has = one["planned"], found.get(name)
        if has is None:
            why = next((run["error"] for run in one["runs"]), "not begun in time")
            rows.append((name, _spec(one), f"{plan['seconds']:.4g}", "", "", f"{plan['bytes'] / 2**30:.3f}", "", why))
            continue
        held = "memory error" in has
        rows.append(
            (
                name,
                _spec(one),
                f"{plan['seconds']:.4g}",
                f"{has['seconds']:.4g}",
                f"{100 * has['time error']:+.1f} %",
                f"{plan['bytes'] / 2**30:.3f}",
                f"{has['bytes'] / 2**30:.3f}" if held else "",
                f"{100 * has['memory error']:+.1f} %" if held else "not counted",
                *(_energy(one) if sampled else ()),
            )
        )
    head = ("configuration", "spec", "planned s", "measured s", "error", "planned GiB", "measured GiB", "error")
    return "\n".join([*lines, *reports.table(head + (reports.JOULES if sampled else ()), rows), *_firsts(result)])


def _that_count(result: Mapping[str, Any]) -> str:
    """Return which steps count, and at which speed."""
    paces = [
        _usual(result, one) / pace
        for one in result["configurations"].values()
        for run in one["runs"]
        for pace in run.get("pace", ())
        if _usual(result, one)
    ]
    if not paces:
        return "a start's median, and the fastest start"
    low, high = (statistics.quantiles(paces, n=20, method="inclusive")[place] for place in (0, -1))
    return (
        "the median of the starts' medians, at the calibrated speed, which matmuls beside each step tell: they ran at "
        f"{low:.2f} to {high:.2f} of it (nine of ten)"
    )


def _energy(one: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of the energy of a configuration's fastest start."""
    run = min((run for run in one["runs"] if "error" not in run), key=lambda run: median(run["seconds"]))
    asked = one["configuration"]
    return reports.joules(reports.mean_power([run]), median(run["seconds"]), asked["batch"] * asked["seq_len"])


def _firsts(result: Mapping[str, Any]) -> list[str]:
    """Return a table of the specs that plans put first, below an empty line; nothing where a model has one spec only."""
    rows = [
        (
            one.first,
            _spec(result["configurations"][one.first]),
            one.fastest,
            str(one.specs),
            f"{one.ratio:.3f}" if math.isfinite(one.ratio) else "did not run",
        )
        for one in firsts_of(result)
    ]
    head = ("first by plan", "its spec", "fastest measured", "specs", "first ÷ fastest, measured")
    return ["", *reports.table(head, rows)] if rows else []


def _spec(one: Mapping[str, Any]) -> str:
    asked = one["configuration"]
    return f"{asked['ranks']}: `{asked['parallel']}`"


def _drawn(result: Mapping[str, Any]) -> Any:
    """Draw predicted against measured, seconds above and memory below, with bands of the bars and names of what they leave out."""
    found = errors(result)
    figure, panels = reports.panels(2, 1, 8.0)
    for panel, key, unit, scale, bands in (
        (panels[0][0], "seconds", "seconds a step", 1.0, (_TIME, _ALL)),
        (panels[1][0], "bytes", "GiB of the fullest rank", 2.0**30, (_MEMORY,)),
    ):
        places = {
            name: (one[key] / scale, result["configurations"][name]["planned"][key] / scale)
            for name, one in found.items()
            if one[key]
        }
        points = [*places.values()]
        panel.set(xscale="log", yscale="log", xlabel=f"measured {unit}", ylabel=f"planned {unit}")
        if not points:
            panel.set_title("not counted")
            continue
        low, high = min(map(min, points)) / 1.5, max(map(max, points)) * 1.5
        for band in sorted(bands, reverse=True):
            panel.fill_between(
                [low, high],
                [low * (1 - band), high * (1 - band)],
                [low * (1 + band), high * (1 + band)],
                color=reports.PEER,
                alpha=0.4 if band == min(bands) else 0.18,
                lw=0,
                label=f"within {100 * band:.0f} %",
            )
        panel.plot([low, high], [low, high], color=reports.PEER, lw=1)
        panel.plot([x for x, _ in points], [y for _, y in points], "o", color=reports.OURS, ms=5)
        _name_outliers(panel, places, max(bands))
        panel.legend(loc="upper left")
    return figure


def _name_outliers(panel: Any, places: Mapping[str, tuple[float, float]], band: float) -> None:
    """Write the names of points outside of a band beside them, away from it; names of points of one height lie above each other."""
    last, lift = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for name, (x, y) in sorted(places.items(), key=lambda one: one[1][1]):
        above = y > x
        if abs(y / x - 1) <= band:
            continue
        lift[above] = lift[above] + 10 if y < 1.15 * last[above] else 0
        last[above] = y
        place = dict(
            xytext=(-6 if above else 6, lift[above]), textcoords="offset points", va="center", fontsize="small"
        )
        panel.annotate(name, (x, y), ha="right" if above else "left", **place)
