"""Traits by which the results of one family or candidate are expected of others."""

from __future__ import annotations

from typing import Any

from meshfold.planner.suggestions.layouts import Candidate, Family


def kinds_of(family: Family) -> tuple[tuple[str, ...], ...]:
    """Return the kinds of split for which traced and likely seconds have about the same ratio."""
    spec, found = family.spec, list[tuple[str, ...]]()
    if spec.tensor is not None:
        extra = "megatron" if spec.sequence is not None and spec.sequence.mode == "megatron" else ""
        found.append(("tensor", spec.tensor.mode_name, str(spec.tensor.attention), extra))
    if spec.sequence is not None and spec.sequence.mode != "megatron":
        found.append(("sequence", str(spec.sequence.mode)))
    if spec.expert is not None:
        found.append(("expert",))
    return tuple(found)


def likeness(candidate: Candidate) -> Any:
    """Return the traits shared by candidates whose plans and outlooks have about the same ratio."""
    zero = candidate.spec.zero
    return (
        str(candidate.family.layout.to_dict()),
        candidate.family.stages > 1,
        zero is not None,
        candidate.recompute,
    )


def group_of(candidate: Candidate) -> Any:
    """Return the traits by which shown options differ: their ranks, and whether they have ``zero``."""
    return str(candidate.family.spec.to_dict()), candidate.spec.zero is not None
