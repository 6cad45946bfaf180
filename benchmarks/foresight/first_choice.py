"""The spec that plans put first, beside the fastest that was measured for the same model, batch and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CHOSEN = ("parallel", "recompute", "accumulate", "least_gib")
"""Entries of a configuration that a plan chooses; the others say what is trained, and where."""


@dataclass(frozen=True, kw_only=True)
class FirstChoice:
    """A model and a batch on a number of ranks, with the outcomes of at least two specs.

    Attributes:
        first: name of the configuration with the shortest planned step.
        fastest: name of the one with the shortest measured step.
        specs: that were measured or tried.
        ratio: measured seconds of the first by those of the fastest; infinite if the first did not run.
    """

    first: str
    fastest: str
    specs: int
    ratio: float


def first_choices(result: Mapping[str, Any], seconds: Mapping[str, float]) -> list[FirstChoice]:
    """Return an entry for each model, batch and number of ranks that several specs were begun of.

    Args:
        result: of the benchmark. Configurations that were not begun are left out.
        seconds: measured, of a step of each configuration that ran.
    """
    questions: dict[str, dict[str, float]] = {}
    for name, one in result["configurations"].items():
        if one["runs"]:
            asked = {key: value for key, value in one["configuration"].items() if key not in _CHOSEN}
            questions.setdefault(repr(sorted(asked.items())), {})[name] = one["planned"]["seconds"]
    found = []
    for plans in questions.values():
        ran = [name for name in plans if name in seconds]
        if len(plans) < 2 or not ran:
            continue
        first, fastest = min(plans, key=plans.__getitem__), min(ran, key=seconds.__getitem__)
        ratio = seconds.get(first, math.inf) / seconds[fastest]
        found.append(FirstChoice(first=first, fastest=fastest, specs=len(plans), ratio=ratio))
    return found
