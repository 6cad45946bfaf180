"""List scheduling: on a clock, every free rank takes the best action whose inputs are available."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from meshfold.pipeline.scheduling.actions import Action, Op
from meshfold.pipeline.scheduling.costs import StageCosts

Lists = list[list[Action]]
Key = Callable[[Op, int, int], float]
"""from operation, stage and micro-batch to a number: the least is taken first"""


@dataclass(frozen=True, kw_only=True)
class ListScheduler:
    """List scheduling: a clock, and rules for the next action of a free rank.

    Attributes:
        stage_ranks: the rank of every stage.
        microbatches: how many a step has.
        costs: for every stage.
        key: priority among F, B and BW; W is taken if none of these can run, or if memory is short.
        window: the most micro-batches between their first forward and their last gradient of an input.
        split: whether weight gradients are computed separately, by stage.
        patience: W waits for an action that will be ready within this fraction of W's time.
        limit: the most activations a rank may hold; None: no limit.
    """

    stage_ranks: tuple[int, ...]
    microbatches: int
    costs: StageCosts
    key: Key
    window: int
    split: Sequence[bool]
    patience: float = 0.0
    limit: Sequence[float] | None = None

    def run(self, ranks: int) -> tuple[float, Lists] | None:
        """Return the makespan and every rank's actions in the order taken; None if memory ran out for good."""
        return _Clock(self, ranks).run()


class _Clock:
    def __init__(self, how: ListScheduler, ranks: int) -> None:
        self.how = how
        self.free = [0.0] * ranks
        self.held = [0.0] * ranks
        # Pending actions by the arrival of their inputs; ready ones by key; weight gradients in order.
        self.coming: list[list[tuple[float, int, Op, int, int]]] = [[] for _ in range(ranks)]
        self.ready: list[list[tuple[float, int, Op, int, int]]] = [[] for _ in range(ranks)]
        self.weights: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
        self.done: Lists = [[] for _ in range(ranks)]
        self.count = self.entered = self.inside = 0

    def run(self) -> tuple[float, Lists] | None:
        how = self.how
        self._enter(0.0)
        left = sum(3 if split else 2 for split in how.split) * how.microbatches
        while left:
            order = sorted((when, rank) for rank in range(len(self.free)) if (when := self._when(rank)) is not None)
            if not any(self._step(rank, when) for when, rank in order):
                return None
            left -= 1
        return max(self.free), self.done

    def _when(self, rank: int) -> float | None:
        """Return the earliest time at which a rank could start an action."""
        if self.ready[rank] or self.weights[rank]:
            return self.free[rank]
        return max(self.free[rank], self.coming[rank][0][0]) if self.coming[rank] else None

    def _step(self, rank: int, now: float) -> bool:
        coming, ready, how = self.coming[rank], self.ready[rank], self.how
        while coming and coming[0][0] <= now:
            _, place, op, stage, microbatch = heappop(coming)
            heappush(ready, (how.key(op, stage, microbatch), place, op, stage, microbatch))
        full = []
        chosen = None
        while ready and chosen is None:
            entry = heappop(ready)
            if entry[2] is Op.F and not self._fits(rank, entry[3]):
                full.append(entry)
            else:
                chosen = entry
        for entry in full:
            heappush(ready, entry)
        if chosen is not None:
            self._do(rank, now, *chosen[2:])
            return True
        weights = self.weights[rank]
        if weights and not full and coming and how.patience:
            stage = weights[0][1]
            arrival, _, op, next_stage, _ = coming[0]
            fits = op is not Op.F or self._fits(rank, next_stage)
            if fits and arrival < now + how.patience * how.costs.durations[stage][Op.W]:
                return self._step(rank, arrival)
        if weights:
            _, stage, microbatch = heappop(weights)
            self._do(rank, now, Op.W, stage, microbatch)
            return True
        return bool(coming) and self._step(rank, max(now, coming[0][0]))

    def _fits(self, rank: int, stage: int) -> bool:
        limit = self.how.limit
        return limit is None or self.held[rank] + self.how.costs.activation[stage] <= limit[rank] * (1 + 1e-12)

    def _do(self, rank: int, now: float, op: Op, stage: int, microbatch: int) -> None:
        how, costs = self.how, self.how.costs
        end = now + costs.durations[stage][op]
        self.free[rank] = end
        self.done[rank].append(Action(op, stage, microbatch))
        size, kept = costs.activation[stage], costs.kept[stage]
        last = len(how.stage_ranks) - 1
        if op is Op.F:
            self.held[rank] += size
            self._give(end, rank, Op.F, stage + 1, microbatch) if stage < last else self._give(
                end, rank, Op.B, stage, microbatch
            )
            return
        self.held[rank] -= size * {Op.B: 1 - kept, Op.W: kept, Op.BW: 1.0}[op]
        if op is Op.W:
            return
        if op is Op.B:
            self.count += 1
            heappush(self.weights[rank], (self.count, stage, microbatch))
        if stage:
            self._give(end, rank, Op.B, stage - 1, microbatch)
        else:
            self.inside -= 1
            self._enter(end)

    def _give(self, end: float, rank: int, op: Op, stage: int, microbatch: int) -> None:
        """Make an action ready once its inputs have arrived."""
        target, maker = self.how.stage_ranks[stage], stage + (-1 if op is Op.F else 1)
        away = target != rank
        arrival = end + (self.how.costs.send[min(stage, maker)] if away else 0.0)
        if op is Op.B and not self.how.split[stage]:
            op = Op.BW
        self.count += 1
        heappush(self.coming[target], (arrival, self.count, op, stage, microbatch))

    def _enter(self, now: float) -> None:
        """Admit as many micro-batches as the window has room for."""
        while self.inside < self.how.window and self.entered < self.how.microbatches:
            self.count += 1
            heappush(self.coming[self.how.stage_ranks[0]], (now, self.count, Op.F, 0, self.entered))
            self.entered += 1
            self.inside += 1
