"""Positions of the elements of a rank's tensor in the tensor that one process would have for the global batch.

A dim is a sequence of *runs*, major first. A run is neighbouring elements that are whole on the rank, its block over mesh axes, the
rows of its part of the batch, or its tokens of split sequences. The number of an element in one process's tensor, row-major,
follows from the numbers in each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshfold.mesh import LayoutError, Mesh, MeshfoldError
from meshfold.mesh.random import TokenShards, current_dropout_stream
from meshfold.mesh.tracking import (
    ROWS,
    ROWS_INNERMOST,
    TOKENS_EXCHANGED,
    Dim,
    Dims,
    Factor,
    Split,
    is_unknown,
)
from meshfold.tensor_parallel.layers.base import BatchShape


class Run(NamedTuple):
    """A part of a dim.

    Attributes:
        axes: whose ranks have a block of it each, major first.
        rows: ``"rows"``: rows of the batch, each followed by its elements; ``"turned"``: tokens, each followed by all rows;
            ``"tokens"``: tokens of the batch, numbered consecutively; ``""``: none of these.
        token_split: its tokens are split over ranks.
        single: of rows: nothing follows them in the run.
        size: local elements.
    """

    axes: tuple[str, ...] = ()
    rows: str = ""
    token_split: bool = False
    single: bool = False
    size: int = 0


Positions = tuple[tuple[Run, ...], ...]
"""For each dim of a tensor its runs."""


class GlobalBatch(NamedTuple):
    """Rows and tokens of a forward, which determine their numbers in the global batch.

    Attributes:
        first_row, first_token: rows and tokens of the global batch before this forward's.
        rows: of the global batch; 0: as many as this forward's.
        here: this forward's, on all ranks that share them.
        token_shards: which tokens of each sequence there are; None: all. Unused where a graph asks for them when it runs.
    """

    first_row: int | Tensor
    first_token: int | Tensor
    rows: int | Tensor
    here: BatchShape
    token_shards: TokenShards | None


def followed_positions(
    x: Tensor,
    real: Dims,
    rows: Dims,
    guess: Positions,
    batch: GlobalBatch,
    mesh: Mesh,
    sequence_axes: tuple[str, ...],
    name: str,
) -> Positions | None:
    """Return the positions of a tensor's elements from a tracker's layouts; None if these do not determine them.

    Args:
        x: the tensor.
        real: its dims on the mesh; unknown ones are taken from ``guess``.
        rows: its dims by rows of the batch.
        guess: positions inferred from its sizes.
        batch: of the forward.
        sequence_axes: axes that split sequences.
        name: of the dropout, for messages.

    Raises:
        LayoutError: if the batch is part of a larger one, and the positions of its rows in the tensor are unknown.
    """
    if any(factor.split == TOKENS_EXCHANGED for dim in rows for factor in dim):
        raise _exchanged(x, name)
    is_part = batch.rows not in (0, batch.here.given)
    tokens = tuple(axis for runs in guess for run in runs if run.rows for axis in run.axes)
    if any(map(is_unknown, rows)):
        if is_part:
            raise _lost(x, name, batch.here.given)
        rows = tuple((Factor(n, ROWS if runs[0].rows else None),) for n, runs in zip(x.shape, guess, strict=True))
    if any(map(is_unknown, real)):
        real = _guessed(x, rows, guess, tokens, batch, sequence_axes)
    found = [_runs(a, b, sequence_axes, batch.here.rows, mesh) for a, b in zip(real, rows, strict=True)]
    if None in found and is_part:
        raise _lost(x, name, batch.here.given)
    return None if None in found else tuple(runs for runs in found if runs is not None)


def _exchanged(x: Tensor, name: str) -> LayoutError:
    return LayoutError(
        f"{name}: dropout of a tensor {list(x.shape)}, sequence first: in this mode ranks exchange tokens along the first dim, so "
        "it would drop other elements than one process. Pass the layers around it [batch, tokens, hidden], use mode '1d' or "
        "'2d', or set its probability to 0"
    )


def _lost(x: Tensor, name: str, rows: int) -> LayoutError:
    return LayoutError(
        f"{name}: dropout of a tensor {list(x.shape)} made from {rows} rows of a larger batch: nothing tells which element belongs "
        "to which row, so it would drop other elements than one process. Apply dropout before rows are selected or mixed, or set "
        "its probability to 0"
    )


def _guessed(
    x: Tensor,
    rows: Dims,
    guess: Positions,
    tokens: tuple[str, ...],
    batch: GlobalBatch,
    sequence_axes: tuple[str, ...],
) -> Dims:
    """Return a tensor's dims on the mesh when only its rows are known: they are split over the token axes."""
    made: list[Dim] = []
    for place, (size, dim) in enumerate(zip(x.shape, rows, strict=True)):
        has_rows, flat = any(f.split for f in dim), guess[place][0].rows == "tokens"
        here = (
            batch.token_shards is not None
            and sequence_axes
            and (flat or (not has_rows and size == batch.token_shards.local))
        )
        axes = guess[place][0].axes if place == len(guess) - 1 else tokens if has_rows else ()
        split = Split((*axes, *sequence_axes), "tokens") if here else Split(axes) if axes else None
        made.append((Factor(size, split),))
    return tuple(made)


def _runs(real: Dim, rows: Dim, sequence_axes: tuple[str, ...], here: int, mesh: Mesh) -> tuple[Run, ...] | None:
    """Return the runs of a dim from both descriptions of its factors; None if they do not fit together."""
    made: list[Run] = []
    left, right = [*real], [*rows]
    while left or right:
        if left and right and (left[0].size == 1) == (right[0].size == 1):
            pair = _aligned(left, right)
        elif left and left[0].size == 1:  # match a single element with nothing
            pair = left.pop(0), Factor(1)
        else:
            pair = (Factor(1), right.pop(0)) if right and right[0].size == 1 else None
        run = None if pair is None else _run(*pair, sequence_axes, here, mesh)
        if run is None:
            return None
        made.append(run)
    return tuple(made)


def _aligned(left: list[Factor], right: list[Factor]) -> tuple[Factor, Factor] | None:
    """Take factors with equal numbers of elements off both lists."""
    size = min(left[0].size, right[0].size)
    one, other = _taken(left, size), _taken(right, size)
    return None if one is None or other is None else (one, other)


def _taken(factors: list[Factor], size: int) -> Factor | None:
    """Take the major part of the first factor. It keeps the factor's split; the rest is whole."""
    first = factors.pop(0)
    if first.size == size:
        return first
    if first.size % size or first.parts or (first.split is not None and first.split.kind == "tokens"):
        return None
    factors.insert(0, Factor(first.size // size))
    return Factor(size, first.split)


def _run(real: Factor, rows: Factor, sequence_axes: tuple[str, ...], here: int, mesh: Mesh) -> Run | None:
    if real.parts or (real.split is not None and real.split.kind not in ("block", "tokens")):
        return None
    token_split = real.split is not None and real.split.kind == "tokens"
    axes = () if real.split is None else real.split.axes
    axes = tuple(axis for axis in axes if not (token_split and axis in sequence_axes))
    kind = "" if rows.split is None else "turned" if rows.split == ROWS_INNERMOST else "rows"
    size = max(real.size, rows.size)
    every = size * mesh.size(*axes)
    if kind == "rows" and every % here:
        return None
    return Run(axes, kind, token_split, kind == "rows" and every == here, size)


def fitted_positions(place: Positions, shape: tuple[int, ...], batch: GlobalBatch, mesh: Mesh) -> Positions | None:
    """Return the same runs for a tensor of another shape; None if that is impossible."""
    if len(place) != len(shape):
        return None
    made = []
    for runs, size in zip(place, shape, strict=True):
        sizes = [size] if len(runs) == 1 else _sizes(runs, size, batch, mesh)
        if sizes is None:
            return None
        made.append(tuple(_resized(run, n, batch, mesh) for run, n in zip(runs, sizes, strict=True)))
    return tuple(made)


def _resized(run: Run, size: int, batch: GlobalBatch, mesh: Mesh) -> Run:
    if run.rows != "rows" or torch.compiler.is_compiling():  # avoid one graph for every number of rows
        return run._replace(size=size)
    return run._replace(size=size, single=size * mesh.size(*run.axes) == batch.here.rows)


def _sizes(runs: tuple[Run, ...], size: int, batch: GlobalBatch, mesh: Mesh) -> list[int] | None:
    """Return the sizes of one dim's runs: rows and sharded tokens are known; of the others, only one may have changed."""
    sizes, left = [run.size for run in runs], -1
    for at, run in enumerate(runs):
        if run.rows and run.single:
            sizes[at] = batch.here.rows // mesh.size(*run.axes)
        elif run.token_split and batch.token_shards is not None:
            sizes[at] = batch.token_shards.local
        elif left < 0:
            left, sizes[at] = at, 1
    rest, over = divmod(size, max(prod(sizes), 1))
    if over or (left < 0 and rest != 1):
        return None
    if left >= 0:
        sizes[left] = rest
    return sizes


def block_of(place: Positions, batch: GlobalBatch, mesh: Mesh) -> tuple[int | Tensor, int, int] | None:
    """Return the numbers of a tensor that is whole in all dims but its first and last, which may be blocks.

    Returns:
        (number of the first row ``.. c``, of the first column, columns of the whole); None for any other layout.
    """
    *lead, last = place
    if len(last) != 1 or last[0].token_split or last[0].rows:
        return None
    width, axes = last[0].size, last[0].axes
    columns = width * mesh.index(*axes), width * mesh.size(*axes)
    runs = [run for dim in lead for run in dim]
    if not runs:
        return 0, *columns
    first, *others = runs
    if first.token_split or first.rows == "turned" or any(run.axes or run.rows or run.token_split for run in others):
        return None
    start = _first(first, batch, mesh)
    for run in others:
        start = start * run.size
    return start, *columns


def numbers_of(place: Sequence[tuple[Run, ...]], batch: GlobalBatch, mesh: Mesh, device: torch.device) -> Tensor:
    """Return the number of each element of a tensor in one process's: a vector, row-major, int64."""
    found: Tensor = torch.zeros(1, dtype=torch.int64, device=device)
    stride: int | Tensor = 1
    runs = [run for dim in place for run in dim]
    for at in range(len(runs) - 1, -1, -1):
        count, size = _counted(runs[at], batch, mesh, device, first=at == 0)
        found = ((count * stride).unsqueeze(1) + found).flatten()
        stride = stride * size
    return found


def _counted(
    run: Run, batch: GlobalBatch, mesh: Mesh, device: torch.device, *, first: bool
) -> tuple[Tensor, int | Tensor]:
    """Return the global numbers of a run's elements, and the global size, which is not needed for the ``first`` run."""
    local = torch.arange(run.size, device=device)
    if not run.token_split and run.rows != "turned":
        every: int | Tensor = run.size * mesh.size(*run.axes)
        if run.rows == "rows" and not first:
            every = _all_rows(batch) * _inner(run, batch, mesh)
        return local + _first(run, batch, mesh), every
    size = run.size * mesh.size(*run.axes)
    count = local + mesh.index(*run.axes) * run.size
    if run.rows == "turned":
        here = batch.here.rows
        token, row = count // here, count % here
        tokens: int | Tensor = size // here
        if run.token_split:
            token, tokens = global_token_numbers(token, size // here, batch.token_shards, rows=False)
        rows = _all_rows(batch)
        return token * rows + batch.first_row + row, tokens * rows
    count, whole = global_token_numbers(count, size, batch.token_shards, rows=bool(run.rows))
    if run.rows == "tokens":
        return count + batch.first_token, whole
    if not run.rows:
        return count, whole
    inner = whole // batch.here.rows
    return count + batch.first_row * inner, whole if first else _all_rows(batch) * inner


def _first(run: Run, batch: GlobalBatch, mesh: Mesh) -> int | Tensor:
    """Return the global number of a contiguous run's first element."""
    first = run.size * mesh.index(*run.axes)
    if run.rows == "tokens":
        return first + batch.first_token
    return first + batch.first_row * _inner(run, batch, mesh) if run.rows else first


def _inner(run: Run, batch: GlobalBatch, mesh: Mesh) -> int:
    """Return a run's number of elements per row."""
    return 1 if run.single or not run.rows else run.size * mesh.size(*run.axes) // batch.here.rows


def _all_rows(batch: GlobalBatch) -> int | Tensor:
    """Return the number of rows of the global batch.

    Raises:
        MeshfoldError: if this is a part of a batch of unknown size.
    """
    if isinstance(batch.rows, Tensor):
        return torch.where(batch.rows > 0, batch.rows, batch.here.given)
    if batch.rows == 0 and isinstance(batch.first_row, int) and batch.first_row > 0:
        raise MeshfoldError(
            "dropout of a sequence-first model needs the number of rows of the global batch, of which "
            f"{batch.first_row} are before these: dropout_stream(seed, step, first_row=..., rows=...)"
        )
    return batch.rows or batch.here.given


def global_token_numbers(
    tokens: Tensor, size: int, token_shards: TokenShards | None, *, rows: bool
) -> tuple[Tensor, int | Tensor]:
    """Return numbers among whole sequences of tokens that are numbered among this rank's shards.

    Args:
        tokens: int64, any shape.
        size: how many there are of this rank's parts.
        token_shards: which tokens of each sequence those are; None: all. A graph asks for it when it runs.
        rows: they belong to several consecutive sequences; else only a whole sequence's number of them is one.

    Returns:
        The numbers, and how many there are in whole sequences.
    """
    if torch.compiler.is_compiling():
        found = torch.ops.meshfold.global_token_numbers(tokens, size, rows)
        return found[1:].view(tokens.shape), found[0]
    if token_shards is None or (size % token_shards.local if rows else size != token_shards.local):
        return tokens, size
    return token_shards.numbers(tokens), size // token_shards.local * token_shards.length


@cache
def prepare_global_token_numbers() -> Any:
    """Register the custom operation that compiled graphs use for :func:`global_token_numbers`, before anything is traced."""

    @torch.library.custom_op("meshfold::global_token_numbers", mutates_args=())
    def numbers(tokens: Tensor, size: int, rows: bool) -> Tensor:
        found, whole = global_token_numbers(tokens, size, current_dropout_stream().token_shards, rows=rows)
        return torch.cat([torch.tensor([whole], device=tokens.device), found.flatten()])

    @numbers.register_fake
    def _(tokens: Tensor, size: int, rows: bool) -> Tensor:
        return tokens.new_empty(tokens.numel() + 1)

    return numbers
