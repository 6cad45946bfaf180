"""ZB-H1 and ZB-H2: the gradient of the weights waits, and fills what would be idle."""

from __future__ import annotations

from meshfold.pipeline.scheduling.actions import Action, Op

Lists = list[list[Action]]


def zb_h1(*, ranks: int, microbatches: int) -> Lists:
    """1F1B's memory and a third of its bubble (Qi et al. 2023, arXiv 2401.10241, section 2.2).

    Bubble (p - 1)(TF + TB - TW); every rank holds at most p micro-batches.
    """
    return _handcrafted(ranks, microbatches, steps=1)


def zb_h2(*, ranks: int, microbatches: int) -> Lists:
    """No bubble if TF = TB = TW, for nearly twice 1F1B's memory (arXiv 2401.10241, section 2.3).

    Bubble (p - 1)(TF + TB - 2 TW) in the longest span of a rank; every rank holds at most 2 p - 1 micro-batches.
    """
    return _handcrafted(ranks, microbatches, steps=2)


def _handcrafted(ranks: int, microbatches: int, steps: int) -> Lists:
    """Forwards run ahead by ``steps`` for every rank behind, weight gradients lag by ``steps`` for every rank before."""
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
