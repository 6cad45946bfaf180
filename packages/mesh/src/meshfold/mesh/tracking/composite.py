"""Calls that torch runs in several steps, tracked as one: their steps move dims of one element in ways that cannot be tracked.

In an ``einsum`` over a dim with one element on a rank, torch does not even sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.mesh.tracking.call import at_dim, require_whole_attention
from meshfold.mesh.tracking.dims import (
    Dim,
    Dims,
    Factor,
    MixesError,
    axes_of,
    check_axes_once,
    distinct_splits,
    is_open,
    is_split,
    is_whole,
    normal,
    size_of,
    whole,
)
from meshfold.mesh.tracking.reshaping import regroup

Layout = Callable[[Tensor], Dims]
Followed = tuple[list[Tensor], Callable[[], Dims]]


def followed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dims_of: Layout) -> Followed | None:
    """Return the operands of such a call, and a function that returns the layout of its result; None for other calls."""
    rule = _within if getattr(func, "is_attention", False) else _RULES.get(func)
    found: Followed | None = None if rule is None else rule(dims_of, *args, **kwargs)
    if found is None or all(is_whole(dim) for x in found[0] for dim in dims_of(x)):
        return None
    return found


def _summed(what: str, several: Sequence[tuple[Dim, int]]) -> None:
    """Check that summed dims are whole; an unknown dim next to a whole one is whole too."""
    known = any(is_whole(dim) and size_of(dim) > 1 for dim, _ in several)
    for dim, number in several:
        if is_split(dim) or (is_open(dim) and not known):
            raise at_dim(what, number, dim)


def _aligned(several: Sequence[tuple[Dim, int]]) -> Dim:
    """Return the layout of a dim that all operands have or broadcast along."""
    split = distinct_splits(dim for dim, _ in several if is_split(dim))
    size = max(size_of(dim) for dim, _ in several)
    for dim, number in several:
        other = not is_split(dim) and not is_open(dim) and size_of(dim) > 1
        if split and (len(split) > 1 or other or size_of(split[0]) != size):
            raise at_dim(
                "combines a shard with a tensor that is not split in the same way, along",
                number,
                split[0] if not is_split(dim) else dim,
            )
    if split:
        return split[0]
    wide = [dim for dim, _ in several if size_of(dim) == size]
    return next((dim for dim in wide if is_open(dim)), wide[0])


def _product(a: Dims, b: Dims, summed: int | None = None) -> Dims:
    """Multiply ``.. i k`` by ``.. k j``; ``summed``: the index of ``k`` in the tensor that the second is a view of."""
    _summed("sums products over", ((a[-1], len(a) - 1), (b[-2], len(b) - 2 if summed is None else summed)))
    batch = max(len(a), len(b)) - 2
    lead = []
    for back in range(batch + 2, 2, -1):
        here = [(dims[-back], len(dims) - back) for dims in (a, b) if len(dims) >= back]
        lead.append(_aligned(here))
    return check_axes_once((*lead, a[-2], b[-1]))


def _matmul(dims_of: Layout, input: Any, other: Any, **rest: Any) -> Any:
    if not isinstance(input, Tensor) or not isinstance(other, Tensor) or not input.dim() or not other.dim():
        return None

    def found() -> Dims:
        a, b = dims_of(input), dims_of(other)
        made = _product(a if len(a) > 1 else (whole(1), *a), b if len(b) > 1 else (*b, whole(1)))
        made = made if len(b) > 1 else made[:-1]
        return made if len(a) > 1 else (*made[: len(made) - 1 - (len(b) > 1)], *made[len(made) - (len(b) > 1) :])

    return [input, other], found


def _backwards(dims_of: Layout, other: Any, input: Any, **rest: Any) -> Any:
    return _matmul(dims_of, input, other)


def _linear(dims_of: Layout, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not input.dim() or weight.dim() != 2:
        return None

    def found() -> Dims:
        a, w = dims_of(input), dims_of(weight)
        made = _product(a if len(a) > 1 else (whole(1), *a), (w[1], w[0]), 1)
        last = made[-1] if bias is None else _aligned([(made[-1], len(made) - 1), (dims_of(bias)[-1], 0)])
        return (*made[1 if len(a) == 1 else 0 : -1], last)

    return [input, weight, *([] if bias is None else [bias])], found


def _einsum(dims_of: Layout, *given: Any) -> Any:
    equation, *operands = given
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or not all(isinstance(x, Tensor) for x in operands):
        return None
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        return None
    letters = [_letters(term, x.dim()) for term, x in zip(terms, operands, strict=True)]
    if any(len(names) != x.dim() for names, x in zip(letters, operands, strict=True)):
        return None
    every = [name for names in letters for name in names]
    spread = sorted({name for name in every if name.startswith(".")}, key=lambda name: -int(name[1:]))
    if arrow:
        made = [n for part in result.replace("...", " ").partition(" ") for n in (spread if part == " " else part)]
    else:
        made = [*spread, *sorted({n for n in every if every.count(n) == 1 and not n.startswith(".")})]

    def found() -> Dims:
        where: dict[str, list[tuple[Dim, int]]] = {}
        for names, x in zip(letters, operands, strict=True):
            dims = dims_of(x)
            for number, name in enumerate(names):
                if names.count(name) > 1 and not is_whole(dims[number]):
                    raise at_dim("takes the diagonal of", number, dims[number])
                where.setdefault(name, []).append((dims[number], number))
        for name, several in where.items():
            if name not in made:
                _summed("sums products over", several)
        return check_axes_once(tuple(_aligned(where[name]) for name in made))

    return list(operands), found


def _letters(term: str, rank: int) -> list[str]:
    """Return the names of an operand's dims; dims of an ellipsis are counted from the end."""
    before, dots, behind = term.partition("...")
    count = rank - len(before) - len(behind) if dots else 0
    return [*before, *(f".{back}" for back in range(count, 0, -1)), *behind]


def _flatten(dims_of: Layout, input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    rank = input.dim()
    if not rank or not isinstance(start_dim, int) or not isinstance(end_dim, int):
        return None

    def found() -> Dims:
        dims = dims_of(input)
        first, last = start_dim % rank, end_dim % rank
        if first >= last:
            return dims
        joined = normal(factor for dim in dims[first : last + 1] for factor in dim)
        return (*dims[:first], joined, *dims[last + 1 :])

    return [input], found


def _repeat(dims_of: Layout, input: Tensor, repeats: Any, dim: int | None = None, *, output_size: Any = None) -> Any:
    if dim is None or not isinstance(repeats, int) or repeats < 1:
        return None

    def found() -> Dims:
        dims, number = list(dims_of(input)), dim % input.dim()
        if is_open(dims[number]):
            raise at_dim("repeats a shard along", number, dims[number])
        dims[number] = normal((*dims[number], Factor(int(repeats))))
        return tuple(dims)

    return [input], found


def _unflatten(dims_of: Layout, input: Tensor, dim: Any, sizes: Any) -> Any:
    if not isinstance(dim, int) or not input.dim():
        return None

    def found() -> Dims:
        dims, number = dims_of(input), dim % input.dim()
        asked = [int(size) for size in sizes]
        inferred = asked.index(-1) if -1 in asked else None
        if inferred is not None:
            rest = 1
            for size in asked:
                rest *= size if size != -1 else 1
            asked[inferred] = size_of(dims[number]) // max(rest, 1)
        return (*dims[:number], *regroup((dims[number],), asked, inferred), *dims[number + 1 :])

    return [input], found


def _attention(
    dims_of: Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p or any(x.dim() < 3 for x in (query, key, value)):
        return None

    def found() -> Dims:
        q, k, v = dims_of(query), dims_of(key), dims_of(value)
        require_whole_attention(q, k, v)
        masked = () if attn_mask is None else dims_of(attn_mask)
        for number in range(max(0, len(masked) - 2), len(masked)):
            if is_split(masked[number]):
                raise at_dim("attends with a mask that is split along", number, masked[number])
        lead = []
        for back in range(len(q), 2, -1):
            here = [(q[-back], len(q) - back)]
            for dims in (k, v):
                theirs = dims[-back]
                fewer = enable_gqa or size_of(theirs) == 1  # grouped queries, or one key head for all (Falcon)
                if fewer and axes_of(theirs) == axes_of(q[-back]) and size_of(q[-back]) % size_of(theirs) == 0:
                    continue
                here.append((theirs, len(q) - back))
            if len(masked) >= back and is_split(masked[-back]):
                here.append((masked[-back], len(masked) - back))
            lead.append(_aligned(here))
        return check_axes_once((*lead, q[-2], v[-1]))

    return [query, key, value, *([] if attn_mask is None else [attn_mask])], found


def _within(dims_of: Layout, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Any:
    """Attention of another library's function, marked by ``is_attention = True``: ``b heads s d``, key heads may be fewer."""
    return _attention(dims_of, query, key, value, enable_gqa=True)


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    Tensor.__rmatmul__: _backwards,
    F.linear: _linear,
    **dict.fromkeys((torch.einsum, torch.functional.einsum), _einsum),
    **dict.fromkeys((torch.flatten, Tensor.flatten), _flatten),
    **dict.fromkeys((torch.repeat_interleave, Tensor.repeat_interleave), _repeat),
    F.scaled_dot_product_attention: _attention,
}
UNFLATTEN: dict[Any, Callable[..., Followed | None]] = dict.fromkeys((torch.unflatten, Tensor.unflatten), _unflatten)


def check_slices(dims: Dims, index: Any, is_local: Callable[[Any], bool]) -> None:
    """Refuse ``x[:, :4]`` where a rank has four elements of more: torch sees that it takes all.

    Raises:
        MixesError: for such a slice of a split dim.
    """
    items = index if isinstance(index, tuple) else (index,)
    used = sum(_takes(item) for item in items)
    number = 0
    for item in items:
        if item is Ellipsis:
            number += len(dims) - used
            continue
        if isinstance(item, slice) and number < len(dims) and is_split(dims[number]):
            size = size_of(dims[number])
            named = [n for n in (item.start, item.stop) if n is not None and not is_local(n)]
            if item.start == 0 and item.start in named:
                named.remove(item.start)
            if named and item.indices(size) == (0, size, 1):
                raise at_dim("selects elements by position in", number, dims[number])
        number += _takes(item)


def _takes(item: Any) -> int:
    """Return the number of dims that an index consumes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype is torch.bool else 1


def check_length(dims: Dims, number: int, start: int, length: int) -> None:
    """Refuse a ``narrow``, or a ``split`` into one part, as :func:`check_slices` does."""
    if is_split(dims[number]) and start == 0 and length >= size_of(dims[number]):
        raise at_dim("selects elements by position in", number, dims[number])


__all__ = ["UNFLATTEN", "MixesError", "check_length", "check_slices", "followed"]
