"""Learning-rate schedules: two with a warm-up, and the handover to the engine of one that was made for another optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from meshfold.mesh import SpecError


def check(scheduler: Any, old: object) -> None:
    """Check that :func:`hand_over` can take over a scheduler, or a function that makes one.

    Raises:
        SpecError: for the scheduler of another optimizer, and for anything else.
    """
    if isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        for one in _all(scheduler):
            if one.optimizer is not old:
                raise SpecError(
                    f"lr_scheduler={type(one).__name__}(...) is of another optimizer than the one that was given with it"
                )
    elif not callable(scheduler):
        raise SpecError(f"lr_scheduler={scheduler!r}: give a torch scheduler, or a function of the optimizer")


def hand_over(scheduler: Any, new: torch.optim.Optimizer | None) -> Any:
    """Return the scheduler, switched with those inside it to the engine's optimizer, or the result of a function that makes one.

    Args:
        scheduler: checked. It keeps its settings and its position; base rates are in the groups, which the new optimizer
            has from the old one.
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
    """Yield a scheduler and the schedulers inside it (SequentialLR, ChainedScheduler, a warm-up with a successor)."""
    yield scheduler
    for value in vars(scheduler).values():
        for inner in value if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, LRScheduler | ReduceLROnPlateau):
                yield from _all(inner)


def _mark(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer report its steps, as torch's schedulers expect."""
    rates = [group["lr"] for group in optimizer.param_groups]
    LambdaLR(optimizer, lambda step: 1.0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class _WarmUp(LRScheduler):
    """Schedule with a linear warm-up, followed by :meth:`_after`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        """Args:
            optimizer: the optimizer whose rates are set.
            total_steps: all calls of ``step``, including the warm-up.
            warmup_steps: calls of ``step`` in the warm-up.
            last_epoch: calls that were made before; -1 for none.

        Raises:
            SpecError: for an invalid number, or no step after the warm-up.
        """
        for name, value in dict(total_steps=total_steps, warmup_steps=warmup_steps).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise SpecError(f"{type(self).__name__}: {name}={value!r}: give a whole number from 0 up")
        if total_steps <= warmup_steps:
            raise SpecError(
                f"{type(self).__name__}: total_steps={total_steps} with warmup_steps={warmup_steps} leaves no step after the "
                "warm-up: write a larger total_steps, which counts the warm-up too"
            )
        self.total_steps, self.warmup_steps = total_steps, warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group."""
        done = self.last_epoch - self.warmup_steps
        bases = [float(base) for base in self.base_lrs]
        if done < 0:
            return [self._before(base) for base in bases]
        share = done / (self.total_steps - self.warmup_steps)
        return [self._after(base, share) for base in bases]

    def _before(self, base: float) -> float:
        """Return the rate of a warm-up step."""
        raise NotImplementedError

    def _after(self, base: float, share: float) -> float:
        """Return the rate after a fraction ``share`` of the steps that follow the warm-up."""
        raise NotImplementedError


class CosineAnnealingWarmupLR(_WarmUp):
    """Linear warm-up to the rate of the group, then down half a cosine to ``eta_min``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        """Args:
            optimizer: its rates are set.
            total_steps: calls of ``step`` in all, including the warm-up's.
            warmup_steps: calls of the warm-up; the rate of call i is i/``warmup_steps`` of the group's.
            eta_min: the last rate.
            last_epoch: calls that were made before; -1 for none.

        Raises:
            SpecError: for an invalid number, or no step after the warm-up.
        """
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _before(self, base: float) -> float:
        return base * (self.last_epoch + 1) / self.warmup_steps

    def _after(self, base: float, share: float) -> float:
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * share)) / 2


class LinearWarmupLR(_WarmUp):
    """Linear warm-up to the rate of the group, then linear decay to 0."""

    def _before(self, base: float) -> float:
        return base * (self.last_epoch + 1) / (self.warmup_steps + 1)

    def _after(self, base: float, share: float) -> float:
        return base * max(0.0, 1 - share)
