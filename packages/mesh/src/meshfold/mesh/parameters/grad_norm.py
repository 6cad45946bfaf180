"""The gradient norm of a sharded model, and clipping by it.

Each rank sums the powers of its own blocks, divided by the number of ranks that hold the same block; one all-reduce over the mesh
gives the norm of the whole model. Every rank gets the same bits, so all replicas are scaled equally. Blocks that equally many ranks
hold are summed together, in a handful of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from meshfold.mesh.collectives import operations
from meshfold.mesh.errors import SpecError
from meshfold.mesh.group import Group
from meshfold.mesh.mesh import Mesh
from meshfold.mesh.parameters.parameter_meta import ParameterMeta, metadata, metadata_on


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[Tensor],
    mesh: Mesh,
    norm_type: float = 2.0,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the norm over all gradients of the global model: a float64 scalar, equal on every rank of the mesh.

    Gradients must already be summed over their ``sum_axes``. Padding counts as nothing (its gradient is zero).

    Args:
        parameters: this rank's blocks; those without a gradient are left out.
        mesh: where they lie.
        norm_type: 1, 2, any p > 0, or infinity.
        device: where this rank computes; None: where its gradients are. One without gradients, such as a stage whose layers
            are frozen, has to say it where ranks communicate from a GPU.

    Raises:
        SpecError: for a norm type that is not a positive number.
    """
    if isinstance(norm_type, bool) or not isinstance(norm_type, int | float) or not norm_type > 0:
        raise SpecError(f"norm_type={norm_type!r}: give a number above 0, such as 1 or 2, or math.inf")
    found: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    known: dict[object, int] = {}  # ranks that hold the same numbers, by placement: parameters are split in a few ways
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        meta = metadata(parameter)
        if meta is None or not (meta.placement.parts or meta.only_at):
            placed = None if meta is None else (meta.mesh, meta.placement.axes)
            holders = known.get(placed)
            if holders is None:
                [(_, holders)] = gradient_shards(grad, metadata_on(parameter, mesh), mesh)
                known[placed] = holders
            shards: Iterable[tuple[Tensor, int]] = ((grad, holders),)
        else:
            shards = gradient_shards(grad, meta, mesh)
        for piece, holders in shards:
            if piece.numel():
                found.setdefault((holders, piece.dtype), []).append(piece)
    if device is None:
        device = next((piece.device for alike in found.values() for piece in alike), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    largest = math.isinf(norm_type)
    for (holders, dtype), alike in found.items():
        # Sums of squares are in float32 or wider; other powers need no fast path.
        wide = torch.float32 if norm_type == 2.0 and dtype != torch.float64 else torch.float64
        norms = torch.stack(torch._foreach_norm(alike, norm_type, dtype=wide)).to(device, torch.float64)
        if largest:
            total = torch.maximum(total, norms.max())
        else:
            total = total + norms.pow(norm_type).sum() / holders
    whole = mesh.group(*mesh.names)
    if largest:
        return max_over_ranks(total, whole)
    return operations.all_reduce(total, whole) ** (1.0 / norm_type)


def max_over_ranks(value: Tensor, group: Group) -> Tensor:
    """Return the largest of all ranks' scalars; NaN if one is NaN, which back ends order arbitrarily."""
    nan = value.isnan()
    both = operations.all_reduce(torch.stack([value.masked_fill(nan, 0.0), nan.to(value)]), group, "max")
    return both[0].masked_fill(both[1] > 0, math.nan)


def clip_gradients(
    parameters: Iterable[Tensor],
    mesh: Mesh,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; return the norm before.

    The same rule as ``torch.nn.utils.clip_grad_norm_``, over the global model, in place, without waiting for the
    device. ``device``: as of :func:`gradient_norm`.

    Raises:
        SpecError: for a ``max_norm`` that is not a positive number.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
        raise SpecError(
            f"max_norm={max_norm!r}: the largest norm allowed is a number above 0; leave it out not to clip"
        )
    chosen = [p for p in parameters if p.grad is not None]
    norm = gradient_norm(chosen, mesh, norm_type, device=device)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for alike in _alike_gradients(chosen):
        torch._foreach_mul_(alike, scale.to(alike[0].device, alike[0].dtype))
    return norm


@torch.no_grad()
def clip_gradient_values(parameters: Iterable[Tensor], max_value: float) -> None:
    """Bring every element of all gradients into [-max_value, max_value], in place.

    The same rule as ``torch.nn.utils.clip_grad_value_``. Gradients must already be summed over their ``sum_axes``;
    each block is then clipped on its own, whatever its layout. NaN stays NaN.

    Raises:
        SpecError: for a ``max_value`` that is not a positive number.
    """
    if isinstance(max_value, bool) or not isinstance(max_value, int | float) or not max_value > 0:
        raise SpecError(
            f"max_value={max_value!r}: the largest value allowed is a number above 0; leave it out not to clip"
        )
    for alike in _alike_gradients(parameters):
        torch._foreach_clamp_min_(alike, -max_value)
        torch._foreach_clamp_max_(alike, max_value)


def _alike_gradients(parameters: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return the gradients in lists of one dtype and device each."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            found.setdefault((grad.dtype, grad.device), []).append(grad)
    return found.values()


def gradient_shards(grad: Tensor, meta: ParameterMeta, mesh: Mesh) -> Iterable[tuple[Tensor, int]]:
    """Return the gradient in shards, each with the number of ranks that hold the same numbers."""
    replicas = mesh.world_size // meta.mesh.size(*meta.placement.split_axes, *meta.only_at)
    replicas *= math.prod(map(len, meta.only_at.values()))
    if all(part.repeat == 1 for parts in meta.placement.parts.values() for part in parts):
        yield grad, replicas
        return
    cut = [(grad, replicas)]
    for dim, parts in meta.placement.parts.items():
        lengths = [n for _, n in meta.placement.segments(meta.mesh, dim)]
        cut = [
            (segment, holders * part.repeat)
            for piece, holders in cut
            for segment, part in zip(piece.split(lengths, dim), parts, strict=True)
        ]
    yield from cut
