"""1F1B: as few micro-batches in flight as keep the pipeline full."""

from __future__ import annotations

from meshfold.pipeline.scheduling.actions import Action, Op

Lists = list[list[Action]]


def one_forward_one_backward(*, ranks: int, microbatches: int) -> Lists:
    """1F1B: after a warm-up, one forward and one backward by turns (Narayanan et al. 2021, arXiv 2104.04473).

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
