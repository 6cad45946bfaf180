"""Learning rates over time, as factors of the highest one."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from meshfold.mesh import SpecError, did_you_mean

_LAST = 0.1  # final rate as a fraction of the highest


def factor(schedule: str, step: int, *, warmup: int, steps: int) -> float:
    """Return the factor of the optimizer step with number ``step``, from 0."""
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
    """Return a function that makes an optimizer's scheduler.

    Raises:
        SpecError: for an unknown name, or an invalid warm-up.
    """
    if schedule not in SCHEDULES:
        raise SpecError(f"schedule={schedule!r}: {did_you_mean(schedule, SCHEDULES)} Known: {', '.join(SCHEDULES)}")
    if warmup < 0 or steps < 1:
        raise SpecError(f"warmup={warmup}, steps={steps}: steps from 1 up, of which 0 or more warm up")
    return lambda optimizer: LambdaLR(optimizer, lambda step: factor(schedule, step, warmup=warmup, steps=steps))


def go_on(scheduler: LRScheduler, *, step: int, lr: float) -> None:
    """Make a scheduler of :func:`lr_schedule` continue at a step as if made with its settings from the start.

    A checkpoint contains the highest and the next rate of the run that wrote it, which are replaced.

    Args:
        scheduler: loaded from a checkpoint, or new.
        step: optimizer steps made so far.
        lr: the highest rate.
    """
    assert isinstance(scheduler, LambdaLR)  # lr_schedule makes only these
    groups = scheduler.optimizer.param_groups
    scheduler.last_epoch = step
    scheduler.base_lrs = [lr] * len(groups)
    rates = [lr * factor_of(step) for factor_of in scheduler.lr_lambdas]
    for group, rate in zip(groups, rates, strict=True):
        group["initial_lr"], group["lr"] = lr, rate
    scheduler._last_lr = list(rates)
