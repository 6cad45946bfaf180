"""Best-first search: families are ranked by a bound, their candidates by outlook, and the most promising get a full plan.

A node of the queue is a family with a bound on its seconds, then with the best outlook of its likely profile, then a candidate with
its outlook, then one whose schedule was simulated. The first node decides what happens next, so that only layouts that can win are
traced, and only candidates that can win are planned. Traced layouts correct the likely profiles of similar ones. The search
ends when no node is faster than the best plan by more than :data:`.findings.TOLERANCE`, or after ``plans`` plans, unless a spec is
left that should be far faster than the best of them.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from meshfold.mesh import MeshfoldError, ParallelSpec, SpecError
from meshfold.planner.estimates import Estimate
from meshfold.planner.machines import Machine
from meshfold.planner.suggestions.bound import Bound
from meshfold.planner.suggestions.findings import TOLERANCE, Findings
from meshfold.planner.suggestions.layouts import Candidate, Family, candidates, families
from meshfold.planner.suggestions.likely import Likely
from meshfold.planner.suggestions.options import Suggestion, option_of, plan_of
from meshfold.planner.suggestions.outlook import Outlook, outlook_of
from meshfold.planner.suggestions.part_clock import Clock
from meshfold.planner.suggestions.profile import Profile
from meshfold.planner.suggestions.profiler import Profiler
from meshfold.planner.suggestions.refusals import sentence, too_large, undivided, unfitting, untraceable

_FAMILY, _LIKELY, _CANDIDATE, _SIMULATED = range(4)
_KEPT_PER_FAMILY = 24
_FAR = 1.1  # ratio to the best seconds above which a candidate gets no full plan
_PATIENCE = 3  # times ``plans`` that are made while nothing fits, or while a faster spec than all of them is expected
_AGAIN = (
    0.03  # share of the best seconds by which a family that waited for them has to be faster to be traced after all
)
_ROOMY = 0.97  # share of a device's memory below which a plan moved nothing to the host
_TELLING = ("1f1b", "zb-h2", "zb-v")  # schedules with the least idle time, and the least memory


def suggest(
    build: Callable[[], nn.Module],
    machine: Machine,
    *,
    batch_size: int,
    seq_len: int,
    ranks: int | None = None,
    precision: str = "bf16",
    fp8: str | None = None,
    optimizer: str = "adamw",
    rules: Any = None,
    kernels: object = "auto",
    clip: bool = True,
    accumulate: int | None = None,
    options: int = 2,
    plans: int = 8,
    name: str = "model",
) -> Suggestion:
    """Return the specs with which a causal language model trains fastest.

    Args:
        build: makes the model as for one device, which is never allocated.
        machine: to train on.
        batch_size: sequences of a global batch.
        seq_len: tokens of a sequence.
        ranks: world size; by default those of one node.
        precision: as for the engine.
        fp8: recipe of linear layers in fp8, as for :func:`meshfold.planner.estimate`.
        optimizer: a key of :data:`meshfold.planner.optimizer_state.MOMENTS`.
        rules: as for the engine.
        kernels: as for the engine.
        clip: clip gradients by their norm.
        accumulate: micro-steps of an optimizer step; None: as many as are fastest.
        options: number of options to plan, of different families or ``zero`` stages.
        plans: most full plans to make.
        name: of the model, for messages.

    Raises:
        SpecError: for a model that cannot be traced, a batch that no spec divides, and a model that fits under no spec.
    """
    return Search(
        build=build,
        machine=machine,
        ranks=machine.devices if ranks is None else ranks,
        batch_size=batch_size,
        seq_len=seq_len,
        precision=precision,
        settings=dict(fp8=fp8, optimizer=optimizer, rules=rules, kernels=kernels, clip=clip, name=name),
        accumulate=accumulate,
        options=options,
        most=plans,
    ).run()


@dataclass(kw_only=True)
class Search:
    """One search: the arguments of :func:`suggest`, and the findings so far."""

    build: Callable[[], nn.Module]
    machine: Machine
    ranks: int
    batch_size: int
    seq_len: int
    precision: str
    settings: dict[str, Any]
    accumulate: int | None
    options: int
    most: int
    queue: list[tuple[float, tuple[tuple[int, ...], int], int, int, Any]] = field(default_factory=list)
    found: Findings = field(default_factory=Findings)
    least: float = float("inf")  # the lowest outlook of a candidate that should fit
    considered: int = 0
    turn: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        given = self.settings
        self.profiler = Profiler(
            build=self.build,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            optimizer=given["optimizer"],
            kind=self.machine.kind,
            settings=dict(
                precision=self.precision
                if given["fp8"] is None
                else dict(name=self.precision, matmul="fp8", recipe=given["fp8"]),
                rules=given["rules"],
                kernels=given["kernels"],
                clip_grad_norm=1.0 if given["clip"] else None,
            ),
        )
        self.clock = Clock(
            machine=self.machine,
            batch_size=self.batch_size,
            precision=self.precision,
            optimizer=given["optimizer"],
            clip=given["clip"],
        )

    def run(self) -> Suggestion:
        """Search, and return the result."""
        begin = time.perf_counter()
        shape = self.profiler.shape
        every = families(
            self.ranks,
            self.batch_size,
            self.seq_len,
            blocks=shape.blocks,
            heads=shape.heads,
            experts=shape.experts,
        )
        if not every:
            raise SpecError(undivided(self.batch_size, self.seq_len, self.ranks))
        bound = self._bound()
        for family in every:
            self._push(bound.seconds(family), (family.entries,), _FAMILY, family)
        while self.queue and not self._is_done():
            seconds, _, _, kind, node = heapq.heappop(self.queue)
            if kind in (_FAMILY, _LIKELY):
                if seconds >= (1 - TOLERANCE) * self.least:
                    self.found.unopened.append((seconds, kind, node))
                elif kind == _FAMILY and not self.profiler.knows(node.layout):
                    self._look_at(node, seconds)
                elif kind == _LIKELY and (price := self.found.likely_seconds(node)) > seconds * 1.001:
                    self._push(price, (node.entries,), _LIKELY, node)  # a similar traced layout was slower
                else:
                    self._open(node)
            elif not self._reprice(seconds, kind, node):
                self._close(kind, node)
        found = self.found
        if not found.fitting:
            least = min((outlook.memory for _, outlook in found.nearest.values()), default=0.0)
            raise SpecError(unfitting(self.machine, self.ranks, found.planned, [*found.refused.values()], least))
        options = found.ranked()
        waiting = [(seconds, node) for seconds, _, _, kind, node in self.queue if kind in (_FAMILY, _LIKELY)]
        return Suggestion(
            options=tuple(options),
            misfits=tuple(one for one in found.planned if one.misfit),
            rejected=tuple(found.rejected(options[0].outlook, waiting)),
            ranks=self.ranks,
            machine=self.machine,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            precision=self.precision,
            considered=self.considered,
            traces=self.profiler.traces,
            plans=len(found.planned),
            seconds=time.perf_counter() - begin,
        )

    def _bound(self) -> Bound:
        """Return the bound from the layout of a single rank."""
        try:
            profile = self.profiler.of(ParallelSpec.parse({}, 1))
        except Exception as error:
            raise SpecError(untraceable(error)) from error
        width = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[self.precision]
        self.likely = Likely(profile, self.seq_len, width)
        return Bound(profile, self.clock, self.ranks, self.seq_len)

    def _push(self, seconds: float, simplicity: tuple[int, ...], kind: int, node: Any) -> None:
        heapq.heappush(self.queue, (seconds, (simplicity, next(self.turn)), 0, kind, node))

    def _is_done(self) -> bool:
        """Return True if nothing in the queue can beat the planned options by more than the tolerance."""
        fitting = [one.speed.seconds for one in self.found.fitting]
        if not fitting:
            return len(self.found.planned) >= _PATIENCE * self.most
        best, following = min(fitting), self.queue[0][0]
        most = self.most * (_PATIENCE if _FAR * following < best else 1)
        if len(self.found.planned) >= most or following > _FAR * best:
            return True
        return following >= (1 - TOLERANCE) * best and len(fitting) >= self.options

    def _look_at(self, family: Family, bound: float) -> None:
        """Put a family back into the queue with the best outlook of its likely profile; drop it if none fits."""
        made = self._fitting(family, self.likely.of(family), schedules=_TELLING)
        if not made:
            self.found.refuse(family, too_large(self.machine))
            return
        self.found.expected[str(family.spec.to_dict())] = made[0][2:]
        self._push(max(bound, self.found.likely_seconds(family)), (family.entries,), _LIKELY, family)

    def _fitting(
        self, family: Family, profile: Profile, *, schedules: tuple[str, ...] = ()
    ) -> list[tuple[float, Any, Candidate, Outlook]]:
        """Return a family's candidates that may fit, fastest first; ``schedules``: of a pipeline, only those."""
        made = []
        for candidate in candidates(family, self.batch_size, blocks=profile.shape.blocks):
            if self.accumulate not in (None, candidate.accumulate):
                continue
            pipeline = candidate.spec.pipeline
            if schedules and pipeline is not None and pipeline.schedule not in schedules:
                continue
            self.considered += not schedules  # others are counted when their layout is traced
            outlook = outlook_of(self.clock, candidate, profile)
            if self.can_fit(candidate, outlook, self.found.ratio(candidate)[1]):
                made.append((outlook.seconds, candidate.complexity, candidate, outlook))
        return sorted(made, key=lambda one: one[:2])

    def _open(self, family: Family) -> None:
        """Trace a family's layout, and put its candidates into the queue."""
        fitting = [one.speed.seconds for one in self.found.fitting]
        try:
            profile = self.profiler.of(family.layout)
        except MeshfoldError as error:
            self.found.refuse(family, sentence(error))
            return
        made = self._fitting(family, profile)
        if made:
            expected = self.found.expected.get(str(family.spec.to_dict()))
            alike = None if expected is None else outlook_of(self.clock, expected[0], profile)
            self.found.note_traced(family, *made[0][2:], alike)
            self.least = min(self.least, made[0][0])
        for seconds, complexity, candidate, outlook in made[:_KEPT_PER_FAMILY]:
            if not fitting or len(fitting) < self.options or seconds < min(fitting):
                kind = _SIMULATED if family.stages == 1 else _CANDIDATE
                self._push(seconds * self.ratio(candidate, outlook)[0], complexity, kind, (candidate, outlook, profile))

    def ratio(self, candidate: Candidate, outlook: Outlook) -> tuple[float, float]:
        """Return the seconds and bytes in plans of similar candidates, divided by those of their outlooks.

        Where the planner may recompute blocks but need not, the plan without recomputation says how long it takes.
        """
        seconds, held = self.found.ratio(candidate)
        if candidate.family.stages > 1 and held * outlook.memory > self.machine.memory:
            seconds = max(seconds, self.found.hosted_ratio(candidate))
        if candidate.recompute == "auto" and not outlook.repeated:
            kept, most = self.found.ratio(replace(candidate, recompute=None))
            if most * outlook.memory < _ROOMY * self.machine.memory:
                return max(seconds, kept), held
        return seconds, held

    def can_fit(self, candidate: Candidate, outlook: Outlook, ratio: float) -> bool:
        """Return True if the candidate may fit: in the device's memory, or under ``zero`` with the host's."""
        over = ratio * outlook.memory - self.machine.memory
        if over <= 0:
            return True
        zero = candidate.spec.zero
        local = min(self.machine.devices, self.ranks)
        movable = zero is not None and zero.stage == 3 and over < 0.9 * outlook.state
        return movable and over * local < self.machine.host.memory

    def _reprice(self, seconds: float, kind: int, node: tuple[Candidate, Outlook, Profile]) -> bool:
        """Put a candidate whose expected seconds have changed back into the queue, or drop it if it no longer fits."""
        candidate, outlook, _ = node
        ratio, bytes_ratio = self.ratio(candidate, outlook)
        if not self.can_fit(candidate, outlook, bytes_ratio):
            return True
        price = outlook.seconds * ratio
        if price > seconds * 1.001:
            self._push(price, candidate.complexity, kind, node)
            return True
        return False

    def _close(self, kind: int, node: tuple[Candidate, Outlook, Profile]) -> None:
        """Simulate a candidate's schedule, or plan it."""
        candidate, _, profile = node
        if kind == _CANDIDATE:
            try:
                outlook = outlook_of(self.clock, candidate, profile, simulate=True)
            except MeshfoldError:  # a schedule that this number of micro-batches does not allow
                return
            self._push(
                outlook.seconds * self.ratio(candidate, outlook)[0],
                candidate.complexity,
                _SIMULATED,
                (candidate, outlook, profile),
            )
            return
        if self.found.is_shown(candidate):
            return
        self._plan(candidate, node[1])

    def _plan(self, candidate: Candidate, outlook: Outlook) -> None:
        try:
            found = self.estimate(candidate)
        except MeshfoldError as error:
            self.found.refuse(candidate.family, sentence(error), candidate, outlook)
            return
        self.found.note_planned(option_of(candidate, found, outlook, self.machine, self.precision))
        self._look_again()

    def _look_again(self) -> None:
        """Put families back into the queue that were slower than an outlook, but are faster than its plan and all that is left."""
        found = self.found
        left = [
            max(price, node[1].seconds * self.ratio(node[0], node[1])[0])
            for price, _, _, kind, node in self.queue
            if kind in (_CANDIDATE, _SIMULATED) and self.can_fit(node[0], node[1], found.ratio(node[0])[1])
        ]
        self.least = min([*left, *(one.speed.seconds for one in found.fitting)], default=float("inf"))
        slower: list[tuple[float, int, Family]] = []
        for seconds, kind, family in found.unopened:
            if seconds < (1 - _AGAIN) * self.least:
                self._push(seconds, (family.entries,), kind, family)
            else:
                slower.append((seconds, kind, family))
        found.unopened = slower

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the full plan of a candidate."""
        return plan_of(
            candidate,
            self.build,
            self.machine,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            precision=self.precision,
            **self.settings,
        )
