"""Table and plot of a result of zero-offload: ratios first."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.common import median
from benchmarks.zero_offload import verdict
from benchmarks.zero_offload.cases import CASES, MINE
from benchmarks.zero_offload.job import GIB

HEAD = (
    "contestant",
    "its time ÷ ours",
    "s a step",
    "samples/s",
    "TFLOP/s a GPU",
    "clip factor",
    "GPU GiB (reserved)",
    "host GiB",
    "J a step (W, MHz)",
    "J a token",
    "predicted s, GPU GiB",
    "loss",
)


def report(path: Path) -> None:
    """Write table and plot beside a result."""
    result = json.loads(path.read_text())
    reports.save(_drawn(result), _lines(result), path)


def line(row: dict[str, Any], ranks: int) -> str:
    """A run in a line."""
    if not verdict.seconds(row):
        return str(row.get("error", "no timed step"))
    gpu, host = row["gpu_peak_bytes"] / GIB, row["host_peak_bytes"] / GIB
    return (
        f"{median(verdict.seconds(row)):.3f} s a step at {row['rows']} rows, GPU {gpu:.1f} GiB, host {host:.1f} GiB, "
        f"loss {row['steps'][0]['loss']:.3f} → {row['steps'][-1]['loss']:.3f}, clip factor {_factors(row)}"
        + (f"; then: {row['error']}" if row.get("error") else "")
    )


def _lines(result: dict[str, Any]) -> list[str]:
    found = [
        "Each contestant in a process of its own, on the same cores and under the same limits; bfloat16 unless its name says "
        "otherwise, every block recomputed. Times are medians of the timed steps of all rounds, lowest and highest in "
        "brackets; ratios above 1 say that ours is faster; there is one where both ran in one call on one machine. "
        "TFLOP/s count 6 · parameters · tokens. Host memory is the most "
        "that a process and its children had resident at a time.",
    ]
    for name, case in result["cases"].items():
        settings = case["settings"]
        rows = verdict.rows(result, name)
        found += ["", f"## {name}: {settings['about']}", "", _about(case), ""]
        ours = next((rows[mine] for mine in MINE if mine in rows and verdict.all_seconds(rows[mine])), None)
        cells = (_row(contestant, runs, ours, settings) for contestant, runs in rows.items())
        found += reports.table(HEAD, cells)
        if settings.get("published"):
            found += ["", f"Published: {settings['published']}."]
        found += ["", *verdict.bars(CASES[name], rows)] if name in CASES else []
    return found


def _about(case: dict[str, Any]) -> str:
    settings = case["settings"]
    runs: list[dict[str, Any]] = next((runs for runs in case["rows"].values() if runs), [])
    on = runs[0]["machine"] if runs else {}
    clip = "not clipped" if settings["clip"] is None else f"clipped at {settings['clip']:g}"
    rows = "rows found by search" if settings["search"] else f"{settings['rows']} × {settings['seq_len']} tokens a step"
    return (
        f"{rows}, {settings['layers']} layers, {clip}, learning rate {settings['lr']:g}; "
        f"{settings['ranks']} × {on.get('gpu', 'CPU')}, torch {on.get('torch', '?')}, "
        f"DeepSpeed {on.get('deepspeed') or 'not there'}, Colossal-AI {on.get('colossalai') or 'not there'}."
    )


def _row(
    contestant: str, runs: list[dict[str, Any]], ours: list[dict[str, Any]] | None, settings: dict[str, Any]
) -> list[str]:
    times = verdict.all_seconds(runs)
    if not times:
        return [contestant, str(runs[-1].get("error", "no timed step"))]
    last = next(run for run in reversed(runs) if verdict.seconds(run))
    middle, ranks = median(times), settings["ranks"]
    ratio = "–"
    if ours is not None and ours is not runs:
        values = verdict.ratios(ours, runs)
        ratio = reports.spread((median(values), min(values), max(values)), 2) if values else "other call"
    tokens = last["rows"] * settings["seq_len"]
    return [
        contestant,
        ratio,
        reports.spread((middle, min(times), max(times)), 3),
        f"{last['rows'] * ranks / middle:.2f} at {last['rows']} a GPU",
        f"{6 * last['parameters'] * tokens / middle / 1e12:.0f}",
        _factors(last),
        f"{verdict.peak(runs, 'gpu_peak_bytes'):.1f} ({verdict.peak(runs, 'gpu_reserved_peak_bytes'):.1f})",
        f"{verdict.peak(runs, 'host_peak_bytes'):.1f}",
        *_energy(last, tokens * ranks),
        _predicted(last),
        f"{last['steps'][0]['loss']:.3f} → {last['steps'][-1]['loss']:.3f}",
    ]


def _factors(row: dict[str, Any]) -> str:
    found = verdict.factors(row)
    if not found:
        return "not known"
    low, high = min(found), max(found)
    return f"{low:.3g}" if low == high else f"{low:.3g}–{high:.3g}"


def _energy(row: dict[str, Any], tokens: int) -> tuple[str, str]:
    """Joules of the GPUs in a step, with their watts together and the clock of one, and those of a token of all ranks."""
    found = row.get("power") or {}
    if not found:
        return "–", "–"
    _, token, watts, clock = reports.joules(found, middle := median(verdict.seconds(row)), tokens)
    return f"{found['watts'] * middle:,.0f} ({watts}, {clock})", token


def _predicted(row: dict[str, Any]) -> str:
    said = row.get("predicted") or {}
    seconds, gpu = said.get("seconds"), said.get("peak_gpu_bytes")
    if seconds is None and gpu is None:
        return "–"
    return f"{'–' if seconds is None else f'{seconds:.3f}'}, {'–' if gpu is None else f'{gpu / GIB:.1f}'}"


def _heading(about: str) -> str:
    """Return a case in words, in lines that fit a phone."""
    for regime, words in {"regime A": "fp32 Adam state", "regime B": "bf16 Adam state"}.items():
        about = about.replace(regime, words)
    return textwrap.fill(about, 54)


def _drawn(result: dict[str, Any]) -> Any:
    """For each case TFLOP/s and the peak of GPU memory, with its limit."""
    speeds, peaks, limits, ours, headings = {}, {}, {}, [], []
    for name, case in result["cases"].items():
        settings = case["settings"]
        headings.append(settings["about"])
        speeds[headings[-1]] = peaks[headings[-1]] = math.nan
        for contestant, runs in verdict.rows(result, name).items():
            times = verdict.all_seconds(runs)
            if not times:
                continue
            last = next(run for run in reversed(runs) if verdict.seconds(run))
            row = f"{name}: {contestant}"
            work = 6 * last["parameters"] * last["rows"] * settings["seq_len"]
            speeds[row] = work / median(times) / 1e12
            peaks[row] = verdict.peak(runs, "gpu_peak_bytes")
            limits[row] = settings["gpu_gib"]
            ours += [row] if contestant in MINE else []
    figure, panels = reports.panels(1, 2, 0.42 * len(speeds) + 1.1)
    left, right = panels[0]
    words = {row: row.partition(": ")[2].replace("ours", "Meshfold") for row in limits}
    words |= {row: _heading(row) for row in headings}
    reports.draw_bars(left, speeds, ours, "TFLOP/s of a GPU", digits=0, words=words)
    reports.draw_bars(right, peaks, ours, "peak of GPU memory, GiB", limits=limits)
    right.set_yticks([])
    right.set_zorder(-1)  # names of the left panel reach into it
    strokes = ", red strokes: the limit" if any(limits.values()) else ""
    reports.title(figure, f"Meshfold blue, peers grey{strokes}")
    return figure
