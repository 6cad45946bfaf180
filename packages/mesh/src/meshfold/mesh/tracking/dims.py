"""Layouts of local tensors: the split dims of a tensor, and the axes that split them.

A dim is a row of factors, major first. ``view`` merges dims and separates them again
(:mod:`meshfold.mesh.tracking.reshaping`). The dim ``b·s`` of a batch with split sequences therefore has two factors, a whole one
and a split one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal


class MixesError(Exception):
    """An operation reads across a split dim. Never leaves this package: it becomes a LayoutError with the user's line."""


_OPEN = ("alike", "unknown")


@dataclass(frozen=True)
class Split:
    """Split of a factor.

    Attributes:
        axes: mesh axes, major first.
        kind: ``"block"``: a contiguous block of the whole, ``"tokens"``: tokens in any order, ``"chosen"``: some of a rank's own
            elements, ``"places"``: where ``nonzero`` has found these, ``"moved"``: tokens of other ranks too, until they are
            brought back, ``"alike"``: all elements are the same, so that they are a piece of as many more, ``"unknown"``: may be
            anything, as a tensor that an earlier forward has left, ``"counted"``: numbers that every rank counts by itself.
        choice: tells choices, or moves, apart.
    """

    axes: tuple[str, ...]
    kind: Literal["block", "tokens", "chosen", "places", "moved", "alike", "unknown", "counted"] = "block"
    choice: int = 0

    @property
    def is_open(self) -> bool:
        """Return True if a factor may be whole or a piece."""
        return self.kind in _OPEN


UNKNOWN, ALIKE = Split((), "unknown"), Split((), "alike")
ROWS = Split(("rows",))
"""Split of a factor that holds rows, possibly joined with the entries of each row."""


@dataclass(frozen=True)
class Factor:
    """A part of a dim.

    Attributes:
        size: local, in elements.
        split: None if it is whole on every rank.
        parts: local sizes of the outputs that a fused layer has concatenated; each is a block of its own.
        grain: elements of a block that always stay together, such as a head's; 0 if unknown, −1 if there are none.
    """

    size: int
    split: Split | None = None
    parts: tuple[int, ...] = ()
    grain: int = field(default=0, compare=False)


Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


@lru_cache(maxsize=4096, typed=True)  # typed: a size that remembers its dim is no plain number
def whole(size: int) -> Dim:
    """Return a dim that is whole on every rank."""
    return (Factor(size),)


def whole_dims(shape: Iterable[int]) -> Dims:
    """Return the layout of a tensor that is whole on every rank."""
    return tuple(whole(size) for size in shape)


def block(size: int, axes: Sequence[str], parts: tuple[int, ...] = (), grain: int = 0) -> Dim:
    """Return a dim that is split so that a rank has one block; whole without axes."""
    if not axes:
        return whole(size)
    return (Factor(size, Split(tuple(axes)), parts if len(parts) > 1 else (), grain),)


def size_of(dim: Dim) -> int:
    """Return the local size."""
    found = 1
    for factor in dim:
        found *= factor.size
    return found


def axes_of(dim: Dim) -> tuple[str, ...]:
    """Return the axes that split a dim."""
    return tuple(axis for factor in dim if factor.split is not None for axis in factor.split.axes)


def axes_in(dims: Dims) -> set[str]:
    """Return the axes that split any of these dims."""
    return {axis for dim in dims for axis in axes_of(dim)}


def is_split_first(dim: Dim, axes: tuple[str, ...]) -> bool:
    """Return True if a dim is split over these axes first, so that ranks' shards are in order."""
    split = dim[0].split
    return not axes or (split is not None and split.axes[: len(axes)] == axes and not dim[0].parts)


def unknown(size: int) -> Dim:
    """Return a dim that may be whole, or a piece."""
    return (Factor(size, UNKNOWN),)


def unknown_dims(shape: Iterable[int]) -> Dims:
    """Return the layout of a tensor that nothing is known about."""
    return tuple(unknown(size) for size in shape)


def is_split(dim: Dim) -> bool:
    """Return True if a rank has a piece of the dim."""
    for factor in dim:  # noqa: SIM110  a generator takes three times as long, and every operation asks for all dims
        if factor.split is not None and factor.split.kind not in _OPEN:
            return True
    return False


def is_open(dim: Dim) -> bool:
    """Return True if the dim may be whole or a shard; only the tensors that it is combined with decide."""
    return not is_whole(dim) and not is_split(dim)


def is_unknown(dim: Dim) -> bool:
    """Return True if nothing is known about the dim."""
    return is_open(dim) and any(factor.split is not None and factor.split.kind == "unknown" for factor in dim)


def is_counted(dim: Dim) -> bool:
    """Return True for a dim that has a rank's number of elements of something, but is not a shard of a larger dim."""
    return len(dim) == 1 and dim[0].split is not None and dim[0].split.kind == "counted"


def is_whole(dim: Dim) -> bool:
    """Return True if every rank has all of the dim; only such dims may be mixed."""
    for factor in dim:  # noqa: SIM110  as above
        if factor.split is not None:
            return False
    return True


def distinct_splits(several: Iterable[Dim]) -> list[Dim]:
    """Return the different splits of a dim; open parts of one may be as in another."""
    found: list[Dim] = []
    for dim in sorted(several, key=_has_open):
        if not any(dim == other or _may_be(dim, other) for other in found):
            found.append(dim)
    return found


def _may_be(dim: Dim, other: Dim) -> bool:
    known = [f.split for f in dim if f.split is not None and not f.split.is_open]
    return _has_open(dim) and all(any(f.split == split for f in other) for split in known)


def _has_open(dim: Dim) -> bool:
    return any(f.split is not None and f.split.is_open for f in dim)


def any_split(dims: Dims) -> bool:
    """Return True if a rank has a piece of the tensor."""
    return any(map(is_split, dims))


def shape_of(dims: Dims) -> tuple[int, ...]:
    """Return the local shape."""
    return tuple(map(size_of, dims))


def normal(factors: Iterable[Factor]) -> Dim:
    """Return the same dim with as few factors as possible: factors after a block are parts of its elements."""
    found: list[Factor] = []
    for factor in factors:
        if factor.size == 1 and factor.split is None:
            continue
        last = found[-1] if found else None
        if last is not None and factor.split is None and _takes_up(last):
            parts = tuple(part * factor.size for part in last.parts)
            size, grain = last.size * factor.size, max(last.grain, 1) * factor.size
            found[-1] = replace(last, size=size, parts=parts, grain=grain)
        elif last is not None and factor.split == UNKNOWN and last.split in (None, UNKNOWN):
            found[-1] = Factor(last.size * factor.size, UNKNOWN)
        else:
            found.append(factor)
    return tuple(found) or whole(1)


def _takes_up(factor: Factor) -> bool:
    return factor.split is None or factor.split.kind in ("block", "unknown")


def chosen_by(dims: Dims) -> Dims:
    """Return dims with the layout of an index, for a tensor that is not one."""
    return tuple(
        tuple(
            replace(f, split=replace(f.split, kind="chosen")) if f.split is not None and f.split.kind == "places" else f
            for f in dim
        )
        for dim in dims
    )


def check_axes_once(dims: Dims) -> Dims:
    """Return the dims themselves.

    Raises:
        MixesError: if an axis splits two of them: a rank would have only the pairs of its own shards.
    """
    seen: set[str] = set()
    for dim in dims:
        mine = set() if is_counted(dim) else set(axes_of(dim))
        if seen & mine:
            raise MixesError(f"pairs elements of two dims that are split over {', '.join(sorted(seen & mine))}")
        seen |= mine
    return dims
