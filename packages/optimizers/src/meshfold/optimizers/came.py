"""CAME: Adafactor's memory with a measure of confidence (Luo et al. 2023, arXiv 2307.02047)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from meshfold.optimizers.base import MatrixOptimizer, gradient_of
from meshfold.optimizers.blocks import in_buckets
from meshfold.optimizers.factored import (
    add_to_means,
    inverse_root,
    limit_rms,
    row_and_column,
    square_sum,
    zero_means,
)
from meshfold.optimizers.settings import OptimizerSettingError, at_least, decay_rates, learning_rate, positive

__all__ = ["Came"]


class Came(MatrixOptimizer):
    """CAME as in Algorithm 2 of the paper; the same as ``came_pytorch.CAME`` 0.1.3.

    The last two dims of a tensor are a matrix, of which it keeps means of rows and columns: of squared gradients, and of the
    squared distance between an update and its running mean. One more tensor has the parameter's shape. Vectors and
    numbers keep whole means, and no distance.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        """Args:
        params: parameters, or groups of them as in torch.
        lr: learning rate.
        betas: decay rates of the means of updates, of squared gradients, and of squared distances.
        eps: added to squared gradients and to squared distances.
        clip_threshold: largest root mean square of an update.
        weight_decay: of the weights, times the learning rate.

        Raises:
            OptimizerSettingError: for a value that is out of range.
        """
        learning_rate("Came", lr)
        decay_rates("Came", "betas", betas, example=(0.9, 0.999, 0.9999))
        if not isinstance(eps, tuple | list) or len(eps) != 2:
            raise OptimizerSettingError(f"Came: eps={eps!r}; give 2 numbers above 0, such as eps=(1e-30, 1e-16)")
        for one in eps:
            positive("Came", "eps", one, example="(1e-30, 1e-16)")
        positive("Came", "clip_threshold", clip_threshold, example="1.0")
        at_least("Came", "weight_decay", weight_decay, 0.0, example="0.01")
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, clip_threshold=clip_threshold, weight_decay=weight_decay)
        )

    def _step(self) -> None:
        for group in self.param_groups:
            for bucket in in_buckets(self._trained(group), self.blocks.bucket_elements):
                self._step_on(group, bucket)

    def _step_on(self, group: dict[str, Any], bucket: list[Tensor]) -> None:
        """Step some parameters, with three rounds of sums: of squares, of updates, of distances."""
        blocks, (beta1, beta2, beta3) = self.blocks, group["betas"]
        factored = [p for p in bucket if p.dim() >= 2]
        squares = self._means(
            factored, "exp_avg_sq", (gradient_of(p).square().add_(group["eps"][0]) for p in factored), beta2
        )
        updates = []
        for p in bucket:
            if p in squares:
                update = inverse_root(blocks, p, *squares[p]).mul_(gradient_of(p))
            else:
                [mean_square] = self._moments([p], "exp_avg_sq")
                mean_square.mul_(beta2).add_(gradient_of(p).square().add_(group["eps"][0]), alpha=1 - beta2)
                update = mean_square.rsqrt().mul_(gradient_of(p))
            updates.append(update)
        norms = blocks.sums(square_sum(p, update) for p, update in zip(bucket, updates, strict=True))
        means = self._moments(bucket, "exp_avg")
        for p, update, mean, norm in zip(bucket, updates, means, norms, strict=True):
            limit_rms(blocks, p, update, norm, group["clip_threshold"])
            mean.mul_(beta1).add_(update, alpha=1 - beta1)
        by_parameter = dict(zip(bucket, zip(updates, means, strict=True), strict=True))
        distances = ((u - m).square_().add_(group["eps"][1]) for u, m in (by_parameter[p] for p in factored))
        confidence = self._means(factored, "exp_avg_res", distances, beta3)
        for p, mean in zip(bucket, means, strict=True):
            update = inverse_root(blocks, p, *confidence[p]).mul_(mean) if p in confidence else mean.clone()
            if group["weight_decay"]:
                p.mul_(1 - group["weight_decay"] * group["lr"])
            p.sub_(update.mul_(group["lr"]))

    def _means(
        self, factored: list[Tensor], key: str, values: Iterable[Tensor], rate: float
    ) -> dict[Tensor, tuple[Tensor, Tensor]]:
        """Return each matrix's running row and column means, updated with its values."""
        found = {}
        for p in factored:
            state = self.state[p]
            if f"{key}_row" not in state:
                state[f"{key}_row"], state[f"{key}_col"] = zero_means(self.blocks, p)
            found[p] = state[f"{key}_row"], state[f"{key}_col"]
        wanted = (one for p, value in zip(factored, values, strict=True) for one in row_and_column(p, value))
        sums = self.blocks.sums(wanted)
        for place, p in enumerate(factored):
            add_to_means(self.blocks, p, found[p], sums[2 * place : 2 * place + 2], rate)
        return found
