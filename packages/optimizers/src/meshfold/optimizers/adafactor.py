"""Adafactor in the two forms that are in use (Shazeer and Stern 2018, arXiv 1804.04235)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from meshfold.optimizers.base import TensorOptimizer, gradient_of
from meshfold.optimizers.factored import add_to_means, inverse_root, limit_rms, rms, zero_means
from meshfold.optimizers.settings import OptimizerSettingError, at_least, learning_rate, positive

__all__ = ["Adafactor", "AdafactorHF"]

Adafactor = torch.optim.Adafactor
"""torch's: no first moment, the learning rate is given, and ``1/√t`` bounds it."""


class AdafactorHF(TensorOptimizer):
    """Adafactor as in ``transformers.optimization.Adafactor``, which follows fairseq's.

    It differs from torch's: the rate may be relative to the step and to the parameter, a first moment is optional, and
    squares are raised by ``eps[0]`` before they are averaged. With ``relative_step`` a group's ``lr`` is no setting: it shows the
    rate of its last step, before that of the parameter.
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
            raise OptimizerSettingError(
                f"{name}: warmup_init=True is of the relative rate, and relative_step=False; leave one of them out"
            )
        if lr is not None:
            learning_rate(name, lr)
        if not isinstance(eps, tuple | list) or len(eps) != 2:
            raise OptimizerSettingError(f"{name}: eps={eps!r}; give 2 numbers above 0, such as eps=(1e-30, 1e-3)")
        for one in eps:
            positive(name, "eps", one, example="(1e-30, 1e-3)")
        positive(name, "clip_threshold", clip_threshold, example="1.0")
        if not isinstance(decay_rate, float) or not -1 <= decay_rate < 0:
            raise OptimizerSettingError(
                f"{name}: decay_rate={decay_rate!r}; give a number in [-1, 0), such as decay_rate=-0.8"
            )
        if beta1 is not None and (not isinstance(beta1, float) or not 0 <= beta1 < 1):
            raise OptimizerSettingError(
                f"{name}: beta1={beta1!r}; give a number in [0, 1), such as beta1=0.9, or None for no first moment"
            )
        at_least(name, "weight_decay", weight_decay, 0.0, example="0.01")
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
            for parameter in self._trained(group):
                self._step_on(group, parameter)

    def _step_on(self, group: dict[str, Any], parameter: Tensor) -> None:
        gradient, state = gradient_of(parameter), self.state[parameter]
        count = self._count(parameter)
        decay = 1.0 - count ** group["decay_rate"]
        rate = _rate(group, count, parameter)
        squares = gradient.square().add_(group["eps"][0])
        if parameter.dim() >= 2:
            if "exp_avg_sq_row" not in state:
                state["exp_avg_sq_row"], state["exp_avg_sq_col"] = zero_means(parameter)
            rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            add_to_means(rows, columns, squares, decay)
            update = inverse_root(rows, columns).mul_(gradient)
        else:
            [mean_square] = self._moments([parameter], "exp_avg_sq")
            mean_square.mul_(decay).add_(squares, alpha=1 - decay)
            update = mean_square.rsqrt().mul_(gradient)
        limit_rms(update, group["clip_threshold"])
        update.mul_(rate)
        if group["beta1"] is not None:
            [mean] = self._moments([parameter], "exp_avg")
            update = mean.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"]:
            parameter.mul_(1 - group["weight_decay"] * rate)
        parameter.sub_(update)


def _relative_rate(count: float, warmup_init: bool) -> float:
    return min(1e-6 * count if warmup_init else 1e-2, 1.0 / math.sqrt(count))


def _rate(group: dict[str, Any], count: float, parameter: Tensor) -> float | Tensor:
    """Return the learning rate of one parameter's step."""
    rate: float | Tensor = group["lr"]
    if group["relative_step"]:
        rate = group["lr"] = _relative_rate(count, group["warmup_init"])
    return rms(parameter).clamp(min=group["eps"][1]) * rate if group["scale_parameter"] else rate
