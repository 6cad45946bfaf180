"""LAMB: Adam's direction, each tensor's step scaled to the tensor's norm (You et al. 2019, arXiv 1904.00962)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.optimizers.base import NormOptimizer, gradient_of, rate_of
from meshfold.optimizers.settings import adam_settings


class Lamb(NormOptimizer):
    """LAMB as in Algorithm 2 of the paper, with Adam's bias correction.

    For a tensor x: u = m̂ / (√v̂ + eps) + weight_decay · x, then x ← x − lr · (‖x‖ / ‖u‖) · u. Where a norm is 0 the ratio counts
    as 1. This is ``timm.optim.Lamb(max_grad_norm=None, always_adapt=True)``. Others differ by up to 7e-2 after five steps.
    Colossal-AI's and torch_optimizer's clamp the norm of x to [0, 10] and put the bias correction into the learning rate. NVIDIA's
    first clips by the norm of the whole gradient. Before it, clip the gradient with the engine's ``clip_grad_norm``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        always_adapt: bool = True,
        trust_clip: bool = False,
    ) -> None:
        """Args:
        params: parameters, or groups of them as in torch.
        lr: learning rate.
        betas: decay rates of the means of the gradient and of its square.
        eps: added to the root of the mean square.
        weight_decay: of the weights, in the direction u.
        bias_correction: divide the means by 1 − beta^t.
        always_adapt: scale also the tensors of groups without weight decay; timm leaves them out by default.
        trust_clip: let the ratio be at most 1.

        Raises:
            OptimizerSettingError: for a value that is out of range.
        """
        adam_settings("Lamb", lr, betas, eps, weight_decay)
        super().__init__(
            params,
            dict(
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                bias_correction=bias_correction,
                always_adapt=always_adapt,
                trust_clip=trust_clip,
            ),
        )

    def _step(self) -> None:
        groups = [(group, self._trained(group)) for group in self.param_groups]
        if not self._step_by_lists(groups):
            self._step_by_operations(groups)

    def _step_by_lists(self, groups: Sequence[tuple[dict[str, Any], list[Tensor]]]) -> bool:
        """Step in two launches a group and one for the norms, the direction computed twice; return False where that cannot be.

        The host has a kernel of its own for the direction.
        """
        everything = [p for _, chosen in groups for p in chosen]
        on_host = "lamb_direction" in self.kernels and any(p.device.type == "cpu" for p in everything)
        if not everything or on_host or not self._takes_sums(everything):
            return False
        gradients = {p: gradient_of(p) for p in everything}
        fits = self._list_kernel("lamb_moment_lists", everything, list(gradients.values()))
        if fits is None or any(rate_of(group) is None for group, _ in groups):
            return False
        parts = []
        for group, chosen in groups:
            for count, alike in self._alike(chosen):
                means, squares = self._moments(alike, "exp_avg"), self._moments(alike, "exp_avg_sq")
                beta1, beta2 = group["betas"]
                corrections = (1 - beta1**count, (1 - beta2**count) ** 0.5) if group["bias_correction"] else (1.0, 1.0)
                parts.append((group, alike, means, squares, corrections))
        sums = [
            self.kernels["lamb_moment_lists"](
                alike,
                [gradients[p] for p in alike],
                means,
                squares,
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                corrections=corrections,
            )
            for group, alike, means, squares, corrections in parts
        ]
        stepped = [p for _, alike, *_ in parts for p in alike]
        weights, steps = self._whole_sums(stepped, torch.cat(sums, dim=1)).sqrt().to(stepped[0].device)
        ratios = _trust_ratio(weights, steps).split([len(alike) for _, alike, *_ in parts])
        for (group, alike, means, squares, corrections), ratio in zip(parts, ratios, strict=True):
            if not (group["always_adapt"] or group["weight_decay"]):
                ratio = torch.ones_like(ratio)
            if group["trust_clip"]:
                ratio = ratio.clamp(max=1.0)
            self.kernels["lamb_apply_lists"](
                alike,
                means,
                squares,
                self._copies_of(alike),
                ratio * float(group["lr"]),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                corrections=corrections,
            )
        return True

    def _step_by_operations(self, groups: Sequence[tuple[dict[str, Any], list[Tensor]]]) -> None:
        updates = {p: u for group, chosen in groups for p, u in zip(chosen, self._updates(group, chosen), strict=True)}
        adapted = [p for group, chosen in groups if group["always_adapt"] or group["weight_decay"] for p in chosen]
        weights, steps = self._norms(adapted, adapted, [updates[p] for p in adapted])
        place = {p: number for number, p in enumerate(adapted)}
        ratios = {device: _trust_ratio(norm, steps[device]) for device, norm in weights.items()}
        for group, chosen in groups:
            elsewhere = []
            for p in chosen:
                ratio: Tensor | float = ratios[p.device][place[p]] if p in place else 1.0
                if group["trust_clip"] and isinstance(ratio, Tensor):
                    ratio = ratio.clamp(max=1.0)
                if p.device.type == "cpu":  # reading a number costs nothing, and makes the step one operation
                    p.sub_(updates[p], alpha=float(ratio * group["lr"]))
                    continue
                updates[p].mul_(ratio)
                elsewhere.append(p)
            if elsewhere:
                torch._foreach_mul_([updates[p] for p in elsewhere], group["lr"])
                torch._foreach_sub_(elsewhere, [updates[p] for p in elsewhere])

    def _updates(self, group: dict[str, Any], chosen: list[Tensor]) -> list[Tensor]:
        """Update the moments and return each parameter's direction u."""
        if not chosen:
            return []
        beta1, beta2 = group["betas"]
        gradients = [gradient_of(p) for p in chosen]
        means, squares = self._moments(chosen, "exp_avg"), self._moments(chosen, "exp_avg_sq")
        counts = [self._count(p) for p in chosen]
        corrections = [(1.0, 1.0)] * len(chosen)
        if group["bias_correction"]:
            corrections = [(1 - beta1**count, (1 - beta2**count) ** 0.5) for count in counts]
        settings = dict(betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"])
        kernels = [
            self._kernel("lamb_direction", *some) for some in zip(chosen, gradients, means, squares, strict=True)
        ]
        if all(kernels):
            return [
                kernel(*(one.view(-1) for one in some), **settings, corrections=pair).view(some[0].shape)
                for kernel, pair, *some in zip(kernels, corrections, chosen, gradients, means, squares, strict=True)
                if kernel is not None
            ]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        if group["bias_correction"]:
            torch._foreach_div_(roots, [root for _, root in corrections])
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)
        if group["bias_correction"]:
            torch._foreach_div_(updates, [mean for mean, _ in corrections])
        if group["weight_decay"]:
            torch._foreach_add_(updates, chosen, alpha=group["weight_decay"])
        return list(updates)


def _trust_ratio(weights: Tensor, steps: Tensor) -> Tensor:
    """Return ‖x‖ / ‖u‖ of each tensor, 1 where a norm is 0."""
    both = (weights > 0) & (steps > 0)
    return torch.where(both, weights / steps.masked_fill(~both, 1.0), 1.0)
