"""Spans of a parameter of which neighbouring ranks hold copies: key/value heads, if there are fewer than ranks."""

from __future__ import annotations

from torch import Tensor

from meshfold.mesh import LayoutError, Mesh, ParameterMeta, collectives
from meshfold.mesh.collectives import Primitive, adjoint_pair, identity


def repeated_spans(meta: ParameterMeta | None, dim: int, mesh: Mesh) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    """Return the spans of the local block that neighbouring ranks hold as well."""
    if meta is None or dim not in meta.placement.parts:
        return ()
    spans, start = [], 0
    parts, axes = meta.placement.parts[dim], meta.placement.axes[dim]
    for part, (_, length) in zip(parts, meta.placement.segments(mesh, dim), strict=True):
        if part.repeat > 1:
            spans.append((start, length, _neighbours(axes, part.repeat, mesh)))
        start += length
    return tuple(spans)


def bind_sum_repeated(mesh: Mesh, dim: int, spans: tuple[tuple[int, int, tuple[str, ...]], ...]) -> Primitive:
    """Bind the identity on a parameter with spans that several ranks hold and use differently (key/value heads
    when there are fewer than ranks); backward sums the gradient of those spans.

    Args:
        mesh: where it lies.
        dim: the dim that has the spans.
        spans: (start, length, axes) of each span, in local elements; an axis may be a factor such as ``"tensor%2"``.
    """
    if all(mesh.size(*axes) == 1 for _, _, axes in spans):
        return identity
    for _, _, axes in spans:
        mesh.prepare(*axes)

    def sum_spans(grad: Tensor) -> Tensor:
        grad = grad.clone()
        for start, length, axes in spans:
            span = grad.narrow(dim, start, length)
            span.copy_(collectives.all_reduce(span, mesh.group(*axes)))
        return grad

    return mesh.once(("sum repeated", dim, spans), lambda: adjoint_pair(identity, sum_spans))


def _neighbours(axes: tuple[str, ...], count: int, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes that ``count`` neighbouring blocks span: the minor axes, and a minor factor of the next one."""
    found: list[str] = []
    for axis in reversed(axes):
        size = mesh.size(axis)
        if count % size == 0:
            found.insert(0, axis)
            count //= size
        else:
            if size % count:
                raise LayoutError(
                    f"{count} neighbouring ranks cannot share a key/value head over axes {', '.join(axes)}, the last of "
                    f"size {size}: use a number of key/value heads that is a multiple of {size}"
                )
            found.insert(0, f"{axis}%{count}")
            count = 1
        if count == 1:
            break
    return tuple(found)
