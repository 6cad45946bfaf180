"""Steps of LAMB and LARS on flat tensors, before and after the norms that both need, in as few passes over memory as possible.

LAMB's direction is made in one pass, with the moments. LARS knows its norms before and steps in one pass. Computed in the
tensors' dtype, float32 or float64, within rounding of torch's own operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.inputs import check_flat

_DTYPES = (torch.float32, torch.float64)


class LambScalars(NamedTuple):
    """Numbers of a LAMB step.

    Attributes:
        beta1, beta2: decay rates of the means.
        eps: added to the root of the mean square.
        weight_decay: of the weights, in the direction.
        correction1: what the mean is divided by.
        correction2: what the root is divided by.
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    correction1: float
    correction2: float


class LarsScalars(NamedTuple):
    """Numbers of a LARS step.

    Attributes:
        lr: learning rate.
        momentum: of the direction; 0: none.
        dampening: by which a new direction counts less.
        weight_decay: of the weights, in the direction.
        nesterov: look one step of momentum ahead.
        first: the buffer takes the direction unchanged.
    """

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    first: bool


@torch.no_grad()
def lamb_direction(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> Tensor:
    """``n -> n``: return LAMB's direction; the means take the gradient in, in place.

    Args:
        parameter: flat, contiguous, float32 or float64; so are the others, of its length.
        gradient: of it.
        mean: of gradients.
        square: mean of squared gradients.
        betas: decay rates of the means.
        eps: added to the root of the mean square.
        weight_decay: of the weights, in the direction.
        corrections: what the mean and the root are divided by.

    Raises:
        TypeError: for another dtype.
        ValueError: if a tensor is not flat and contiguous, or lengths or devices differ.
    """
    check_flat("parameter", parameter, _DTYPES)
    for name, one in (("gradient", gradient), ("mean", mean), ("square", square)):
        check_flat(name, one, (parameter.dtype,), parameter)
    out = torch.empty_like(parameter)
    scalars = LambScalars(*betas, eps, weight_decay, *corrections)
    dispatch.twin(direction, parameter)(parameter.detach(), gradient.detach(), mean, square, out.detach(), scalars)
    return out


@torch.no_grad()
def lars_step(
    parameter: Tensor,
    gradient: Tensor,
    buffer: Tensor | None,
    *,
    ratio: float,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
) -> None:
    """``n``: step with LARS in place, where norms are known.

    Args:
        parameter: flat, contiguous, float32 or float64; so are the others, of its length.
        gradient: of it.
        buffer: of momentum, changed in place; None without momentum.
        ratio: what the direction counts times.
        lr: learning rate.
        momentum: of the direction; 0: none.
        dampening: by which a new direction counts less.
        weight_decay: of the weights, in the direction.
        nesterov: look one step of momentum ahead.
        first: the buffer takes the direction unchanged; its content is ignored.

    Raises:
        TypeError: for another dtype.
        ValueError: if a tensor is not flat and contiguous, lengths or devices differ, or momentum has no buffer.
    """
    check_flat("parameter", parameter, _DTYPES)
    check_flat("gradient", gradient, (parameter.dtype,), parameter)
    if (buffer is None) != (not momentum):
        raise ValueError(f"momentum={momentum} {'without' if buffer is None else 'with'} a buffer: give both, or none")
    if buffer is not None:
        check_flat("buffer", buffer, (parameter.dtype,), parameter)
    kept = parameter[:0] if buffer is None else buffer
    scalars = LarsScalars(lr, momentum, dampening, weight_decay, nesterov, first)
    dispatch.twin(step, parameter)(parameter.detach(), gradient.detach(), kept.detach(), ratio, scalars)


LAYERWISE: Mapping[str, Callable[..., Any]] = {"lamb_direction": lamb_direction, "lars_step": lars_step}
"""The functions by name, as LAMB and LARS of ``meshfold.optimizers`` take them."""


# The reference in plain torch: it defines every result and the signatures of the numba version.


def direction(
    parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, out: Tensor, scalars: LambScalars
) -> None:
    """Write LAMB's direction to ``out``."""
    mean.lerp_(gradient, 1 - scalars.beta1)
    square.mul_(scalars.beta2).addcmul_(gradient, gradient, value=1 - scalars.beta2)
    torch.sqrt(square, out=out)
    out.div_(scalars.correction2).add_(scalars.eps)
    torch.div(mean, out, out=out)
    out.div_(scalars.correction1)
    if scalars.weight_decay:
        out.add_(parameter, alpha=scalars.weight_decay)


def step(parameter: Tensor, gradient: Tensor, buffer: Tensor, ratio: float, scalars: LarsScalars) -> None:
    """Step with LARS; the buffer is empty without momentum."""
    moved = torch.add(gradient, parameter, alpha=scalars.weight_decay).mul_(ratio)
    if scalars.momentum:
        if scalars.first:
            buffer.copy_(moved)
        else:
            buffer.mul_(scalars.momentum).add_(moved, alpha=1 - scalars.dampening)
        moved = moved.add(buffer, alpha=scalars.momentum) if scalars.nesterov else buffer
    parameter.sub_(moved, alpha=scalars.lr)
