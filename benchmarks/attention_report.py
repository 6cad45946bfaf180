"""Table, bars and plot of a result of the attention benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import median, ratios

DEFAULT = "torch default"
AIMED_AT = 4
"""ranks that the bars are for"""


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
            *_table(result, case),
            "",
            *bars(case, s["kernels"], s["ranks"]),
        ]
    if result["notes"]:
        lines += ["", "| contestant | note |", "| --- | --- |"]
        lines += [f"| {name} | {note.replace('|', '/')} |" for name, note in result["notes"].items()]
    return "\n".join(lines)


def _table(result: dict[str, Any], case: dict[str, Any]) -> Iterator[str]:
    times = case["milliseconds"]
    peers = [name for name in times if name.startswith("torch")]
    head = ["contestant", *(f"{peer} ÷ this" for peer in peers), "ms", "TFLOP/s a rank", "peak GiB", "error"]
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for name, values in times.items():
        against = []
        for peer in peers:
            middle, low, high = ratios(values, times[peer])
            against.append(f"{middle:.3f} ({low:.3f}–{high:.3f})")
        middle = median(values)
        yield (
            f"| {' | '.join([name, *against])} | {middle:.2f} | {case['flops_per_rank'] / middle / 1e9:.0f} | "
            f"{case['peak_bytes'][name] / 2**30:.2f} | {result['relative_error'][name]:.5f} |"
        )


def bars(case: dict[str, Any], kernels: Sequence[str], ranks: int) -> list[str]:
    """What was aimed at, and whether it was reached: aims are for four ranks, elsewhere there are only the ratios."""
    times = case["milliseconds"]
    ours = [name for name in times if not name.startswith("torch")]
    found = (
        [] if ranks == AIMED_AT else [f"- the bars are for {AIMED_AT} ranks and are not judged on {ranks}"]
    )
    if ours and DEFAULT in times:
        best = min(ours, key=lambda name: median(times[name]))
        found.append(
            _bar(
                f"our best ({best}) against torch's default",
                ratios(times[best], times[DEFAULT])[0],
                1.3,
                ranks,
            )
        )
    for kernel in kernels:
        same = [name for name in ours if name.endswith(f" {kernel}")]
        if same and f"torch {kernel}" in times:
            best = min(same, key=lambda name: median(times[name]))
            ratio = ratios(times[best], times[f"torch {kernel}"])[0]
            what = f"our best with {kernel} ({best}) against torch's with {kernel}"
            found.append(_bar(what, ratio, 1.05, ranks))
        if f"ring {kernel}" in times and f"ring contiguous {kernel}" in times:
            ratio = ratios(times[f"ring {kernel}"], times[f"ring contiguous {kernel}"])[0]
            found.append(_bar(f"zigzag against the contiguous split, {kernel}", ratio, 1.5, ranks))
    return found


def _bar(what: str, ratio: float, bar: float, ranks: int) -> str:
    if ranks != AIMED_AT:
        return f"- {what}: {ratio:.3f}"
    return f"- {what}: {ratio:.3f} (bar {bar:g}): {'met' if ratio >= bar else '**not met**'}"


def report(path: Path) -> int:
    """Write the table and the plot next to a result."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    result = json.loads(path.read_text())
    path.with_suffix(".md").write_text(described(result) + "\n")
    cases = result["cases"]
    most = max((len(case["milliseconds"]) for case in cases.values()), default=1)
    figure, panels = plt.subplots(
        1, len(cases), figsize=(5.5 * len(cases), 0.34 * most + 1.6), squeeze=False, layout="constrained"
    )
    for panel, (length, case) in zip(panels[0], cases.items(), strict=True):
        times = case["milliseconds"]
        names = sorted(times, key=lambda name: median(times[name]))
        colours = ["#888888" if name.startswith("torch") else "#2266bb" for name in names]
        panel.barh(
            names, [case["flops_per_rank"] / median(times[name]) / 1e9 for name in names], color=colours
        )
        panel.set_xlabel("TFLOP/s a rank (forward + backward)")
        panel.set_title(f"{int(length):,} tokens", loc="left")
        panel.invert_yaxis()
        panel.bar_label(panel.containers[0], fmt="%.0f", padding=3)
        panel.margins(x=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{result['settings']['ranks']} × {result['machine'].get('gpu', 'CPU')}: ours blue, torch grey"
    )
    figure.savefig(path.with_suffix(".png"), dpi=130)
    plt.close(figure)
    print(f"wrote {path.with_suffix('.md')} and {path.with_suffix('.png')}")
    return 0
