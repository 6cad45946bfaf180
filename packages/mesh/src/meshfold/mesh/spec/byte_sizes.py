"""Units of bytes, and amounts of memory as people read them."""

from __future__ import annotations

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


def canonical_unit(word: str) -> str:
    """Return the key of :data:`UNITS` that a word stands for, in any case and without its B; the word itself if it is none.

    >>> unit_of("G"), unit_of("gib"), unit_of("Gi"), unit_of("parsec")
    ('GB', 'GiB', 'GiB', 'parsec')
    """
    folded = {name.casefold(): name for name in UNITS}
    known = folded | {name.removesuffix("b"): unit for name, unit in folded.items() if unit != "B"}
    return known.get(word.casefold(), word)


def format_bytes(count: float) -> str:
    """Return bytes as text: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
