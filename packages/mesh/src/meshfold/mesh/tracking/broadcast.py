"""Elementwise operations: the dims of all operands must have the same layout."""

from __future__ import annotations

from torch import Tensor, nn

from meshfold.mesh.tracking.call import Call, as_list
from meshfold.mesh.tracking.dims import (
    Dim,
    Dims,
    MixesError,
    axes_of,
    check_axes_once,
    chosen_by,
    distinct_splits,
    is_open,
    is_split,
    is_unknown,
    size_of,
    whole,
)

_COPIES = ("clone", "_to_copy", "detach", "alias", "lift_fresh", "contiguous")
"""Whose results say the same as their operand."""


def broadcast_dims(call: Call, operands: list[tuple[Tensor, Dims]], shape: tuple[int, ...]) -> Dims:
    """Return the layout of an elementwise result of operands that are broadcast to a shape.

    Raises:
        MixesError: where a piece meets something that is no piece.
    """
    return check_axes_once(tuple(_dim(call, operands, place - len(shape), size) for place, size in enumerate(shape)))


def _dim(call: Call, operands: list[tuple[Tensor, Dims]], place: int, size: int) -> Dim:
    here = [(x, dims[place]) for x, dims in operands if len(dims) >= -place]
    split = distinct_splits(dim for _, dim in here if is_split(dim))
    if not split:
        return _open(call, [(x, dim) for x, dim in here if size_of(dim) == size], place, size)
    found = split[0]
    if len(split) > 1:
        _check_counted(here, place, split)
        raise MixesError(
            f"combines tensors whose dim {place} is split in two ways, over {_axes(split[0])} and over {_axes(split[1])}"
        )
    if size_of(found) != size:
        raise MixesError(f"broadcasts a shard of dim {place}, which is split over {_axes(found)}")
    for x, dim in here:
        if is_split(dim) or is_open(dim) or size_of(dim) == 1:
            continue
        # If all elements along a dim are equal, such as zeros, it can serve as a shard.
        if not call.is_alike(x, place):
            raise MixesError(
                f"combines a shard with a tensor {list(x.shape)} that is the same on every rank; dim {place} of the shard "
                f"is split over {_axes(found)}"
            )
    return found


def _check_counted(here: list[tuple[Tensor, Dim]], place: int, split: list[Dim]) -> None:
    """Refuse positions that each rank counts from 0 together with a shard."""
    sharded = next((dim for dim in split if not _is_counted(dim)), None)
    counted = next((x for x, dim in here if is_split(dim) and _is_counted(dim)), None)
    if sharded is not None and counted is not None:
        raise MixesError(
            f"combines a shard with a tensor {list(counted.shape)} that is the same on every rank; dim {place} of the shard "
            f"is split over {_axes(sharded)}"
        )


def _is_counted(dim: Dim) -> bool:
    return any(factor.split is not None and factor.split.kind == "counted" for factor in dim)


def _open(call: Call, wide: list[tuple[Tensor, Dim]], place: int, size: int) -> Dim:
    """Return the common layout of dims that are not split: whole, or unknown."""
    unknown = next((dim for _, dim in wide if is_unknown(dim)), None)
    known = [x for x, dim in wide if not is_open(dim) and not call.is_alike(x, place)]
    if size == 1 or not wide or (known and unknown is None) or any(isinstance(x, nn.Parameter) for x in known):
        return whole(size)  # a weight always has its full size
    if known:
        raise MixesError(
            f"combines a tensor whose dim {place} may be split with a tensor {list(known[0].shape)} that is the same on "
            "every rank"
        )
    return unknown or next((dim for _, dim in wide if is_open(dim)), whole(size))


def _axes(dim: Dim) -> str:
    return ", ".join(axes_of(dim))


def pointwise(call: Call) -> list[Dims]:
    """Return the layouts of the results of an elementwise operation."""
    read = (lambda dims: dims) if call.name in _COPIES else chosen_by
    operands = [(x, read(call.dims_of(x))) for x in call.tensors]
    return [
        broadcast_dims(call, operands, tuple(out.shape)) if isinstance(out, Tensor) else () for out in as_list(call.out)
    ]


def alike(call: Call) -> list[Dims]:
    """Return the layouts of results that are laid out like the first operand."""
    return [call.first if isinstance(out, Tensor) else () for out in as_list(call.out)]
