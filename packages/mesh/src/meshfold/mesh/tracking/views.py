"""Operations that rearrange elements: views, slices, ``cat``, padding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshfold.mesh.tracking.broadcast import broadcast_dims
from meshfold.mesh.tracking.call import Call, Rule, at_dim, require_whole, tensors_in
from meshfold.mesh.tracking.dims import (
    Dim,
    Dims,
    MixesError,
    axes_of,
    block,
    is_split,
    is_whole,
    normal,
    size_of,
    whole,
)
from meshfold.mesh.tracking.reshaping import cut, regroup


def _view(call: Call) -> list[Dims]:
    asked = call.given.get("size", call.given.get("shape"))
    inferred = call.inferred
    if inferred is None and asked is not None and -1 in asked:
        inferred = list(asked).index(-1)
    sizes = tuple(call.out.shape)
    axes = [getattr(size, "axes", ()) for size in call.asked or ()]
    if call.asked is not None and inferred is None and -1 in call.asked and len(axes) == len(sizes):
        inferred = list(call.asked).index(-1)
    return [regroup(call.first, sizes, inferred, axes if len(axes) == len(sizes) else None)]


def _expand(call: Call) -> list[Dims]:
    dims, sizes = call.first, tuple(call.out.shape)
    new = len(sizes) - len(dims)
    made = [whole(size) for size in sizes[:new]]
    for place, (dim, size) in enumerate(zip(dims, sizes[new:], strict=True)):
        if size_of(dim) != size:
            require_whole(dims, (place,), "repeats a piece along")
        made.append(dim if size_of(dim) == size else whole(size))
    return [tuple(made)]


def _permute(call: Call) -> list[Dims]:
    dims = call.first
    if call.name == "t":
        order = tuple(reversed(range(len(dims))))
    elif call.name == "transpose":
        a, b = (call.number(call.given[name], len(dims)) for name in ("dim0", "dim1"))
        swapped = list(range(len(dims)))
        if dims:
            swapped[a], swapped[b] = b, a
        order = tuple(swapped)
    else:
        order = call.numbers(call.given["dims"], len(dims))
    return [tuple(dims[place] for place in order)]


def _unsqueeze(call: Call) -> list[Dims]:
    dims = list(call.first)
    dims.insert(call.number(call.given["dim"], len(dims) + 1), whole(1))
    return [tuple(dims)]


def _squeeze(call: Call) -> list[Dims]:
    dims = call.first
    numbers = call.numbers(call.given.get("dim"), len(dims))
    for number in numbers:
        if size_of(dims[number]) == 1:
            require_whole(dims, (number,), "drops a piece of")
    return [tuple(d for place, d in enumerate(dims) if not (place in numbers and size_of(d) == 1))]


def _select(call: Call) -> list[Dims]:
    dims = list(call.first)
    number = call.number(call.given["dim"], len(dims))
    index = call.number(call.given["index"], size_of(dims[number]))
    return [_chosen(dims, number, index, index + 1, keep=False)]


def _chosen(dims: Sequence[Dim], number: int, start: int, stop: int, *, keep: bool) -> Dims:
    """Return a layout after selecting elements of one dim; without the dim if a single one is selected and not kept."""
    made = list(dims)
    try:
        made[number] = cut(dims[number], start, stop)
    except MixesError as error:
        raise at_dim(f"{error} in", number, dims[number]) from None
    if keep:
        return tuple(made)
    if dims[number][0].parts and number + 1 < len(made):  # one head per rank: queries, keys or values
        made[number + 1] = normal((*made[number], *made[number + 1]))
    elif not is_whole(made[number]):
        raise at_dim("selects elements by position in", number, dims[number])
    del made[number]
    return tuple(made)


def _slice(call: Call) -> list[Dims]:
    dims = list(call.first)
    number = call.number(call.given.get("dim", 0), len(dims))
    size = size_of(dims[number])
    start, stop, step = (call.given.get(name) for name in ("start", "end", "step"))
    first, last, by = slice(start, stop, step).indices(size)
    try:
        dims[number] = cut(dims[number], first, max(first, last), by)
    except MixesError as error:
        raise at_dim(f"{error} in", number, dims[number]) from None
    return [tuple(dims)]


def _split(call: Call) -> list[Dims]:
    dims = call.first
    number = call.number(call.given.get("dim", 0), len(dims))
    found, start = [], 0
    for out in tensors_in(call.out):
        stop = start + out.shape[number]
        found.append(_chosen(dims, number, start, stop, keep=True))
        start = stop
    return found


def _unbind(call: Call) -> list[Dims]:
    dims = call.first
    number = call.number(call.given.get("dim", 0), len(dims))
    size = size_of(dims[number])
    return [_chosen(dims, number, place, place + 1, keep=False) for place in range(size)]


def _cat(call: Call) -> list[Dims]:
    given = [x for x in call.given["tensors"] if x.dim() != 1 or x.numel()]
    rank = call.out.dim()
    number = call.number(call.given.get("dim", 0), rank)
    operands: list[tuple[Tensor, Dims]] = []
    joined: list[Dim] = []
    for x in given:
        dims = list(call.dims_of(x))
        if call.name == "stack":
            dims.insert(number, whole(1))
            x = x.unsqueeze(number)
        joined.append(dims[number])
        dims[number] = whole(1)
        operands.append((x, tuple(dims)))
    piece = next((dim for dim in joined if not is_whole(dim)), None)
    features = call.name == "cat" and number == rank - 1
    blocks = _as_parts(joined) if features and piece is not None and len(given) > 1 else None
    if piece is not None and len(given) > 1 and blocks is None:
        raise at_dim("concatenates shards along", number, piece)
    made = list(broadcast_dims(call, operands, tuple(1 if i == number else n for i, n in enumerate(call.out.shape))))
    made[number] = joined[0] if len(given) == 1 else blocks or whole(call.out.shape[number])
    return [tuple(made)]


def _as_parts(joined: list[Dim]) -> Dim | None:
    """Return the dim of concatenated features, each shard a part of its own, as a fused layer writes them; None for others."""
    axes = axes_of(joined[0])
    for first, *inner in joined:
        split = first.split
        if split is None or split.kind != "block" or split.axes != axes or first.parts:
            return None
        if any(factor.split is not None for factor in inner):
            return None
    return block(sum(map(size_of, joined)), axes, tuple(map(size_of, joined)), grain=-1)


def _pad(call: Call) -> list[Dims]:
    dims = list(call.first)
    amounts = call.given["pad"]
    for back in range(len(amounts) // 2):
        if amounts[2 * back] or amounts[2 * back + 1]:
            number = len(dims) - 1 - back
            require_whole(tuple(dims), (number,), "fills up a piece of")
            dims[number] = whole(call.out.shape[number])
    return [tuple(dims)]


def _repeat(call: Call) -> list[Dims]:
    dims, repeats = call.first, call.given["repeats"]
    new = len(repeats) - len(dims)
    made = [whole(n) for n in repeats[:new]]
    for place, (dim, n) in enumerate(zip(dims, repeats[new:], strict=True)):
        if n != 1:
            require_whole(dims, (place,), "repeats a piece along")
        made.append(dim if n == 1 else whole(size_of(dim) * n))
    return [tuple(made)]


def _copy(call: Call) -> list[Dims]:
    """``copy_``: copy into the first argument, which may be uninitialised."""
    into, source = call.given["self"], call.given["src"]
    known = call.dims_of(into)
    operands = [(source, call.dims_of(source))]
    if any(map(is_split, known)):
        operands.append((into, known))
    return [broadcast_dims(call, operands, tuple(into.shape))]


def _diagonal(call: Call) -> list[Dims]:
    dims = list(call.first)
    pair = sorted({call.number(call.given[name], len(dims)) for name in ("dim1", "dim2")}, reverse=True)
    require_whole(call.first, tuple(pair), "takes the diagonal of")
    for number in pair:
        del dims[number]
    return [(*dims, whole(call.out.shape[-1]))]


def _unfold(call: Call) -> list[Dims]:
    dims = list(call.first)
    number = call.number(call.given["dimension"], len(dims))
    require_whole(call.first, (number,), "takes windows along")
    dims[number] = whole(call.out.shape[number])
    return [(*dims, whole(call.out.shape[-1]))]


def _as_strided(call: Call) -> list[Dims]:
    x = call.tensors[0]
    same = tuple(call.out.shape) == tuple(x.shape) and call.out.stride() == x.stride()
    if same and call.out.storage_offset() == x.storage_offset():
        return [call.dims_of(x)]
    raise MixesError("reinterprets the memory of a shard")


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"), _view),
    **dict.fromkeys(("expand", "broadcast_to"), _expand),
    **dict.fromkeys(("permute", "transpose", "t"), _permute),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "select": _select,
    **dict.fromkeys(("slice", "narrow"), _slice),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    "unbind": _unbind,
    **dict.fromkeys(("cat", "stack"), _cat),
    "constant_pad_nd": _pad,
    "repeat": _repeat,
    "copy": _copy,
    "diagonal": _diagonal,
    "unfold": _unfold,
    "as_strided": _as_strided,
}
