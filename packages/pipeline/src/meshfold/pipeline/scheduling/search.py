"""``auto``: search for an order under given costs and a memory bound.

Candidates come from three sources:

- every named schedule with the same number of stages,
- list scheduling under the real costs, with several keys, windows and placements of the stages,
- moves on the critical path of the best of these (:mod:`meshfold.pipeline.scheduling.local_search`).

The fastest is kept. ``auto`` keeps the one that holds the fewest activations among those within 1 % of the fastest: costs are
measured one action at a time, and schedules that they put so close come out in any order when they run together. On four H100s
orders found to be 0.1 to 0.6 % faster than ``zb-v`` took 0.7 to 4 % longer, in up to 1.5 times its memory.

No result of :func:`search` is slower than the best named schedule within the bound, which is among the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product

from meshfold.mesh import with_old_arguments
from meshfold.pipeline.errors import ScheduleError
from meshfold.pipeline.scheduling.actions import Action, Op, Schedule
from meshfold.pipeline.scheduling.costs import Costs, StageCosts
from meshfold.pipeline.scheduling.list_scheduling import Key, ListScheduler
from meshfold.pipeline.scheduling.local_search import fuse, improve, makespan
from meshfold.pipeline.scheduling.schedules import SCHEDULES, wave_ranks
from meshfold.pipeline.scheduling.simulation import Replay, Simulation, peak_activations, simulate_costs

Lists = list[list[Action]]
_CLOSE = 0.01
"""Share of a makespan that measured costs cannot tell."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search.

    Attributes:
        schedule: the best; its name is ``auto``.
        costs: those of the chosen cut if there were several.
        simulation: of the schedule under these costs.
        named: the makespan of every named schedule that was within the bound, by a text such as ``interleaved, 2 chunks``.
    """

    schedule: Schedule
    costs: Costs
    simulation: Simulation
    named: Mapping[str, float]

    @property
    def time(self) -> float:
        """The makespan."""
        return self.simulation.makespan


def auto(
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | Mapping[int, Costs] | None = None,
    memory: float | Sequence[float] | None = None,
    stage_ranks: Sequence[int] | None = None,
) -> Schedule:
    """Return the smallest order within 1 % of the fastest found for given costs; :func:`search` also returns the alternatives."""
    return search(
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        costs=costs,
        memory=memory,
        stage_ranks=stage_ranks,
        close=_CLOSE,
    ).schedule


@with_old_arguments({"home": "stage_ranks"})
def search(
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | Mapping[int, Costs] | None = None,
    memory: float | Sequence[float] | None = None,
    effort: float = 1.0,
    stage_ranks: Sequence[int] | None = None,
    close: float = 0.0,
) -> Found:
    """Search for the order with the least makespan.

    Args:
        ranks, microbatches: as in :func:`meshfold.pipeline.schedule`.
        chunks: stages a rank holds; None: what the lists in ``costs`` say, or whichever of the cuts in a mapping is faster.
        costs: of ranks × chunks stages; or, by chunks, of the same model cut into ranks × chunks stages. None: equal
            stages, F, B and W of equal length, free messages, one or two chunks a rank.
        memory: the most activations that a rank may hold at a time, for all or for each, in the unit of
            ``costs.activation``; None: no bound.
        effort: how long to try; with 0 only named schedules are compared.
        stage_ranks: the rank of every stage, if fixed: only orders with stages there.
        close: share of the least makespan; of orders within it the one with the fewest activations on the fullest rank is taken.

    Raises:
        ScheduleError: if numbers do not fit the ranks, or if nothing within the bound was found.
    """
    if memory is not None and not isinstance(memory, int | float) and len(memory) != ranks:
        raise ScheduleError(f"memory has {len(memory)} bounds and there are {ranks} ranks. Give one for each.")
    limit = [float(memory)] * ranks if isinstance(memory, int | float) else memory and [float(one) for one in memory]
    named: dict[str, float] = {}
    found: list[tuple[Candidate, Costs]] = []
    alone = []
    for count, given in _cuts(ranks, chunks, costs).items():
        settled = None if stage_ranks is None else tuple(stage_ranks)
        cut = _Cut(ranks, microbatches, count, given.for_stages(ranks * count), limit, settled)
        alone.append(cut.least())
        for one in cut.candidates(effort):
            if one.label:
                named[one.label] = one.time
            found.append((one, given))
    if not found:
        raise ScheduleError(
            f"no order of {microbatches} micro-batches on {ranks} ranks was found that holds at most {memory} activations; "
            f"one micro-batch alone takes {min(alone):.6g} on a rank. Raise the bound, make micro-batches smaller, or cut "
            "the model over more ranks."
        )
    most = (1 + close) * min(one.time for one, _ in found)
    best, given = min((pair for pair in found if pair[0].time <= most), key=lambda pair: (pair[0].peak, pair[0].time))
    schedule = Schedule.of(best.lists, name="auto", microbatches=microbatches)
    return Found(schedule=schedule, costs=given, simulation=simulate_costs(schedule, given), named=named)


def _cuts(ranks: int, chunks: int | None, costs: Costs | Mapping[int, Costs] | None) -> dict[int, Costs]:
    """Return the costs of the stages for every allowed number of chunks."""
    if costs is None:
        return {count: Costs().finer(count) for count in ([1, 2] if chunks is None else [chunks])}
    if isinstance(costs, Mapping):
        cuts = {count: one for count, one in costs.items() if chunks in (None, count)}
        if not cuts:
            raise ScheduleError(
                f"costs are given for {sorted(costs)} chunks a rank, and chunks={chunks}. Add that cut."
            )
        return cuts
    if chunks is None:
        stages = costs.stages or ranks
        if stages % ranks:
            raise ScheduleError(
                f"costs are given for {stages} stages, which {ranks} ranks cannot hold in equal numbers. "
                f"Give a multiple of {ranks}."
            )
        chunks = stages // ranks
    return {chunks: costs}


@dataclass(frozen=True)
class Candidate:
    """An order within the bound: makespan, peak activations of a rank, and the name of a named schedule."""

    time: float
    peak: float
    label: str
    stage_ranks: tuple[int, ...]
    lists: Lists


@dataclass(frozen=True)
class _Cut:
    """Model cut into a number of stages, with its candidate schedules."""

    ranks: int
    microbatches: int
    chunks: int
    costs: StageCosts
    limit: Sequence[float] | None
    stage_ranks: tuple[int, ...] | None = None
    replays: dict[tuple[int, ...], Replay] = field(default_factory=dict)

    def candidates(self, effort: float) -> Iterator[Candidate]:
        """Yield every named schedule within the bound, then the results of list scheduling and local search."""
        tried = []
        for label, lists in self.named():
            stage_ranks = Schedule.of(lists).stage_ranks
            tried += self._judge(stage_ranks, lists, label)
        if effort > 0:
            for stage_ranks, lists in self.listed():
                tried += self._judge(stage_ranks, lists, "")
        yield from tried
        if effort > 0:
            for one in sorted(tried, key=lambda one: (one.time, one.peak))[:3]:
                replay = self.replays[one.stage_ranks]
                better = improve(replay, one.lists, self.limit, tries=int(400 * effort))
                yield from self._judge(one.stage_ranks, better, "")
                yield from self._judge(one.stage_ranks, fuse(replay, better), "")

    def _judge(self, stage_ranks: tuple[int, ...], lists: Lists, label: str) -> list[Candidate]:
        """Return the candidate in a list; an empty list if a rank would hold too much or a stage is on the wrong rank."""
        if self.stage_ranks not in (None, stage_ranks):
            return []
        peaks = [peak_activations(actions, self.costs.activation, self.costs.kept) for actions in lists]
        if self.limit and any(p > most * (1 + 1e-9) for p, most in zip(peaks, self.limit, strict=True)):
            return []
        replay = self.replays.setdefault(stage_ranks, Replay(stage_ranks, self.costs))
        return [Candidate(makespan(replay, lists), max(peaks), label, stage_ranks, lists)]

    def least(self) -> float:
        """Return one micro-batch's activations on the fullest rank, under the placement of stages where that is least."""
        sizes = self.costs.activation
        return min(
            max(
                sum(size for size, at in zip(sizes, stage_ranks, strict=True) if at == rank)
                for rank in range(self.ranks)
            )
            for stage_ranks in self._choices()
        )

    def _choices(self) -> list[tuple[int, ...]]:
        """Return the placements of stages to try: round robin, and for several chunks also in waves."""
        if self.stage_ranks is not None:
            return [self.stage_ranks]
        choices = [tuple(range(self.ranks)) * self.chunks]
        return choices if self.chunks == 1 else [*choices, wave_ranks(self.ranks, self.chunks)]

    def named(self) -> Iterator[tuple[str, Lists]]:
        """Yield every named schedule with this number of chunks."""
        size = dict(ranks=self.ranks, microbatches=self.microbatches)
        one, two = ("gpipe", "1f1b", "zb-h1", "zb-h2"), ("zb-v", "dualpipe-v")
        for name in {1: one, 2: two}.get(self.chunks, ()):
            yield name, SCHEDULES[name](**size)
        if self.chunks > 1:
            yield f"interleaved, {self.chunks} chunks", SCHEDULES["interleaved"](**size, chunks=self.chunks)
        if self.chunks % 2 == 0:
            waves = self.chunks // 2
            yield f"hanayo, {waves} wave{'s' * (waves > 1)}", SCHEDULES["hanayo"](**size, waves=waves)

    def listed(self) -> Iterator[tuple[tuple[int, ...], Lists]]:
        """Yield list schedules for several keys and windows, with and without separate weight gradients."""
        ranks, m = self.ranks, self.microbatches
        windows = {min(m, w) for w in (ranks, 3 * ranks // 2, max(2 * ranks - 1, 1), 3 * ranks)}
        if self.limit is not None:
            windows |= {1, max(ranks // 2, 1)}
        ways = ((True, 0.0), (True, 1.0), (False, 0.0))
        for stage_ranks, key, window, (split, patience) in product(
            self._choices(), self._keys(), sorted(windows), ways
        ):
            found = ListScheduler(
                stage_ranks=stage_ranks,
                microbatches=m,
                costs=self.costs,
                key=key,
                window=window,
                split=(split,) * len(stage_ranks),
                patience=patience,
                limit=self.limit,
            ).run(ranks)
            if found is not None:
                yield stage_ranks, found[1]

    def _keys(self) -> list[Key]:
        """Return priority keys: the order in which micro-batches arrive at a steady pace; or gradients before forwards."""
        read, last = self.costs, self.ranks * self.chunks - 1
        down = list(
            accumulate(
                (read.durations[s][Op.F] + (read.send[s] if s < last else 0) for s in range(last + 1)),
                initial=0,
            )
        )
        up = list(
            accumulate(
                (read.durations[s][Op.B] + (read.send[s - 1] if s else 0) for s in range(last, -1, -1)),
                initial=down[-1],
            )
        )
        rank_time = sum(sum(one[op] for op in (Op.F, Op.BW)) for one in read.durations) / self.ranks

        def paced(pace: float) -> Key:
            def key(op: Op, stage: int, microbatch: int) -> float:
                return (down[stage] if op is Op.F else up[last - stage]) + pace * rank_time * microbatch

            return key

        def backward_first(op: Op, stage: int, microbatch: int) -> float:
            return microbatch * (last + 1) - stage + (0 if op is not Op.F else self.microbatches * (last + 2))

        return [paced(0.5), paced(1.0), backward_first]
