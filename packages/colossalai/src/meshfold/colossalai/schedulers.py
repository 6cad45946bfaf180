"""Takes over a learning-rate scheduler that was made of another optimizer: it stays the same object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from meshfold.mesh import SpecError


def check(scheduler: Any, old: object) -> None:
    """Check that :func:`hand_over` can take over a scheduler, or a function that makes one.

    Raises:
        SpecError: for the scheduler of another optimizer, and for what is none.
    """
    if isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        for one in _all(scheduler):
            if one.optimizer is not old:
                raise SpecError(
                    f"lr_scheduler={type(one).__name__}(...) is of another optimizer than the one that was given with it"
                )
    elif not callable(scheduler):
        raise SpecError(f"lr_scheduler={scheduler!r}: a scheduler of torch, or a function of the optimizer")


def hand_over(scheduler: Any, new: torch.optim.Optimizer | None) -> Any:
    """The scheduler, and those inside it, of the engine's optimizer from now on; or what a function makes of that.

    Args:
        scheduler: checked. It has its settings and its place in its schedule; base rates are in the groups, which the new
            optimizer has from the old one.
        new: the engine's.
    """
    if scheduler is None or new is None:
        return None
    if not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        return scheduler(new)
    for one in _all(scheduler):
        one.optimizer = new
    _mark(new)
    return scheduler


def _all(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those that it is made of (SequentialLR, ChainedScheduler, a warm-up with one after it)."""
    yield scheduler
    for value in vars(scheduler).values():
        for inner in value if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, LRScheduler | ReduceLROnPlateau):
                yield from _all(inner)


def _mark(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer say when it stepped, as those do of which a scheduler is made: torch warns where it cannot see it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    LambdaLR(optimizer, _as_it_is)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _as_it_is(step: int) -> float:
    return 1.0
