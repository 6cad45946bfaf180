"""Table, plot and verdicts of a result of `meshfold bench fp8-curve`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.fp8 import BARS
from benchmarks.reports import JOULES, joules, mean_power, met, panels, save, table
from experiments import plotting

SIZES = dict(hidden=1536, heads=12, kv_heads=4, ffn=4096, layers=18, words=16_384, rows=4, length=1024, steps=1000)
RULES = dict(warmup=100, held=64, window=50, settled=100, max_bytes=1 << 26)
"""With SIZES: what the bars are for."""
BF16 = "bf16"
_ROUNDED = " again, weights rounded ({})"

Run = Mapping[str, Any]
"""One training: its ``losses``, the ``final`` one on held-out text, times and power."""


def name_of(precision: str, rounding: int) -> str:
    """Return the name of a run; ``rounding``: seed by which its initial weights were rounded, 0 for none."""
    return precision + (_ROUNDED.format(rounding) if rounding else "")


def rounding_of(name: str) -> int:
    """Return the rounding of :func:`name_of`."""
    return int(name.rpartition("(")[2].rstrip(")")) if " again, " in name else 0


def means(losses: Sequence[float], settings: Mapping[str, Any]) -> list[float]:
    """Return the mean loss of each window of steps, from the first step on; steps beyond the last whole window are left out."""
    window = settings["window"]
    return [sum(losses[at : at + window]) / window for at in range(0, len(losses) - window + 1, window)]


def distances(run: Run, bf16: Run, settings: Mapping[str, Any]) -> tuple[float, float, int]:
    """Return how far a run is from bf16's, relative to it: in the final loss, in the worst window, and where that begins.

    Windows that begin in the first ``settled`` steps do not count. A loss that is not finite is infinitely far.
    """
    worst, at = 0.0, settings["settled"]
    for number, (one, other) in enumerate(
        zip(means(run["losses"], settings), means(bf16["losses"], settings), strict=True)
    ):
        if number * settings["window"] >= settings["settled"] and not _apart(one, other) <= worst:
            worst, at = _apart(one, other), number * settings["window"]
    return _apart(run["final"], bf16["final"]), worst, at


def bias(run: Run, bf16: Run, settings: Mapping[str, Any]) -> float:
    """Return the mean loss after the first ``settled`` steps, relative to bf16's, with its sign: chance mostly cancels in it."""
    settled = settings["settled"]
    one, other = (sum(each["losses"][settled:]) for each in (run, bf16))
    return float(one / other - 1.0)


def _apart(one: float, other: float) -> float:
    found = abs(one / other - 1.0)
    return found if found == found else float("inf")


def average(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the mean curve of several runs: their mean loss at each step, and their mean final loss."""
    losses = [mean(at) for at in zip(*(run["losses"] for run in runs), strict=True)]
    return dict(losses=losses, final=mean(run["final"] for run in runs))


def standard_error(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the standard error of the difference of two means over pairs of runs, relative to the second; NaN for one pair."""
    if len(ones) < 2:
        return float("nan")
    apart = [one - other for one, other in zip(ones, others, strict=True)]
    return float(stdev(apart) / len(apart) ** 0.5 / abs(mean(others)))


class Pairs:
    """Runs of one precision beside those in bf16 from the same weights and on the same batches.

    Attributes:
        name: of the precision.
        count: of pairs.
        final, worst: the distances of the two mean curves, as :func:`distances` returns them; ``step``: where the worst begins.
        bias: of the two mean curves, as :func:`bias` returns it.
        errors: the standard errors of ``final``, ``worst`` and ``bias``.
        mean: the mean curve.
    """

    def __init__(self, name: str, runs: Sequence[Run], bf16: Sequence[Run], settings: Mapping[str, Any]) -> None:
        self.name, self.count = name, len(runs)
        self.mean, other = average(runs), average(bf16)
        self.final, self.worst, self.step = distances(self.mean, other, settings)
        self.bias = bias(self.mean, other, settings)
        window = slice(self.step, self.step + settings["window"])
        settled = slice(settings["settled"], None)
        self.errors = (
            standard_error([run["final"] for run in runs], [run["final"] for run in bf16]),
            *(
                standard_error(
                    [mean(run["losses"][steps]) for run in runs], [mean(run["losses"][steps]) for run in bf16]
                )
                for steps in (window, settled)
            ),
        )

    def cells(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return a row of the table of mean curves."""
        final, worst, whole = (f"{error:.2%}" for error in self.errors)
        return (
            self.name,
            str(self.count),
            f"{means(self.mean['losses'], settings)[-1]:.4f}",
            f"{self.mean['final']:.4f}",
            f"{self.final:.2%} ± {final}",
            f"{self.worst:.2%} ± {worst} at {self.step:,}",
            f"{self.bias:+.2%} ± {whole}",
        )


def pairs_of(runs: Mapping[str, Run], settings: Mapping[str, Any]) -> list[Pairs]:
    """Return the pairs of each precision of which several runs have one in bf16 from the same weights."""
    found: dict[str, list[tuple[Run, Run]]] = {}
    for name, run in runs.items():
        precision, rounding = name.partition(" again, ")[0], rounding_of(name)
        if precision != BF16 and name_of(BF16, rounding) in runs:
            found.setdefault(precision, []).append((run, runs[name_of(BF16, rounding)]))
    return [
        Pairs(precision, [one for one, _ in pairs], [other for _, other in pairs], settings)
        for precision, pairs in found.items()
        if len(pairs) > 1
    ]


def halves(runs: Mapping[str, Run], settings: Mapping[str, Any]) -> float:
    """Return the worst distance between the mean curves of two halves of the runs in bf16; NaN for fewer than four."""
    bf16 = [run for name, run in runs.items() if name.startswith(BF16)]
    half = len(bf16) // 2
    if half < 2:
        return float("nan")
    return distances(average(bf16[half : 2 * half]), average(bf16[:half]), settings)[1]


def verdict_on(bar: str, value: float, error: float) -> str:
    """Return the verdict on the distance of two mean curves, and whether so many runs can tell."""
    found, most = met(BARS[bar].met(value)), BARS[bar].most
    unclear = abs(value - most) <= 2 * error
    return f"{found}, but within two standard errors of the bar: more runs can tell" if unclear else found


def report(path: Path) -> None:
    """Write the table and the plot beside a result, and print the table."""
    found = json.loads(path.read_text())
    settings, runs = found["settings"], found["runs"]
    if BF16 not in runs:
        print(f"{path}: has no run '{BF16}' from weights as they are; --report with the other parts makes the table")
        return
    bf16 = runs[BF16]
    judged = all(settings[name] == value for name, value in {**SIZES, **RULES}.items())
    pairs = pairs_of(runs, settings)
    single = judged and not pairs
    head, rows, lines = _single_runs(runs, settings, judged=single)
    again = [name for name in runs if name.startswith(BF16) and name != BF16]
    window = settings["window"]
    several = []
    if pairs:
        several = [
            "",
            "Mean curves: at each step the mean loss of all runs, beside that of the runs in bf16 from the same weights. ± is one "
            "standard error of the difference, from the differences of the pairs. The worst of many means is largest in part by "
            "chance.",
            "",
            *table(
                (
                    "mean of runs",
                    "pairs",
                    f"mean of the last {window}",
                    "held-out text",
                    "its distance",
                    f"worst mean of {window}",
                    "mean of all",
                ),
                [each.cells(settings) for each in pairs],
            ),
        ]
        lines = [line for each in pairs for line in _verdicts(each, judged)]
        if (chance := halves(runs, settings)) == chance:
            lines.append(f"- bf16 against itself, the mean curves of two halves of its runs: {chance:.2%} at worst")
    lines = [
        f"Measured on: {', '.join(f'{key} {value}' for key, value in found['machine'].items() if value is not None)}.",
        "",
        f"A Llama of {bf16['parameters'] / 1e6:,.3g} million parameters ({settings['layers']} layers, hidden "
        f"{settings['hidden']:,}, ffn {settings['ffn']:,}), {settings['steps']:,} steps of {settings['rows']} × "
        f"{settings['length']:,} tokens of {found['text_tokens']:,}, AdamW at {settings['lr']:g}, compiled by "
        f"{settings['backend']}. Distances are relative to bf16; the first {settings['settled']} steps do not count in them.",
        *(
            [
                "",
                "Runs called *again* are from the same weights rounded to bf16 at random, on the same batches: what chance makes "
                "of one rounding. One in fp8 is compared with the one in bf16 from the same rounded weights. *Mean of all*: of all "
                "losses that count, with its sign."
                if pairs
                else "Runs called *again* are in bf16, too, from the same weights rounded to bf16 at random, on the same batches: "
                "what chance makes of one rounding. *Mean of all*: of all losses that count, with its sign.",
            ]
            if again
            else []
        ),
        *several,
        "",
        *table(head, rows),
        "",
        *lines,
    ]
    print("\n".join(lines))
    try:
        figure = draw_curves(runs, settings)
    except ImportError:
        print("no plot: matplotlib is missing; pip install 'meshfold[plot]'", file=sys.stderr)
        path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        save(figure, lines, path)


def _single_runs(
    runs: Mapping[str, Run], settings: Mapping[str, Any], *, judged: bool
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Return head and rows of the table of single runs, and their verdicts if they are ``judged``."""
    bf16, rows, lines = runs[BF16], [], []
    controls = [distances(run, bf16, settings) for name, run in runs.items() if name.startswith(f"{BF16} again")]
    sampled, tokens = any("watts" in run for run in runs.values()), settings["rows"] * settings["length"]
    for name, run in runs.items():
        power = joules(mean_power([run]), run["step_ms"] / 1e3, tokens) if sampled else ()
        other = bf16 if name.startswith(BF16) else runs.get(name_of(BF16, rounding_of(name)), bf16)
        final, worst, step = distances(run, other, settings)
        cells = (f"{run['losses'][0]:.3f}", f"{means(run['losses'], settings)[-1]:.4f}", f"{run['final']:.4f}")
        apart = (f"{final:.2%}", f"{worst:.2%} at {step:,}", f"{bias(run, other, settings):+.2%}")
        if run is bf16:
            apart = ("–",) * 3
        rows.append((name, *cells, *apart, f"{run['step_ms']:.1f}", f"{run['seconds']:.0f}", *power))
        if not name.startswith(BF16) and judged:
            for number, (bar, value) in enumerate((("final", final), ("means", worst))):
                what = BARS[bar].what.format(name=name, step=step)
                chance = f"; bf16 again: {max(each[number] for each in controls):.2%}" if controls else ""
                lines.append(f"- {what}: {value:.2%} (bar {BARS[bar].most:.1%}{chance}): {met(BARS[bar].met(value))}")
    head = (
        "run",
        "loss of the first step",
        f"mean of the last {settings['window']}",
        "held-out text",
        "its distance",
        f"worst mean of {settings['window']}",
        "mean of all",
        "ms a step",
        "seconds",
        *(JOULES if sampled else ()),
    )
    return head, rows, lines


def _verdicts(pairs: Pairs, judged: bool) -> list[str]:
    """Return the verdicts on mean curves; without them, of sizes that the bars are not for."""
    lines = []
    for bar, value, error in (("final", pairs.final, pairs.errors[0]), ("means", pairs.worst, pairs.errors[1])):
        if judged:
            what = BARS[bar].what.format(name=pairs.name, step=pairs.step)
            lines.append(
                f"- {what}, mean curves of {pairs.count} runs: {value:.2%} ± {error:.2%} (bar {BARS[bar].most:.1%}): "
                f"{verdict_on(bar, value, error)}"
            )
    return lines


def draw_curves(runs: Mapping[str, Run], settings: Mapping[str, Any]) -> Any:
    """Draw the mean loss of each window, and below it each run's distance from bf16, in percent.

    Of pairs the mean curves are drawn, beside the single runs in bf16.

    Raises:
        ImportError: without matplotlib.
    """
    height = 2.6
    figure, (top, bottom) = panels(2, 1, 2 * height, sharex=True)
    colours = iter((plotting.BLUE, plotting.GREEN, plotting.RED, plotting.PURPLE))
    pairs = pairs_of(runs, settings)
    bf16 = [run for name, run in runs.items() if name.startswith(BF16)]
    wanted = means((average(bf16) if pairs else runs[BF16])["losses"], settings)
    steps = [settings["window"] * (number + 1) for number in range(len(wanted))]
    ends = []
    shown = {name: run for name, run in runs.items() if not pairs or name.startswith(BF16)}
    for name, run in [*shown.items(), *((each.name, each.mean) for each in pairs)]:
        found = means(run["losses"], settings)
        colour = plotting.GREY if name.startswith(BF16) else next(colours)
        top[0].plot(steps, found, color=colour)
        if not name.startswith(f"{BF16} again"):
            ends.append((found[-1], name, colour))
        if name != BF16 or pairs:
            apart = [100 * (one / other - 1) for one, other in zip(found, wanted, strict=True)]
            bottom[0].plot(steps, apart, color=colour)
    for bound in (-100 * BARS["means"].most, 100 * BARS["means"].most):
        bottom[0].axhline(bound, linestyle=":", color=plotting.RED)
    bottom[0].axvline(settings["settled"], linestyle=":", color=plotting.GREY)
    top[0].set(title=f"Mean loss of {settings['window']} steps")
    bottom[0].set(title="Distance from bf16 in percent; red: the bar", xlabel="step")
    plotting.name_lines(top[0], height, ends)
    return figure
