"""The gradient norm of a sharded model, and clipping by it.

Each rank sums the powers of its own blocks, divided by the number of ranks that hold the same block; one
all-reduce over the mesh gives the norm of the whole model: the same bits on every rank, so that every replica is
scaled alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from meshfold.mesh import collectives
from meshfold.mesh.errors import SpecError
from meshfold.mesh.mesh import Mesh
from meshfold.mesh.metadata import ParameterMeta, placed


def gradient_norm(parameters: Iterable[Tensor], mesh: Mesh, norm_type: float = 2.0) -> Tensor:
    """The norm over all gradients of the global model: a float64 scalar, equal on every rank of the mesh.

    Gradients must already be summed over their ``sum_axes``. Padding counts as nothing (its gradient is zero).

    Args:
        parameters: this rank's blocks; those without a gradient are left out.
        mesh: where they lie.
        norm_type: 1, 2, any p > 0, or infinity.

    Raises:
        SpecError: for a norm type that is not a positive number.
    """
    if isinstance(norm_type, bool) or not isinstance(norm_type, int | float) or not norm_type > 0:
        raise SpecError(f"norm_type={norm_type!r}: a norm is 1, 2, any number above 0, or math.inf")
    blocks = [(p.grad, placed(p, mesh)) for p in parameters if p.grad is not None]
    device = blocks[0][0].device if blocks else torch.device("cpu")
    whole = mesh.group(*mesh.names)
    if math.isinf(norm_type):
        largest = torch.zeros((), dtype=torch.float64, device=device)
        for grad, _ in blocks:
            if grad.numel():
                largest = torch.maximum(largest, grad.detach().abs().max().double())
        return collectives.all_reduce(largest, whole, "max")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad, meta in blocks:
        for piece, holders in _pieces(grad.detach(), meta, mesh):
            total = total + _power_sum(piece, norm_type) / holders
    return collectives.all_reduce(total, whole) ** (1.0 / norm_type)


def clip_gradients(parameters: Iterable[Tensor], mesh: Mesh, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; return the norm before.

    The same rule as ``torch.nn.utils.clip_grad_norm_``, over the global model, in place, without waiting for the
    device.

    Raises:
        SpecError: for a ``max_norm`` that is not a positive number.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
        raise SpecError(f"max_norm={max_norm!r}: the largest norm allowed is a number above 0; leave it out not to clip")
    chosen = [p for p in parameters if p.grad is not None]
    norm = gradient_norm(chosen, mesh, norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in chosen:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm


def _pieces(grad: Tensor, meta: ParameterMeta, mesh: Mesh) -> Iterable[tuple[Tensor, int]]:
    """The gradient in pieces, each with how many ranks hold the same numbers."""
    replicas = mesh.world_size // meta.mesh.size(*meta.placement.split_axes)
    if all(part.repeat == 1 for parts in meta.placement.parts.values() for part in parts):
        yield grad, replicas
        return
    pieces = [(grad, replicas)]
    for dim, parts in meta.placement.parts.items():
        lengths = [n for _, n in meta.placement.segments(meta.mesh, dim)]
        pieces = [
            (stretch, holders * part.repeat)
            for piece, holders in pieces
            for stretch, part in zip(piece.split(lengths, dim), parts, strict=True)
        ]
    yield from pieces


def _power_sum(x: Tensor, norm_type: float) -> Tensor:
    """Sum of powers in float64 of partial sums that are at least float32."""
    if norm_type == 2.0:
        wide = x if x.dtype == torch.float64 else x.float()
        return torch.linalg.vector_norm(wide).double() ** 2
    return x.double().abs().pow(norm_type).sum()
