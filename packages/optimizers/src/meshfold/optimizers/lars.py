"""LARS: SGD with momentum, each tensor's rate scaled to the tensor's norm (You et al. 2017, arXiv 1708.03888)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.optimizers.base import NormOptimizer, gradient_of
from meshfold.optimizers.settings import OptimizerSettingError, learning_rate, not_negative, positive


class Lars(NormOptimizer):
    """LARS as in the paper, in timm's form.

    For a tensor x with gradient g: ratio = trust_coeff · ‖x‖ / (‖g‖ + weight_decay · ‖x‖ + eps), d = ratio · (g + weight_decay ·
    x), v ← momentum · v + d, x ← x − lr · v. Where a norm is 0 the ratio counts as 1. The paper puts the learning rate into v,
    which is the same while the rate does not change. ``timm.optim.Lars`` with ``always_adapt=True`` is this one; Colossal-AI's
    clamps norms (1e-4 away after five steps), ``torch_optimizer``'s is 1.5e-2 away.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        trust_coeff: float = 0.001,
        eps: float = 1e-8,
        always_adapt: bool = True,
    ) -> None:
        """Args:
        params: parameters, or groups of them as in torch.
        lr: learning rate.
        momentum: of the direction; 0: none is kept.
        dampening: by which a new direction counts less.
        weight_decay: of the weights, in the direction.
        nesterov: look one step of momentum ahead.
        trust_coeff: the trust coefficient η of the paper.
        eps: added to the denominator of the ratio.
        always_adapt: scale also the tensors of groups without weight decay; timm leaves them out by default.

        Raises:
            OptimizerSettingError: for a value that is out of range.
        """
        learning_rate("Lars", lr)
        not_negative("Lars", "momentum", momentum, example="0.9")
        not_negative("Lars", "dampening", dampening, example="0")
        not_negative("Lars", "weight_decay", weight_decay, example="1e-4")
        positive("Lars", "trust_coeff", trust_coeff, example="0.001")
        not_negative("Lars", "eps", eps, example="1e-8")
        if nesterov and (not momentum or dampening):
            raise OptimizerSettingError(
                f"Lars: nesterov=True with momentum={momentum!r} and dampening={dampening!r}; give a momentum and no dampening"
            )
        super().__init__(
            params,
            dict(
                lr=lr,
                momentum=momentum,
                dampening=dampening,
                weight_decay=weight_decay,
                nesterov=nesterov,
                trust_coeff=trust_coeff,
                eps=eps,
                always_adapt=always_adapt,
            ),
        )

    def _step(self) -> None:
        groups = [(group, self._trained(group)) for group in self.param_groups]
        adapted = [p for group, chosen in groups if group["always_adapt"] or group["weight_decay"] for p in chosen]
        weights, gradients = self._norms(adapted, adapted, [gradient_of(p) for p in adapted])
        place = {p: number for number, p in enumerate(adapted)}
        for group, chosen in groups:
            for p in chosen:
                ratio: Tensor | float = 1.0
                if p in place:
                    ratio = _ratio(group, *(norms[p.device][place[p]] for norms in (weights, gradients)))
                if self._step_by_kernel(group, p, ratio):
                    continue
                direction = torch.add(gradient_of(p), p, alpha=group["weight_decay"]).mul_(ratio)
                p.sub_(self._with_momentum(group, p, direction) * group["lr"])

    def _step_by_kernel(self, group: dict[str, Any], parameter: Tensor, ratio: Tensor | float) -> bool:
        """Step one parameter by a kernel; return False if no kernel fits."""
        kept: Tensor | None = self.state.get(parameter, {}).get("momentum_buffer") if group["momentum"] else None
        tensors = [one for one in (parameter, gradient_of(parameter), kept) if one is not None]
        kernel = self._kernel("lars_step", *tensors)
        if kernel is None:
            return False
        first = kept is None
        if group["momentum"] and kept is None:
            kept = self.state[parameter]["momentum_buffer"] = torch.empty_like(parameter)
        settings = {name: group[name] for name in ("momentum", "dampening", "weight_decay", "nesterov")}
        kernel(
            parameter.view(-1),
            gradient_of(parameter).view(-1),
            None if kept is None else kept.view(-1),
            ratio=float(ratio),
            lr=float(group["lr"]),
            first=first,
            **settings,
        )
        return True

    def _with_momentum(self, group: dict[str, Any], parameter: Tensor, direction: Tensor) -> Tensor:
        """Return the direction with momentum."""
        if not group["momentum"]:
            return direction
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            kept = state["momentum_buffer"] = direction.clone()
        else:
            kept = state["momentum_buffer"]
            kept.mul_(group["momentum"]).add_(direction, alpha=1 - group["dampening"])
        return direction.add(kept, alpha=group["momentum"]) if group["nesterov"] else kept


def _ratio(group: dict[str, Any], weight: Tensor, gradient: Tensor) -> Tensor:
    """Return the trust ratio of a tensor, from its norm and its gradient's."""
    ratio = group["trust_coeff"] * weight / (gradient + weight * group["weight_decay"] + group["eps"])
    return torch.where((weight > 0) & (gradient > 0), ratio, 1.0)
