"""Losses, target counts and outputs of an engine's model without dropout and without gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from meshfold.mesh import all_reduce
from meshfold.mesh.model_io import eval_mode

if TYPE_CHECKING:
    from meshfold.engine.engine import Engine


def eval_loss(engine: Engine, batch: Any) -> tuple[float, int]:
    """See :meth:`Engine.eval_loss`."""
    forward = engine.runner.forward
    with torch.no_grad():
        work = forward.prepare(batch)
        shares = forward.shares(work, places=False)
        loss = all_reduce(forward.assess(work, shares) * shares.weight(), engine.world.data_group)
    count = int(shares.total())
    return (float(loss) if count else math.nan), count


def count_targets(engine: Engine, batch: Any) -> int:
    """See :meth:`Engine.count_targets`."""
    forward = engine.runner.forward
    return int(forward.shares(forward.prepare(batch), places=False).total())


def predict(engine: Engine, batch: Any) -> Any:
    """See :meth:`Engine.predict`."""
    forward = engine.runner.forward
    work = forward.prepare(batch)
    if forward.shifts_labels:  # with labels the model would leave logits split over the vocabulary
        work.kwargs.pop("labels", None)
    with eval_mode(engine.model), torch.no_grad():
        return engine.generator(*work.args, **work.kwargs)
