"""Text for people and back: amounts of memory, and tables with aligned columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from meshfold.mesh.errors import did_you_mean

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_FOLDED = {name.casefold(): name for name in UNITS}
_WRITTEN = _FOLDED | {name.removesuffix("b"): unit for name, unit in _FOLDED.items() if unit != "B"}


def parse_bytes(text: str) -> int:
    """Return an amount of memory in bytes; the unit may be in any case and without its B.

    >>> parse_bytes("24GiB") == parse_bytes("24 gi"), parse_bytes("5GB"), parse_bytes("0.5k")
    (True, 5000000000, 500)

    Raises:
        ValueError: a sentence without a subject, such as ``has no unit.``
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]*)", text)
    if match is None:
        raise ValueError("is not an amount of memory.")
    number, written = match.groups()
    unit = _WRITTEN.get(written.casefold())
    if unit is None:
        raise ValueError(f"has no unit {written!r}.{did_you_mean(written, UNITS)}" if written else "has no unit.")
    count = round(Fraction(number) * UNITS[unit])  # exact: 0.1GiB is not a float
    if count < 1:
        raise ValueError("is less than one byte.")
    return count


def format_bytes(count: float) -> str:
    """Return bytes as text: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def format_table(rows: Sequence[Sequence[str]], align: str = "") -> list[str]:
    """Return the lines of a table, its columns two spaces apart.

    >>> print(*format_table([("rank", "bytes"), ("0", "1,024")], "<>"), sep="\\n")
    rank  bytes
    0     1,024

    Args:
        rows: the cells, row by row, each row of one length.
        align: ``<`` or ``>`` for each column; the columns beyond it are aligned as its last, or left.
    """
    columns = range(len(rows[0]) if rows else 0)
    align = align.ljust(len(columns), align[-1:] or "<")
    widths = [max(len(row[column]) for row in rows) for column in columns]
    return ["  ".join(f"{row[i]:{align[i]}{widths[i]}}" for i in columns).rstrip() for row in rows]
