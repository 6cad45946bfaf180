"""Whether the distributions that a spec needs are there: the only part of a spec that looks outside it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

from meshfold.mesh.spec.entry import listed

UNRELEASED = frozenset({"meshfold-pipeline"})
"""Distributions that the grammar knows and that nobody can install yet; a test holds this to the repository."""


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


def why_missing(needs: Sequence[Need]) -> str:
    """What a spec asks for that is not there, and what to do about it."""
    entries: dict[str, list[str]] = {}
    for need in needs:
        entries.setdefault(need.distribution, []).append(need.entry)
    wants = (f"{listed(names, 'and')} {'need' if names[1:] else 'needs'} {d}" for d, names in entries.items())
    ways = []
    if folders := [f"./packages/{_folder(d)}" for d in entries if d not in UNRELEASED]:
        ways.append(f"In a clone of Meshfold's repository, run: pip install {' '.join(folders)}.")
    if later := [d for d in entries if d in UNRELEASED]:
        out = [name for d in later for name in entries[d]]
        ways.append(
            f"Leave {listed(out, 'and')} out: {listed(later, 'and')} {'are' if later[1:] else 'is'} not released yet."
        )
    return f"{listed(wants, 'and')}, which this installation does not have. {' '.join(ways)}"


def _folder(distribution: str) -> str:
    return distribution.removeprefix("meshfold-").replace("-", "_")
