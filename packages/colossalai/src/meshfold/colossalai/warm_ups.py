"""Two schedules with a warm-up that most scripts for Colossal-AI use, as functions of the step alone."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LRScheduler

from meshfold.mesh import SpecError


class _WarmUp(LRScheduler):
    """Rates that rise in a line, and then do what :meth:`_after` says."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        """Args:
            optimizer: whose rates are set.
            total_steps: calls of ``step`` in all, the warm-up's among them.
            warmup_steps: calls on the way up.
            last_epoch: calls that were made before; -1 for none.

        Raises:
            SpecError: for a number that is none, or no step after the warm-up.
        """
        for name, value in dict(total_steps=total_steps, warmup_steps=warmup_steps).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise SpecError(f"{type(self).__name__}: {name}={value!r}: a whole number from 0 up")
        if total_steps <= warmup_steps:
            raise SpecError(
                f"{type(self).__name__}: total_steps={total_steps} with warmup_steps={warmup_steps} leaves no step after the "
                "warm-up: write a larger total_steps, which counts the warm-up too"
            )
        self.total_steps, self.warmup_steps = total_steps, warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """A rate a group."""
        done = self.last_epoch - self.warmup_steps
        bases = [float(base) for base in self.base_lrs]
        if done < 0:
            return [self._before(base) for base in bases]
        share = done / (self.total_steps - self.warmup_steps)
        return [self._after(base, share) for base in bases]

    def _before(self, base: float) -> float:
        """The rate of a step of the warm-up."""
        raise NotImplementedError

    def _after(self, base: float, share: float) -> float:
        """The rate when ``share`` of the steps after the warm-up are done."""
        raise NotImplementedError


class CosineAnnealingWarmupLR(_WarmUp):
    """In a line up to the rate of the group, then down half a cosine to ``eta_min``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        """Args:
            optimizer: whose rates are set.
            total_steps: calls of ``step`` in all, the warm-up's among them.
            warmup_steps: calls on the way up; the rate of call i is i/``warmup_steps`` of the group's.
            eta_min: the last rate.
            last_epoch: calls that were made before; -1 for none.

        Raises:
            SpecError: for a number that is none, or no step after the warm-up.
        """
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _before(self, base: float) -> float:
        return base * (self.last_epoch + 1) / self.warmup_steps

    def _after(self, base: float, share: float) -> float:
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * share)) / 2


class LinearWarmupLR(_WarmUp):
    """In a line up to the rate of the group, then in a line down to 0, where it stays."""

    def _before(self, base: float) -> float:
        return base * (self.last_epoch + 1) / (self.warmup_steps + 1)

    def _after(self, base: float, share: float) -> float:
        return base * max(0.0, 1 - share)
