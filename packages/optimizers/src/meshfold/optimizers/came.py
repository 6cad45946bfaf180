"""CAME: Adafactor's memory with a measure of confidence (Luo et al. 2023, arXiv 2307.02047)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshfold.optimizers.base import MatrixOptimizer, gradient_of, rate_of
from meshfold.optimizers.blocks import SumOver, in_buckets
from meshfold.optimizers.factored import (
    add_to_means,
    inverse_root,
    rms,
    row_and_column,
    running_means,
    square_sum,
    take_lists,
)
from meshfold.optimizers.settings import decay_rates, learning_rate, not_negative, positive, stabilizers


class Came(MatrixOptimizer):
    """CAME as in Algorithm 2 of the paper; the same as ``came_pytorch.CAME`` 0.1.3.

    The last two dims of a tensor are a matrix. CAME keeps means of its rows and columns: of squared gradients, and of the squared
    distance between an update and its running mean. One more tensor has the parameter's shape. Vectors and numbers keep whole
    means, and no distance. If a rank has blocks, two rounds of sums per bucket give the sums of whole tensors.
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
        stabilizers("Came", eps, example="(1e-30, 1e-16)")
        positive("Came", "clip_threshold", clip_threshold, example="1.0")
        not_negative("Came", "weight_decay", weight_decay, example="0.01")
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, clip_threshold=clip_threshold, weight_decay=weight_decay)
        )

    def _step(self) -> None:
        for group in self.param_groups:
            for bucket in in_buckets(self._step_by_lists(group, self._trained(group)), self.blocks):
                self._step_on(group, bucket)

    def _step_by_lists(self, group: dict[str, Any], chosen: list[Tensor]) -> list[Tensor]:
        """Step whole matrices in three passes over all of them, if kernels are available; return the remaining parameters."""
        factored, rate = [p for p in chosen if p.dim() >= 2 and p.numel()], rate_of(group)
        if not factored or rate is None or not self.blocks.whole(factored):
            return chosen
        gradients, means = [gradient_of(p) for p in factored], self._moments(factored, "exp_avg")
        if self._list_kernel("factored_apply_lists", factored, gradients, means) is None:
            return chosen
        beta1, beta2, beta3 = group["betas"]
        rows, columns = self._kept(factored, "exp_avg_sq")
        sums = self.kernels["square_sum_lists"](gradients)
        take_lists(factored, (rows, columns), sums, [beta2] * len(factored), eps=group["eps"][0])
        limited, *distances = self.kernels["came_distance_lists"](
            gradients, means, rows, columns, clip_threshold=group["clip_threshold"]
        )
        confidence = self._kept(factored, "exp_avg_res")
        take_lists(factored, confidence, distances, [beta3] * len(factored), factor=beta1**2, eps=group["eps"][1])
        rates = torch.full_like(limited, rate)
        self.kernels["factored_apply_lists"](
            factored,
            gradients,
            rows,
            columns,
            self._copies_of(factored),
            limited,
            rates,
            rates * group["weight_decay"],
            means=means,
            beta1=beta1,
            confidence=confidence,
        )
        done = set(factored)
        return [p for p in chosen if p not in done]

    def _kept(self, factored: list[Tensor], key: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return running means of rows and of columns of matrices, zeros at first."""
        pairs = [running_means(self.state[p], key, self.blocks, p) for p in factored]
        return [rows for rows, _ in pairs], [columns for _, columns in pairs]

    def _step_on(self, group: dict[str, Any], bucket: list[Tensor]) -> None:
        """Step some parameters, with two rounds of sums: of squares, then of updates and distances.

        The distance is b₁ · (l · u − m) of an update u, its limit l, and the mean m before. l is known only after the second round.
        With d = u − m, that round sums d², d · m and m², which give (l · u − m)² = l² · d² − 2 · l · (1 − l) · d · m + (1 − l)² ·
        m²: exactly d² if nothing is limited.
        """
        blocks, (beta1, beta2, beta3) = self.blocks, group["betas"]
        factored = [p for p in bucket if p.dim() >= 2]
        rows_and_columns = dict(zip(factored, zip(*self._kept(factored, "exp_avg_sq"), strict=True), strict=True))
        squares = (one for p in factored for one in row_and_column(p, gradient_of(p).square().add_(group["eps"][0])))
        sums = blocks.sums(squares)
        for place, p in enumerate(factored):
            add_to_means(blocks, p, rows_and_columns[p], sums[2 * place : 2 * place + 2], beta2)
        updates = []
        for p in bucket:
            if p in rows_and_columns:
                update = inverse_root(blocks, p, *rows_and_columns[p]).mul_(gradient_of(p))
            else:
                [mean_square] = self._moments([p], "exp_avg_sq")
                mean_square.mul_(beta2).add_(gradient_of(p).square().add_(group["eps"][0]), alpha=1 - beta2)
                update = mean_square.rsqrt().mul_(gradient_of(p))
            updates.append(update)
        means = self._moments(bucket, "exp_avg")

        def wanted() -> Iterator[SumOver]:
            for p, update, mean in zip(bucket, updates, means, strict=True):
                yield square_sum(p, update)
                if p in rows_and_columns:
                    apart = update - mean
                    for values in (apart.square(), apart * mean, mean.square()):
                        yield from row_and_column(p, values)

        found = iter(blocks.sums(wanted()))
        confidence = dict(zip(factored, zip(*self._kept(factored, "exp_avg_res"), strict=True), strict=True))
        for p, update, mean in zip(bucket, updates, means, strict=True):
            limit = (rms(blocks, p, next(found)) / group["clip_threshold"]).clamp_(min=1.0).reciprocal()
            mean.mul_(beta1).add_(update.mul_(limit), alpha=1 - beta1)
            step = mean
            if p in confidence:
                near, mixed, far = ([next(found), next(found)] for _ in range(3))
                shape = blocks.shape(p)
                distances = [
                    beta1**2 * (limit**2 * d - 2 * limit * (1 - limit) * m + (1 - limit) ** 2 * f).clamp_(min=0.0)
                    + group["eps"][1] * count
                    for d, m, f, count in zip(near, mixed, far, (shape[-1], shape[-2]), strict=True)
                ]
                add_to_means(blocks, p, confidence[p], distances, beta3)
                step = inverse_root(blocks, p, *confidence[p]).mul_(mean)
            if group["weight_decay"]:
                p.mul_(1 - group["weight_decay"] * group["lr"])
            p.sub_(step * group["lr"])
