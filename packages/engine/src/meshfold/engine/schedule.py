"""Learning rates over time, as factors of the highest."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from meshfold.mesh import SpecError
from meshfold.mesh.errors import nearest

_LAST = 0.1  # of the highest rate, where a schedule falls


def factor(schedule: str, step: int, *, warmup: int, steps: int) -> float:
    """The factor of the optimizer step with number ``step``, from 0."""
    if step < warmup:
        return (step + 1) / warmup
    way = min(1.0, (step - warmup) / max(1, steps - warmup))
    return {
        "constant": 1.0,
        "linear": 1.0 - (1.0 - _LAST) * way,
        "cosine": _LAST + (1.0 - _LAST) * 0.5 * (1.0 + math.cos(math.pi * way)),
    }[schedule]


SCHEDULES = ("cosine", "linear", "constant")


def lr_schedule(schedule: str, *, warmup: int, steps: int) -> Callable[[Optimizer], LambdaLR]:
    """What makes the scheduler of an optimizer.

    Raises:
        SpecError: for an unknown name, or a warm-up that is no number of steps.
    """
    if schedule not in SCHEDULES:
        raise SpecError(
            f"schedule={schedule!r}: {nearest(schedule, SCHEDULES)} Known: {', '.join(SCHEDULES)}"
        )
    if warmup < 0 or steps < 1:
        raise SpecError(f"warmup={warmup}, steps={steps}: steps from 1 up, of which 0 or more warm up")
    return lambda optimizer: LambdaLR(
        optimizer, lambda step: factor(schedule, step, warmup=warmup, steps=steps)
    )
