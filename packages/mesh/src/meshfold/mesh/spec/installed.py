"""Whether the distributions that a spec needs are there: the only part of a spec that looks outside it."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple


class Need(NamedTuple):
    """A distribution that an entry of a spec needs, and the module by which its presence is told."""

    entry: str
    distribution: str
    module: str


def importable(module: str) -> bool:
    """Whether ``module`` could be imported, without importing it. A folder without code does not count."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # its parent is missing or no package
        return False
    return found is not None and found.origin is not None
