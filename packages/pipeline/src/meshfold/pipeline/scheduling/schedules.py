"""The schedules by name. Each is a function of ranks and micro-batches to a list of actions for every rank."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from meshfold.pipeline.scheduling.actions import Action, Op
from meshfold.pipeline.scheduling.costs import Costs
from meshfold.pipeline.scheduling.list_scheduling import ListScheduler

Lists = list[list[Action]]
Maker = Callable[..., Lists]


def gpipe(*, ranks: int, microbatches: int) -> Lists:
    """Run all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    Bubble (p - 1)(TF + TB + TW), a share of (p - 1) / (m + p - 1); a rank holds all m micro-batches. The backwards run in
    the order of the forwards, so that gradients are summed as in 1F1B, to the bit.
    """
    order = [(op, i) for op in (Op.F, Op.BW) for i in range(microbatches)]
    return [[Action(op, rank, i) for op, i in order] for rank in range(ranks)]


def one_forward_one_backward(*, ranks: int, microbatches: int) -> Lists:
    """Return 1F1B: after a warm-up, alternate one forward and one backward (Narayanan et al. 2021, arXiv 2104.04473).

    Bubble (p - 1)(TF + TB + TW), as GPipe's; rank r holds at most p - r micro-batches.
    """
    lists = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        actions = [Action(Op.F, rank, i) for i in range(ahead)]
        for i in range(microbatches):
            if i + ahead < microbatches:
                actions.append(Action(Op.F, rank, i + ahead))
            actions.append(Action(Op.BW, rank, i))
        lists.append(actions)
    return lists


def interleaved(*, ranks: int, microbatches: int, chunks: int = 2) -> Lists:
    """Return 1F1B with ``chunks`` stages a rank: stage s is on rank s mod p (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Bubble (p - 1)(TF + TB + TW) with the times of a stage, 1 / chunks of 1F1B's, if p divides m; a rank holds at most p chunks + p
    - 1 activations of a stage. Micro-batches run in groups of p. If the last group is not full, every list leaves out the missing
    micro-batches and keeps the order of the rest.
    """
    padded = -(-microbatches // ranks) * ranks
    turns = [(chunk, group + i) for group in range(0, padded, ranks) for chunk in range(chunks) for i in range(ranks)]
    lists = []
    for rank in range(ranks):
        forward = [Action(Op.F, chunk * ranks + rank, i) for chunk, i in turns]
        backward = [Action(Op.BW, (chunks - 1 - chunk) * ranks + rank, i) for chunk, i in turns]
        behind = ranks - 1 - rank
        ahead = behind if chunks == 1 else min(2 * behind + (chunks - 1) * ranks, len(turns))
        actions = forward[:ahead]
        for place, action in enumerate(backward):
            actions += [*forward[place + ahead : place + ahead + 1], action]
        lists.append([action for action in actions if action.microbatch < microbatches])
    return lists


def zb_h1(*, ranks: int, microbatches: int) -> Lists:
    """Make a schedule with 1F1B's memory and a third of its bubble (Qi et al. 2023, arXiv 2401.10241, section 2.2).

    Bubble (p - 1)(TF + TB - TW); every rank holds at most p micro-batches.
    """
    return _handcrafted(ranks, microbatches, steps=1)


def zb_h2(*, ranks: int, microbatches: int) -> Lists:
    """Make a schedule without a bubble if TF = TB = TW, for nearly twice 1F1B's memory (arXiv 2401.10241, section 2.3).

    Bubble (p - 1)(TF + TB - 2 TW) in the longest span of a rank; every rank holds at most 2 p - 1 micro-batches.
    """
    return _handcrafted(ranks, microbatches, steps=2)


def _handcrafted(ranks: int, microbatches: int, steps: int) -> Lists:
    """Run forwards ahead by ``steps`` per later rank, and delay weight gradients by ``steps`` per earlier rank."""
    lists = []
    for rank in range(ranks):
        ahead, lag = min(steps * (ranks - 1 - rank), microbatches), steps * rank
        actions = [Action(Op.F, rank, i) for i in range(ahead)]
        for i in range(microbatches + lag):
            if i + ahead < microbatches:
                actions.append(Action(Op.F, rank, i + ahead))
            if i < microbatches:
                actions.append(Action(Op.B, rank, i))
            if 0 <= i - lag < microbatches:
                actions.append(Action(Op.W, rank, i - lag))
        lists.append(actions)
    return lists


def wave_ranks(ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of every stage if odd chunks run in reverse rank order; two chunks are a V, or one wave."""
    down = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (down[::-1] if chunk % 2 else down))


def hanayo(*, ranks: int, microbatches: int, waves: int = 1) -> Lists:
    """Run micro-batches in waves over 2 ``waves`` stages a rank (Liu et al. 2023, arXiv 2308.15762).

    The paper's share of idle time for m = p, TB + TW = 2 TF and free messages is (2 p - 2) / (3 p waves + p - 1). List scheduling
    under these times finds the order. Priority is the order in which actions run if every stage runs as soon as it can and a
    micro-batch enters after each half of a rank's time for one. The paper does not cover m > p. Here further micro-batches enter
    while no rank holds more activations of a stage than interleaved 1F1B does: 2 p waves + p - 1.
    """
    stages = 2 * waves * ranks
    costs = Costs().for_stages(stages)

    def greedy(window: int, stage_weight: float) -> tuple[float, Lists] | None:
        def key(op: Op, stage: int, microbatch: int) -> float:
            alone = stage if op is Op.F else stages + 2 * (stages - 1 - stage)
            return stage_weight * alone + 3 * waves * microbatch

        return ListScheduler(
            stage_ranks=wave_ranks(ranks, 2 * waves),
            microbatches=microbatches,
            costs=costs,
            key=key,
            window=window,
            split=(False,) * stages,
            limit=(stages + ranks - 1,) * ranks,
        ).run(ranks)

    windows = sorted({min(microbatches, window) for window in (ranks, 2 * ranks - 1, 2 * ranks, 3 * ranks)})
    tried = [greedy(window, stage_weight) for window in windows for stage_weight in (1.0, 1.5, 3.0)]
    return min((one for one in tried if one is not None), key=lambda one: one[0])[1]


Phase = tuple[int, str]
"""A phase of a V-shaped schedule: how often, and which operations: ``"F0 F1"``.

0 is a rank's stage on the way down, 1 the one on the way up; a plain ``W`` is the oldest weight gradient that waits. The
micro-batches of every operation count up from 0. Phases are written for enough micro-batches to fill the pipeline. With fewer,
every list leaves out the missing ones and keeps the order of the rest.
"""


def zb_v(*, ranks: int, microbatches: int) -> Lists:
    """Make a schedule without a bubble if TF = TB = TW, at 1F1B's memory (Qi et al. 2023, arXiv 2401.10241, section 6).

    A rank holds at most 2 p activations of a stage, p of a rank.
    """
    full = max(microbatches, 2 * ranks - 1)
    lists = []
    for rank in range(ranks):
        behind = ranks - rank
        phases = [
            (2 * behind - 1, "F0"),
            (rank, "F1 F0"),
            (behind, "F1 B1 W1"),
            (full - ranks, "F0 B0 W0 F1 B1 W1"),
            (rank, "B0 B1"),
            (behind, "B0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ]
        lists.append(_unroll(phases, (rank, 2 * ranks - 1 - rank), microbatches))
    return lists


def dualpipe_v(*, ranks: int, microbatches: int) -> Lists:
    """Return DeepSeek's DualPipe cut in half, with one copy of the weights (arXiv 2412.19437; "cut-in-half" by its authors).

    Both gradients at once in the middle, weight gradients separate where that fills a gap. The forward of one micro-batch is
    paired with the backward of another, so that each can hide the other's messages.
    A rank holds at most 2 p + 1 activations of a stage.
    """
    full = max(microbatches, 2 * ranks)
    lists = []
    for rank in range(ranks):
        behind, here = ranks - 1 - rank, rank + 1
        early = here // 2
        phases = [
            (2 * behind, "F0"),
            (here, "F0 F1"),
            (behind, "B1 W F1"),
            (full - 2 * ranks + here, "F0 BW1 F1 BW0"),
            (behind, "BW1 F1 BW0"),
            (early, "BW1 BW0"),
            (1, "BW1 B0" if rank % 2 == 0 else "B1 B0"),
            (here - early - 1, "B1 B0"),
            (behind, "W B0"),
            (here, "W"),
        ]
        lists.append(_unroll(phases, (rank, 2 * ranks - 1 - rank), microbatches))
    return lists


def _unroll(phases: Sequence[Phase], stages: tuple[int, int], microbatches: int) -> list[Action]:
    """Number the micro-batches of every operation, and drop those beyond the step."""
    count: Counter[tuple[str, int]] = Counter()
    waiting: deque[tuple[int, int]] = deque()
    actions = []
    for times, what in phases:
        for word in what.split() * times:
            if word == "W":
                stage, microbatch = waiting.popleft()
                actions.append(Action(Op.W, stage, microbatch))
                continue
            op, chunk = Op(word[:-1]), int(word[-1])
            kind = "B" if op is Op.BW else op.value
            actions.append(Action(op, stages[chunk], count[kind, chunk]))
            if op is Op.B:
                waiting.append((stages[chunk], count[kind, chunk]))
            count[kind, chunk] += 1
    return [action for action in actions if action.microbatch < microbatches]


SCHEDULES: Mapping[str, Maker] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "interleaved": interleaved,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
        "hanayo": hanayo,
        "dualpipe-v": dualpipe_v,
    }
)
"""Every schedule with a name; ``auto`` is searched, not written (:mod:`meshfold.pipeline.scheduling.search`)."""
