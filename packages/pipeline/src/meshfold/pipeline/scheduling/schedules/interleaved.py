"""Interleaved 1F1B: several stages a rank, the pipeline runs round the ranks."""

from __future__ import annotations

from meshfold.pipeline.scheduling.actions import Action, Op

Lists = list[list[Action]]


def interleaved(*, ranks: int, microbatches: int, chunks: int = 2) -> Lists:
    """1F1B with ``chunks`` stages a rank: stage s is on rank s mod p (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Bubble (p - 1)(TF + TB + TW) with the times of a stage, 1 / chunks of 1F1B's, if p divides m; a rank holds at most
    p chunks + p - 1 activations of a stage. Micro-batches go through in groups of p; where the last group is not
    full, the places of those that are missing are left out of every list, which keeps what is left in order.
    """
    padded = -(-microbatches // ranks) * ranks
    turns = [
        (chunk, group + i)
        for group in range(0, padded, ranks)
        for chunk in range(chunks)
        for i in range(ranks)
    ]
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
