"""Table, bars and plot of a result of the pipeline benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import median, ratios
from benchmarks.pipelining.contestants import LIKE, OURS, PEERS

AIMED_AT = 4
"""ranks that the bars are for"""
BEHIND = ("ms", "TFLOP/s a rank", "peak GiB", "bubble", "simulated", "from costs of the run", "loss",
          "gradient norms off by")  # fmt: skip


def report(path: Path) -> int:
    """Write the table and the plot next to a result."""
    result = json.loads(path.read_text())
    path.with_suffix(".md").write_text(described(result) + "\n")
    _draw(path.with_suffix(".png"), result)
    print(f"wrote {path.with_suffix('.md')} and {path.with_suffix('.png')}")
    return 0


def described(result: dict[str, Any]) -> str:
    """All cases in Markdown, the bars below each."""
    s, m = result["settings"], result["machine"]
    lines = [
        f"{s['layers']} Llama blocks, hidden {s['hidden']}, {s['heads']} heads, {s['kv_heads']} key/value heads, inner "
        f"{s['ffn']}, {s['vocab']} words; micro-batches of {s['rows']} × {s['seq_len']} tokens, {s['dtype']}, forward and "
        f"backward on {s['ranks']} ranks; {m.get('gpu', 'CPU')}, torch {m['torch']}, Triton {m['triton']}. Median of "
        f"{s['rounds']} interleaved rounds, from a barrier to the end of the slowest rank; ratios above 1 say that the row is "
        "faster than that peer (lowest and highest round in brackets). The bubble is what events around the actions of "
        "every rank leave of the time to the last one's end; simulated: from costs of each stage by itself, and from the "
        f"durations in the run itself. A message takes {result['send_milliseconds']:.3f} ms."
    ]
    for microbatches, case in result["cases"].items():
        lines += ["", f"## {microbatches} micro-batches", "", *_table(case), "", *bars(case, s["ranks"])]
    if result.get("notes"):
        lines += ["", "| contestant | why not |", "| --- | --- |"]
        lines += [f"| {name} | {note.replace('|', '/')} |" for name, note in result["notes"].items()]
    return "\n".join(lines)


def _table(case: dict[str, Any]) -> Iterator[str]:
    times = case["milliseconds"]
    peers = [name for name in times if name.startswith("torch")]
    head = ("contestant", *(f"{peer} ÷ this" for peer in peers), *BEHIND)
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for name, values in times.items():
        against = []
        for peer in peers:
            found = ratios(values, times[peer])
            against.append(f"{found[0]:.3f} ({found[1]:.3f}–{found[2]:.3f})")
        bubble = case["bubbles"].get(name)
        shares = ("measured", "simulated", "simulated_from_run")
        cells = [
            name,
            *against,
            f"{median(values):.1f}",
            f"{case['flops_per_rank'] / median(values) / 1e9:.0f}",
            f"{case['peak_bytes'][name] / 2**30:.2f}",
            *(f"{bubble[share]:.1%}" if bubble else "–" for share in shares),
            f"{case['loss'][name]:.4f}",
            f"{case['norm_error'][name]:.1e}",
        ]
        yield "| " + " | ".join(cells) + " |"


def bars(case: dict[str, Any], ranks: int) -> list[str]:
    """What was aimed at, and whether it was reached: aims are for four ranks, elsewhere there are only the ratios."""
    times = case["milliseconds"]
    found = (
        [] if ranks == AIMED_AT else [f"- the bars are for {AIMED_AT} ranks and are not judged on {ranks}"]
    )
    for ours, peer in LIKE.items():
        if ours in times and peer in times:
            ratio = ratios(times[ours], times[peer])[0]
            found.append(_bar(f"{ours} against {peer}", ratio, 1.0, ranks))
        one, other = f"{ours} compiled", f"{peer} compiled"
        if one in times and other in times:
            found.append(f"- {one} against {other}: {ratios(times[one], times[other])[0]:.3f} (no bar)")
    best = _best(times, OURS)
    if best and "torch 1f1b" in times:
        found.append(
            _bar(
                f"our best ({best}) against torch 1f1b",
                ratios(times[best], times["torch 1f1b"])[0],
                1.2,
                ranks,
            )
        )
    rival = _best(times, [peer for peer in PEERS if peer != "torch 1f1b"])
    if best and rival:
        found.append(
            _bar(
                f"our best ({best}) against torch's best ({rival})",
                ratios(times[best], times[rival])[0],
                1.03,
                ranks,
            )
        )
    for name, bubble in case["bubbles"].items():
        off = 100 * abs(bubble["measured"] - bubble["simulated"])
        what = f"- bubble of {name}: {off:.1f} points from the simulator's"
        found.append(f"{what} (bar 3): {_met(off <= 3)}" if ranks == AIMED_AT else what)
    for name in times:
        plain = name.removesuffix(" compiled")
        if plain != name and plain in times:
            found.append(f"- compiling {plain}: {ratios(times[name], times[plain])[0]:.3f} times as fast")
    return found


def _best(times: dict[str, list[float]], names: Any) -> str | None:
    return min((name for name in names if name in times), key=lambda name: median(times[name]), default=None)


def _bar(what: str, ratio: float, bar: float, ranks: int) -> str:
    if ranks != AIMED_AT:
        return f"- {what}: {ratio:.3f}"
    return f"- {what}: {ratio:.3f} (bar {bar:g}): {_met(ratio >= bar)}"


def _met(yes: bool) -> str:
    return "met" if yes else "**not met**"


def _draw(path: Path, result: dict[str, Any]) -> None:
    """For each number of micro-batches times and peaks; ours blue."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cases = result["cases"]
    most = max((len(case["milliseconds"]) for case in cases.values()), default=1)
    figure, panels = plt.subplots(
        len(cases), 2, figsize=(11, len(cases) * (0.34 * most + 1.3)), squeeze=False, layout="constrained"
    )
    for (left, right), (microbatches, case) in zip(panels, cases.items(), strict=True):
        times = case["milliseconds"]
        names = sorted(times, key=lambda name: median(times[name]))
        colours = ["#888888" if name.startswith("torch") else "#2266bb" for name in names]
        left.barh(names, [median(times[name]) for name in names], color=colours)
        left.set_xlabel("ms a step (forward + backward)")
        left.set_title(f"{microbatches} micro-batches", loc="left")
        right.barh(names, [case["peak_bytes"][name] / 2**30 for name in names], color=colours)
        right.set_xlabel("peak GiB, fullest rank")
        right.set_yticks([])
        for panel in (left, right):
            panel.invert_yaxis()
            panel.bar_label(panel.containers[0], fmt="%.1f", padding=3)
            panel.margins(x=0.15)
            panel.spines[["top", "right"]].set_visible(False)
    s = result["settings"]
    figure.suptitle(
        f"{s['layers']} Llama blocks, {s['ranks']} × {result['machine'].get('gpu', 'CPU')}: ours blue, torch grey"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
