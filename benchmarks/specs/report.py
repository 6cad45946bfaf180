"""Table, bars, loss curves and speeds of a result of the specs benchmark."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.common import median
from benchmarks.specs.contestants import FP8, PEERS
from meshfold.models import build, preset
from meshfold.train.metrics import flops_per_token, peak_of_gpu

BARS = reports.read_bars("specs", ("fsdp2", "fsdp2_two", "mfu", "fp8", "curves"))
JUDGED = dict(model="llama-8b", seq_len=4096, precision="bf16")
"""The work that the bars of speed are for."""
HEAD = (
    "contestant",
    "FSDP2 compiled ÷ this",
    "s a step",
    "tokens/s a GPU",
    "MFU",
    "peak GiB",
    "loss",
    "curve off by",
    "mJ a token",
    "MHz",
)


def described(result: dict[str, Any]) -> str:
    """The table in Markdown, the bars below it."""
    s, m = result["settings"], result["machine"]
    gpu = m.get("gpu", "CPU")
    parts = f" in {s['micro_steps']} micro-steps" if "micro_steps" in s else ""
    lines = [
        f"{s['model']}, {s['rows']} × {s['seq_len']} tokens a step{parts} over {s['ranks']} ranks, {s['precision']}, AdamW at "
        f"{s['lr']:g} after a rise of {s['rise']} steps, clipped at {s['clip']:g}, nothing recomputed; {gpu}, torch "
        f"{m['torch']}. Each contestant in processes of its own, from the same weights, on the same batches. Times are "
        "medians of all steps but the first "
        f"{s['warm_up']} of each start, lowest and highest in brackets; ratios above 1 say that the row is faster than FSDP2 "
        "compiled; there is one where both ran in one call on one machine. "
        "MFU counts 6 · parameters + 12 · layers · hidden · length operations a token. A curve is off by its largest "
        "distance from the mean of all curves, relative to that.",
        "",
        *reports.table(HEAD, _rows(result)),
        "",
        *bars(result),
    ]
    return "\n".join(lines)


def _seconds(result: dict[str, Any], name: str, calls: Collection[str | None] | None = None) -> list[float]:
    """Seconds of a contestant's timed steps, of some calls or of all."""
    warm_up = result["settings"]["warm_up"]
    runs = [run for run in result["contestants"].get(name, []) if calls is None or run.get("call") in calls]
    return [value for run in runs for value in run["seconds"][warm_up:]]


def _ratio(result: dict[str, Any], name: str, peer: str) -> float | None:
    """Divide a peer's time by a contestant's, within the calls that ran both; None if there is none."""
    calls = {run.get("call") for run in result["contestants"].get(peer, [])} - {None}
    both = calls & {run.get("call") for run in result["contestants"].get(name, [])}
    times, others = (_seconds(result, one, both) for one in (name, peer))
    return median(others) / median(times) if times and others else None


def _curves(result: dict[str, Any]) -> dict[str, list[float]]:
    """The losses of the first start of each contestant that came to its end."""
    steps = result["settings"]["steps"]
    first = {name: runs[0]["losses"] for name, runs in result["contestants"].items()}
    return {name: losses for name, losses in first.items() if len(losses) == steps}


def _distances(result: dict[str, Any]) -> dict[str, float]:
    """How far each curve is from the mean of all at most, relative to that."""
    curves = _curves(result)
    means = [sum(values) / len(values) for values in zip(*curves.values(), strict=True)]
    return {
        name: max(abs(loss / mean - 1) for loss, mean in zip(losses, means, strict=True))
        for name, losses in curves.items()
    }


def _rows(result: dict[str, Any]) -> Iterator[list[str]]:
    s = result["settings"]
    distances = _distances(result)
    for name, runs in result["contestants"].items():
        times = _seconds(result, name)
        if not times:
            yield [name, str(runs[0].get("error", "no timed step"))]
            continue
        tokens = _tokens(s, median(times))
        share = _mfu(result, tokens)
        curve = runs[0]["losses"]
        yield [
            name,
            "other call" if (found := _ratio(result, name, "FSDP2 compiled")) is None else f"{found:.3f}",
            reports.spread((median(times), min(times), max(times)), 3),
            f"{tokens:,.0f}",
            f"{share:.1%}" if share is not None else "–",
            f"{max(run['peak_bytes'] for run in runs) / 2**30:.1f}",
            f"{curve[0]:.3f} → {curve[-1]:.3f}",
            f"{distances[name]:.2%}" if name in distances else "–",
            *_energy([run for run in runs if "watts" in run], median(times) / (s["rows"] * s["seq_len"])),
        ]


def _tokens(settings: dict[str, Any], seconds: float) -> float:
    """Return tokens a second of a GPU, for a step of so many seconds."""
    return float(settings["rows"] * settings["seq_len"] / settings["ranks"] / seconds)


def _mfu(result: dict[str, Any], tokens: float) -> float | None:
    """Return the share of the GPU's bf16 operations that so many tokens a second need; None for an unknown GPU."""
    s = result["settings"]
    most = peak_of_gpu(result["machine"].get("gpu", ""), s["precision"])
    if not most:
        return None
    config = preset(s["model"], max_positions=s["seq_len"])
    return tokens * flops_per_token(partial(build, config), s["seq_len"]) / most


def _energy(runs: list[dict[str, Any]], seconds: float) -> tuple[str, str]:
    """Return the cells of the energy of a token, which takes so many seconds, and of the mean clock."""
    if not runs:
        return "–", "–"
    watts, clock = (sum(run[key] for run in runs) / len(runs) for key in ("watts", "mhz"))
    return f"{1e3 * watts * seconds:.1f}", f"{clock:.0f}"


def bars(result: dict[str, Any]) -> list[str]:
    """Return a line for each aim: the value and the verdict, or the value alone where the aim is for other ranks."""
    ranks = result["settings"]["ranks"]
    found = []
    times = {name: median(values) for name in result["contestants"] if (values := _seconds(result, name))}
    low = [name for name in times if FP8 in name]
    ours = [name for name in times if name not in (*PEERS, *low)]
    rivals = [name for name in times if name in PEERS and "compiled" in name]
    if ours and rivals:
        best, rival = min(ours, key=times.__getitem__), min(rivals, key=times.__getitem__)
        value, names = _ratio(result, best, rival), {"best": best, "rival": rival}
        bar = BARS["fsdp2_two"] if ranks == BARS["fsdp2_two"].ranks else BARS["fsdp2"]
        found.append(
            f"- {bar.what.format(**names)}: not measured in one call"
            if value is None
            else bar.line(value, ranks, **names)
        )
    judged = ranks if all(result["settings"].get(name) == value for name, value in JUDGED.items()) else -1
    for key, some in (("mfu", ours), ("fp8", low)):
        if some:
            best = min(some, key=times.__getitem__)
            tokens = _tokens(result["settings"], times[best])
            share = _mfu(result, tokens)
            if key == "fp8" or share is not None:
                found.append(BARS[key].line(tokens if key == "fp8" else share or 0.0, judged, best=best))
    distances = _distances(result)
    if len(distances) > 1:
        furthest = max(distances, key=distances.__getitem__)
        off, bar = distances[furthest], BARS["curves"]
        what = bar.what.format(number=len(distances), steps=result["settings"]["steps"])
        found.append(
            f"- {what}: the furthest ({furthest}) is off by {off:.2%} (bar {bar.most:.0%}): {reports.met(bar.met(off))}"
        )
    return found


def report(path: Path) -> int:
    """Write the table and the plot next to a result."""
    result = json.loads(path.read_text())
    s = result["settings"]
    speeds = {
        name: s["rows"] * s["seq_len"] / s["ranks"] / median(times)
        for name in result["contestants"]
        if (times := _seconds(result, name))
    }
    heights = (3.0, 0.45 * len(speeds) + 0.5)
    figure, panels = reports.panels(2, 1, sum(heights) + 1.3, height_ratios=heights)
    curves, bars = panels[:, 0]
    for name, losses in _curves(result).items():
        style = ":" if name in PEERS else "-"
        curves.plot(range(1, len(losses) + 1), losses, style, label=name, linewidth=1.2)
    curves.set_xlabel("step")
    curves.xaxis.get_major_locator().set_params(integer=True)
    curves.set_ylabel("loss, nats a token")
    distances = _distances(result)
    if distances and BARS["curves"].met(max(distances.values())):
        curves.set_title(f"{len(distances)} loss curves, at most {max(distances.values()):.1%} apart")
    else:
        curves.legend(fontsize=8)
    ordered = {name: speeds[name] for name in sorted(speeds, key=speeds.__getitem__, reverse=True)}
    ours = [name for name in ordered if name not in PEERS]
    reports.draw_bars(bars, ordered, ours, "throughput, tokens/s a GPU", digits=0)
    gpu = result["machine"].get("gpu", "CPU")
    reports.title(figure, f"{s['model']}, {s['ranks']} × {gpu}: Meshfold blue, FSDP2 grey")
    reports.save(figure, [described(result)], path)
    return 0
