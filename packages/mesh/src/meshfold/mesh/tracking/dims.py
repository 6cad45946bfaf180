"""Layouts of local tensors: the split dims of a tensor, the axes that split them, and how a view changes them.

A dim is a row of factors, major first. ``view`` merges dims and separates them again. The dim ``b·s`` of a batch with split
sequences therefore has two factors, a whole one and a split one.
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


def regroup(
    dims: Dims,
    sizes: Sequence[int],
    inferred: int | None = None,
    counted: Sequence[tuple[str, ...]] | None = None,
) -> Dims:
    """Return the layout after ``view``.

    Args:
        dims: before.
        sizes: the new shape.
        inferred: which of its sizes the user has left open, as -1. The others are numbers that the model's code knows; they
            describe the whole tensor, except numbers of heads.
        counted: the axes of the elements that each size counts, where the model's code has read it off a split dim.

    Raises:
        MixesError: where a piece of a split dim would be taken apart.
    """
    if shape_of(dims) == tuple(sizes):
        return dims
    if 0 in sizes:
        return whole_dims(sizes)
    return _Regrouping(dims, sizes, inferred, counted).run()


class _Regrouping:
    """Assigns the factors of the old shape to the dims of the new shape, from the left."""

    def __init__(
        self,
        dims: Dims,
        sizes: Sequence[int],
        inferred: int | None,
        counted: Sequence[tuple[str, ...]] | None = None,
    ) -> None:
        self._sizes, self._inferred, self._counted = list(sizes), inferred, counted
        self._rest: list[Factor] = []
        for dim in dims:
            for factor in dim:
                if factor.size > 1 or factor.split is not None:
                    self._add(factor)
        self._made: list[list[Factor]] = [[] for _ in sizes]
        self._at, self._wants = 0, self._sizes[0] if sizes else 1

    def _add(self, factor: Factor) -> None:
        """Add a factor; merge adjacent whole factors."""
        last = self._rest[-1] if self._rest else None
        if last is not None and last.split is None and factor.split is None:
            self._rest[-1] = Factor(last.size * factor.size)
        else:
            self._rest.append(factor)

    def run(self) -> Dims:
        while self._rest:
            factor = self._rest.pop(0)
            if factor.size == 1:
                self._place_single(factor)
            else:
                self._place(factor)
        return tuple(normal(made) if made else whole(1) for made in self._made)

    def _place_single(self, factor: Factor) -> None:
        """Place a split dim with one local element, whose destination does not follow from the sizes."""
        if self._wants > 1 or not self._sizes:
            if self._sizes:
                self._made[self._at].append(factor)
            return
        after = self._at + 1
        if (into := self._written(factor)) is not None:
            pass
        elif self._sizes[self._at] == 1 and not self._made[self._at]:
            # Batch rows come first, as when a batched matmul splits batch and heads again.
            into = self._at + (0 if factor.split == ROWS else self._spare())
        elif after == len(self._sizes):
            into = self._at
        elif self._sizes[after] == 1:
            into = after
        elif self._at == 0 and len(self._sizes) == 3 and any(self._made):
            into = self._at  # heads merged with the batch for a batched matmul
        elif factor.grain == 0 and self._made[self._at]:
            into = self._at  # rows and tokens merge with the dims before, not with features
        else:
            into = after  # heads merge with their elements, or with their group of queries
        while into > self._at:
            self._step()
        self._made[self._at].append(factor)

    def _written(self, factor: Factor) -> int | None:
        """Return the destination of a single element that the sizes in the model's code imply; None if they do not."""
        first = self._at if self._made[self._at] or self._sizes[self._at] == 1 else self._at + 1
        beyond = next((i for i in range(self._at + 1, len(self._sizes)) if self._sizes[i] != 1), len(self._sizes) - 1)
        places = range(first, beyond + 1)
        if factor.split is None or self._counted is None:
            return None
        axes = set(factor.split.axes)
        mine = [place for place in places if axes and axes <= set(self._counted[place])]
        if len(mine) == 1:
            return mine[0]
        # A free size of 1 may be this one's, read from an untracked tensor.
        is_free = not self._made[self._at] and self._sizes[self._at] == 1
        is_row = factor.grain == 0 and not is_free and not mine
        return self._inferred if self._inferred in places and is_row else None

    def _spare(self) -> int:
        """Return how many more dims of size 1 follow than factors that could fill them."""
        dims = next((i for i, n in enumerate(self._sizes[self._at :]) if n != 1), len(self._sizes) - self._at)
        factors = next((i for i, f in enumerate(self._rest) if f.size != 1), len(self._rest))
        return max(0, dims - factors - 1)

    def _step(self) -> None:
        self._at += 1
        self._wants = self._sizes[self._at]

    def _place(self, factor: Factor) -> None:
        while self._wants == 1 and self._at + 1 < len(self._sizes):
            empty = self._sizes[self._at] == 1 and not self._made[self._at]
            if (
                empty
                and factor.split is not None
                and factor.split.kind == "block"
                and (_is_one(factor) or (self._at == self._inferred and not factor.parts))
            ):
                # One head per rank: in ``view(b, s, heads, d)`` the heads are split.
                self._made[self._at].append(Factor(1, factor.split, (), -1))
                factor = Factor(factor.size)
            self._step()
        if self._wants % factor.size == 0:
            self._made[self._at].append(factor)
            self._wants //= factor.size
            return
        if factor.size % self._wants:
            raise MixesError("reshapes a split dim across the borders of its shards")
        major, minor = _apart(factor, self._wants, self._at == self._inferred)
        self._made[self._at].append(major)
        self._wants = 1
        self._rest.insert(0, minor)


def _is_one(factor: Factor) -> bool:
    """Return True if a rank's block may be a single unit, such as one head or one row."""
    return not factor.parts and factor.grain in (0, factor.size)


def _apart(factor: Factor, major: int, inferred: bool) -> tuple[Factor, Factor]:
    """Split a factor into ``major`` times the rest; ``inferred``: the number was -1 in the model's code."""
    minor = factor.size // major
    split = factor.split
    if split is None or split.is_open:
        return Factor(major, split), Factor(minor, split)
    if split.kind != "block":
        raise MixesError("reshapes tokens that are split over ranks")
    if not factor.parts:
        known = factor.grain == 0 or (factor.grain > 0 and minor % factor.grain == 0)
        if not known and not inferred:
            raise MixesError(
                f"reshapes a shard to {major} × {minor}, the sizes of the whole dim (write -1 instead of {major} "
                f"if every rank has {minor})"
            )
        return Factor(major, split, (), -1), Factor(minor)
    one = factor.parts[0]
    if factor.parts == (one,) * major and minor == one != factor.grain:
        return Factor(major), Factor(minor, split, (), factor.grain)
    if all(part % minor == 0 for part in factor.parts):
        return Factor(major, split, tuple(part // minor for part in factor.parts), -1), Factor(minor)
    raise MixesError("reshapes the outputs of a fused layer across their borders")


def cut(dim: Dim, start: int, stop: int, step: int = 1) -> Dim:
    """Return elements ``start`` to ``stop`` of a dim.

    Raises:
        MixesError: unless these are all, or the outputs of a fused layer.
    """
    size = size_of(dim)
    count = max(0, -(-(stop - start) // step))
    if (start, count, step) == (0, size, 1):
        return dim
    if is_whole(dim):
        return whole(count)
    if len(dim) == 1 and dim[0].parts and step == 1:
        edges = [0]
        for part in dim[0].parts:
            edges.append(edges[-1] + part)
        if start in edges and stop in edges:
            kept = dim[0].parts[edges.index(start) : edges.index(stop)]
            return (Factor(stop - start, dim[0].split, kept if len(kept) > 1 else (), dim[0].grain),)
    if dim[0].split is None and dim[0].size > 1 and step == 1:  # outputs of a fused layer, or whole sequences
        inner = size // dim[0].size
        if start % inner == 0 and stop % inner == 0:
            return normal((Factor((stop - start) // inner), *dim[1:]))
    raise MixesError("selects elements by position")
