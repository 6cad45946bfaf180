"""Hanayo's waves: the stages run down the ranks and up again, once or several times, with one copy of the weights."""

from __future__ import annotations

from meshfold.pipeline.scheduling.actions import Action, Op
from meshfold.pipeline.scheduling.costs import Costs
from meshfold.pipeline.scheduling.list_scheduling import ListScheduler

Lists = list[list[Action]]


def wave_home(ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of every stage where odd chunks run up the ranks; two chunks are a V, or one wave."""
    down = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (down[::-1] if chunk % 2 else down))


def hanayo(*, ranks: int, microbatches: int, waves: int = 1) -> Lists:
    """Waves with 2 ``waves`` stages a rank (Liu et al. 2023, arXiv 2308.15762).

    The paper's share of idle time for m = p, TB + TW = 2 TF and free messages is (2 p - 2) / (3 p waves + p - 1).
    The order is found by list scheduling under these times: first is taken what would be first if every stage ran
    as soon as it could and micro-batches entered every half of a rank's time for one. For m > p the paper says
    nothing; more micro-batches then enter as long as no rank holds more activations of a stage than interleaved 1F1B
    does, 2 p waves + p - 1.
    """
    stages = 2 * waves * ranks
    costs = Costs().for_stages(stages)

    def greedy(window: int, stretch: float) -> tuple[float, Lists] | None:
        def key(op: Op, stage: int, microbatch: int) -> float:
            alone = stage if op is Op.F else stages + 2 * (stages - 1 - stage)
            return stretch * alone + 3 * waves * microbatch

        return ListScheduler(
            home=wave_home(ranks, 2 * waves),
            microbatches=microbatches,
            costs=costs,
            key=key,
            window=window,
            split=(False,) * stages,
            limit=(stages + ranks - 1,) * ranks,
        ).run(ranks)

    windows = sorted({min(microbatches, window) for window in (ranks, 2 * ranks - 1, 2 * ranks, 3 * ranks)})
    tried = [greedy(window, stretch) for window in windows for stretch in (1.0, 1.5, 3.0)]
    return min((one for one in tried if one is not None), key=lambda one: one[0])[1]
