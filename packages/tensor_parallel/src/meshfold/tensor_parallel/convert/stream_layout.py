"""Layouts of the stream's tensors where they are gathered, split, or returned by a layer."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from meshfold.mesh import Mesh
from meshfold.mesh.tracking import (
    ALIKE,
    Dim,
    Dims,
    Factor,
    Split,
    Tracker,
    axes_in,
    axes_of,
    block,
    is_split,
    is_split_first,
    is_unknown,
    is_whole,
    normal,
    tracker,
    whole,
    whole_dims,
)

Axes = tuple[str, ...]


def spanning_axes(mesh: Mesh, axes: Axes) -> Axes:
    """Return the axes with more than one rank."""
    return tuple(axis for axis in axes if mesh.size(axis) > 1)


def token_dim(found: Tracker, mesh: Mesh, size: int, axes: Axes, before: Dims | None) -> Dim:
    """Return a dim of ``size`` tokens over these axes, whose sequences other axes may split.

    Args:
        before: of what they were made, which tells whether sequences are split; None: they are if any are.
    """
    axes = spanning_axes(mesh, axes)
    split = found.token_split
    if split is None or (before is not None and not any(set(split.axes) & set(axes_of(dim)) for dim in before)):
        return block(size, axes)
    length = found.local_tokens
    if size % length == 0:
        return normal((*block(size // length, axes), Factor(length, split)))
    return (Factor(size, Split((*axes, *split.axes), "tokens")),)


def output_rows(found: Tracker, mesh: Mesh, lead: Dims, shape: tuple[int, ...], reads: Axes, writes: Axes) -> Dims:
    """Return the dims before the last of a layer's output, from those of its input.

    Args:
        lead: of its input.
        shape: of its output, without the last.
        reads, writes: the axes that split tokens before and after it.
    """
    reads, writes = spanning_axes(mesh, reads), spanning_axes(mesh, writes)
    if reads == writes:
        return lead
    if (number := move_of(lead)) is not None:
        return rows_before_move(found.moved[number - 1], lead)
    inside = axes_in(lead[1:]) & {*reads, *writes}
    if inside or (lead and not is_split_first(lead[0], reads)):
        found.moved.append(lead)
        return tuple(
            (Factor(n, Split(() if place else writes, "moved", len(found.moved))),) for place, n in enumerate(shape)
        )
    if len(shape) == 1 or not lead:
        return tuple(token_dim(found, mesh, n, writes, lead) for n in shape)
    return (block(shape[0], writes), *(lead[1:] if len(lead) == len(shape) else whole_dims(shape[1:])))


def move_of(lead: Dims) -> int | None:
    """Return the number of the move that all of these dims come from; None for no move, or several."""
    numbers = {
        factor.split.choice if factor.split and factor.split.kind == "moved" else 0 for dim in lead for factor in dim
    }
    return next(iter(numbers)) or None if len(numbers) == 1 else None


def rows_before_move(before: Dims, lead: Dims) -> Dims:
    """Return the dims that tokens had before they were moved, in one dim if they are in one now."""
    if len(lead) == len(before):
        return before
    return (normal(factor for dim in before for factor in dim),)


def inner_rows(found: Tracker, shape: tuple[int, ...]) -> Dims:
    """Return the dims of tokens after the first, whose sequence may be split."""
    split = found.token_split
    return tuple(
        (Factor(n, split),) if split is not None and place == 0 and n == found.local_tokens else whole(n)
        for place, n in enumerate(shape)
    )


def stream_rows(found: Tracker, shape: tuple[int, ...], axes: Axes, rows: Dims) -> Dims:
    """Return the dims before the last of a stream, over these axes, if only the rows of the batch are known."""
    if len(rows) > 2 and is_split(rows[1]) and not is_split(rows[0]):
        return (*inner_rows(found, shape[:1]), block(shape[1], axes), *whole_dims(shape[2:]))
    return (block(shape[0], axes), *inner_rows(found, shape[1:]))


def split_rows(found: Tracker, mesh: Mesh, before: Dims, out: Tensor, axes: Axes, columns: Axes) -> Dims:
    """Return the layout of a block of the stream that was cut out of a tensor, whole over these axes."""
    shape = tuple(out.shape)
    last = block(shape[-1], spanning_axes(mesh, columns), grain=-1)
    if len(shape) != len(before):
        return (*(token_dim(found, mesh, n, axes, before) for n in shape[:-1]), last)
    if len(shape) == 2:
        return (token_dim(found, mesh, shape[0], axes, before), last)
    return (block(shape[0], spanning_axes(mesh, axes)), *before[1:-1], last)


def joined_rows(found: Tracker, mesh: Mesh, before: Dims, shape: tuple[int, ...]) -> Dims:
    """Return the layout of a tensor that was joined from blocks of the stream."""
    if len(shape) == len(before) and len(shape) != 2:
        return (whole(shape[0]), *before[1:-1], whole(shape[-1]))
    if len(shape) == 2:
        return (token_dim(found, mesh, shape[0], (), before), whole(shape[-1]))
    return (whole(shape[0]), *inner_rows(found, shape[1:-1]), whole(shape[-1]))


def mark_gathered(mesh: Mesh, x: Tensor, number: int, axes: Axes, joined: Tensor, *, repeated: bool = False) -> Tensor:
    """Return ``joined``, x gathered along a dim. In a tracked forward x must be split so, and the result is marked whole.

    Args:
        repeated: x may be constant along the dim, so that joining repeats it.

    Raises:
        LayoutError: for a tensor that is not split along that dim over these axes.
    """
    found, axes = tracker(), spanning_axes(mesh, axes)
    if found is None or not axes:
        return joined
    dims = list(found.dims(x))
    first, *rest = dims[number]
    if _is_block(dims[number], axes):
        first = Factor(first.size * mesh.size(*axes))
    elif repeated and is_whole(dims[number]) and found.records.is_alike(x, number):
        first = Factor(joined.shape[number])
    elif first.split != ALIKE:
        _refuse_whole(found, x, number, axes, "receives", "gathers it")
    dims[number] = normal((first, *rest))
    found.mark(joined, tuple(dims))
    found.records.sum_over([joined], found.records.summed(x))
    return joined


def block_dims(dims: Dims, tokens: Axes, columns: Axes) -> tuple[int | None, int | None]:
    """Return the dims that are split over the axes of tokens and of features, in blocks; None: none is."""
    found: list[int | None] = [
        next((number for number, dim in enumerate(dims) if axes and _is_block(dim, axes)), None)
        for axes in (tokens, columns)
    ]
    return found[0], found[1]


def _is_block(dim: Dim, axes: Axes) -> bool:
    return dim[0].split == Split(axes) and not dim[0].parts


def mark_split(mesh: Mesh, x: Tensor, number: int, axes: Axes, mine: Tensor) -> Tensor:
    """Return ``mine``, a rank's block of x along a dim, marked so in a tracked forward.

    Raises:
        LayoutError: for a tensor that is not whole along that dim.
    """
    found, axes = tracker(), spanning_axes(mesh, axes)
    if found is None or not axes:
        return mine
    dims = list(found.dims(x))
    if not is_whole(dims[number]):
        _refuse_whole(found, x, number, axes, "returns", "splits it")
    dims[number] = block(mine.shape[number], axes, grain=-1)
    found.mark(mine, tuple(dims))
    found.records.sum_over([mine], found.records.summed(x))
    return mine


def _refuse_whole(found: Tracker, x: Tensor, number: int, axes: Axes, what: str, does: str) -> NoReturn:
    dim = found.dims(x)[number]
    found.refuse(
        "a module that is kept whole",
        f"{what} a tensor whose dim {number % x.dim()} {describe(dim)}, but {does} over {', '.join(axes)}",
        x,
        axes=(*axes_of(dim), *axes),
    )


def check_stream(found: Tracker, mesh: Mesh, x: Tensor, axes: Axes, columns: Axes, what: str) -> None:
    """Refuse a tensor used as the stream, or as a head's output, without its layout: rows first, columns last."""
    dims = found.dims(x)
    sequence_axes = () if found.token_split is None else found.token_split.axes
    for place, wanted in ((0, spanning_axes(mesh, axes)), (len(dims) - 1, spanning_axes(mesh, columns))):
        have = tuple(axis for axis in axes_of(dims[place]) if axis not in sequence_axes)
        turn = "" if place else ": transpose it, rows first"
        if (have == wanted and is_split_first(dims[place], wanted) and not is_unknown(dims[place])) or dims[place][
            0
        ].split == ALIKE:
            continue
        found.refuse(
            what,
            f"receives a tensor whose dim {place} {describe(dims[place])}, but needs one that is split over "
            f"{', '.join(wanted) or 'nothing'}{turn}",
            x,
            axes=(*have, *wanted),
        )


def describe(dim: Dim) -> str:
    """Return a dim's layout in words."""
    if is_unknown(dim):
        return "is not known to be split or whole"
    return f"is split over {', '.join(axes_of(dim)) or 'nothing'}"
