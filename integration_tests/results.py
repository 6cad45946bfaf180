"""What the matrix found: a file with a line a member, and the table that docs/composition.md shows of it.

::

    python -m integration_tests.results            write the table into docs/composition.md
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from integration_tests.house import ROOT
from integration_tests.matrix import DIMENSIONS, MODELS, OFF, Member

FILE = ROOT / "integration_tests" / "results" / "matrix.jsonl"
PAGE = ROOT / "docs" / "composition.md"
BEGIN, END = "<!-- the matrix: begin -->", "<!-- the matrix: end -->"


@dataclass(frozen=True, kw_only=True)
class Found:
    """One member that trained as one process, and went on under another.

    Attributes:
        member: it.
        following: under whose spec its checkpoint went on.
        loss_error: the largest difference from one process's losses, relative.
        weight_error: the largest of an element of the weights, relative to the largest of its tensor.
        seconds: that it took.
    """

    member: Member
    following: Member
    loss_error: float
    weight_error: float
    seconds: float

    def line(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "model": self.member.model,
            "values": list(self.member.values),
            "ranks": self.member.ranks,
            "parallel": self.member.spec,
            "continued_under": self.following.spec,
            "loss_error": float(f"{self.loss_error:.2g}"),
            "weight_error": float(f"{self.weight_error:.2g}"),
            "seconds": round(self.seconds, 1),
            "torch": torch.__version__,
        }


def read(path: Path = FILE) -> dict[Member, dict[str, Any]]:
    """The lines of a file by their members."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {Member(values=tuple(line["values"]), model=line["model"]): line for line in lines}


def write(found: Sequence[Found], path: Path = FILE) -> None:
    """Put these results into a file, beside those of other members that are there."""
    lines = {**read(path), **{one.member: one.line() for one in found}}
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(lines, key=lambda member: (member.ranks, member.values, member.model))
    path.write_text("".join(f"{json.dumps(lines[member], ensure_ascii=False)}\n" for member in ordered))


def kinds() -> Iterator[tuple[str, str]]:
    """Every dimension with every kind of its values."""
    for dimension, values in DIMENSIONS.items():
        for kind in dict.fromkeys(value.kind for value in values.values()):
            yield dimension, kind


def table(members: Iterable[Member]) -> str:
    """How many members have the one kind of value beside the other, as markdown."""
    having = [({(d, DIMENSIONS[d][v].kind) for d, v in member.at.items() if v != OFF}, member) for member in members]
    columns = list(kinds())
    rows = [
        f"| entries | {' | '.join(_title(*column) for column in columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for place, row in enumerate(columns):
        cells = []
        for other, column in enumerate(columns):
            both = sum(1 for has, _ in having if {row, column} <= has)
            same = row[0] == column[0] and row != column
            cells.append("" if other > place or same else str(both) if both else "–")
        rows.append(f"| {_title(*row)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _title(dimension: str, kind: str) -> str:
    return dimension if kind == "on" else f"{dimension}: {kind}"


def summary(lines: dict[Member, dict[str, Any]]) -> str:
    """What the page shows: a sentence of figures, and the table."""
    by_ranks = {ranks: sum(line["ranks"] == ranks for line in lines.values()) for ranks in (4, 8)}
    loss, weight = (max(line[f"{what}_error"] for line in lines.values()) for what in ("loss", "weight"))
    sentence = (
        f"{len(lines)} specs ({by_ranks[4]} on 4 ranks, {by_ranks[8]} on 8; models: {', '.join(MODELS)}) trained as one "
        f"process: losses differ by at most {loss:.1g} relative, weights by {weight:.1g} of their tensor's largest."
    )
    return f"{sentence}\n\n{table(lines)}"


def main() -> None:
    """Write what the page shows."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{summary(read())}\n{END}{after}")


if __name__ == "__main__":
    main()
