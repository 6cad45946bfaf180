"""The tracker of the forward under way: layers and hooks that exchange between ranks ask for it.

Who runs parts of a model says which (:func:`part_of_model`), and which forwards compute nothing (:func:`unwatched`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torch import Tensor

from meshfold.mesh.tracking.dims import UNKNOWN, Dims, Factor, shape_of

if TYPE_CHECKING:
    from meshfold.mesh.tracking.follow import Tracker

_active: list[Tracker] = []
_parts: list[object] = []


def tracker() -> Tracker | None:
    """Of the forward under way; None where it is not looked at."""
    return _active[-1] if _active else None


def untracked(*, rows: bool = False) -> Any:
    """A context in which ranks may exchange: operations are not looked at.

    Args:
        rows: they do not, and the rows of the batch are followed all the same.
    """
    return _active[-1].untracked(rows=rows) if _active else nullcontext()


@contextmanager
def activated(found: Tracker) -> Iterator[None]:
    """Inside, a tracker is the active one."""
    _active.append(found)
    try:
        with found:
            yield
    finally:
        _active.pop()


@contextmanager
def part_of_model(part: object) -> Iterator[None]:
    """Inside, a forward runs this part of the model alone: another part has other code."""
    _parts.append(part)
    try:
        yield
    finally:
        _parts.pop()


def unwatched() -> Any:
    """A context in which no forward is looked at."""
    return part_of_model(None)


def is_watched() -> bool:
    """Whether forwards are looked at."""
    return not _parts or _parts[-1] is not None


def part() -> object:
    """Of the model that runs; None if all of it does."""
    return _parts[-1] if _parts else None


def arrived(tensors: Iterable[Tensor], rows: Iterable[Dims | None] = ()) -> None:
    """Tensors have come from elsewhere: nothing is known of how they lie.

    Args:
        rows: where each has the rows of the batch, from :func:`rows_of`; left out: that is unknown as well.
    """
    found = tracker()
    if found is not None:
        for tensor, dims in zip_longest(tensors, rows):
            found.mark(tensor, tuple((Factor(size, UNKNOWN),) for size in tensor.shape))
            if dims is None or shape_of(dims) != tuple(tensor.shape):
                found.rows.lose(tensor)
            else:
                found.rows.put(tensor, dims)


def rows_of(tensor: Tensor) -> Dims | None:
    """Where a tensor has the rows of the batch; None where they are not followed."""
    found = tracker()
    return found.rows.dims(tensor) if found is not None and found.rows.follows else None
