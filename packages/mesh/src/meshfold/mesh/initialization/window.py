"""Elements of a tensor that a view reaches, dim by dim: a row, a range, or a transposed matrix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshfold.mesh.initialization.trace import Geometry


@dataclass(frozen=True, slots=True)
class Window:
    """Elements of a tensor that a write reaches: along each dim ``count`` indices from ``start`` in steps of ``step``.

    ``dims`` says for each dim of what is written which dim of the tensor it runs along, None for one of size 1.
    """

    starts: tuple[int, ...]
    steps: tuple[int, ...]
    counts: tuple[int, ...]
    dims: tuple[int | None, ...]

    @classmethod
    def of(cls, written: Geometry, base: Geometry) -> Window | None:
        """The window of ``base`` that ``written`` is, if it is one."""
        if written.dtype != base.dtype or written.offset < base.offset:
            return None
        rest = written.offset - base.offset
        starts, steps, counts = [0] * len(base.size), [1] * len(base.size), [1] * len(base.size)
        order = sorted((d for d, size in enumerate(base.size) if size > 1), key=lambda d: -base.stride[d])
        for d in order:
            if base.stride[d] == 0:
                return None
            starts[d], rest = divmod(rest, base.stride[d])
        dims: list[int | None] = []
        for size, stride in zip(written.size, written.stride, strict=True):
            along = (
                next((d for d in order if stride and stride % base.stride[d] == 0), None)
                if size > 1
                else None
            )
            if size > 1 and (along is None or along in dims):
                return None
            if along is not None:
                steps[along], counts[along] = stride // base.stride[along], size
            dims.append(along)
        inside = all(starts[d] + (counts[d] - 1) * steps[d] < base.size[d] for d in order)
        if rest or not inside:
            return None
        return cls(tuple(starts), tuple(steps), tuple(counts), tuple(dims))

    @classmethod
    def all(cls, base: Geometry) -> Window:
        """Every element of a tensor."""
        n = len(base.size)
        return cls((0,) * n, (1,) * n, base.size, tuple(range(n)))

    def positions(self, dim: int, points: Tensor, size: int) -> slice | Tensor:
        """Return the window's positions along a dim of a block; padding belongs to a window of the whole dim."""
        if self.starts[dim] == 0 and self.steps[dim] == 1 and self.counts[dim] == size:
            return slice(None)
        distance = points - self.starts[dim]
        step = self.steps[dim]
        inside = (distance >= 0) & (distance % step == 0) & (distance < self.counts[dim] * step)
        return inside.nonzero().flatten()
