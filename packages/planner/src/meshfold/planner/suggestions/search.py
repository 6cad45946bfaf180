"""Best-first search: families by a bound, their candidates by outlook, the most promising by a whole plan.

A node of the queue is a family with a bound on its seconds, then with the best outlook of its likely profile, then a candidate with
its outlook, then one whose schedule was simulated. The first node decides what happens next, so that only layouts that can win are
traced, and only candidates that can win are planned. Traced layouts correct the likely profiles of those that are alike. The search
ends when no node is faster than the best plan by more than :data:`TOLERANCE`, or after ``plans`` plans.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from meshfold.mesh import MeshfoldError, ParallelSpec, SpecError
from meshfold.mesh.spec import divisors, format_bytes
from meshfold.planner.estimates import Estimate
from meshfold.planner.machines import Machine
from meshfold.planner.suggestions.bound import Bound
from meshfold.planner.suggestions.layouts import Candidate, Family, candidates, families
from meshfold.planner.suggestions.likely import Likely
from meshfold.planner.suggestions.options import Option, Rejected, Suggestion, option_of, plan_of, what_costs
from meshfold.planner.suggestions.outlook import Clock, Outlook
from meshfold.planner.suggestions.profile import Profile, Profiler

TOLERANCE = 0.01
"""Seconds that are so near to the best are as good: then the simpler spec is first, and the search ends."""
_FAMILY, _LIKELY, _CANDIDATE, _SIMULATED = range(4)
_KEPT_PER_FAMILY = 24
_FAR = 1.1  # times as slow as the best: not worth a whole plan
_TELLING = ("1f1b", "zb-h2", "zb-v")  # schedules with the least idle time, and the least memory
_LEAST_TENSOR = (
    0.92  # share of its likely seconds that a tensor mode takes at least: a split head and MLP fuse a little more
)


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
        optimizer: a key of :data:`meshfold.planner.estimates.MOMENTS`.
        rules: as for the engine.
        kernels: as for the engine.
        clip: clip gradients by their norm.
        accumulate: micro-steps of an optimizer step; None: as many as are fastest.
        options: number of options to plan, of different families or ``zero`` stages.
        plans: most whole plans to make.
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
    """One search; the fields are the arguments of :func:`suggest`, and what was found so far."""

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
    planned: list[Option] = field(default_factory=list)
    refused: dict[str, Rejected] = field(default_factory=dict)
    nearest: dict[str, tuple[Candidate, Outlook]] = field(default_factory=dict)
    expected: dict[str, tuple[Candidate, Outlook]] = field(default_factory=dict)  # by likely profiles
    took: dict[Any, float] = field(default_factory=dict)  # times as long as likely, by kind of split
    ratios: dict[Any, tuple[float, float]] = field(default_factory=dict)
    unopened: list[tuple[float, Family]] = field(default_factory=list)
    least: float = float("inf")  # the lowest outlook of a candidate that should fit
    considered: int = 0
    turn: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        given = self.settings
        self.too_large = f"no setting of it fits in {format_bytes(round(self.machine.memory))}"
        self.profiler = Profiler(
            build=self.build,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            optimizer=given["optimizer"],
            settings=dict(
                precision=self.precision,
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
        """Return what was found."""
        begin = time.perf_counter()
        shape = self.profiler.shape
        found = families(
            self.ranks,
            self.batch_size,
            self.seq_len,
            blocks=shape.blocks,
            heads=shape.heads,
            experts=shape.experts,
        )
        if not found:
            raise SpecError(self._undivided())
        bound = self._bound()
        for family in found:
            self._push(bound.seconds(family), (family.entries,), _FAMILY, family)
        while self.queue and not self._is_done():
            seconds, _, _, kind, node = heapq.heappop(self.queue)
            if kind in (_FAMILY, _LIKELY):
                if seconds >= (1 - TOLERANCE) * self.least:
                    self.unopened.append((seconds, node))
                elif kind == _FAMILY and not self.profiler.knows(node.layout):
                    self._look_at(node, seconds)
                elif kind == _LIKELY and (price := self._likely_seconds(node)) > seconds * 1.001:
                    self._push(price, (node.entries,), _LIKELY, node)  # a traced layout that is alike was slower
                else:
                    self._open(node, seconds)
            elif not self._reprice(seconds, kind, node):
                self._close(kind, node)
        options = sorted((one for one in self.planned if not one.misfit), key=lambda one: one.speed.seconds)
        if not options:
            raise SpecError(self._unfitting())
        near = [one for one in options if one.speed.seconds <= (1 + TOLERANCE) * options[0].speed.seconds]
        first = min(near, key=lambda one: (one.candidate.complexity, one.speed.seconds))
        options = [first, *(one for one in options if one is not first)]
        return Suggestion(
            options=tuple(options),
            misfits=tuple(one for one in self.planned if one.misfit),
            rejected=tuple(self._rejected(options)),
            ranks=self.ranks,
            machine=self.machine,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            precision=self.precision,
            considered=self.considered,
            traces=self.profiler.traces,
            plans=len(self.planned),
            seconds=time.perf_counter() - begin,
        )

    def _bound(self) -> Bound:
        """Return the bound by the layout of a single rank; if the engine refuses the model, there is nothing to suggest."""
        try:
            profile = self.profiler.of(ParallelSpec.parse({}, 1))
        except Exception as error:
            raise SpecError(
                f"the model cannot be traced on meta tensors, so nothing can be suggested for it: {_sentence(error)}. It must be a "
                "causal language model whose forward takes token ids and labels and returns a loss; write parallel=dict(...) for "
                "others"
            ) from error
        width = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[self.precision]
        self.likely = Likely(profile, self.seq_len, width)
        return Bound(profile, self.clock, self.ranks, self.seq_len)

    def _push(self, seconds: float, simplicity: tuple[int, ...], kind: int, node: Any) -> None:
        heapq.heappush(self.queue, (seconds, (simplicity, next(self.turn)), 0, kind, node))

    def _is_done(self) -> bool:
        """Return True if nothing in the queue can be better than what is planned by more than the tolerance."""
        fitting = [one.speed.seconds for one in self.planned if not one.misfit]
        if not fitting:
            return len(self.planned) >= 3 * self.most
        best, following = min(fitting), self.queue[0][0]
        if len(self.planned) >= self.most or following > _FAR * best:
            return True
        return following >= (1 - TOLERANCE) * best and len(fitting) >= self.options

    def _look_at(self, family: Family, bound: float) -> None:
        """Put a family back with the best outlook of its likely profile; without one that fits, leave it out."""
        made = self._fitting(family, self.likely.of(family), schedules=_TELLING)
        if not made:
            self.refused[str(family.spec.to_dict())] = Rejected(
                family=family, seconds=float("inf"), candidate=None, outlook=None, why=self.too_large
            )
            return
        self.expected[str(family.spec.to_dict())] = made[0][2:]
        self._push(max(bound, self._likely_seconds(family)), (family.entries,), _LIKELY, family)

    def _likely_seconds(self, family: Family) -> float:
        """Return the expected seconds of a family: of its likely profile, times what traced layouts took that are alike."""
        _, outlook = self.expected[str(family.spec.to_dict())]
        ratio = 1.0
        for kind in _kinds(family):
            ratio *= self.took.get(kind, _LEAST_TENSOR if kind[0] == "tensor" else 1.0)
        return outlook.seconds * ratio

    def _fitting(
        self, family: Family, profile: Profile, *, schedules: tuple[str, ...] = ()
    ) -> list[tuple[float, Any, Candidate, Outlook]]:
        """Return a family's candidates that may fit, fastest first; of a pipeline with ``schedules`` those with them."""
        made = []
        for candidate in candidates(family, self.batch_size, blocks=profile.shape.blocks):
            if self.accumulate not in (None, candidate.accumulate):
                continue
            pipeline = candidate.spec.pipeline
            if schedules and pipeline is not None and pipeline.schedule not in schedules:
                continue
            self.considered += not schedules  # others are counted when their layout is traced
            outlook = self.clock.outlook(candidate, profile)
            if self.can_fit(candidate, outlook, self._ratio(candidate)[1]):
                made.append((outlook.seconds, candidate.complexity, candidate, outlook))
        return sorted(made, key=lambda one: one[:2])

    def _open(self, family: Family, bound: float) -> None:
        """Trace a family's layout, and put its candidates into the queue."""
        fitting = [one.speed.seconds for one in self.planned if not one.misfit]
        key = str(family.spec.to_dict())
        try:
            profile = self.profiler.of(family.layout)
        except MeshfoldError as error:
            self.refused[key] = Rejected(
                family=family, seconds=float("inf"), candidate=None, outlook=None, why=_sentence(error)
            )
            return
        made = self._fitting(family, profile)
        if made:
            self.nearest[key] = made[0][2], made[0][3]
            self.least = min(self.least, made[0][0])
            kinds = _kinds(family)
            if len(kinds) == 1 and key in self.expected:
                took = made[0][0] / self.expected[key][1].seconds
                self.took[kinds[0]] = min(took, self.took.get(kinds[0], took))
        for seconds, complexity, candidate, outlook in made[:_KEPT_PER_FAMILY]:
            if not fitting or len(fitting) < self.options or seconds < min(fitting):
                kind = _SIMULATED if family.stages == 1 else _CANDIDATE
                self._push(seconds * self._ratio(candidate)[0], complexity, kind, (candidate, outlook, profile))

    def can_fit(self, candidate: Candidate, outlook: Outlook, ratio: float) -> bool:
        """Return True if the candidate may fit: in the device's memory, or under ``zero`` with the host's."""
        over = ratio * outlook.memory - self.machine.memory
        if over <= 0:
            return True
        zero = candidate.spec.zero
        local = min(self.machine.devices, self.ranks)
        movable = zero is not None and zero.stage == 3 and over < 0.9 * outlook.state
        return movable and over * local < self.machine.host.memory

    def _ratio(self, candidate: Candidate) -> tuple[float, float]:
        """Return the seconds and bytes of planned candidates that are alike, by their outlooks'."""
        return self.ratios.get(_alike(candidate), (1.0, 1.0))

    def _reprice(self, seconds: float, kind: int, node: tuple[Candidate, Outlook, Profile]) -> bool:
        """Put a candidate back whose price has changed, or leave it out if it no longer fits."""
        candidate, outlook, _ = node
        ratio, bytes_ratio = self._ratio(candidate)
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
                outlook = self.clock.outlook(candidate, profile, simulate=True)
            except MeshfoldError:  # a schedule that this number of micro-batches does not allow
                return
            self._push(
                outlook.seconds * self._ratio(candidate)[0],
                candidate.complexity,
                _SIMULATED,
                (candidate, outlook, profile),
            )
            return
        if self._is_shown(candidate):
            return
        self._plan(candidate, node[1])

    def _is_shown(self, candidate: Candidate) -> bool:
        """Return True if a planned option that fits differs only in settings, and this one would not be first."""
        fitting = [one for one in self.planned if not one.misfit]
        if not fitting:
            return False
        best = min(one.speed.seconds for one in fitting)
        outlook = self.nearest.get(str(candidate.family.spec.to_dict()))
        same = [one for one in fitting if _group(one.candidate) == _group(candidate)]
        return bool(same) and outlook is not None and min(s.speed.seconds for s in same) <= best * (1 + 5 * TOLERANCE)

    def _plan(self, candidate: Candidate, outlook: Outlook) -> None:
        try:
            found = self.estimate(candidate)
        except MeshfoldError as error:
            key = str(candidate.spec.to_dict())
            self.refused[key] = Rejected(
                family=candidate.family,
                seconds=float("inf"),
                candidate=candidate,
                outlook=outlook,
                why=_sentence(error),
            )
            return
        option = option_of(candidate, found, outlook, self.machine, self.precision)
        self.planned.append(option)
        before = self._ratio(candidate)
        took = option.speed.seconds / outlook.seconds if outlook.seconds and not option.misfit else before[0]
        self.ratios[_alike(candidate)] = (max(before[0], took), max(before[1], option.bytes / outlook.memory))

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the whole plan of a candidate."""
        return plan_of(
            candidate,
            self.build,
            self.machine,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            precision=self.precision,
            **self.settings,
        )

    def _rejected(self, options: list[Option]) -> list[Rejected]:
        """Return the families that lost, fastest first."""
        shown = {str(one.candidate.family.spec.to_dict()) for one in self.planned}
        best = options[0].outlook
        found = []
        for key, (candidate, outlook) in self.nearest.items():
            if key not in shown:
                seconds = outlook.seconds * self._ratio(candidate)[0]
                found.append(
                    Rejected(
                        family=candidate.family,
                        seconds=seconds,
                        candidate=candidate,
                        outlook=outlook,
                        why=what_costs(outlook, best),
                    )
                )
        left = [(seconds, node) for seconds, _, _, kind, node in self.queue if kind in (_FAMILY, _LIKELY)]
        for seconds, family in (*self.unopened, *left):
            known = self.expected.get(str(family.spec.to_dict()))
            why = "its operators and messages alone take as long" if known is None else what_costs(known[1], best)
            found.append(Rejected(family=family, seconds=seconds, candidate=None, outlook=None, why=why))
        return [*sorted(found, key=lambda one: one.seconds), *self.refused.values()]

    def _undivided(self) -> str:
        near = max(1, self.batch_size // self.ranks) * self.ranks
        return (
            f"no spec divides a batch of {self.batch_size} sequences of {self.seq_len} tokens over {self.ranks} ranks: take a "
            f"batch of {near} sequences, or {max(d for d in divisors(self.ranks) if d <= self.batch_size)} ranks"
        )

    def _unfitting(self) -> str:
        if not self.planned:
            refusals = [one.why for one in self.refused.values()]
            if refusals and self.too_large not in refusals:
                return f"no spec for {self.ranks} ranks can be used. {refusals[0]}"
            least = min((outlook.memory for _, outlook in self.nearest.values()), default=0.0)
            held = f": a rank would hold {format_bytes(round(least))} at least" if least else ""
            return (
                f"nothing fits in {format_bytes(round(self.machine.memory))} a device on {self.ranks} ranks of "
                f"{self.machine.name}{held}. Take more ranks, a smaller batch, shorter sequences or larger devices"
            )
        least_one = min(self.planned, key=lambda one: one.bytes)
        spec = least_one.candidate.spec.to_dict()
        return (
            f"nothing fits in {format_bytes(round(self.machine.memory))} a device on {self.ranks} ranks of {self.machine.name}: "
            f"with parallel={spec} a rank holds {format_bytes(least_one.bytes)}. Take more ranks, a smaller batch, shorter "
            "sequences or larger devices"
        )


def _kinds(family: Family) -> list[tuple[str, ...]]:
    """Return the kinds of split whose layouts are slower than likely by about the same."""
    spec, found = family.spec, list[tuple[str, ...]]()
    if spec.tensor is not None:
        extra = "megatron" if spec.sequence is not None and spec.sequence.mode == "megatron" else ""
        found.append(("tensor", spec.tensor.mode_name, str(spec.tensor.attention), extra))
    if spec.sequence is not None and spec.sequence.mode != "megatron":
        found.append(("sequence", str(spec.sequence.mode)))
    if spec.expert is not None:
        found.append(("expert",))
    return found


def _alike(candidate: Candidate) -> Any:
    """Return what candidates share whose plans differ from their outlooks in the same way."""
    zero = candidate.spec.zero
    return (
        str(candidate.family.layout.to_dict()),
        candidate.family.stages > 1,
        zero is not None,
        candidate.recompute,
    )


def _group(candidate: Candidate) -> Any:
    """Return what options that are shown differ in: ranks, and whether there is ``zero``."""
    return str(candidate.family.spec.to_dict()), candidate.spec.zero is not None


def _sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].removesuffix(".")
