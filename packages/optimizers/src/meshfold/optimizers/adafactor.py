"""Adafactor in the two forms that are in use (Shazeer and Stern 2018, arXiv 1804.04235)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshfold.optimizers.base import ListSteps, MatrixOptimizer, Sight, gradient_of, rate_of
from meshfold.optimizers.blocks import Blocks, Product, SumOver, WholeTensors, in_buckets
from meshfold.optimizers.factored import (
    add_to_means,
    inverse_root,
    limit_rms,
    on_device,
    rms,
    rms_of_lists,
    row_and_column,
    running_means,
    spread,
    square_sum,
    take_lists,
    zero_means,
)
from meshfold.optimizers.settings import OptimizerSettingError, learning_rate, not_negative, positive, stabilizers


class Adafactor(ListSteps, torch.optim.Adafactor):
    """``torch.optim.Adafactor``, that may be given blocks of tensors: no first moment, ``lr`` is given, and ``1/√t`` bounds it.

    Attributes:
        sight: see :class:`meshfold.optimizers.base.TensorOptimizer`.
        elementwise: False.
        blocks: see :class:`meshfold.optimizers.base.MatrixOptimizer`. Whole tensors are stepped by torch, unless there are kernels.
        kernels: these and others see :class:`meshfold.optimizers.base.TensorOptimizer`.
    """

    sight: ClassVar[Sight] = "matrices"
    elementwise: ClassVar[bool] = False
    blocks: Blocks = WholeTensors()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step once on all parameters that have a gradient; see torch."""
        if isinstance(self.blocks, WholeTensors) and not self.kernels:
            by_torch: Any = super().step  # torch's step has no type annotations
            return by_torch(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            chosen = [p for p in group["params"] if p.grad is not None]
            for bucket in in_buckets(self._step_by_lists(group, chosen), self.blocks):
                self._step_on(group, bucket)
        return loss

    def _step_by_lists(self, group: dict[str, Any], chosen: list[Tensor]) -> list[Tensor]:
        """Step whole matrices in passes over all of them, if kernels are available; return the remaining parameters."""
        factored, rate = [p for p in chosen if p.dim() >= 2 and p.numel()], rate_of(group)
        if not factored or rate is None or group["maximize"] or not self.blocks.whole(factored):
            return chosen
        gradients = [gradient_of(p) for p in factored]
        if self._list_kernel("factored_apply_lists", factored, gradients) is None:
            return chosen
        states = [self._state_of(p) for p in factored]
        counts = [float(state["step"]) for state in states]
        rows, columns = [one["row_var"].squeeze(-1) for one in states], [one["col_var"].squeeze(-2) for one in states]
        sums = self.kernels["square_sum_lists"](gradients)
        take_lists(factored, (rows, columns), sums, [1 - count ** group["beta2_decay"] for count in counts])
        least = torch.finfo(factored[0].dtype).eps if group["eps"][0] is None else group["eps"][0]
        limited = self.kernels["factored_limit_lists"](
            gradients, rows, columns, floor=least * least, clip_threshold=group["d"]
        )
        bounded = [min(rate, 1 / math.sqrt(count)) for count in counts]
        self.kernels["factored_apply_lists"](
            factored,
            gradients,
            rows,
            columns,
            self._copies_of(factored),
            limited,
            rms_of_lists(factored).clamp(min=group["eps"][1]) * on_device(bounded, limited),
            torch.full_like(limited, rate * group["weight_decay"]),
            floor=least * least,
        )
        done = set(factored)
        return [p for p in chosen if p not in done]

    @staticmethod
    def check_block(shape: Sequence[int], whole: Sequence[int]) -> None:
        """Check that means of a whole tensor, of torch's shapes, cannot be taken for a block.

        Args:
            shape: of the block.
            whole: of the tensor.

        Raises:
            OptimizerSettingError: for a block of one row or column.
        """
        if len(shape) >= 2 and tuple(shape) != tuple(whole) and 1 in shape[-2:]:
            raise OptimizerSettingError(
                f"Adafactor: a block of shape {tuple(shape)} of a tensor of shape {tuple(whole)} has one row or column, the shape "
                "of its means in a checkpoint; use adafactor_hf, or fewer ranks for tensor"
            )

    def _step_on(self, group: dict[str, Any], bucket: list[Tensor]) -> None:
        """Step some parameters as torch does, with two rounds of sums: of squares, then of updates."""
        blocks, sign = self.blocks, -1 if group["maximize"] else 1
        gradients = {p: gradient_of(p) * sign for p in bucket}

        def wanted() -> Iterator[SumOver]:
            for p in bucket:
                yield square_sum(p, p)
                if p.dim() >= 2:
                    yield from row_and_column(p, gradients[p].square())

        sums = iter(blocks.sums(wanted()))
        updates, rates = [], []
        for p in bucket:
            state, count = self._state_of(p), float(self.state[p]["step"])
            kept = count ** group["beta2_decay"]
            least = torch.finfo(p.dtype).eps if group["eps"][0] is None else group["eps"][0]
            size = rms(blocks, p, next(sums)).clamp(min=group["eps"][1])
            rates.append(size * min(float(group["lr"]), 1 / math.sqrt(count)))
            if p.dim() >= 2:
                rows, columns = state["row_var"].squeeze(-1), state["col_var"].squeeze(-2)
                add_to_means(blocks, p, (rows, columns), [next(sums), next(sums)], 1 - kept)
                share = rows / rows.mean(dim=-1, keepdim=True).clamp_(min=least)
                estimate = spread(blocks, p, share, columns)
            else:
                estimate = state["variance"].lerp_(gradients[p].square(), kept).clone()
            updates.append(estimate.clamp_(min=least * least).rsqrt_().mul_(gradients[p]))
            if group["weight_decay"]:
                p.mul_(1 - float(group["lr"]) * group["weight_decay"])
        norms = blocks.sums(square_sum(p, update) for p, update in zip(bucket, updates, strict=True))
        for p, update, rate, norm in zip(bucket, updates, rates, norms, strict=True):
            limit_rms(blocks, p, update, norm, group["d"])
            p.sub_(update.mul_(rate))

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's state, with torch's names and shapes, and count the step."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            if parameter.dim() >= 2:
                rows, columns = zero_means(self.blocks, parameter)
                state["row_var"], state["col_var"] = rows.unsqueeze(-1), columns.unsqueeze(-2)
            else:
                state["variance"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        return state


def check_factors(
    name: str, eps: object, clip_threshold: object, decay_rate: object, beta1: object, weight_decay: object
) -> None:
    """Check the settings that :class:`AdafactorHF` and GaLore's Adafactor share.

    Raises:
        OptimizerSettingError: for a value that is out of range.
    """
    stabilizers(name, eps, example="(1e-30, 1e-3)")
    positive(name, "clip_threshold", clip_threshold, example="1.0")
    if not isinstance(decay_rate, float) or not -1 <= decay_rate < 0:
        raise OptimizerSettingError(
            f"{name}: decay_rate={decay_rate!r}; give a number in [-1, 0), such as decay_rate=-0.8"
        )
    if beta1 is not None and (not isinstance(beta1, float) or not 0 <= beta1 < 1):
        raise OptimizerSettingError(
            f"{name}: beta1={beta1!r}; give a number in [0, 1), such as beta1=0.9, or None for no first moment"
        )
    not_negative(name, "weight_decay", weight_decay, example="0.01")


class AdafactorHF(MatrixOptimizer):
    """Adafactor as in ``transformers.optimization.Adafactor``, which follows fairseq's.

    It differs from torch's: the rate may be relative to the step and to the parameter, and a first moment is optional. ``eps[0]``
    is added to squares before they are averaged. With ``relative_step`` a group's ``lr`` is not a setting: it shows the rate of its
    last step, before the factor of the parameter.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        *,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        """Args:
        params: parameters, or groups of them as in torch.
        lr: learning rate; None with ``relative_step``.
        eps: added to squared gradients, and the least root mean square of a parameter that the rate is scaled by.
        clip_threshold: largest root mean square of an update.
        decay_rate: the mean of squares decays by 1 − t^decay_rate; below 0.
        beta1: decay rate of the mean of updates; None: none is kept.
        weight_decay: of the weights, times the rate.
        scale_parameter: scale the rate by the parameter's root mean square.
        relative_step: the rate is min(1e-2, 1/√t) instead of ``lr``.
        warmup_init: with ``relative_step``, min(1e-6 · t, 1/√t).

        Raises:
            OptimizerSettingError: for a value that is out of range, or rates that are given twice or not at all.
        """
        name = "AdafactorHF"
        if relative_step and lr is not None:
            raise OptimizerSettingError(
                f"{name}: lr={lr!r} with relative_step=True, which has its own rate; leave lr out, or write relative_step=False"
            )
        if not relative_step and lr is None:
            raise OptimizerSettingError(f"{name}: relative_step=False without lr; give one, such as lr=1e-3")
        if warmup_init and not relative_step:
            raise OptimizerSettingError(f"{name}: warmup_init=True needs relative_step=True; leave one of them out")
        if lr is not None:
            learning_rate(name, lr)
        check_factors(name, eps, clip_threshold, decay_rate, beta1, weight_decay)
        super().__init__(
            params,
            dict(
                lr=_relative_rate(1.0, warmup_init) if lr is None else lr,
                eps=eps,
                clip_threshold=clip_threshold,
                decay_rate=decay_rate,
                beta1=beta1,
                weight_decay=weight_decay,
                scale_parameter=scale_parameter,
                relative_step=relative_step,
                warmup_init=warmup_init,
            ),
        )

    def _step(self) -> None:
        for group in self.param_groups:
            for bucket in in_buckets(self._step_by_lists(group, self._trained(group)), self.blocks):
                self._step_on(group, bucket)

    def _step_by_lists(self, group: dict[str, Any], chosen: list[Tensor]) -> list[Tensor]:
        """Step whole matrices in passes over all of them, if kernels are available; return the remaining parameters."""
        factored, rate = [p for p in chosen if p.dim() >= 2 and p.numel()], rate_of(group)
        if not factored or rate is None or not self.blocks.whole(factored):
            return chosen
        gradients = [gradient_of(p) for p in factored]
        if self._list_kernel("factored_apply_lists", factored, gradients) is None:
            return chosen
        counts = [self._count(p) for p in factored]
        rates = self._rates(group, counts, rate)
        pairs = [running_means(self.state[p], "exp_avg_sq", self.blocks, p) for p in factored]
        rows, columns = [row for row, _ in pairs], [column for _, column in pairs]
        sums = self.kernels["square_sum_lists"](gradients)
        decays = [1 - count ** group["decay_rate"] for count in counts]
        take_lists(factored, (rows, columns), sums, decays, eps=group["eps"][0])
        limited = self.kernels["factored_limit_lists"](
            gradients, rows, columns, floor=0.0, clip_threshold=group["clip_threshold"]
        )
        sized = on_device(rates, limited)
        if group["scale_parameter"]:
            sized = sized * rms_of_lists(factored).clamp(min=group["eps"][1])
        settings: dict[str, Any] = {}
        lengths = limited, sized
        if group["beta1"] is not None:  # the mean is of updates with their rates
            settings = dict(means=self._moments(factored, "exp_avg"), beta1=group["beta1"])
            lengths = limited * sized, torch.ones_like(sized)
        self.kernels["factored_apply_lists"](
            factored,
            gradients,
            rows,
            columns,
            self._copies_of(factored),
            *lengths,
            sized * group["weight_decay"],
            **settings,
        )
        done = set(factored)
        return [p for p in chosen if p not in done]

    def _rates(self, group: dict[str, Any], counts: Sequence[float], given: float | Tensor) -> list[Any]:
        """Return the rates of parameters of these step counts; the group shows the last one if they are relative."""
        if not group["relative_step"]:
            return [given] * len(counts)
        rates = [_relative_rate(count, group["warmup_init"]) for count in counts]
        group["lr"] = rates[-1]
        return rates

    def _step_on(self, group: dict[str, Any], bucket: list[Tensor]) -> None:
        """Step some parameters, with two rounds of sums: of squares, then of updates."""
        counts = {p: self._count(p) for p in bucket}
        rates = dict(zip(bucket, self._rates(group, list(counts.values()), group["lr"]), strict=True))
        for p, update, rate in adafactor_updates(self, group, counts, {p: gradient_of(p) for p in bucket}, rates):
            if group["beta1"] is not None:
                [mean] = self._moments([p], "exp_avg")
                update = mean.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
            if group["weight_decay"]:
                p.mul_(1 - group["weight_decay"] * rate)
            p.sub_(update)


def adafactor_updates(
    optimizer: MatrixOptimizer,
    group: Mapping[str, Any],
    counts: Mapping[Tensor, float],
    gradients: Mapping[Tensor, Tensor],
    rates: Mapping[Tensor, float | Tensor],
    whole: Mapping[Tensor, Tensor] = MappingProxyType({}),
    products: Sequence[Product] = (),
) -> Iterator[tuple[Tensor, Tensor, float | Tensor]]:
    """Yield each parameter with its update, times its rate, and that rate; the optimizer's means take the gradients in.

    Args:
        optimizer: whose state and blocks.
        group: with ``eps``, ``clip_threshold``, ``decay_rate`` and ``scale_parameter``.
        counts: steps of each parameter.
        gradients: of each.
        rates: of each, before the parameter's size.
        whole: gradients that take the place of some parameters' own: whole tensors on every rank.
        products: others like them, which the all-reduce of the first sums adds up as well.
    """
    blocks = optimizer.blocks
    others = gradients.keys() - whole.keys() - {one.parameter for one in products}

    def wanted() -> Iterator[SumOver | Product]:
        yield from products
        for p, gradient in gradients.items():
            if p in others and gradient.dim() >= 2:
                yield from row_and_column(p, gradient.square().add_(group["eps"][0]))
            if group["scale_parameter"]:
                yield square_sum(p, p)

    sums = iter(blocks.sums(wanted()))
    whole = {**whole, **{one.parameter: next(sums) for one in products}}
    updates, sized = {}, {}
    for p in gradients:
        gradient, like = (gradients[p], p) if p in others else (whole[p], whole[p])
        decay = 1.0 - counts[p] ** group["decay_rate"]
        if gradient.dim() >= 2:
            means = running_means(optimizer.state[p], "exp_avg_sq", blocks, like)
            if p in others:
                added = [next(sums), next(sums)]
            else:  # this rank has all of it
                added = blocks.sums(row_and_column(like, gradient.square().add_(group["eps"][0])))
            add_to_means(blocks, like, means, added, decay)
            updates[p] = inverse_root(blocks, like, *means).mul_(gradient)
        else:
            [mean_square] = optimizer._moments([p], "exp_avg_sq")
            mean_square.mul_(decay).add_(gradient.square().add_(group["eps"][0]), alpha=1 - decay)
            updates[p] = mean_square.rsqrt().mul_(gradient)
        size = rms(blocks, p, next(sums)).clamp(min=group["eps"][1]) if group["scale_parameter"] else 1.0
        sized[p] = size * rates[p]
    likes = {p: whole.get(p, p) for p in updates}
    norms = blocks.sums(square_sum(likes[p], update) for p, update in updates.items())
    for (p, update), norm in zip(updates.items(), norms, strict=True):
        limit_rms(blocks, likes[p], update, norm, group["clip_threshold"])
        yield p, update.mul_(sized[p]), sized[p]


def _relative_rate(count: float, warmup_init: bool) -> float:
    return min(1e-6 * count if warmup_init else 1e-2, 1.0 / math.sqrt(count))
