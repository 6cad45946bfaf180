"""Lion: the sign of a mean of gradients (Chen et al. 2023, arXiv 2302.06675)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from meshfold.optimizers.base import Sight, TensorOptimizer, gradient_of, rate_of
from meshfold.optimizers.settings import decay_rates, learning_rate, not_negative


class Lion(TensorOptimizer):
    """Lion as in Algorithm 2 of the paper: x ← x − lr · (sign(β₁ m + (1 − β₁) g) + weight_decay · x), m ← β₂ m + (1 − β₂) g.

    It keeps one tensor a parameter. Its learning rate is about a tenth of AdamW's, its weight decay ten times as large.
    """

    sight: ClassVar[Sight] = "elements"
    elementwise: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        """Args:
        params: parameters, or groups of them as in torch.
        lr: learning rate.
        betas: weight of the mean in the direction, and decay rate of the mean.
        weight_decay: of the weights, times the learning rate.

        Raises:
            OptimizerSettingError: for a value that is out of range.
        """
        learning_rate("Lion", lr)
        decay_rates("Lion", "betas", betas, example=(0.9, 0.99))
        not_negative("Lion", "weight_decay", weight_decay, example="0.1")
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    def _step(self) -> None:
        for group in self.param_groups:
            chosen = self._trained(group)
            if not chosen:
                continue
            beta1, beta2 = group["betas"]
            gradients, means = [gradient_of(p) for p in chosen], self._moments(chosen, "exp_avg")
            kernel, rate = self._list_kernel("lion_lists", chosen, gradients), rate_of(group)
            if kernel is not None and rate is not None:
                settings = dict(betas=group["betas"], weight_decay=group["weight_decay"])
                kernel(chosen, gradients, means, self._copies_of(chosen), lr=rate, **settings)
                continue
            updates = torch._foreach_lerp(means, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            if group["weight_decay"]:
                torch._foreach_add_(updates, chosen, alpha=group["weight_decay"])
            torch._foreach_mul_(updates, group["lr"])
            torch._foreach_sub_(chosen, updates)
            torch._foreach_lerp_(means, gradients, 1 - beta2)
