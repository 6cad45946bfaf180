"""Size of a split dim that remembers the dim: valid as a size of views and new tensors, not as a factor."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from meshfold.mesh.tracking.dims import Dim, Dims, Factor, Split, axes_of, normal, size_of


class LocalSize(int):
    """A number of a rank's own elements.

    Sums, products and quotients of it are such numbers too. Dividing by it, powers, fractions and floats are refused: the
    model means the number of all elements.

    Attributes:
        axes: mesh axes that split the counted elements.
        dim: the dim it is the size of; None for a number computed from such sizes.
        refuse: raises the LayoutError of the line that computes with it.
    """

    axes: tuple[str, ...]
    dim: Dim | None
    refuse: Callable[[], NoReturn]

    def __truediv__(self, other: Any) -> Any:
        return self._refuse(other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._refuse(other)

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        return self._refuse(other)

    def __rpow__(self, other: Any, modulo: Any = None) -> Any:
        return self._refuse(other)

    def __float__(self) -> float:
        self.refuse()

    def __mul__(self, other: Any) -> Any:
        return self._computed(int.__mul__, other, self._times(other))

    def __rmul__(self, other: Any) -> Any:
        return self._computed(int.__rmul__, other, self._times(other, first=True))

    def __add__(self, other: Any) -> Any:
        return self._computed(int.__add__, other)

    def __radd__(self, other: Any) -> Any:
        return self._computed(int.__radd__, other)

    def __sub__(self, other: Any) -> Any:
        return self._computed(int.__sub__, other)

    def __rsub__(self, other: Any) -> Any:
        return self._computed(int.__rsub__, other)

    def __floordiv__(self, other: Any) -> Any:
        found = self._computed(int.__floordiv__, other)
        if isinstance(found, LocalSize) and not isinstance(other, LocalSize) and self._is_part(int(found)):
            return int(found)
        return found

    def __rfloordiv__(self, other: Any) -> Any:
        return self._computed(int.__rfloordiv__, other)

    def __mod__(self, other: Any) -> Any:
        return self._computed(int.__mod__, other)

    def __rmod__(self, other: Any) -> Any:
        return self._computed(int.__rmod__, other)

    def __neg__(self) -> Any:
        return local_size(-int(self), self.axes, None, self.refuse)

    def __reduce__(self) -> Any:
        return int, (int.__int__(self),)

    def _refuse(self, other: Any) -> Any:
        if isinstance(other, numbers.Number):
            self.refuse()
        return NotImplemented  # defer to the tensor's method

    def _computed(self, operation: Callable[..., Any], other: Any, dim: Dim | None = None) -> Any:
        if not isinstance(other, int):
            return self._refuse(other)
        axes = other.axes if isinstance(other, LocalSize) else ()
        return local_size(operation(self, other), tuple(dict.fromkeys((*self.axes, *axes))), dim, self.refuse)

    def _times(self, other: Any, *, first: bool = False) -> Dim | None:
        """Return the dim of a view that merges two dims."""
        if self.dim is None or not isinstance(other, int) or isinstance(other, bool) or other < 1:
            return None
        theirs = other.dim if isinstance(other, LocalSize) else (Factor(int(other)),)
        if theirs is None:
            return None
        return normal((*theirs, *self.dim) if first else (*self.dim, *theirs))

    def _is_part(self, number: int) -> bool:
        """Return True if this many elements always stay together, such as a head's."""
        grains = {factor.grain for factor in self.dim or () if factor.split is not None}
        return len(grains) == 1 and number > 0 and number in grains


def local_size(value: int, axes: tuple[str, ...], dim: Dim | None, refuse: Callable[[], NoReturn]) -> LocalSize | int:
    """Return a number of a rank's elements; a plain int without axes."""
    if not axes:
        return value
    found = LocalSize(value)
    found.axes, found.dim, found.refuse = axes, dim, refuse
    return found


def dim_of(size: int) -> Dim:
    """Return the dim of a new tensor with this size: split like the dim that this is the size of."""
    if not isinstance(size, LocalSize):
        return (Factor(int(size)),)
    if size.dim is not None and size_of(size.dim) == size and axes_of(size.dim):
        return size.dim
    return (Factor(int(size), Split(size.axes, "counted")),)


def dims_of(sizes: Sequence[int]) -> Dims:
    """Return the layout of a new tensor. If two of its dims are split over one axis, neither counts as a block."""
    dims = tuple(map(dim_of, sizes))
    axes = [axis for dim in dims for axis in axes_of(dim)]
    if len(axes) == len(set(axes)):
        return dims
    return tuple((Factor(int(n), Split(n.axes, "counted") if isinstance(n, LocalSize) else None),) for n in sizes)


def local_sizes_in(value: Any) -> Iterator[LocalSize]:
    """Yield all such numbers in an argument."""
    if isinstance(value, LocalSize):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from local_sizes_in(item)
    elif isinstance(value, slice):
        yield from local_sizes_in((value.start, value.stop, value.step))


def sizes_given(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int] | None:
    """Return the shape that a call of torch asks for, as written; None if it asks for none."""
    if "size" in kwargs or "shape" in kwargs:
        given: Any = kwargs.get("size", kwargs.get("shape"))
        return list(given) if isinstance(given, list | tuple) else None
    rest = args if name in _NEW else args[1:]
    if name in _FILLED:
        rest = [value for value in rest if isinstance(value, list | tuple)][:1]
    if rest and isinstance(rest[0], list | tuple):
        rest = rest[0]
    found = list(_while_int(rest))
    return found or None


def _while_int(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            return
        yield value


_NEW = frozenset(("zeros", "ones", "empty", "rand", "randn", "full", "randint"))
_FILLED = frozenset(("full", "new_full", "randint"))
