"""Outcomes of a search so far: plans, refusals, and what these say about similar candidates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from meshfold.planner.suggestions.layouts import Candidate, Family
from meshfold.planner.suggestions.options import Option, Rejected, what_costs
from meshfold.planner.suggestions.outlook import Outlook

TOLERANCE = 0.01
"""Share of the best seconds within which specs count as equal: the simpler one is first, and the search ends."""
_LEAST_TENSOR = 0.92
"""Least share of its likely seconds that a tensor mode takes: a split head and MLP fuse a little more."""


@dataclass(kw_only=True)
class Findings:
    """Outcomes by family, and options.

    Attributes:
        planned: options, those that do not fit included.
        refused: what the engine refuses, and what cannot fit.
        nearest: the best outlook of each traced family that should fit.
        expected: the best outlook of each family's likely profile.
        unopened: families that were not traced, with a lower bound on their seconds and their kind of node of the queue.
    """

    planned: list[Option] = field(default_factory=list)
    refused: dict[str, Rejected] = field(default_factory=dict)
    nearest: dict[str, tuple[Candidate, Outlook]] = field(default_factory=dict)
    expected: dict[str, tuple[Candidate, Outlook]] = field(default_factory=dict)
    unopened: list[tuple[float, int, Family]] = field(default_factory=list)
    _took: dict[Any, float] = field(default_factory=dict)  # ratio of traced to likely seconds, by kinds of split
    _ratios: dict[Any, tuple[float, float]] = field(default_factory=dict)
    _hosted: dict[str | None, float] = field(default_factory=dict)  # least ratio of pipelines with state on the host

    @property
    def fitting(self) -> list[Option]:
        """Options that fit."""
        return [one for one in self.planned if not one.misfit]

    def refuse(
        self, family: Family, why: str, candidate: Candidate | None = None, outlook: Outlook | None = None
    ) -> None:
        """Note that a family, or one candidate of it, cannot be used."""
        spec = family.spec if candidate is None else candidate.spec
        self.refused[str(spec.to_dict())] = Rejected(
            family=family, seconds=float("inf"), candidate=candidate, outlook=outlook, why=why
        )

    def note_traced(self, family: Family, candidate: Candidate, outlook: Outlook, alike: Outlook | None = None) -> None:
        """Note the best candidate of a family whose layout was traced.

        Args:
            family: with the layout.
            candidate: the best of it that should fit.
            outlook: of this candidate.
            alike: of the candidate that was expected to be the best. That may not fit: then the best one is slower for lack of
                memory, which a family with the same kinds of split may have.
        """
        key = str(family.spec.to_dict())
        self.nearest[key] = candidate, outlook
        kinds = _kinds_of(family)
        if kinds and key in self.expected:
            seconds = outlook.seconds if alike is None else min(outlook.seconds, alike.seconds - alike.offload)
            took = seconds / self.expected[key][1].seconds
            self._took[kinds] = min(took, self._took.get(kinds, took))

    def note_planned(self, option: Option) -> None:
        """Note an option with its plan."""
        self.planned.append(option)
        outlook, before = option.outlook, self.ratio(option.candidate)
        took = option.speed.seconds / outlook.seconds if outlook.seconds and not option.misfit else before[0]
        self._ratios[_likeness(option.candidate)] = (
            max(before[0], took),
            max(before[1], option.bytes / outlook.memory),
        )
        if option.candidate.family.stages > 1 and option.found.memory.host and not option.misfit:
            recompute = option.candidate.recompute
            self._hosted[recompute] = min(took, self._hosted.get(recompute, took))

    def likely_seconds(self, family: Family) -> float:
        """Return the expected seconds of a family: those of its likely profile, scaled as similar traced layouts were.

        Of no layout with the same kinds of split: as those with each kind alone were.
        """
        _, outlook = self.expected[str(family.spec.to_dict())]
        kinds = _kinds_of(family)
        if kinds in self._took:
            return outlook.seconds * self._took[kinds]
        alone = (self._took.get((kind,), _LEAST_TENSOR if kind[0] == "tensor" else 1.0) for kind in kinds)
        return outlook.seconds * math.prod(alone)

    def ratio(self, candidate: Candidate) -> tuple[float, float]:
        """Return the seconds and bytes in plans of similar candidates, divided by those of their outlooks."""
        return self._ratios.get(_likeness(candidate), (1.0, 1.0))

    def hosted_ratio(self, candidate: Candidate) -> float:
        """Return the least ratio of seconds in plans to outlooks of pipelines with state on the host, whatever they split.

        Their outlooks are short by about the same share: without it, one after the other was planned in full.
        """
        return self._hosted.get(candidate.recompute, 1.0)

    def is_shown(self, candidate: Candidate) -> bool:
        """Return True if a planned option that fits differs only in settings, and this one would not be first."""
        fitting = self.fitting
        if not fitting:
            return False
        best = min(one.speed.seconds for one in fitting)
        outlook = self.nearest.get(str(candidate.family.spec.to_dict()))
        same = [one for one in fitting if _group_of(one.candidate) == _group_of(candidate)]
        return bool(same) and outlook is not None and min(s.speed.seconds for s in same) <= best * (1 + 5 * TOLERANCE)

    def ranked(self) -> list[Option]:
        """Return the options that fit: the simplest of the fastest, then all others by their seconds."""
        options = sorted(self.fitting, key=lambda one: one.speed.seconds)
        near = [one for one in options if one.speed.seconds <= (1 + TOLERANCE) * options[0].speed.seconds]
        first = min(near, key=lambda one: (one.candidate.complexity, one.speed.seconds))
        return [first, *(one for one in options if one is not first)]

    def rejected(self, best: Outlook, waiting: Iterable[tuple[float, Family]]) -> list[Rejected]:
        """Return the families that lost, fastest first.

        Args:
            best: outlook of the first option.
            waiting: families that are still in the queue, with a lower bound on their seconds.
        """
        shown = {str(one.candidate.family.spec.to_dict()) for one in self.planned}
        found = []
        for key, (candidate, outlook) in self.nearest.items():
            if key not in shown:
                seconds = outlook.seconds * self.ratio(candidate)[0]
                found.append(
                    Rejected(
                        family=candidate.family,
                        seconds=seconds,
                        candidate=candidate,
                        outlook=outlook,
                        why=what_costs(outlook, best),
                    )
                )
        for seconds, family in (*((seconds, family) for seconds, _, family in self.unopened), *waiting):
            known = self.expected.get(str(family.spec.to_dict()))
            why = "its operators and messages alone take as long" if known is None else what_costs(known[1], best)
            found.append(Rejected(family=family, seconds=seconds, candidate=None, outlook=None, why=why))
        return [*sorted(found, key=lambda one: one.seconds), *self.refused.values()]


def _kinds_of(family: Family) -> tuple[tuple[str, ...], ...]:
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


def _likeness(candidate: Candidate) -> Any:
    """Return the traits shared by candidates whose plans and outlooks have about the same ratio."""
    zero = candidate.spec.zero
    return (
        str(candidate.family.layout.to_dict()),
        candidate.family.stages > 1,
        zero is not None,
        candidate.recompute,
    )


def _group_of(candidate: Candidate) -> Any:
    """Return the traits by which shown options differ: their ranks, and whether they have ``zero``."""
    return str(candidate.family.spec.to_dict()), candidate.spec.zero is not None
