"""The paper's search for ZB-2p (arXiv 2401.10241, section 3.1), written anew as a schedule of one's own.

Ranks on a clock. Before its first B a rank runs as many F as end by the time it comes. Then F and B by turns; where a turn has to
wait, W fills the gap if it is long enough, or if the rank would otherwise be the one that has waited longest of all. Where memory
is short W frees some; W that are left come last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from meshfold.pipeline import Action, Costs, Op

Lists = list[list[Action]]
_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Times:
    """What a stage costs, alike on all ranks.

    Attributes:
        forward, backward_input, backward_weight: TF, TB, TW.
        send: Tcomm.
        kept: share of a micro-batch's activations that W still needs.
    """

    forward: float
    backward_input: float
    backward_weight: float
    send: float
    kept: float = 1.0

    @property
    def total(self) -> float:
        """TF + TB + TW."""
        return self.forward + self.backward_input + self.backward_weight

    def costs(self, chunks: int = 1) -> Costs:
        """For the simulator, with a rank's share cut into so many stages."""
        return Costs(
            forward=self.forward / chunks,
            backward_input=self.backward_input / chunks,
            backward_weight=self.backward_weight / chunks,
            send=self.send,
            activation=1 / chunks,
            kept=self.kept,
        )


def heuristic(times: Times, memory: float, *, more: bool = False) -> Callable[..., Lists]:
    """A function for :func:`meshfold.pipeline.schedule`.

    Args:
        times: of a stage.
        memory: the most activations that a rank may hold, in those of a stage for one micro-batch.
        more: whether one F more may delay the first B, if it would leave a gap.
    """

    def searched(*, ranks: int, microbatches: int) -> Lists:
        return _Search(times, memory, more, ranks, microbatches).run()

    return searched


@dataclass
class _Rank:
    place: int
    clock: float = 0.0
    began: float | None = None
    held: float = 0.0
    waited: float = 0.0
    last: Op = Op.W
    count: dict[Op, int] = field(default_factory=lambda: {Op.F: 0, Op.B: 0, Op.W: 0})
    arrived: dict[Op, list[float]] = field(default_factory=lambda: {Op.F: [], Op.B: []})
    done: list[Action] = field(default_factory=list)


class _Search:
    def __init__(self, times: Times, memory: float, more: bool, ranks: int, microbatches: int) -> None:
        self.times, self.memory, self.more, self.microbatches = times, memory, more, microbatches
        self.ranks = [_Rank(place) for place in range(ranks)]
        self.ranks[0].arrived[Op.F] = [0.0] * microbatches
        self.length = {Op.F: times.forward, Op.B: times.backward_input, Op.W: times.backward_weight}

    def run(self) -> Lists:
        """The lists, made by letting the rank whose clock is behind choose; one that waits for another is passed over."""
        waiting: set[int] = set(range(1, len(self.ranks)))
        while live := [rank for rank in self.ranks if rank.place not in waiting]:
            rank = min(live, key=lambda one: (one.clock, -one.place))
            op, start = self._choose(rank)
            if start == inf:
                waiting.add(rank.place)
                continue
            waiting -= self._do(rank, op, start)
        return [rank.done for rank in self.ranks]

    def _choose(self, rank: _Rank) -> tuple[Op, float]:
        """What comes next and when; at infinity where that is not known yet, or nothing is left."""
        count = rank.count
        f, b = self._when(rank, Op.F), self._when(rank, Op.B)
        if count[Op.B] == self.microbatches:
            return Op.W, rank.clock if count[Op.W] < self.microbatches else inf
        if not count[Op.B]:
            return (Op.F, f) if self._before_first(rank, f) else (Op.B, b)
        if count[Op.F] == self.microbatches or rank.last is Op.F:
            op, start = Op.B, b
        else:
            op, start = (Op.F, f) if f <= rank.clock + _SLACK or b > rank.clock + _SLACK else (Op.B, b)
        gap = start - rank.clock
        if gap > _SLACK and count[Op.B] > count[Op.W]:
            most = max(one.waited for one in self.ranks)
            if gap >= self.length[Op.W] - _SLACK or rank.waited + gap > most + _SLACK:
                return Op.W, rank.clock
        return op, start

    def _before_first(self, rank: _Rank, start: float) -> bool:
        """Whether another F goes before the first B, whose time is known from the first F's: down and up again."""
        if rank.began is None:
            return True
        behind = len(self.ranks) - 1 - rank.place
        times = self.times
        first = rank.began + times.forward
        first += behind * (times.forward + times.backward_input + 2 * times.send)
        if start + times.forward <= first + _SLACK:
            return True
        return self.more and start < first - _SLACK

    def _when(self, rank: _Rank, op: Op) -> float:
        number = rank.count[op]
        arrived = rank.arrived[op]
        if number >= len(arrived) or (op is Op.F and rank.held + 1 > self.memory + _SLACK):
            return inf
        return max(rank.clock, arrived[number])

    def _do(self, rank: _Rank, op: Op, start: float) -> set[int]:
        """Run it, and tell whom it lets go on."""
        if rank.began is None:
            rank.clock = rank.began = start
        rank.waited += start - rank.clock
        rank.clock = end = start + self.length[op]
        rank.done.append(Action(op, rank.place, rank.count[op]))
        rank.count[op] += 1
        if op is Op.W:
            rank.held -= self.times.kept
            return set()
        rank.last = op
        rank.held += 1 if op is Op.F else self.times.kept - 1
        to = rank.place + (1 if op is Op.F else -1)
        if op is Op.F and to == len(self.ranks):
            rank.arrived[Op.B].append(end)
        elif to >= 0:
            self.ranks[to].arrived[op].append(end + self.times.send)
            return {to}
        return set()
