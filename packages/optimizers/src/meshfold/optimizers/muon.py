"""Muon: matrices step along the orthogonal factor of their momentum, all else by AdamW.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshfold.optimizers.base import RoleOptimizer, gradient_of, rate_of
from meshfold.optimizers.blocks import in_buckets
from meshfold.optimizers.newton_schulz import COEFFICIENTS, orthogonalize
from meshfold.optimizers.roles import MATRICES
from meshfold.optimizers.settings import OptimizerSettingError, decay_rates, learning_rate, not_negative, positive

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64, "same": None}
_ADJUST = ("original", "match_rms_adamw")


class Muon(RoleOptimizer):
    """Muon on matrices and AdamW on embeddings, head, norms and biases.

    A group's ``role`` says which: ``"matrices"`` are orthogonalised, the other roles of
    :func:`meshfold.optimizers.role_groups` go to AdamW. Without a role, parameters of two dims count as matrices: so give
    groups for a model with embeddings. On matrices it is ``torch.optim.Muon``, with Nesterov momentum and rates that grow
    with the shape. Matrices of one shape are orthogonalised in one batch; of blocks, each matrix by one rank. Parameters of three
    dims in a group of matrices are stacks of them, ``(experts, m, n)``, each orthogonalised separately.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        ns_steps: int = 5,
        ns_eps: float = 1e-7,
        ns_dtype: str = "bfloat16",
        adjust_lr_fn: str = "original",
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
    ) -> None:
        """Args:
        params: parameters, or groups of them as :func:`meshfold.optimizers.role_groups` makes.
        lr: learning rate of matrices.
        weight_decay: of matrices, times the learning rate.
        momentum: of the gradient's mean.
        nesterov: look one step of momentum ahead.
        ns_coefficients: of Newton-Schulz, for x, x³ and x⁵.
        ns_steps: iterations.
        ns_eps: the least norm that a matrix is divided by.
        ns_dtype: in which Newton-Schulz multiplies: ``"bfloat16"`` as torch does, ``"float32"``, ``"float64"``, or
            ``"same"`` for the parameter's.
        adjust_lr_fn: ``"original"``: times √max(1, m/n); ``"match_rms_adamw"``: times 0.2 · √max(m, n), for AdamW's rates.
        adamw_lr: learning rate of the other roles; None: ``lr``.
        adamw_betas: decay rates of AdamW.
        adamw_eps: of AdamW.
        adamw_weight_decay: of AdamW; None: ``weight_decay``.

        Raises:
            OptimizerSettingError: for a value that is out of range, an unknown role, or matrices that are none.
        """
        learning_rate("Muon", lr)
        not_negative("Muon", "weight_decay", weight_decay, example="0.1")
        decay_rates("Muon", "momentum", (momentum,), example=(0.95,))
        if len(tuple(ns_coefficients)) != 3:
            raise OptimizerSettingError(
                f"Muon: ns_coefficients={ns_coefficients!r}; give 3 numbers, such as {COEFFICIENTS}"
            )
        if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or not 1 <= ns_steps < 100:
            raise OptimizerSettingError(f"Muon: ns_steps={ns_steps!r}; give a count from 1 to 99, such as ns_steps=5")
        positive("Muon", "ns_eps", ns_eps, example="1e-7")
        if ns_dtype not in _DTYPES:
            raise OptimizerSettingError(f"Muon: ns_dtype={ns_dtype!r}; give one of {', '.join(map(repr, _DTYPES))}")
        if adjust_lr_fn not in _ADJUST:
            raise OptimizerSettingError(f"Muon: adjust_lr_fn={adjust_lr_fn!r}; give {' or '.join(map(repr, _ADJUST))}")
        if adamw_lr is not None:
            not_negative("Muon", "adamw_lr", adamw_lr, example="3e-4")
        decay_rates("Muon", "adamw_betas", adamw_betas, example=(0.9, 0.95))
        not_negative("Muon", "adamw_eps", adamw_eps, example="1e-8")
        if adamw_weight_decay is not None:
            not_negative("Muon", "adamw_weight_decay", adamw_weight_decay, example="0.1")
        super().__init__(
            params,
            dict(
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_coefficients=tuple(ns_coefficients),
                ns_steps=ns_steps,
                ns_eps=ns_eps,
                ns_dtype=ns_dtype,
                adjust_lr_fn=adjust_lr_fn,
                adamw_betas=adamw_betas,
                adamw_eps=adamw_eps,
                role=None,
            ),
        )
        # AdamW groups have their own rate and decay, under torch's names so that schedulers see them.
        for group in self.param_groups:
            if group["role"] in (None, MATRICES):
                continue
            group["lr"] = lr if adamw_lr is None else adamw_lr
            group["weight_decay"] = weight_decay if adamw_weight_decay is None else adamw_weight_decay

    def _step(self) -> None:
        for group in self.param_groups:
            matrices: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            others = []
            for parameter in self._trained(group):
                if group["role"] == MATRICES or (group["role"] is None and parameter.dim() == 2):
                    matrices.setdefault((parameter.device, parameter.dtype), []).append(parameter)
                else:
                    others.append(parameter)
            for alike in matrices.values():
                by_shape = sorted(alike, key=self.blocks.shape)  # those of one shape are orthogonalised in one batch
                for bucket in in_buckets(by_shape, self.blocks):
                    self._step_on_matrices(group, bucket)
            if others:
                self._step_by_adamw(group, others)

    def _step_on_matrices(self, group: dict[str, Any], alike: list[Tensor]) -> None:
        """Step matrices of one dtype."""
        gradients, means = [gradient_of(p) for p in alike], self._moments(alike, "momentum_buffer")
        dtype = _DTYPES[group["ns_dtype"]] or alike[0].dtype
        average = self._list_kernel("average_lists", gradients, means)
        if average is not None:
            ahead = [torch.empty_like(p, dtype=dtype) for p in alike]
            average(gradients, means, ahead, momentum=group["momentum"], nesterov=group["nesterov"])
        else:
            torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
            looked = torch._foreach_lerp(gradients, means, group["momentum"]) if group["nesterov"] else means
            ahead = [one.to(dtype) for one in looked]
        iterate = partial(
            orthogonalize, steps=group["ns_steps"], coefficients=group["ns_coefficients"], eps=group["ns_eps"]
        )
        orthogonal = self.blocks.through_whole(alike, ahead, iterate)
        del ahead
        factors: dict[float, list[int]] = {}
        for place, parameter in enumerate(alike):
            factors.setdefault(_factor(group, self.blocks.shape(parameter)), []).append(place)
        for factor, places in factors.items():
            self._move(group, [alike[place] for place in places], [orthogonal[place] for place in places], factor)

    def _move(self, group: dict[str, Any], alike: list[Tensor], updates: list[Tensor], factor: float) -> None:
        """Let weights decay, and step by updates whose rate counts times a factor."""
        kernel, rate = self._list_kernel("apply_lists", alike), rate_of(group)
        if kernel is not None and rate is not None and all(one.is_contiguous() for one in updates):
            keep = 1 - rate * group["weight_decay"]
            kernel(alike, updates, self._copies_of(alike), keep=keep, rate=rate * factor)
            return
        updates = [one.to(alike[0].dtype) for one in updates]
        torch._foreach_mul_(alike, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_mul_(updates, group["lr"] * factor)
        torch._foreach_sub_(alike, updates)

    def _step_by_adamw(self, group: dict[str, Any], others: list[Tensor]) -> None:
        beta1, beta2 = group["adamw_betas"]
        rate = rate_of(group)
        for count, alike in self._alike(others):
            gradients = [gradient_of(p) for p in alike]
            means, squares = self._moments(alike, "exp_avg"), self._moments(alike, "exp_avg_sq")
            corrections = 1 - beta1**count, math.sqrt(1 - beta2**count)
            kernel = self._list_kernel("adamw_lists", alike, gradients, means, squares)
            if kernel is not None and rate is not None:
                kernel(
                    alike,
                    gradients,
                    means,
                    squares,
                    self._copies_of(alike),
                    lr=rate,
                    betas=group["adamw_betas"],
                    eps=group["adamw_eps"],
                    weight_decay=group["weight_decay"],
                    corrections=corrections,
                )
                continue
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
            roots = torch._foreach_sqrt(squares)
            torch._foreach_div_(roots, corrections[1])
            torch._foreach_add_(roots, group["adamw_eps"])
            updates = torch._foreach_div(means, corrections[0])
            torch._foreach_div_(updates, roots)
            torch._foreach_mul_(alike, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_mul_(updates, group["lr"])
            torch._foreach_sub_(alike, updates)


def _factor(group: dict[str, Any], shape: tuple[int, ...]) -> float:
    """Return the factor on the learning rate of a matrix."""
    rows, columns = shape[-2:]
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
