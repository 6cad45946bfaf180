"""Time, traffic and memory of each way to split a model from 4 to 4096 ranks: strong and weak scaling, simulated in a minute.

`meshfold bench growth` traces layers on simulated ranks, times them by the planner's clock on `--machine` (a name, or a file of
`meshfold calibrate`), and writes JSON, a page and a plot. No GPU and no process is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks import reports
from benchmarks.common import add_output, check_out, write
from benchmarks.growth.curves import RANKS, WAYS, curve
from experiments import plotting
from meshfold.planner import find_machine

_COLOURS = dict(
    zip(
        WAYS,
        (
            *("#b8b8b8", "#555555", plotting.BROWN, plotting.PURPLE),
            *(plotting.RED, "#e08a8f", plotting.BLUE, "#7fb0ea", plotting.GREEN),
        ),
        strict=True,
    )
)
KINDS = {
    "strong": "Strong scaling: 103 billion parameters, 1,024 sequences of 512 tokens",
    "weak": "Weak scaling: 1 billion parameters on 4 ranks to 1,031 billion on 4,096, the same batch",
}


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench growth`."""
    parser = argparse.ArgumentParser(prog="meshfold bench growth", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--machine", default="h100x8", metavar="NAME|FILE", help="(h100x8)")
    parser.add_argument(
        "--ranks", type=int, default=RANKS[-1], help=f"the most ranks (of {', '.join(map(str, RANKS))})"
    )
    add_output(parser, "growth")
    args = parser.parse_args(argv)
    if args.report is None:
        if args.ranks < RANKS[0]:
            raise SystemExit(f"--ranks {args.ranks}: curves begin at {RANKS[0]} ranks")
        check_out(args.out)
        machine = find_machine(args.machine)
        points = [point for kind in KINDS for point in curve(kind, machine, args.ranks)]
        write(args.out, {"area": "growth", "machine": machine.name, "memory": machine.memory, "points": points})
    return report(args.report or args.out)


def report(path: Path) -> int:
    """Write the page and the plot next to a result."""
    result = json.loads(path.read_text())
    reports.save(_drawn(result), [described(result, path.with_suffix(".png").name)], path)
    return 0


def fastest(result: Mapping[str, Any], kind: str) -> dict[int, tuple[str, str]]:
    """Return by ranks the fastest way, and the fastest of those that fit in memory; empty if none does."""
    found = {}
    for ranks in sorted({point["ranks"] for point in result["points"] if point["kind"] == kind}):
        here = [point for point in result["points"] if (point["kind"], point["ranks"]) == (kind, ranks)]
        fitting = [point for point in here if point["fits"]]
        first = [min(some, key=lambda one: one["seconds"])["way"] if some else "" for some in (here, fitting)]
        found[ranks] = (first[0], first[1])
    return found


def described(result: Mapping[str, Any], plot: str = "growth.png") -> str:
    """Return the page, which shows ``plot``: for both kinds, which way is fastest, then seconds, traffic and memory by ranks."""
    lines = [
        "# Growth curves",
        "",
        f"Simulated on {result['machine']} by `meshfold bench growth`: transformer layers in bf16 with recomputation, AdamW, "
        "traced on simulated ranks and timed by the planner's clock. All ranks split one model in one way, which nobody would "
        "do with thousands: the curves show where each way ends, and specs combine them. *Efficiency* is the share of the rate "
        "of matmuls that is progress. A way without a number has fewer heads, rows or layers than ranks. The whole batch is one "
        "micro-step, so that memory is the most that it can be; *fits* is in the memory of a device.",
        "",
        f"![Efficiency and traffic by ranks]({plot})",
    ]
    for kind, title in KINDS.items():
        points = {(point["way"], point["ranks"]): point for point in result["points"] if point["kind"] == kind}
        ranks = sorted({count for _, count in points})
        wins = fastest(result, kind)
        lines += ["", f"## {title}", ""]
        head = ("ranks", *(f"{count:,}" for count in ranks))
        rows = [
            ("fastest", *(wins[count][0] for count in ranks)),
            ("that fits", *(wins[count][1] or "–" for count in ranks)),
        ]
        lines += reports.table(head, rows)
        for name, unit, key, scale in (
            ("efficiency", "%", "efficiency", 0.01),
            ("seconds a step", "s", "seconds", 1.0),
            ("sent by a rank in a step", "GiB", "sent", 2.0**30),
            ("held by a rank", "GiB", "held", 2.0**30),
        ):
            cells = [
                (way, *(_cell(points.get((way, count)), key, scale) for count in ranks))
                for way in WAYS
                if any((way, count) in points for count in ranks)
            ]
            lines += ["", *reports.table((f"{name}, {unit}", *head[1:]), cells)]
    return "\n".join(lines)


def _cell(point: Mapping[str, Any] | None, key: str, scale: float) -> str:
    """Return a number of a point; memory says whether it fits."""
    if point is None:
        return ""
    value = point[key] / scale
    number = f"{value:.0f}" if key == "efficiency" else f"{value:,.3g}"
    return number + (" fits" if key == "held" and point["fits"] else "")


def _drawn(result: Mapping[str, Any]) -> Any:
    """Draw efficiency and traffic by ranks, for both kinds."""
    figure, panels = reports.panels(4, 1, 13.0)
    for number, (kind, title) in enumerate(KINDS.items()):
        for panel, key, scale, label in (
            (panels[2 * number][0], "efficiency", 1.0, "efficiency"),
            (panels[2 * number + 1][0], "sent", 2.0**30, "GiB that a rank sends in a step"),
        ):
            for way in WAYS:
                line = [
                    (point["ranks"], point[key] / scale)
                    for point in result["points"]
                    if (point["kind"], point["way"]) == (kind, way)
                ]
                if line:
                    panel.plot(
                        [x for x, _ in line], [y for _, y in line], "o-", color=_COLOURS[way], lw=1.5, ms=3, label=way
                    )
            panel.set(xscale="log", xlabel="ranks", ylabel=label, xticks=RANKS, xticklabels=RANKS)
            panel.minorticks_off()
            if key == "sent":
                panel.set_yscale("log")
            else:
                panel.set_title(title.partition(":")[0])
                panel.set_ylim(bottom=0)
                if number == 0:  # the same colours below
                    panel.legend(fontsize=7, ncols=3)
    return figure


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
