"""Table, bars and plot of a result of the attention benchmark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.common import median, ratios

DEFAULT = "torch default"
BARS = reports.read_bars("attention", ("default", "same_kernel", "zigzag"))


def described(result: dict[str, Any]) -> str:
    """All lengths in Markdown, the bars below each."""
    s, m = result["settings"], result["machine"]
    lines = [
        f"Causal attention, {s['heads']} heads of queries, {s['kv_heads']} of keys and values, {s['head_dim']} wide, "
        f"{s['dtype']}, one sequence over {s['ranks']} ranks, forward and backward; {m.get('gpu', 'CPU')}, torch "
        f"{m['torch']}, Triton {m['triton']}. Median of {s['rounds']} interleaved rounds of {s['repeats']}, the slowest rank; "
        "ratios above 1 say that the row is faster than that peer (lowest and highest round in brackets). TFLOP/s count "
        f"seven products over the pairs that are seen. Error: against one process in float32 at {s['check_length']} tokens, "
        "the largest of output, dQ, dK and dV. torch has its own load balancing on."
    ]
    for length, case in result["cases"].items():
        lines += [
            "",
            f"## {int(length):,} tokens",
            "",
            *_table(result, case, int(length)),
            "",
            *bars(case, s["kernels"], s["ranks"]),
        ]
    return "\n".join([*lines, *reports.notes(result["notes"])])


def _table(result: dict[str, Any], case: dict[str, Any], tokens: int) -> list[str]:
    times = case["milliseconds"]
    peers = [name for name in times if name.startswith("torch")]
    power = case.get("power", {})
    head = ["contestant", *(f"{peer} ÷ this" for peer in peers), "ms", "TFLOP/s a rank", "peak GiB", "error"]
    head += reports.ENERGY if power else ()
    return reports.table(
        head,
        (
            [
                name,
                *(reports.ratio(values, times[peer]) for peer in peers),
                f"{median(values):.2f}",
                f"{case['flops_per_rank'] / median(values) / 1e9:.0f}",
                f"{case['peak_bytes'][name] / 2**30:.2f}",
                f"{result['relative_error'][name]:.5f}",
                *(
                    reports.energy(found := power.get(name), found["milliseconds"] if found else 0.0, tokens)
                    if power
                    else ()
                ),
            ]
            for name, values in times.items()
        ),
    )


def bars(case: dict[str, Any], kernels: Sequence[str], ranks: int) -> list[str]:
    """Return a line for each aim: the ratio and the verdict, or the ratio alone where the aim is for other ranks."""
    times = case["milliseconds"]
    ours = [name for name in times if not name.startswith("torch")]
    found = reports.not_judged(BARS, ranks)

    def add(bar: str, one: str, other: str, kernel: str = "") -> None:
        value = ratios(times[one], times[other])[0]
        found.append(BARS[bar].line(value, ranks, best=one, kernel=kernel))

    if ours and DEFAULT in times:
        best = min(ours, key=lambda name: median(times[name]))
        add("default", best, DEFAULT)
    for kernel in kernels:
        same = [name for name in ours if name.endswith(f" {kernel}")]
        if same and f"torch {kernel}" in times:
            best = min(same, key=lambda name: median(times[name]))
            add("same_kernel", best, f"torch {kernel}", kernel)
        if f"ring {kernel}" in times and f"ring contiguous {kernel}" in times:
            add("zigzag", f"ring {kernel}", f"ring contiguous {kernel}", kernel)
    return found


def _in_words(name: str) -> str:
    """Return a contestant as the plot names it: the scheme, then the kernel."""
    scheme, _, kernel = name.rpartition(" ")
    scheme = scheme.replace("ring_ulysses", "ring + Ulysses").replace("ulysses", "Ulysses")
    return f"{scheme}, {kernel.replace('cudnn', 'cuDNN')} kernel"


def report(path: Path) -> int:
    """Write the table and the plot next to a result."""
    result = json.loads(path.read_text())
    cases = result["cases"]
    most = max((len(case["milliseconds"]) for case in cases.values()), default=1)
    figure, panels = reports.panels(len(cases), 1, len(cases) * (0.45 * most + 0.9) + 0.6)
    for panel, (length, case) in zip(panels[:, 0], cases.items(), strict=True):
        times = case["milliseconds"]
        names = sorted(times, key=lambda name: median(times[name]))
        speeds = {name: case["flops_per_rank"] / median(times[name]) / 1e9 for name in names}
        ours = [name for name in names if not name.startswith("torch")]
        words = {name: _in_words(name) for name in names}
        reports.draw_bars(panel, speeds, ours, "TFLOP/s of a rank, forward + backward", digits=0, words=words)
        panel.set_title(f"{int(length):,} tokens")
    gpu = result["machine"].get("gpu", "CPU")
    reports.title(figure, f"{result['settings']['ranks']} × {gpu}: Meshfold blue, torch grey")
    reports.save(figure, [described(result)], path)
    return 0
