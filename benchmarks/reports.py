"""What reports of results share: tables in Markdown that put ratios first, bars that are judged, plots with ours in blue."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ratios
from experiments.toml_tables import TableError, check_names, read_tables

OURS, PEER = "#2266bb", "#888888"
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
        return f"{found} (bar {self.least:g}): {met(self.met(value))}" if self.judged(ranks) else found


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


def panels(rows: int, columns: int, size: tuple[float, float], **settings: Any) -> tuple[Any, Any]:
    """A figure in inches that no window shows, and its panels ``rows columns``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **settings)


def draw_bars(
    panel: Any,
    values: Mapping[str, float],
    ours: Iterable[str],
    label: str,
    digits: int = 1,
    limits: Mapping[str, float] | None = None,
) -> None:
    """Draw a bar for each name from the top down, its value at its end; ``ours`` are blue, limits are strokes.

    The row of a name whose value is nan stays empty, for a heading.
    """
    blue = set(ours)
    colours = [OURS if name in blue else PEER for name in values]
    panel.barh(list(values), list(values.values()), color=colours)
    limits = {name: limit for name, limit in (limits or {}).items() if limit}
    if limits:
        panel.plot(list(limits.values()), list(limits), "k|", markersize=12, label="limit")
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    width = 0.12 * max([*known.values(), *limits.values()], default=0.0)  # of a number, with room
    for name, value in known.items():
        limit = limits.get(name, value)
        end = (
            limit if value <= limit < value + width else value
        )  # beyond a stroke that would go through the number
        panel.annotate(
            f"{value:.{digits}f}", (end, name), xytext=(3, 0), textcoords="offset points", va="center"
        )
    panel.set_xlabel(label)
    panel.invert_yaxis()
    panel.margins(x=0.15)
    frame_open(panel)


def frame_open(panel: Any) -> None:
    """No frame above and on the right."""
    panel.spines[["top", "right"]].set_visible(False)


def save(figure: Any, text: Iterable[str], path: Path) -> None:
    """Write the plot and the lines of the report beside a result; ``path``: of its JSON."""
    from matplotlib import pyplot as plt

    path.with_suffix(".md").write_text("\n".join(text) + "\n")
    figure.savefig(path.with_suffix(".png"), dpi=130)
    plt.close(figure)
    print(f"wrote {path.with_suffix('.md')} and {path.with_suffix('.png')}")
