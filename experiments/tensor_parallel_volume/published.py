"""The formulas of the papers: read from published.csv, evaluated exactly."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

CSV = Path(__file__).with_name("published.csv")
MARKS = {
    "P": "in the paper's own text, or in the authors' documentation",
    "S": "in a third party's account of the paper",
    "D": "derived here by arithmetic from the others",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A row of published.csv.

    Attributes:
        id: what this experiment calls it.
        source, place: whose it is, and where it stands.
        mark: how it was found, a key of ``MARKS``.
        scope: what it counts.
        expression: in Python's notation.
        unit: of its value.
    """

    id: str
    source: str
    place: str
    mark: str
    scope: str
    expression: str
    unit: str

    def value(self, **names: Fraction | int) -> Fraction:
        """The formula's exact value.

        Raises:
            ValueError: if a name has no value, or a root or a logarithm is not a whole number.
        """
        exact = {name: Fraction(value) for name, value in names.items()}
        try:
            code = compile(self.expression, f"{CSV.name}: {self.id}", "eval")
            found = eval(code, {"__builtins__": {}, "log2": _log2, "sqrt": _sqrt}, exact)
        except NameError as error:
            raise ValueError(f"{self.id}: {self.expression}: {error}; given are {', '.join(names)}") from None
        return Fraction(found)


@cache
def published() -> dict[str, Published]:
    """Every row by id."""
    with CSV.open(newline="") as file:
        rows = [Published(**row) for row in csv.DictReader(file)]
    wrong = [row.id for row in rows if row.mark not in MARKS]
    if wrong:
        raise ValueError(f"{CSV.name}: the marks of {', '.join(wrong)} are none of {', '.join(MARKS)}")
    return {row.id: row for row in rows}


def _log2(x: Fraction) -> int:
    n = int(x)
    if x != n or n < 1 or n & (n - 1):
        raise ValueError(f"log2({x}) is not a whole number")
    return n.bit_length() - 1


def _sqrt(x: Fraction) -> int:
    root = math.isqrt(int(x))
    if root * root != x:
        raise ValueError(f"sqrt({x}) is not a whole number")
    return root
