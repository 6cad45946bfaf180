"""Checks of an experiment's committed results, for the tests of all experiments."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from experiments import report
from experiments.report import Experiment, with_results


def committed(experiment: Experiment) -> dict[str, Any]:
    """Return the committed numbers."""
    found: dict[str, Any] = json.loads((experiment.folder / "results" / experiment.numbers_file).read_text("utf-8"))
    return found


def check_committed(experiment: Experiment) -> None:
    """Raise unless table and page follow from the committed numbers, every claim is as expected, and the plot is there."""
    found = committed(experiment)
    claims = experiment.claims(found)
    assert (experiment.folder / "results" / "table.md").read_text("utf-8") == experiment.page(found, claims)
    readme = (experiment.folder / "README.md").read_text("utf-8")
    assert with_results(readme, report.summary(claims)) == readme
    assert unexpected(experiment, found) == []
    assert (experiment.folder / "results" / f"{experiment.name}.png").read_bytes().startswith(b"\x89PNG")


def check_can_fail(experiment: Experiment, spoil: Callable[[dict[str, Any]], None], claim: str) -> None:
    """Raise unless a claim is not as expected once the committed numbers are spoiled."""
    found = committed(experiment)
    spoil(found)
    assert claim in unexpected(experiment, found)


def unexpected(experiment: Experiment, found: dict[str, Any]) -> list[str]:
    """Return the names of the claims that numbers do not bear out as expected."""
    return [one.name for one in experiment.claims(found) if one.holds != one.expected]
