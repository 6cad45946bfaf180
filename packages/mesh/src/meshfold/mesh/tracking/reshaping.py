"""Layouts after a view or a slice: factors of the old shape are assigned to the dims of the new one."""

from __future__ import annotations

from collections.abc import Sequence

from meshfold.mesh.tracking.dims import (
    ROWS,
    Dim,
    Dims,
    Factor,
    MixesError,
    is_whole,
    normal,
    shape_of,
    size_of,
    whole,
    whole_dims,
)


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
