"""Table and plot of a result of zero-offload: ratios first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common import median
from benchmarks.offload import verdict
from benchmarks.offload.cases import CASES, MINE
from benchmarks.offload.job import GIB

HEAD = (
    "contestant", "its time ÷ ours", "s a step", "samples/s", "TFLOP/s a GPU", "clip factor", "GPU GiB (reserved)",
    "host GiB", "predicted s, GPU GiB", "loss",
)  # fmt: skip


def report(path: Path) -> None:
    """Write table and plot beside a result."""
    result = json.loads(path.read_text())
    path.with_suffix(".md").write_text("\n".join(_lines(result)) + "\n")
    _draw(path.with_suffix(".png"), result)
    print(f"wrote {path.with_suffix('.md')} and {path.with_suffix('.png')}")


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
        "brackets; ratios above 1 say that ours is faster. TFLOP/s count 6 · parameters · tokens. Host memory is the most "
        "that a process and its children had resident at a time.",
    ]
    for name, case in result["cases"].items():
        settings = case["settings"]
        rows = verdict.rows(result, name)
        found += ["", f"## {name}: {settings['about']}", "", _about(case), ""]
        found += ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
        ours = next((rows[mine] for mine in MINE if mine in rows and verdict.all_seconds(rows[mine])), None)
        found += [_row(contestant, runs, ours, settings) for contestant, runs in rows.items()]
        if settings.get("published"):
            found += ["", f"Published: {settings['published']}."]
        found += ["", *verdict.bars(CASES[name], rows)] if name in CASES else []
    return found


def _about(case: dict[str, Any]) -> str:
    settings = case["settings"]
    runs: list[dict[str, Any]] = next((runs for runs in case["rows"].values() if runs), [])
    on = runs[0]["machine"] if runs else {}
    clip = "not clipped" if settings["clip"] is None else f"clipped at {settings['clip']:g}"
    rows = (
        "rows found by search"
        if settings["search"]
        else f"{settings['rows']} × {settings['seq_len']} tokens a step"
    )
    return (
        f"{rows}, {settings['layers']} layers, {clip}, learning rate {settings['lr']:g}; "
        f"{settings['ranks']} × {on.get('gpu', 'CPU')}, torch {on.get('torch', '?')}, "
        f"DeepSpeed {on.get('deepspeed') or 'not there'}, Colossal-AI {on.get('colossalai') or 'not there'}."
    )


def _row(
    contestant: str, runs: list[dict[str, Any]], ours: list[dict[str, Any]] | None, settings: dict[str, Any]
) -> str:
    times = verdict.all_seconds(runs)
    if not times:
        return f"| {contestant} | {runs[-1].get('error', 'no timed step').replace('|', '/')} |" + " |" * (
            len(HEAD) - 2
        )
    last = next(run for run in reversed(runs) if verdict.seconds(run))
    middle, ranks = median(times), settings["ranks"]
    ratio = "–"
    if ours is not None and ours is not runs:
        values = verdict.ratios(ours, runs)
        ratio = f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})"
    tokens = last["rows"] * settings["seq_len"]
    cells = [
        contestant,
        ratio,
        f"{middle:.3f} ({min(times):.3f}–{max(times):.3f})",
        f"{last['rows'] * ranks / middle:.2f} at {last['rows']} a GPU",
        f"{6 * last['parameters'] * tokens / middle / 1e12:.0f}",
        _factors(last),
        f"{verdict.peak(runs, 'gpu_peak_bytes'):.1f} ({verdict.peak(runs, 'gpu_reserved_peak_bytes'):.1f})",
        f"{verdict.peak(runs, 'host_peak_bytes'):.1f}",
        _predicted(last),
        f"{last['steps'][0]['loss']:.3f} → {last['steps'][-1]['loss']:.3f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _factors(row: dict[str, Any]) -> str:
    found = verdict.factors(row)
    if not found:
        return "not known"
    low, high = min(found), max(found)
    return f"{low:.3g}" if low == high else f"{low:.3g}–{high:.3g}"


def _predicted(row: dict[str, Any]) -> str:
    said = row.get("predicted") or {}
    seconds, gpu = said.get("seconds"), said.get("peak_gpu_bytes")
    if seconds is None and gpu is None:
        return "–"
    return f"{'–' if seconds is None else f'{seconds:.3f}'}, {'–' if gpu is None else f'{gpu / GIB:.1f}'}"


def _draw(path: Path, result: dict[str, Any]) -> None:
    """For each case TFLOP/s and the peak of GPU memory, ours blue."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names, speeds, peaks, limits, colours = [], [], [], [], []
    for name, case in result["cases"].items():
        settings = case["settings"]
        for contestant, runs in verdict.rows(result, name).items():
            times = verdict.all_seconds(runs)
            if not times:
                continue
            last = next(run for run in reversed(runs) if verdict.seconds(run))
            names.append(f"{name}: {contestant}")
            work = 6 * last["parameters"] * last["rows"] * settings["seq_len"]
            speeds.append(work / median(times) / 1e12)
            peaks.append(verdict.peak(runs, "gpu_peak_bytes"))
            limits.append(settings["gpu_gib"])
            colours.append("#2266bb" if contestant in MINE else "#888888")
    if not names:
        return
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 0.34 * len(names) + 1.6), sharey=True, layout="constrained"
    )
    left.barh(range(len(names)), speeds, color=colours)
    left.set_yticks(range(len(names)), names)
    left.bar_label(left.containers[0], fmt="%.0f", padding=3)
    left.set_xlabel("TFLOP/s a GPU (6 · parameters · tokens)")
    right.barh(range(len(names)), peaks, color=colours)
    right.plot([limit or None for limit in limits], range(len(names)), "k|", markersize=12, label="limit")
    right.bar_label(right.containers[0], fmt="%.1f", padding=3)
    right.set_xlabel("peak of GPU memory, GiB")
    right.legend(loc="upper right")
    left.invert_yaxis()
    for panel in (left, right):
        panel.margins(x=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
