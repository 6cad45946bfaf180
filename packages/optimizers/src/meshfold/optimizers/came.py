"""CAME: Adafactor's memory with a measure of confidence (Luo et al. 2023, arXiv 2307.02047)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshfold.optimizers.base import TensorOptimizer, gradient_of
from meshfold.optimizers.factored import add_to_means, inverse_root, limit_rms, zero_means
from meshfold.optimizers.settings import OptimizerSettingError, at_least, decay_rates, learning_rate, positive

__all__ = ["Came"]


class Came(TensorOptimizer):
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
            for parameter in self._trained(group):
                self._step_on(group, parameter)

    def _step_on(self, group: dict[str, Any], parameter: Tensor) -> None:
        beta1, beta2, beta3 = group["betas"]
        gradient, state = gradient_of(parameter), self.state[parameter]
        factored = parameter.dim() >= 2
        if factored and "exp_avg_sq_row" not in state:
            state["exp_avg_sq_row"], state["exp_avg_sq_col"] = zero_means(parameter)
            state["exp_avg_res_row"], state["exp_avg_res_col"] = zero_means(parameter)
        squares = gradient.square().add_(group["eps"][0])
        if factored:
            rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            add_to_means(rows, columns, squares, beta2)
            update = inverse_root(rows, columns).mul_(gradient)
        else:
            [mean_square] = self._moments([parameter], "exp_avg_sq")
            mean_square.mul_(beta2).add_(squares, alpha=1 - beta2)
            update = mean_square.rsqrt().mul_(gradient)
        limit_rms(update, group["clip_threshold"])
        [mean] = self._moments([parameter], "exp_avg")
        mean.mul_(beta1).add_(update, alpha=1 - beta1)
        if factored:
            distance = (update - mean).square_().add_(group["eps"][1])
            rows, columns = state["exp_avg_res_row"], state["exp_avg_res_col"]
            add_to_means(rows, columns, distance, beta3)
            update = inverse_root(rows, columns).mul_(mean)
        else:
            update = mean.clone()
        if group["weight_decay"]:
            parameter.mul_(1 - group["weight_decay"] * group["lr"])
        parameter.sub_(update.mul_(group["lr"]))
