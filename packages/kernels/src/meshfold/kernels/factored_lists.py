"""Steps of Adafactor and CAME over lists of tensors: passes over all of them in a launch each, nothing of their size in between.

The last two dims of a tensor are matrices. Means of rows and of columns estimate their second moments: V = R · C / mean of R. An
update is u = g / √max(V, floor), divided by its root mean square over ``clip_threshold`` where that is above 1. Lists have one
tensor for each parameter; ``rows`` are of shape ``[..., m]``, ``columns`` of ``[..., n]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshfold.kernels import dispatch

Tensors = Sequence[Tensor]


def _check(first: Tensor, **lists: Tensors | None) -> None:
    """Raise unless all tensors are contiguous and of one dtype and device, and lists are as long.

    Raises:
        TypeError: for another dtype than float32 or float64, or several.
        ValueError: for anything else.
    """
    if first.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"gradients are {first.dtype}; they must be float32 or float64: convert them first")
    given = {name: tensors for name, tensors in lists.items() if tensors is not None}
    if len(lengths := {name: len(tensors) for name, tensors in given.items()}) and len(set(lengths.values())) > 1:
        raise ValueError(f"lists have {lengths} tensors; give one tensor for each parameter in all")
    for name, tensors in given.items():
        for one in tensors:
            if one.dtype != (tensors[0].dtype if name == "copies" else first.dtype):
                raise TypeError(f"{name} has a tensor of {one.dtype} beside {first.dtype}; give one dtype")
            if not one.is_contiguous() or one.device != first.device:
                raise ValueError(
                    f"{name} has a tensor of shape {tuple(one.shape)} and strides {one.stride()} on {one.device}; give contiguous "
                    f"ones on {first.device}"
                )


@torch.no_grad()
def square_sum_lists(gradients: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sums of squares of rows and of columns. Memory moved: 4 bytes a parameter.

    Args:
        gradients: float32 or float64, contiguous, of two dims at least, not none.

    Raises:
        TypeError: for another dtype.
        ValueError: for tensors that are not contiguous.
    """
    _check(gradients[0], gradients=gradients)
    return dispatch.twin(square_sums, gradients[0])(gradients)


@torch.no_grad()
def factored_limit_lists(
    gradients: Tensors, rows: Tensors, columns: Tensors, *, floor: float, clip_threshold: float
) -> Tensor:
    """Return what each update counts times so that its root mean square is at most ``clip_threshold``, ``(tensors,)``.

    Memory moved: 4 bytes a parameter.

    Args:
        gradients: as in :func:`square_sum_lists`.
        rows: means of rows, contiguous, of their dtype.
        columns: means of columns.
        floor: the least that V counts.
        clip_threshold: see above.

    Raises:
        TypeError: for another dtype.
        ValueError: for lists that are not alike.
    """
    _check(gradients[0], gradients=gradients, rows=rows, columns=columns)
    return dispatch.twin(limits, gradients[0])(gradients, rows, columns, floor, clip_threshold)


@torch.no_grad()
def came_distance_lists(
    gradients: Tensors, means: Tensors, rows: Tensors, columns: Tensors, *, clip_threshold: float
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return :func:`factored_limit_lists`, and sums over rows and columns of the squared distance of updates from means.

    Updates are those after the limit. Memory moved: 8 bytes a parameter.

    Args:
        gradients: as in :func:`square_sum_lists`; so are the others as in :func:`factored_limit_lists`.
        means: of updates, of the gradients' shapes.
        rows: means of rows.
        columns: means of columns.
        clip_threshold: see above.

    Raises:
        TypeError: for another dtype.
        ValueError: for lists that are not alike.
    """
    _check(gradients[0], gradients=gradients, means=means, rows=rows, columns=columns)
    return dispatch.twin(distances, gradients[0])(gradients, means, rows, columns, clip_threshold)


@torch.no_grad()
def factored_apply_lists(
    parameters: Tensors,
    gradients: Tensors,
    rows: Tensors,
    columns: Tensors,
    copies: Tensors | None,
    limited: Tensor,
    rates: Tensor,
    decays: Tensor,
    *,
    floor: float = 0.0,
    means: Tensors | None = None,
    beta1: float = 0.0,
    confidence: tuple[Tensors, Tensors] | None = None,
) -> None:
    """Step in place: ``x ← x · (1 − decay) − rate · update``; with ``means`` by the mean of updates.

    Memory moved: 14 bytes a parameter with copies, 22 with means besides.

    Args:
        parameters: float32 or float64, contiguous, of two dims at least, not none.
        gradients: of them.
        rows: means of rows.
        columns: means of columns.
        copies: parameters in lower precision that are also written, or None.
        limited: what each update counts times, ``(tensors,)``.
        rates: of each, ``(tensors,)``.
        decays: of each, ``(tensors,)``.
        floor: the least that V counts.
        means: of updates; None: none is kept.
        beta1: decay rate of the means.
        confidence: means of rows and columns of squared distances, which divide as V does (CAME); None: nothing does.

    Raises:
        TypeError: for another dtype.
        ValueError: for lists that are not alike.
    """
    residual_rows, residual_columns = confidence or (None, None)
    _check(
        parameters[0],
        parameters=parameters,
        gradients=gradients,
        rows=rows,
        columns=columns,
        copies=copies,
        means=means,
        residual_rows=residual_rows,
        residual_columns=residual_columns,
    )
    step = dispatch.twin(apply, parameters[0])
    step(parameters, gradients, rows, columns, copies, limited, rates, decays, floor, means, beta1, confidence)


# The reference, in plain torch: defines every result, and what Triton is given in its place.


def square_sums(gradients: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Reference of :func:`square_sum_lists`."""
    squares = [one.square() for one in gradients]
    return [one.sum(-1) for one in squares], [one.sum(-2) for one in squares]


def limits(gradients: Tensors, rows: Tensors, columns: Tensors, floor: float, clip_threshold: float) -> Tensor:
    """Reference of :func:`factored_limit_lists`."""
    updates = [_update(*some, floor) for some in zip(gradients, rows, columns, strict=True)]
    return torch.stack([_limit(one, clip_threshold) for one in updates])


def distances(
    gradients: Tensors, means: Tensors, rows: Tensors, columns: Tensors, clip_threshold: float
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Reference of :func:`came_distance_lists`."""
    found, of_rows, of_columns = [], [], []
    for gradient, mean, row, column in zip(gradients, means, rows, columns, strict=True):
        update = _update(gradient, row, column, 0.0)
        found.append(_limit(update, clip_threshold))
        squares = (update * found[-1] - mean).square_()
        of_rows.append(squares.sum(-1))
        of_columns.append(squares.sum(-2))
    return torch.stack(found), of_rows, of_columns


def apply(
    parameters: Tensors,
    gradients: Tensors,
    rows: Tensors,
    columns: Tensors,
    copies: Tensors | None,
    limited: Tensor,
    rates: Tensor,
    decays: Tensor,
    floor: float,
    means: Tensors | None,
    beta1: float,
    confidence: tuple[Tensors, Tensors] | None,
) -> None:
    """Reference of :func:`factored_apply_lists`."""
    for place, parameter in enumerate(parameters):
        update = _update(gradients[place], rows[place], columns[place], floor) * limited[place]
        if means is not None:
            update = means[place].mul_(beta1).add_(update, alpha=1 - beta1)
        if confidence is not None:
            update = _update(update, confidence[0][place], confidence[1][place], 0.0)
        parameter.mul_(1 - decays[place]).sub_(update * rates[place])
    if copies is not None:
        torch._foreach_copy_(list(copies), list(parameters))


def _update(values: Tensor, rows: Tensor, columns: Tensor, floor: float) -> Tensor:
    """Return values divided by the root of the matrix that row and column means represent."""
    shares = rows / rows.mean(-1, keepdim=True).clamp(min=floor**0.5)
    return values * (shares.unsqueeze(-1) * columns.unsqueeze(-2)).clamp_(min=floor).rsqrt_()


def _limit(update: Tensor, clip_threshold: float) -> Tensor:
    return 1 / (update.square().mean().sqrt() / clip_threshold).clamp(min=1.0)
