"""Table, bars and plot of a result of the tensor-parallel benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.common import median, ratios
from benchmarks.tensor_parallel.contestants import COLOSSAL_AI, PEERS
from benchmarks.tensor_parallel.parts import ARITHMETIC, MESSAGES, OF, PARTS

BARS = reports.read_bars("tensor_parallel", ("dtensor", "fsdp2", "grid", "grid_memory", "colossal_ai", "hidden"))
JUDGED = dict(layers=8, hidden=4096, heads=32, kv_heads=8, ffn=14336, dtype="bfloat16")
"""The blocks that the bars are for."""
ONE_OF_FOUR = JUDGED | dict(heads=16, kv_heads=4, head_dim=128, ffn=7168)
"""The blocks that the bar of hidden communication is for: over two ranks each has the shapes of one of four."""
MANY = 8
"""2d is judged where there are at least so many tokens a hidden element."""


def table(result: dict[str, Any]) -> str:
    """Markdown: ratios first, then times and memory."""
    times = result["milliseconds"]
    teraflops = result["flops_per_step_per_rank"] / 1e9
    peers = [name for name in PEERS if name in times]
    power, tokens = result.get("power", {}), result["settings"]["batch"] * result["settings"]["seq_len"]
    head = ["contestant", *(f"{peer} ÷ this" for peer in peers), "ms", "TFLOP/s a rank", "peak GiB", "error"]
    rows = [
        [
            name,
            *(reports.ratio(values, times[peer]) for peer in peers),
            f"{median(values):.1f}",
            "–" if name == MESSAGES else f"{teraflops / median(values):.0f}",
            f"{result['peak_bytes'][name] / 2**30:.2f}",
            "–" if name in PARTS else f"{result['relative_error'][name]:.4f}",
            *(reports.energy(power.get(name), median(values), tokens) if any(power.values()) else ()),
        ]
        for name, values in times.items()
    ]
    head += reports.ENERGY if any(power.values()) else ()
    lines = [*reports.table(head, [*rows, *result["notes"].items()])]
    verdicts = [*bars(result), *hidden(result)]
    return "\n".join([*lines, "", *verdicts] if verdicts else lines)


def bars(result: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each aim that the contestants of a result can be judged by."""
    settings, times = result["settings"], result["milliseconds"]
    if any(settings.get(name) != value for name, value in JUDGED.items()):
        return
    ranks = settings["ranks"]

    def fastest(*prefixes: str) -> str | None:
        names = [name for name in times if name not in (*PEERS, *PARTS) and (not prefixes or name.startswith(prefixes))]
        return min(names, key=lambda name: median(times[name]), default=None)

    best = fastest()
    for key, peer in (("dtensor", "dtensor compiled"), ("fsdp2", "FSDP2 compiled")):
        if best and peer in times:
            yield BARS[key].line(ratios(times[best], times[peer])[0], ranks, best=best)
    grid, rival = fastest("2d"), fastest("1d+sequence")
    if grid and COLOSSAL_AI in times:
        yield BARS["colossal_ai"].line(ratios(times[grid], times[COLOSSAL_AI])[0], ranks, best=grid)
    if grid and rival and settings["batch"] * settings["seq_len"] >= MANY * settings["hidden"]:
        yield BARS["grid"].line(ratios(times[grid], times[rival])[0], ranks, best=grid, rival=rival)
        share, bar = result["peak_bytes"][grid] / result["peak_bytes"][rival], BARS["grid_memory"]
        aim = f" (bar {bar.most:g}): {reports.met(bar.met(share))}" if bar.judged(ranks) else ""
        yield f"- {bar.what.format(best=grid, rival=rival)}: {share:.3f}{aim}"


def hidden(result: dict[str, Any]) -> Iterator[str]:
    """Yield which fraction of the communication the fastest of 1D with sequence parallelism hides, uncompiled and compiled."""
    times = {name: median(values) for name, values in result["milliseconds"].items()}
    settings = result["settings"]
    judged = all(settings.get(name) == value for name, value in ONE_OF_FOUR.items())
    for suffix in ("", " compiled"):
        names = [name for name in times if name.startswith(OF) and name.endswith(" compiled") == bool(suffix)]
        best = min((name for name in names if name not in PARTS), key=times.__getitem__, default=None)
        if best and {f"{ARITHMETIC}{suffix}", MESSAGES} <= set(times):
            value = 1 - (times[best] - times[f"{ARITHMETIC}{suffix}"]) / times[MESSAGES]
            yield BARS["hidden"].line(value, settings["ranks"] if judged else 0, best=best)


def _in_words(name: str) -> str:
    """Return a contestant as the plot names it."""
    mode, _, rest = name.partition(" ")
    words = {
        "1d+sequence": "1D + sequence",
        "1d+tokens": "attention by tokens",
        "dtensor": "torch DTensor",
        "FSDP2": "torch FSDP2",
        "Colossal-AI": "Colossal-AI",
    }.get(mode, mode.upper())
    return f"{words} {rest}".strip()


def report(path: Path) -> int:
    """Write the table and the plot next to a result."""
    result = json.loads(path.read_text())
    times = {name: median(values) for name, values in result["milliseconds"].items()}
    names = sorted(times, key=times.__getitem__)
    ours = [name for name in names if name not in (*PEERS, *PARTS)]
    figure, panels = reports.panels(1, 2, 0.45 * len(names) + 1.4)
    left, right = panels[0]
    words = {name: _in_words(name) for name in names}
    ordered = {name: times[name] for name in names}
    reports.draw_bars(left, ordered, ours, "forward and backward, ms", words=words)
    peaks = {name: result["peak_bytes"][name] / 2**30 for name in names}
    reports.draw_bars(right, peaks, ours, "peak of GPU memory, GiB")
    right.set_yticks([])
    settings = result["settings"]
    gpu = result["machine"].get("gpu", "CPU")
    title = f"{settings['layers']} Llama blocks, {settings['ranks']} × {gpu}\nMeshfold blue, others grey"
    reports.title(figure, title)
    reports.save(figure, [_described(result), "", table(result)], path)
    return 0


def _described(result: dict[str, Any]) -> str:
    s, m = result["settings"], result["machine"]
    return (
        f"{s['layers']} blocks, hidden {s['hidden']}, {s['heads']} heads, {s['kv_heads']} key/value heads, "
        f"inner {s['ffn']}; "
        f"{s['batch']} × {s['seq_len']} tokens, {s['dtype']}, forward and backward; {s['ranks']} ranks, "
        f"{m.get('gpu', 'CPU')}, torch {m['torch']}, Triton {m['triton']}. Median of {s['rounds']} interleaved rounds; "
        f"ratios above 1 say that the row is faster than that peer (lowest and highest round in brackets)."
    )
