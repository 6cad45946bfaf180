"""What reports of results share: tables in Markdown that put ratios first, bars that are judged, plots with ours in blue."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ratios
from experiments import plotting
from experiments.toml_tables import TableError, check_names, read_tables

OURS, PEER = plotting.BLUE, plotting.GREY
"""colours"""
BARS = Path(__file__).parent / "bars"
"""Aims of each benchmark, one TOML file each."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; a row shorter than the head is filled up with empty cells."""
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [cell.replace("|", "/") for cell in row]
        lines.append(f"| {' | '.join(cells)} |" + " |" * (len(head) - len(cells)))
    return lines


def notes(found: Mapping[str, str], head: str = "note") -> list[str]:
    """What is to be said of contestants, as a table of its own below an empty line; nothing if there is nothing."""
    return ["", *table(("contestant", head), found.items())] if found else []


def ratio(values: Sequence[float], peer: Sequence[float], digits: int = 3) -> str:
    """A cell: the peer's time by this, with the lowest and the highest round."""
    return spread(ratios(values, peer), digits)


def spread(found: tuple[float, float, float], digits: int) -> str:
    """A cell: the median, with the lowest and the highest in brackets."""
    middle, low, high = (f"{value:.{digits}f}" for value in found)
    return f"{middle} ({low}–{high})"


def mean_power(found: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean ``watts`` and ``mhz`` of the starts in which they were sampled; empty where they were in none."""
    sampled = [one for one in found if "watts" in one]
    return {key: sum(one[key] for one in sampled) / len(sampled) for key in ("watts", "mhz") if sampled}


def joules(power: Mapping[str, float] | None, seconds: float, tokens: float) -> tuple[str, str, str, str]:
    """Four cells: the joules of so many seconds over all GPUs, those of a token, watts and MHz; dashes without samples.

    Args:
        power: mean ``watts`` of all GPUs together and ``mhz`` of one.
        seconds: of a step.
        tokens: of a step.
    """
    if not power:
        return ("–", "–", "–", "–")
    spent = power["watts"] * seconds
    return f"{spent:,.1f}", f"{spent / tokens:#.3g}".rstrip("."), f"{power['watts']:.0f}", f"{power['mhz']:.0f}"


JOULES = ("J a step", "J a token", "W", "MHz")
"""heads of :func:`joules`"""


def energy(power: Mapping[str, float] | None, milliseconds: float, tokens: float) -> tuple[str, str, str]:
    """Three cells: :func:`joules` of so many milliseconds without the watts."""
    step, token, _, clock = joules(power, milliseconds / 1e3, tokens)
    return step, token, clock


ENERGY = ("J a step, all ranks", "J a token", "MHz")
"""heads of :func:`energy`"""


def met(yes: bool) -> str:
    """The verdict on a bar."""
    return "met" if yes else "**not met**"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Aim of a benchmark: a table of a file in ``bars/``.

    Attributes:
        what: what is judged. ``{names}`` are filled in by the report.
        least: the smallest value that meets it.
        most: the largest value that meets it.
        ranks: the number of ranks it is for; 0: any.
    """

    what: str
    least: float = -math.inf
    most: float = math.inf
    ranks: int = 0

    def met(self, value: float) -> bool:
        """Return whether a value meets the aim."""
        return self.least <= value <= self.most

    def judged(self, ranks: int) -> bool:
        """Return whether the aim is for this number of ranks."""
        return self.ranks in (0, ranks)

    def line(self, value: float, ranks: int, **names: object) -> str:
        """Return a line: a ratio and the verdict on it, or the ratio alone where the aim is for other ranks."""
        found = f"- {self.what.format(**names)}: {value:.3f}"
        aim = self.most if self.least == -math.inf else self.least
        return f"{found} (bar {aim:g}): {met(self.met(value))}" if self.judged(ranks) else found


def read_bars(benchmark: str, names: Collection[str]) -> dict[str, Bar]:
    """Read the aims of a benchmark.

    Args:
        benchmark: name of the file in ``bars/``.
        names: the tables that the report computes values for.

    Raises:
        TableError: if the file is wrong, or has other tables.
    """
    path = BARS / f"{benchmark}.toml"
    found = read_tables(path, Bar)
    check_names(path, set(found), set(names))
    return found


def check_known(benchmark: str, name: str, key: str, values: Iterable[str], known: Collection[str]) -> None:
    """Check that the values of a key in a table of bars exist.

    Raises:
        TableError: with the names that do, for one that does not.
    """
    for value in values:
        if value not in known:
            raise TableError(
                f"benchmarks/bars/{benchmark}.toml, [{name}], {key}: {value!r} does not exist: use one of {', '.join(known)}"
            )


def not_judged(bars: Mapping[str, Bar], ranks: int) -> list[str]:
    """Return a line that names the ranks that a benchmark's bars are for; no line where they are for these ranks."""
    wanted = {bar.ranks for bar in bars.values() if not bar.judged(ranks)}
    return [f"- the bars are for {one} ranks and are not judged on {ranks}" for one in sorted(wanted)]


def panels(rows: int, columns: int, height: float, **settings: Any) -> tuple[Any, Any]:
    """A figure of so many inches that no window shows, as wide as a phone, and its panels ``rows columns``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(plotting.settings())
    size = (plotting.WIDTH, height)
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **settings)


def draw_bars(
    panel: Any,
    values: Mapping[str, float],
    ours: Iterable[str],
    label: str,
    digits: int = 1,
    limits: Mapping[str, float] | None = None,
    words: Mapping[str, str] | None = None,
) -> None:
    """Draw a bar for each name from the top down, its value at its end; ``ours`` are blue, limits are strokes.

    A name stands above its bar and may reach into the panel on the right. A name whose value is nan is a heading.
    ``words`` are written for names.
    """
    blue = set(ours)
    rows = list(values)
    places = {name: row for row, name in enumerate(rows)}
    colours = [OURS if name in blue else PEER for name in rows]
    panel.barh(range(len(rows)), list(values.values()), color=colours, height=0.4)
    limits = {name: limit for name, limit in (limits or {}).items() if limit}
    if limits:
        strokes = list(limits.values()), [places[name] for name in limits]
        panel.plot(*strokes, "|", color=plotting.RED, markersize=11, markeredgewidth=1.6, label="limit")
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    width = 0.25 * max([*known.values(), *limits.values()], default=0.0)  # of a number, with room
    for name, value in known.items():
        limit = limits.get(name, value)
        end = limit if value <= limit < value + width else value  # beyond a stroke that would go through the number
        panel.annotate(
            f"{value:,.{digits}f}",
            (end, places[name]),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
        )
    panel.set_xlabel(label)
    panel.set_yticks([row - (0.0 if math.isnan(values[name]) else 0.43) for name, row in places.items()])
    panel.set_yticklabels([(words or {}).get(name, name) for name in rows], ha="left")
    panel.tick_params(axis="y", length=0, pad=-2)
    for name, text in zip(rows, panel.get_yticklabels(), strict=True):
        text.set_in_layout(False)  # it may reach into the other panel, whose row is empty there
        text.set_weight("bold" if math.isnan(values[name]) else "normal")
    panel.set_ylim(len(rows) - 0.6, -0.8)
    panel.margins(x=0.3)
    panel.grid(visible=False)


def title(figure: Any, words: str) -> None:
    """Write a title at the left."""
    figure.suptitle(words, x=0.01, ha="left", fontsize=11)


def save(figure: Any, text: Iterable[str], path: Path) -> None:
    """Write the plot and the lines of the report beside a result; ``path``: of its JSON."""
    from matplotlib import pyplot as plt

    path.with_suffix(".md").write_text("\n".join(text) + "\n")
    plotting.save(plt, figure, path.with_suffix(".png"))
    print(f"wrote {path.with_suffix('.md')} and {path.with_suffix('.png')}")
