"""The full plan of one spec, to compare with a suggestion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from meshfold.mesh import ParallelSpec, SpecError
from meshfold.mesh.spec import divisors
from meshfold.planner.suggestions.layouts import Candidate, Family
from meshfold.planner.suggestions.options import Option, Suggestion, option_of
from meshfold.planner.suggestions.outlook import Outlook, outlook_of
from meshfold.planner.suggestions.search import Search


def explained(
    spec: ParallelSpec,
    build: Callable[[], nn.Module],
    found: Suggestion,
    *,
    recompute: str | None = None,
    **settings: Any,
) -> Option:
    """Return the whole plan of one spec, for the batch and machine of a suggestion, with the fewest micro-steps that fit.

    Args:
        spec: with its world size.
        build: makes the model.
        found: the suggestion to compare it with.
        recompute: as for the engine; None: only if it does not fit without.
        settings: as for :func:`suggest`.

    Raises:
        SpecError: for anything that the engine refuses.
    """
    search = Search(
        build=build,
        machine=found.machine,
        ranks=found.ranks,
        batch_size=found.batch_size,
        seq_len=found.seq_len,
        precision=found.precision,
        settings={
            "rules": None,
            "fp8": None,
            "kernels": "auto",
            "clip": True,
            "name": "model",
            "optimizer": "adamw",
            **settings,
        },
        accumulate=None,
        options=1,
        most=1,
    )
    family = Family(spec=replace(spec, zero=None))
    rows, remainder = divmod(found.batch_size, family.data)
    if remainder:
        raise SpecError(
            f"data={family.data} does not divide the batch of {found.batch_size} sequences: change one of them"
        )
    profile = search.profiler.of(family.layout)
    tried: list[tuple[bool, float, int, Candidate, Outlook]] = []
    for way in (None, "blocks") if recompute is None else (recompute,):
        for accumulate in divisors(rows) if family.stages == 1 else [1]:
            candidate = Candidate(family=family, spec=spec, recompute=way, accumulate=accumulate)
            outlook = outlook_of(search.clock, candidate, profile, simulate=True)
            tried.append((not search.can_fit(candidate, outlook, 1.0), outlook.seconds, len(tried), candidate, outlook))
    *_, candidate, outlook = min(tried)
    return option_of(candidate, search.estimate(candidate), outlook, found.machine, found.precision)
