"""Table, bars and plot of a result of the pipeline benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import reports
from benchmarks.common import median, ratios
from benchmarks.pipeline.contestants import LIKE, OURS, PEERS

BARS = reports.read_bars("pipeline", ("same_schedule", "torch_1f1b", "torch_best", "bubble_points"))
BEHIND = (
    "ms",
    "TFLOP/s a rank",
    "peak GiB",
    "bubble",
    "simulated",
    "from costs of the run",
    "loss",
    "gradient norms off by",
)


def report(path: Path) -> int:
    """Write the table and the plot next to a result."""
    result = json.loads(path.read_text())
    reports.save(_drawn(result), [described(result)], path)
    return 0


def described(result: dict[str, Any]) -> str:
    """All cases in Markdown, the bars below each."""
    s, m = result["settings"], result["machine"]
    lines = [
        f"{s['layers']} Llama blocks, hidden {s['hidden']}, {s['heads']} heads, {s['kv_heads']} key/value heads, inner "
        f"{s['ffn']}, {s['vocab']} words; micro-batches of {s['rows']} × {s['seq_len']} tokens, {s['dtype']}, forward and "
        f"backward on {s['ranks']} ranks; {m.get('gpu', 'CPU')}, torch {m['torch']}, Triton {m['triton']}. Median of "
        "interleaved rounds, from a barrier to the end of the slowest rank; ratios above 1 say that the row is "
        "faster than that peer (lowest and highest round in brackets). The bubble is what events around the actions of "
        "every rank leave of the time to the last one's end; simulated: from costs of each stage by itself, and from the "
        f"durations in the run itself. A message takes {result['send_milliseconds']:.3f} ms."
    ]
    for microbatches, case in result["cases"].items():
        rounds = max((len(times) for times in case["milliseconds"].values()), default=0)
        lines += [
            "",
            f"## {microbatches} micro-batches, {rounds} rounds",
            "",
            *_table(case, int(microbatches) * s["rows"] * s["seq_len"]),
            "",
            *bars(case, s["ranks"]),
        ]
    return "\n".join([*lines, *reports.notes(result.get("notes", {}), "why not")])


def _table(case: dict[str, Any], tokens: int) -> list[str]:
    peers = [name for name in case["milliseconds"] if name.startswith("torch")]
    head = (
        "contestant",
        *(f"{peer} ÷ this" for peer in peers),
        *BEHIND,
        *(reports.ENERGY if case.get("power") else ()),
    )
    return reports.table(head, (_row(case, name, peers, tokens) for name in case["milliseconds"]))


def _row(case: dict[str, Any], name: str, peers: list[str], tokens: int) -> list[str]:
    times, bubble, power = case["milliseconds"], case["bubbles"].get(name), case.get("power", {})
    found = power.get(name)
    shares = ("measured", "simulated", "simulated_from_run")
    return [
        name,
        *(reports.ratio(times[name], times[peer]) for peer in peers),
        f"{median(times[name]):.1f}",
        f"{case['flops_per_rank'] / median(times[name]) / 1e9:.0f}",
        f"{case['peak_bytes'][name] / 2**30:.2f}",
        *(f"{bubble[share]:.1%}" if bubble else "–" for share in shares),
        f"{case['loss'][name]:.4f}",
        f"{case['norm_error'][name]:.1e}",
        *(reports.energy(found, found["milliseconds"] if found else 0.0, tokens) if power else ()),
    ]


def bars(case: dict[str, Any], ranks: int) -> list[str]:
    """Return a line for each aim: the value and the verdict, or the value alone where the aim is for other ranks."""
    times = case["milliseconds"]
    found = reports.not_judged(BARS, ranks)

    def faster(one: str, other: str) -> float:
        return ratios(times[one], times[other])[0]

    for ours, peer in LIKE.items():
        if ours in times and peer in times:
            found.append(BARS["same_schedule"].line(faster(ours, peer), ranks, ours=ours, peer=peer))
        one, other = f"{ours} compiled", f"{peer} compiled"
        if one in times and other in times:
            found.append(f"- {one} against {other}: {faster(one, other):.3f} (no bar)")
    best = _best(times, OURS)
    rival = _best(times, [peer for peer in PEERS if peer != "torch 1f1b"])
    if best and "torch 1f1b" in times:
        found.append(BARS["torch_1f1b"].line(faster(best, "torch 1f1b"), ranks, best=best))
    if best and rival:
        found.append(BARS["torch_best"].line(faster(best, rival), ranks, best=best, rival=rival))
    for name, bubble in case["bubbles"].items():
        off = 100 * abs(bubble["measured"] - bubble["simulated"])
        points = BARS["bubble_points"]
        what = f"- {points.what.format(name=name)}: {off:.1f} points from the simulator's"
        verdict = f" (bar {points.most:g}): {reports.met(points.met(off))}"
        found.append(what + verdict if points.judged(ranks) else what)
    for name in times:
        plain = name.removesuffix(" compiled")
        if plain != name and plain in times:
            found.append(f"- compiling {plain}: {faster(name, plain):.3f} times as fast")
    return found


def _best(times: dict[str, list[float]], names: Any) -> str | None:
    return min((name for name in names if name in times), key=lambda name: median(times[name]), default=None)


def _drawn(result: dict[str, Any]) -> Any:
    """For each number of micro-batches times and peaks."""
    cases = result["cases"]
    most = max((len(case["milliseconds"]) for case in cases.values()), default=1)
    figure, panels = reports.panels(len(cases), 2, len(cases) * (0.45 * most + 0.9) + 0.6)
    for (left, right), (microbatches, case) in zip(panels, cases.items(), strict=True):
        times = {name: median(values) for name, values in case["milliseconds"].items()}
        names = sorted(times, key=times.__getitem__)
        ours = [name for name in names if not name.startswith("torch")]
        ordered = {name: times[name] for name in names}
        reports.draw_bars(left, ordered, ours, "forward and backward, ms", digits=0)
        peaks = {name: case["peak_bytes"][name] / 2**30 for name in names}
        reports.draw_bars(right, peaks, ours, "memory of the fullest GPU, GiB")
        left.set_title(f"{microbatches} micro-batches")
        right.set_yticks([])
    s = result["settings"]
    gpu = result["machine"].get("gpu", "CPU")
    reports.title(figure, f"{s['layers']} Llama blocks, {s['ranks']} × {gpu}\nMeshfold blue, torch grey")
    return figure
