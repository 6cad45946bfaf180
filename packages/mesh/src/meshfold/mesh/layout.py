"""A layout: for each named dim of a tensor, the mesh axes that split it.

Text form, parsed once and cached::

    "m:data,row k:col"      # m is split over data (major) and row (minor), k over col, nothing else is split

Axes are written major first, and the order matters: block ``i`` of ``k:b,a`` belongs to the rank whose row-major index over ``(b,
a)`` is ``i``, for any order of the axes in the mesh. Axes that no dim names replicate the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from meshfold.mesh.errors import LayoutError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_AXIS = re.compile(r"[A-Za-z][A-Za-z0-9_]*([/%][1-9][0-9]*)?")


class Layout(Mapping[str, tuple[str, ...]]):
    """An immutable mapping from dim name to the mesh axes that split it, in the order of the tensor's dims.

    >>> layout = Layout.parse("m:data,row k:col")
    >>> layout["m"]
    ('data', 'row')
    >>> str(layout)
    'm:data,row k:col'
    """

    __slots__ = ("_dims", "_hash")

    def __init__(self, dims: Mapping[str, tuple[str, ...]]) -> None:
        """Raises:
        LayoutError: if an axis splits two dims, or one dim twice.
        """
        owner: dict[str, str] = {}
        for dim, axes in dims.items():
            for axis in axes:
                if axis in owner:
                    raise LayoutError(
                        f"axis {axis!r} appears twice in layout {_text(dims)!r} (in dim {owner[axis]!r} and in dim "
                        f"{dim!r}): an axis can split one dim of a tensor, once; take it out of one of them"
                    )
                owner[axis] = dim
        self._dims = {dim: tuple(axes) for dim, axes in dims.items()}
        self._hash = hash(tuple(self._dims.items()))

    @staticmethod
    def parse(text: str | Layout) -> Layout:
        """Read ``"m:data,row k:col"``.

        Raises:
            LayoutError: for anything that is not dims separated by spaces, each ``name`` or ``name:axis,axis``.
        """
        if isinstance(text, Layout):
            return text
        if not isinstance(text, str):
            raise LayoutError(f"a layout is a string such as 'm:data,row k:col', not {text!r}")
        return _parse(text)

    def __getitem__(self, dim: str) -> tuple[str, ...]:
        try:
            return self._dims[dim]
        except KeyError:
            raise KeyError(f"layout {str(self)!r} has no dim {dim!r}, only {', '.join(self._dims)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._dims)

    def __len__(self) -> int:
        return len(self._dims)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and tuple(self._dims.items()) == tuple(other._dims.items())

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return _text(self._dims)

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that splits some dim, in order of appearance."""
        return tuple(axis for axes in self._dims.values() for axis in axes)

    def replace(self, **dims: tuple[str, ...]) -> Layout:
        """Return the same layout with other axes for the dims named."""
        unknown = [dim for dim in dims if dim not in self._dims]
        if unknown:
            raise LayoutError(f"layout {str(self)!r} has no dim {unknown[0]!r}, only {', '.join(self._dims)}")
        return Layout({dim: dims.get(dim, axes) for dim, axes in self._dims.items()})


def _text(dims: Mapping[str, tuple[str, ...]]) -> str:
    return " ".join(f"{dim}:{','.join(axes)}" if axes else dim for dim, axes in dims.items())


@lru_cache(maxsize=4096)
def _parse(text: str) -> Layout:
    dims: dict[str, tuple[str, ...]] = {}
    for word in text.split():
        name, colon, axes_text = word.partition(":")
        if not _NAME.fullmatch(name):
            raise LayoutError(f"{name!r} in layout {text!r} is not a name of a dim: use letters, digits and _")
        if name in dims:
            raise LayoutError(f"dim {name!r} appears twice in layout {text!r}: give each dim its own name")
        axes = tuple(axes_text.split(",")) if colon else ()
        for axis in axes:
            if not _AXIS.fullmatch(axis):
                raise LayoutError(
                    f"{axis!r} in {word!r} of layout {text!r} is not a name of a mesh axis: write "
                    f"'{name}:axis' or '{name}:major,minor', without spaces around ':' and ','"
                )
        dims[name] = axes
    if not dims:
        raise LayoutError("an empty layout: name the dims of the tensor, as in 'm:data k'")
    return Layout(dims)
