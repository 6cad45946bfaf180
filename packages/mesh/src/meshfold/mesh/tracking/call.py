"""One call of a torch operation: its arguments by name, and the layouts of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from meshfold.mesh.tracking.dims import Dim, Dims, MixesError, axes_of, is_split, is_whole


@dataclass(frozen=True, kw_only=True)
class Call:
    """A completed call.

    Attributes:
        function: the operation, ``torch.ops.aten...``.
        name: without namespace and overload, ``"add"``; of ``add_`` too.
        given: arguments by name, defaults included.
        out: its result.
        dims_of: the layout of a tensor before the call.
        is_alike: whether a tensor is the same all along a dim.
        inferred: which size of an ``unflatten`` the user has left open.
        asked: the sizes of a view as the model's code writes them: sizes of split dims know what they count.
    """

    function: Any
    name: str
    given: Mapping[str, Any]
    out: Any
    dims_of: Callable[[Tensor], Dims]
    is_alike: Callable[[Tensor, int], bool]
    inferred: int | None = None
    asked: Sequence[int] | None = None

    @property
    def first(self) -> Dims:
        """The layout of the first tensor among the arguments."""
        return self.dims_of(self.tensors[0])

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [leaf for value in self.given.values() for leaf in tensors_in(value)]

    def dims(self, name: str) -> Dims:
        """Return the layout of an argument."""
        return self.dims_of(self.given[name])

    def number(self, value: Any, rank: int) -> int:
        """Return a dim's number, from 0 up."""
        return int(value) % max(rank, 1)

    def numbers(self, value: Any, rank: int) -> tuple[int, ...]:
        """Return numbers of dims; all for None or an empty list."""
        if value is None or value == []:
            return tuple(range(rank))
        return tuple(self.number(v, rank) for v in (value if isinstance(value, list | tuple) else [value]))


Rule = Callable[[Call], list[Dims]]
"""From a call to the layouts of its results"""


def bind_arguments(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of an operation's schema."""
    arguments = _arguments(function)
    found: dict[str, Any] = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    for argument in arguments[len(args) :]:
        if argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default:
            found[argument.name] = argument.default
    return found


class _Argument(NamedTuple):
    """An argument of an operation's schema, whose own attributes are slow to read."""

    name: str
    has_default: bool
    default: Any
    is_written: bool


@cache
def _arguments(function: Any) -> tuple[_Argument, ...]:
    return tuple(
        _Argument(
            a.name,
            a.has_default_value(),
            a.default_value,
            a.alias_info is not None and a.alias_info.is_write,
        )
        for a in function._schema.arguments
    )


def tensors_in(value: Any) -> Sequence[Tensor]:
    """Return the tensors in an argument or a result."""
    if isinstance(value, Tensor):
        return (value,)
    if not isinstance(value, list | tuple):
        return ()
    return [x for item in value for x in tensors_in(item)]


def as_list(out: Any) -> list[Any]:
    """Return the results of an operation as a list."""
    return list(out) if isinstance(out, list | tuple) else [out]


def written_tensors(function: Any, given: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    return [
        value
        for argument in _arguments(function)
        if argument.is_written and isinstance(value := given.get(argument.name), Tensor)
    ]


def require_whole(dims: Dims, numbers: tuple[int, ...], what: str) -> None:
    """Raise a MixesError if one of these dims is split, or may be."""
    for number in numbers:
        if number < len(dims) and not is_whole(dims[number]):
            raise at_dim(what, number, dims[number])


def require_whole_attention(queries: Dims, keys: Dims, values: Dims) -> None:
    """Raise a MixesError if the tokens or the elements of a head are split, or may be: ``.. s d``."""
    for what, dims in (("queries", queries), ("keys", keys), ("values", values)):
        require_whole(dims, (len(dims) - 2, len(dims) - 1), f"attends with pieces of {what}:")


def at_dim(what: str, number: int, dim: Dim) -> MixesError:
    """Return the error of an operation that mixes a dim."""
    how = (
        f"which is split over {', '.join(axes_of(dim))}" if is_split(dim) else "of which a rank may have all or a part"
    )
    return MixesError(f"{what} dim {number}, {how}")
