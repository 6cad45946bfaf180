"""Steps of optimizers over lists of tensors: one launch for all tensors of a list, however many and whatever their shapes.

Every list has one tensor for each parameter, of its shape. ``copies`` are parameters in lower precision that are also written, or
None. Without Triton, numbers are computed in float64; Triton computes in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.factored_lists import (
    came_distance_lists,
    factored_apply_lists,
    factored_limit_lists,
    square_sum_lists,
)
from meshfold.kernels.layerwise import LAYERWISE

Tensors = Sequence[Tensor]
_DTYPES = (torch.float32, torch.float64)


def _check(parameters: Tensors, copies: Tensors | None, **others: Tensors) -> None:
    """Raise unless lists are alike.

    Raises:
        TypeError: for parameters of another dtype than float32 or float64, or a list of another one.
        ValueError: for lists of other lengths, shapes or devices, or tensors that are not contiguous.
    """
    first = parameters[0]
    if first.dtype not in _DTYPES:
        raise TypeError(f"parameters are {first.dtype}; they must be float32 or float64: convert them first")
    lists = {"parameters": parameters, **others, **({} if copies is None else {"copies": copies})}
    for name, tensors in lists.items():
        if len(tensors) != len(parameters):
            raise ValueError(f"{name} has {len(tensors)} tensors for {len(parameters)} parameters; give one for each")
        for one, parameter in zip(tensors, parameters, strict=True):
            if one.shape != parameter.shape or one.device != first.device or not one.is_contiguous():
                raise ValueError(
                    f"{name} has a tensor of shape {tuple(one.shape)} on {one.device} for a parameter of shape "
                    f"{tuple(parameter.shape)} on {first.device}; give contiguous ones of the same shapes on one device"
                )
            wanted = tensors[0].dtype if name in ("copies", "ahead", "updates") else first.dtype
            if one.dtype != wanted:
                raise TypeError(f"{name} has a tensor of {one.dtype} beside one of {wanted}; give one dtype")


@torch.no_grad()
def lamb_moment_lists(
    parameters: Tensors,
    gradients: Tensors,
    means: Tensors,
    squares: Tensors,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> Tensor:
    """Return sums of squares of each parameter and of its direction, ``(2, tensors)`` in float64; the means take gradients in.

    The direction of LAMB is not kept: :func:`lamb_apply_lists` computes it again. Memory moved: 24 bytes a parameter.

    Args:
        parameters: float32 or float64, contiguous, not none; so are the others.
        gradients: of them.
        means: of gradients.
        squares: means of squared gradients.
        betas: decay rates of the means.
        eps: added to the root of the mean square.
        weight_decay: of the weights, in the direction.
        corrections: what the mean and the root are divided by.

    Raises:
        TypeError: for another dtype.
        ValueError: for lists that are not alike.
    """
    _check(parameters, None, gradients=gradients, means=means, squares=squares)
    step = dispatch.twin(lamb_moments, parameters[0])
    return step(parameters, gradients, means, squares, betas, eps, weight_decay, corrections)


@torch.no_grad()
def lamb_apply_lists(
    parameters: Tensors,
    means: Tensors,
    squares: Tensors,
    copies: Tensors | None,
    rates: Tensor,
    *,
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> None:
    """Step with LAMB in place: ``x ← x − rate · direction``. Memory moved: 16 bytes a parameter, 18 with copies.

    Args:
        parameters: as in :func:`lamb_moment_lists`.
        means: of gradients, after the step.
        squares: means of squared gradients, after the step.
        copies: see the module.
        rates: of each tensor, ``(tensors,)`` on their device.
        eps: added to the root of the mean square.
        weight_decay: of the weights, in the direction.
        corrections: what the mean and the root are divided by.

    Raises:
        TypeError: for another dtype.
        ValueError: for lists that are not alike.
    """
    _check(parameters, copies, means=means, squares=squares)
    step = dispatch.twin(lamb_apply, parameters[0])
    step(parameters, means, squares, copies, rates, eps, weight_decay, corrections)


@torch.no_grad()
def adamw_lists(
    parameters: Tensors,
    gradients: Tensors,
    means: Tensors,
    squares: Tensors,
    copies: Tensors | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> None:
    """Step with AdamW in place. Memory moved: 28 bytes a parameter, 30 with copies.

    Args:
        parameters: as in :func:`lamb_moment_lists`; so are the other lists and numbers.
        gradients: of them.
        means: of gradients.
        squares: means of squared gradients.
        copies: see the module.
        lr: learning rate.
        betas: decay rates of the means.
        eps: added to the root of the mean square.
        weight_decay: of the weights, times the learning rate.
        corrections: what the mean and the root are divided by.

    Raises:
        TypeError: for another dtype.
        ValueError: for lists that are not alike.
    """
    _check(parameters, copies, gradients=gradients, means=means, squares=squares)
    step = dispatch.twin(adamw, parameters[0])
    step(parameters, gradients, means, squares, copies, lr, betas, eps, weight_decay, corrections)


@torch.no_grad()
def lion_lists(
    parameters: Tensors,
    gradients: Tensors,
    means: Tensors,
    copies: Tensors | None,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """Step with Lion in place. Memory moved: 20 bytes a parameter, 22 with copies.

    Args:
        parameters: as in :func:`lamb_moment_lists`; so are the other lists.
        gradients: of them.
        means: of gradients.
        copies: see the module.
        lr: learning rate.
        betas: weight of the mean in the direction, and its decay rate.
        weight_decay: of the weights, times the learning rate.

    Raises:
        TypeError: for another dtype.
        ValueError: for lists that are not alike.
    """
    _check(parameters, copies, gradients=gradients, means=means)
    dispatch.twin(lion, parameters[0])(parameters, gradients, means, copies, lr, betas, weight_decay)


@torch.no_grad()
def average_lists(gradients: Tensors, means: Tensors, ahead: Tensors, *, momentum: float, nesterov: bool) -> None:
    """Let means take gradients in, and write what Muon orthogonalises, in another dtype. Memory moved: 14 bytes a parameter.

    Args:
        gradients: float32 or float64, contiguous, not none.
        means: of gradients, of their dtype.
        ahead: written: the means, or with ``nesterov`` one step of momentum ahead; of one dtype.
        momentum: decay rate of the means.
        nesterov: see ``ahead``.

    Raises:
        TypeError: for another dtype.
        ValueError: for lists that are not alike.
    """
    _check(gradients, None, means=means, ahead=ahead)
    dispatch.twin(average, _widest(gradients, ahead))(gradients, means, ahead, momentum, nesterov)


@torch.no_grad()
def apply_lists(parameters: Tensors, updates: Tensors, copies: Tensors | None, *, keep: float, rate: float) -> None:
    """Step in place: ``x ← keep · x − rate · update``. Memory moved: 10 bytes a parameter, 12 with copies.

    Args:
        parameters: float32 or float64, contiguous, not none.
        updates: of one dtype.
        copies: see the module.
        keep: what weights count times.
        rate: what updates count times.

    Raises:
        TypeError: for another dtype.
        ValueError: for lists that are not alike.
    """
    _check(parameters, copies, updates=updates)
    dispatch.twin(apply, _widest(parameters, updates))(parameters, updates, copies, keep, rate)


def _widest(tensors: Tensors, others: Tensors) -> Tensor:
    """Return the tensor that decides the implementation for lists of two dtypes: a float64 one if there is one."""
    return max(tensors[0], others[0], key=lambda one: one.dtype == torch.float64)


STEP_KERNELS: Mapping[str, Callable[..., Any]] = {
    **LAYERWISE,
    "square_sum_lists": square_sum_lists,
    "factored_limit_lists": factored_limit_lists,
    "came_distance_lists": came_distance_lists,
    "factored_apply_lists": factored_apply_lists,
    "lamb_moment_lists": lamb_moment_lists,
    "lamb_apply_lists": lamb_apply_lists,
    "adamw_lists": adamw_lists,
    "lion_lists": lion_lists,
    "average_lists": average_lists,
    "apply_lists": apply_lists,
}
"""These functions, and the functions of one tensor on the host, by name: ``meshfold.optimizers`` gets these."""


# The reference, in plain torch: defines every result, and what Triton is given in its place.


def lamb_moments(
    parameters: Tensors,
    gradients: Tensors,
    means: Tensors,
    squares: Tensors,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> Tensor:
    """Reference of :func:`lamb_moment_lists`."""
    _average(gradients, means, squares, betas)
    found = _directions(parameters, means, squares, eps, weight_decay, corrections)
    wide = parameters[0].dtype
    norms = [torch.stack(torch._foreach_norm(list(row), 2.0, dtype=wide)).double() for row in (parameters, found)]
    return torch.stack(norms).square()


def lamb_apply(
    parameters: Tensors,
    means: Tensors,
    squares: Tensors,
    copies: Tensors | None,
    rates: Tensor,
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> None:
    """Reference of :func:`lamb_apply_lists`."""
    updates = _directions(parameters, means, squares, eps, weight_decay, corrections)
    for update, rate in zip(updates, rates.unbind(), strict=True):
        update.mul_(rate)
    torch._foreach_sub_(list(parameters), updates)
    _copy(parameters, copies)


def adamw(
    parameters: Tensors,
    gradients: Tensors,
    means: Tensors,
    squares: Tensors,
    copies: Tensors | None,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> None:
    """Reference of :func:`adamw_lists`."""
    _average(gradients, means, squares, betas)
    updates = _directions(parameters, means, squares, eps, 0.0, corrections)
    torch._foreach_mul_(list(parameters), 1 - lr * weight_decay)
    torch._foreach_add_(list(parameters), updates, alpha=-lr)
    _copy(parameters, copies)


def lion(
    parameters: Tensors,
    gradients: Tensors,
    means: Tensors,
    copies: Tensors | None,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """Reference of :func:`lion_lists`."""
    updates = list(torch._foreach_lerp(list(means), list(gradients), 1 - betas[0]))
    torch._foreach_sign_(updates)
    if weight_decay:
        torch._foreach_add_(updates, list(parameters), alpha=weight_decay)
    torch._foreach_add_(list(parameters), updates, alpha=-lr)
    torch._foreach_lerp_(list(means), list(gradients), 1 - betas[1])
    _copy(parameters, copies)


def average(gradients: Tensors, means: Tensors, ahead: Tensors, momentum: float, nesterov: bool) -> None:
    """Reference of :func:`average_lists`."""
    torch._foreach_lerp_(list(means), list(gradients), 1 - momentum)
    _copy(torch._foreach_lerp(list(gradients), list(means), momentum) if nesterov else means, ahead)


def apply(parameters: Tensors, updates: Tensors, copies: Tensors | None, keep: float, rate: float) -> None:
    torch._foreach_mul_(list(parameters), keep)
    torch._foreach_add_(list(parameters), [one.to(parameters[0].dtype) for one in updates], alpha=-rate)
    _copy(parameters, copies)


def _average(gradients: Tensors, means: Tensors, squares: Tensors, betas: tuple[float, float]) -> None:
    torch._foreach_lerp_(list(means), list(gradients), 1 - betas[0])
    torch._foreach_mul_(list(squares), betas[1])
    torch._foreach_addcmul_(list(squares), list(gradients), list(gradients), 1 - betas[1])


def _directions(
    parameters: Tensors,
    means: Tensors,
    squares: Tensors,
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> list[Tensor]:
    """Return ``(mean / first) / (√square / second + eps) + weight_decay · parameter``."""
    roots = torch._foreach_sqrt(list(squares))
    torch._foreach_div_(roots, corrections[1])
    torch._foreach_add_(roots, eps)
    updates = list(torch._foreach_div(list(means), list(roots)))
    torch._foreach_div_(updates, corrections[0])
    if weight_decay:
        torch._foreach_add_(updates, list(parameters), alpha=weight_decay)
    return updates


def _copy(source: Tensors, into: Tensors | None) -> None:
    if into is not None:
        torch._foreach_copy_(list(into), list(source))
