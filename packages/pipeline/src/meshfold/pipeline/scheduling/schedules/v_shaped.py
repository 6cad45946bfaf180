"""ZB-V and DualPipe-V: two stages a rank, down the ranks and up again, so that the last stage is on the first rank.

A rank's list is written as phases, a phase as operations on its stage on the way down (0) or up (1) and how often they
repeat; the micro-batches of every operation count up from 0. The phases are right for so many micro-batches as fill the
pipeline; where a step has fewer, the places of the others are left out of every list, which keeps what is left in order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from meshfold.pipeline.scheduling.actions import Action, Op

Lists = list[list[Action]]
Phase = tuple[int, str]
"""how often, and what: ``"F0 F1"``; a plain ``W`` is the oldest weight gradient that waits"""


def zb_v(*, ranks: int, microbatches: int) -> Lists:
    """No bubble if TF = TB = TW, at 1F1B's memory (Qi et al. 2023, arXiv 2401.10241, section 6).

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
    """DeepSeek's DualPipe cut in half, with one copy of the weights (arXiv 2412.19437, and "cut-in-half" of DualPipe's authors).

    Both gradients at once in the middle, the weights' apart where that fills a gap. Forward of one micro-batch and backward
    of another stand side by side there, so that the messages of one can hide behind the other's arithmetic.
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
    """Number the micro-batches of every operation, and keep those that a step has."""
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
