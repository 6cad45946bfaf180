"""The tracker of the running forward, for layers and hooks that communicate between ranks.

Code that runs parts of a model declares them (:func:`part_of_model`), and forwards that compute nothing (:func:`without_tracking`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from meshfold.mesh.tracking.dims import Dims, shape_of, unknown_dims

if TYPE_CHECKING:
    from meshfold.mesh.tracking.follow import Tracker

_active: list[Tracker] = []
_parts: list[object] = []


def tracker() -> Tracker | None:
    """Return the tracker of the running forward; None if it is not tracked."""
    return _active[-1] if _active else None


def untracked(*, rows: bool = False) -> Any:
    """Return a context in which ranks may communicate: operations are not tracked.

    Args:
        rows: they do not, and the rows of the batch are followed all the same.
    """
    return _active[-1].untracked(rows=rows) if _active else nullcontext()


@contextmanager
def activated(found: Tracker) -> Iterator[None]:
    """Context manager: make a tracker the active one."""
    _active.append(found)
    try:
        with found:
            yield
    finally:
        _active.pop()


@contextmanager
def part_of_model(part: object) -> Iterator[None]:
    """Context manager: a forward runs only this part of the model; other parts have other code."""
    _parts.append(part)
    try:
        yield
    finally:
        _parts.pop()


def without_tracking() -> Any:
    """Return a context in which no forward is tracked."""
    return part_of_model(None)


def is_tracking_on() -> bool:
    """Return True if forwards are tracked."""
    return None not in _parts  # parts of an untracked forward are not tracked


def part() -> object:
    """Return the part of the model that runs; None if all of it does."""
    return _parts[-1] if _parts else None


@dataclass(frozen=True)
class TrackedLayout:
    """Layout of a tensor.

    Attributes:
        dims: which of its dims are split.
        rows: where it has the rows of the batch; None where they are not followed.
    """

    dims: Dims
    rows: Dims | None


def tracked_layout(tensor: Tensor) -> TrackedLayout | None:
    """Return a tensor's layout; None if the forward is not tracked."""
    found = tracker()
    if found is None:
        return None
    return TrackedLayout(found.dims(tensor), found.rows.dims(tensor) if found.rows.follows else None)


def set_tracked_layout(tensor: Tensor, known: TrackedLayout | None) -> None:
    """Set the layout of a tensor that came from elsewhere; None: unknown."""
    found = tracker()
    if found is None:
        return
    found.mark(tensor, unknown_dims(tensor.shape) if known is None else known.dims)
    if known is None or known.rows is None or shape_of(known.rows) != tuple(tensor.shape):
        found.rows.lose(tensor)
    else:
        found.rows.put(tensor, known.rows)
