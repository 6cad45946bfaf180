"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from meshfold.pipeline.scheduling.actions import Action, Op

Lists = list[list[Action]]


def gpipe(*, ranks: int, microbatches: int) -> Lists:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    Bubble (p - 1)(TF + TB + TW), a share of (p - 1) / (m + p - 1); a rank holds all m micro-batches. The backwards run in
    the order of the forwards, so that gradients are summed as in 1F1B, to the bit.
    """
    order = [(op, i) for op in (Op.F, Op.BW) for i in range(microbatches)]
    return [[Action(op, rank, i) for op, i in order] for rank in range(ranks)]
