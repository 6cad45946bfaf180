"""Check that the distributions that a spec needs are installed: the only part of a spec that looks outside it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

from meshfold.mesh.spec.entry import join_choices


class Need(NamedTuple):
    """A distribution that an entry of a spec needs, and the module by which its presence is told."""

    entry: str
    distribution: str
    module: str


def is_importable(module: str) -> bool:
    """Tell whether ``module`` could be imported, without importing it. A folder without code does not count."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # its parent is missing or no package
        return False
    return found is not None and found.origin is not None


def why_missing(needs: Sequence[Need]) -> str:
    """Return what a spec asks for that is not installed, and what to do about it."""
    entries: dict[str, list[str]] = {}
    for need in needs:
        entries.setdefault(need.distribution, []).append(need.entry)
    wants = (
        f"{join_choices(names, 'and')} {'need' if names[1:] else 'needs'} {d}" for d, names in entries.items()
    )
    folders = " ".join(f"./packages/{_folder(distribution)}" for distribution in entries)
    return (
        f"{join_choices(wants, 'and')}, which this installation does not have. In a clone of Meshfold's repository, run: "
        f"pip install {folders}."
    )


def _folder(distribution: str) -> str:
    return distribution.removeprefix("meshfold-").replace("-", "_")
