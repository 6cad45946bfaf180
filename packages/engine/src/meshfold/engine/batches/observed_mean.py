"""The mean that a model's own loss is, as its first forward shows: the cross entropies in it, beside the targets of the batch.

Ranks' means are combined by numbers of targets. A model's class seldom tells which targets its loss counts: next tokens, all
labels, or rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshfold.engine.batches.batch import Batch
from meshfold.engine.batches.loss import LossCalls
from meshfold.engine.world import World
from meshfold.mesh import SpecError, all_gather
from meshfold.mesh.model_io import LossMean, count_targets

if TYPE_CHECKING:
    from meshfold.pipeline.runtime import Microbatch

_MOST = 8
"""Cross entropies in one forward; a model with more is not compared."""

_CANDIDATES = (LossMean.NEXT_TOKENS, LossMean.LABELS, LossMean.ROWS)


def observed_mean(calls: LossCalls, work: Batch, world: World, *, mean: LossMean, name: str) -> LossMean:
    """Return what the loss of the first forward is a mean over, the same on every rank; all data ranks must call.

    Args:
        calls: its cross entropies.
        work: this data coordinate's batch.
        world: the ranks.
        mean: what the model's class tells.
        name: of the model, for the error.

    Raises:
        SpecError: if ranks' means cannot be combined by one number of targets.
    """
    counts = calls.counts if len(calls.counts) <= _MOST else []
    fill = torch.zeros((), dtype=torch.int64, device=world.device)
    numbers = [fill + len(counts), *(one.to(world.device) for one in counts), *[fill] * (_MOST - len(counts))]
    numbers += [work.count(one, device=world.device) for one in _CANDIDATES]
    mine = torch.stack(numbers).view(1, -1)
    if mine.is_meta:  # a plan's forward has shapes and no numbers, and is that of every step
        return mean
    each, *columns = all_gather(mine, world.row_group, 0).t().tolist()
    if mean is LossMean.SUM or len({*each}) > 1:
        return mean
    found, expected = columns[: len(counts)], dict(zip(_CANDIDATES, columns[_MOST:], strict=True))
    kept = matching(found, expected, mean)
    if kept is None and world.mode is None:
        raise SpecError(
            f"{world.spec.written or world.spec}: the loss of {name} takes means over {_listed(found)} targets (data ranks in "
            f"order), and the batch has {_listed([expected[mean]])} ({mean.value}): no weight of a rank combines them to the "
            "loss of the whole batch. Give a loss_fn that takes one mean, or give every rank as many targets of each kind"
        )
    return kept or mean


def check_microbatches(calls: LossCalls, works: Sequence[Microbatch], mean: LossMean, name: str) -> None:
    """Check that the loss of micro-batches is the mean by which they are weighted.

    Args:
        calls: the cross entropies of all micro-batches, in order.
        works: the micro-batches.
        mean: by which they are weighted.
        name: of the model.

    Raises:
        SpecError: if it is not.
    """
    targets = [labels for work in works if isinstance(labels := work.kwargs.get("labels"), Tensor)]
    each, rest = divmod(len(calls.counts), len(works))
    if mean is LossMean.SUM or rest or not each or len(targets) < len(works):
        return
    if any(one.is_meta for one in (*calls.counts, *targets)):  # a plan's forward has shapes and no numbers
        return
    counts = [int(one) for one in calls.counts]
    found = [counts[call::each] for call in range(each)]
    expected = {one: [int(count_targets(labels, len(labels), one)) for labels in targets] for one in _CANDIDATES}
    kept = matching(found, expected, mean)
    if kept is not mean:
        remedy = "give micro-batches with as many targets each, or a loss_fn"
        if kept is LossMean.LABELS:
            remedy = "its labels are not shifted, so write model.loss_type = 'ForTokenClassification'"
        raise SpecError(
            f"pipeline: the loss of {name} takes means over {_listed(found)} targets (micro-batches in order), which are "
            f"weighted by {_listed([expected[mean]])} ({mean.value}): {remedy}"
        )


def matching(found: list[list[int]], expected: Mapping[LossMean, list[int]], mean: LossMean) -> LossMean | None:
    """Return the mean that parts of a batch can be combined by; None if there is none.

    Args:
        found: of each cross entropy, the targets of each part.
        expected: of each kind of mean, the same.
        mean: expected; stays if it gives the same weights.
    """
    parts = [part for part, count in enumerate(expected[mean]) if count]  # others have a filler target
    for one in (mean, *expected):
        if all(call[part] == expected[one][part] for call in found for part in parts):
            return one
    whole = sum(expected[mean][part] for part in parts)
    same = all(
        call[part] * whole == expected[mean][part] * sum(call[other] for other in parts)
        for call in found
        for part in parts
    )
    return mean if same else None


def check_rows_apart(calls: LossCalls, output: Any, work: Batch, world: World, name: str) -> None:
    """Check that a model's own loss does not compare rows with each other, which are on different ranks.

    Raises:
        SpecError: for a contrastive loss.
    """
    fields = output if isinstance(output, Mapping) else vars(output) if hasattr(output, "__dict__") else {}
    named = any(str(field).startswith("logits_per_") for field in fields)
    contrasts = None if named else calls.contrasts
    if named or (contrasts is not None and not _same(contrasts, work.targets)):
        raise SpecError(
            f"{world.spec.written or world.spec}: the loss of {name} compares every row of the batch with all others "
            "(contrastive), and a data rank has only its own rows: the loss would be another. Use a spec without data and zero, "
            "such as dict(tensor=2), or take a loss of each rank's own rows in a loss_fn if that is what you want"
        )


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and bool((one == other.to(one.device)).all())


def _listed(calls: list[list[int]]) -> str:
    return " and ".join(", ".join(map(str, one)) for one in calls)
