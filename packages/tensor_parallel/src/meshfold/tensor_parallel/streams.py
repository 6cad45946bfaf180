"""How tensors of the stream lie where they are put together, taken apart, or handed on by a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.mesh import Mesh
from meshfold.mesh.tracking.dims import (
    UNKNOWN,
    Dim,
    Dims,
    Factor,
    Split,
    axes_of,
    block,
    is_split,
    is_unknown,
    normal,
    size_of,
    whole,
    whole_dims,
)
from meshfold.mesh.tracking.follow import Tracker

Axes = tuple[str, ...]


def real(mesh: Mesh, axes: Axes) -> Axes:
    """The axes that split something."""
    return tuple(axis for axis in axes if mesh.size(axis) > 1)


def tokens(found: Tracker, mesh: Mesh, size: int, axes: Axes, before: Dims | None) -> Dim:
    """A dim of ``size`` tokens over these axes, of which others may have dealt the sequences.

    Args:
        before: of what they were made, which tells whether they are dealt; None: they are if any are.
    """
    axes = real(mesh, axes)
    dealt = found.dealt
    if dealt is None or (
        before is not None and not any(set(dealt.axes) & set(axes_of(dim)) for dim in before)
    ):
        return block(size, axes)
    length = found.dealt_length
    if size % length == 0:
        return normal((*block(size // length, axes), Factor(length, dealt)))
    return (Factor(size, Split((*axes, *dealt.axes), "dealt")),)


def rows(found: Tracker, mesh: Mesh, lead: Dims, shape: tuple[int, ...], reads: Axes, writes: Axes) -> Dims:
    """The dims before the last of what a layer returns, from those of what it was given.

    Args:
        lead: of what it was given.
        shape: of what it returns, without the last.
        reads, writes: the axes that split tokens before and behind it.
    """
    reads, writes = real(mesh, reads), real(mesh, writes)
    if reads == writes and tuple(map(size_of, lead)) == shape:
        return lead
    if len(shape) == 1 or not lead:
        return tuple(tokens(found, mesh, n, writes, lead) for n in shape)
    first = block(shape[0], writes)
    inner = lead[1:] if len(lead) == len(shape) else whole_dims(shape[1:])
    return (first, *inner)


def inner_rows(found: Tracker, shape: tuple[int, ...]) -> Dims:
    """The dims of tokens behind the first, of which the sequence may be dealt."""
    dealt = found.dealt
    return tuple(
        (Factor(n, dealt),) if dealt is not None and place == 0 and n == found.dealt_length else whole(n)
        for place, n in enumerate(shape)
    )


def stream_rows(found: Tracker, shape: tuple[int, ...], axes: Axes, rows: Dims) -> Dims:
    """The dims before the last of a stream of which only is known where it has the rows of the batch, over these axes."""
    if len(rows) > 2 and is_split(rows[1]) and not is_split(rows[0]):
        return (*inner_rows(found, shape[:1]), block(shape[1], axes), *whole_dims(shape[2:]))
    return (block(shape[0], axes), *inner_rows(found, shape[1:]))


def split_rows(found: Tracker, mesh: Mesh, before: Dims, out: Tensor, axes: Axes, columns: Axes) -> Dims:
    """The layout of a block of the stream that was cut out of a tensor, whole over these axes."""
    shape = tuple(out.shape)
    last = block(shape[-1], real(mesh, columns), grain=-1)
    if len(shape) != len(before):
        return (*(tokens(found, mesh, n, axes, before) for n in shape[:-1]), last)
    if len(shape) == 2:
        return (tokens(found, mesh, shape[0], axes, before), last)
    return (block(shape[0], real(mesh, axes)), *before[1:-1], last)


def joined_rows(found: Tracker, mesh: Mesh, before: Dims, out: Tensor) -> Dims:
    """The layout of a tensor that was put together of blocks of the stream."""
    shape = tuple(out.shape)
    if len(shape) == len(before) and len(shape) != 2:
        return (whole(shape[0]), *before[1:-1], whole(shape[-1]))
    if len(shape) == 2:
        return (tokens(found, mesh, shape[0], (), before), whole(shape[-1]))
    return (whole(shape[0]), *inner_rows(found, shape[1:-1]), whole(shape[-1]))


def check_stream(found: Tracker, mesh: Mesh, x: Tensor, axes: Axes, columns: Axes, what: str) -> None:
    """Refuse what is put together as the stream and does not lie as it."""
    dims = found.dims(x)
    if any(is_unknown(dim) for dim in dims) or len(dims) < 2:
        return
    for place, wanted in ((0, real(mesh, axes)), (len(dims) - 1, real(mesh, columns))):
        dealt = () if found.dealt is None else found.dealt.axes
        have = tuple(axis for axis in axes_of(dims[place]) if axis not in dealt)
        if have != wanted:
            found.refuse(
                what,
                f"is given a tensor whose dim {place} is split over {', '.join(have) or 'nothing'}, and puts it together over "
                f"{', '.join(wanted) or 'nothing'}",
                x,
                axes=(*have, *wanted),
            )


def opaque(shape: torch.Size) -> Dims:
    """Of a tensor that a module only reads the shape of, or hands to its layers."""
    return tuple((Factor(size, UNKNOWN),) for size in shape)
