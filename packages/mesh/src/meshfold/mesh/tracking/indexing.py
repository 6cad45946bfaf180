"""Operations by index: an index counts along a dim that is whole, or it is of a rank's own tokens."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor

from meshfold.mesh.tracking.broadcast import broadcast_dims
from meshfold.mesh.tracking.call import Call, Rule, at_dim, require_whole
from meshfold.mesh.tracking.dims import (
    Dim,
    Dims,
    Factor,
    MixesError,
    Split,
    axes_of,
    check_axes_once,
    chosen_by,
    distinct_splits,
    is_split,
    is_whole,
    size_of,
    unknown,
    whole,
)
from meshfold.mesh.tracking.reshaping import cut

_TAKES = "selects elements by position in"
_BOOLS = (torch.bool, torch.uint8)
_choices = itertools.count(1)


def _chosen_of(dims: Dims) -> Split | None:
    """Return the split of an index that ``nonzero`` made from a rank's own elements."""
    for dim in dims:
        for factor in dim:
            if factor.split is not None and factor.split.kind == "places":
                return factor.split
    return None


def _has_places_of(index: Dims, dim: Dim) -> bool:
    """Return True if ``nonzero`` made an index from this rank's own elements of a dim."""
    own = _chosen_of(index)
    return own is not None and set(axes_of(dim)) <= set(own.axes)


def _chosen(dims: Dims, kind: Literal["places", "chosen"], count: int) -> Dim:
    """Return a dim of ``count`` elements chosen from a tensor, distinct from the dims of other choices."""
    axes = tuple(axis for dim in dims for axis in axes_of(dim))
    return (Factor(count, Split(axes, kind, next(_choices))),)


def _nonzero(call: Call) -> list[Dims]:
    """``nonzero``: ``n dims``, indices of this rank's own elements."""
    rows, columns = call.out.shape
    return [(_chosen(call.first, "places", rows), whole(columns))]


def _masked(call: Call, x: Tensor, mask: Tensor) -> list[Dims]:
    dims = broadcast_dims(call, [(x, call.dims_of(x)), (mask, call.dims_of(mask))], tuple(x.shape))
    return [(_chosen(dims, "chosen", call.out.shape[0]),)]


def _masked_select(call: Call) -> list[Dims]:
    return _masked(call, call.given["self"], call.given["mask"])


def _index(call: Call) -> list[Dims]:
    x, indices = call.given["self"], call.given["indices"]
    dims = call.dims_of(x)
    if any(i is not None and i.dtype in _BOOLS for i in indices):
        mask, *others = indices
        if others or mask.dim() != x.dim():
            raise MixesError("selects elements of a shard by a mask of some dims")
        return _masked(call, x, mask)
    at = [place for place, index in enumerate(indices) if index is not None]
    if len(at) == 1 and any(factor.parts for factor in dims[at[0]]):
        return [_outputs(dims, at[0], indices[at[0]])]
    looked = [(indices[place], call.dims_of(indices[place])) for place in at]
    for (_, found), place in zip(looked, at, strict=True):
        if not is_whole(dims[place]) and not _has_places_of(found, dims[place]):
            raise at_dim(_TAKES, place, dims[place])
    rank = max(i.dim() for i, _ in looked)
    apart = at != list(range(at[0], at[0] + len(at)))
    first = 0 if apart else at[0]
    shape = tuple(call.out.shape[first : first + rank])
    joined = broadcast_dims(call, looked, shape)
    joined = chosen_by(joined)
    kept = [dim for place, dim in enumerate(dims) if place not in at]
    return [check_axes_once((*kept[:first], *joined, *kept[first:]))]


def by_every_row(call: Call) -> Dims | None:
    """Return the layout of an index that takes all of a rank's rows in their order, as a mask of each row does; None for others.

    Only for code that counts the rows that it has: where it counts a fixed number of them, that is another part of the batch.
    """
    if call.name != "index":
        return None
    dims, indices = call.dims_of(call.given["self"]), call.given["indices"]
    if len(indices) != len(dims) or any(index is None or index.dtype in _BOOLS for index in indices):
        return None
    rows = indices[0]
    wide = [place for place, n in enumerate(rows.shape, call.out.dim() - rows.dim()) if n > 1] or [0]
    if any(is_split(dim) for dim in dims[1:]) or len(wide) > 1 or rows.flatten().tolist() != [*range(size_of(dims[0]))]:
        return None
    return tuple(dims[0] if place == wide[0] else whole(n) for place, n in enumerate(call.out.shape))


def _outputs(dims: Dims, place: int, index: Tensor) -> Dims:
    """Return the layout of outputs of a fused layer that an index counts one after the other, as ``[-2]`` of Falcon's keys.

    A meta index says how many alone: it is taken to count the last ones.
    """
    size = size_of(dims[place])
    given = [] if index.dim() != 1 else range(-len(index), 0) if index.is_meta else index.tolist()
    counted = [i % size for i in given]
    if not counted or counted != list(range(counted[0], counted[0] + len(counted))):
        raise at_dim(_TAKES, place, dims[place])
    try:
        taken = cut(dims[place], counted[0], counted[0] + len(counted))
    except MixesError:
        raise at_dim(_TAKES, place, dims[place]) from None
    return (*dims[:place], taken, *dims[place + 1 :])


def _index_put(call: Call) -> list[Dims]:
    """``index_put``: write to indices of the first argument."""
    x, indices = call.given["self"], call.given["indices"]
    dims = call.dims_of(x)
    values = call.given["values"]
    for place, index in enumerate(indices):
        if index is None or is_whole(dims[place]):
            continue
        if index.dtype in _BOOLS and index.dim() == 1 and call.dims_of(index)[0] == dims[place]:
            continue
        if not _has_places_of(call.dims_of(index), dims[place]):
            if index.dtype in _BOOLS and index.dim() == x.dim() and call.dims_of(index) == dims:
                return [dims]
            raise at_dim("writes to positions in a shard of", place, dims[place])
    return [_written(call, dims, values)]


def _written(call: Call, dims: Dims, values: Tensor) -> Dims:
    """Return the layout of a written tensor: it must be split where the values are."""
    axes = {axis for dim in call.dims_of(values) for axis in axes_of(dim)}
    have = {axis for dim in dims for axis in axes_of(dim)}
    if axes - have and any(is_split(d) for d in call.dims_of(values)):
        raise MixesError("writes a shard into a tensor that is the same on every rank")
    return dims


def _along(call: Call) -> list[Dims]:
    """``gather``, ``scatter``: one index per element, along a whole dim."""
    x = call.given["self"]
    dims = list(call.dims_of(x))
    number = call.number(call.given["dim"], len(dims))
    require_whole(tuple(dims), (number,), _TAKES)
    index = call.given["index"]
    found = list(call.dims_of(index))
    rest: list[Dim] = []
    for place, dim in enumerate(found):
        mine = dims[place]
        if place == number:
            rest.append(dim)
        elif is_split(mine) or is_split(dim):
            if mine != dim and not (is_split(dim) and not is_split(mine) and call.name.startswith("scatter")):
                raise at_dim("combines a shard with a tensor that is not split in the same way, along", place, mine)
            rest.append(dim)
        else:
            known = is_whole(mine) and is_whole(dim)
            rest.append(whole(index.shape[place]) if known else unknown(index.shape[place]))
    if call.name.startswith("scatter"):
        made = [dims[number] if place == number else dim for place, dim in enumerate(rest)]
        return [tuple(made)]
    return [check_axes_once(tuple(rest))]


def _index_select(call: Call) -> list[Dims]:
    dims = list(call.dims("self"))
    number = call.number(call.given["dim"], len(dims))
    index = call.dims("index")
    if not is_whole(dims[number]) and not _has_places_of(index, dims[number]):
        raise at_dim(_TAKES, number, dims[number])
    dims[number] = chosen_by(index)[0] if index else whole(1)
    return [check_axes_once(tuple(dims))]


def _index_add(call: Call) -> list[Dims]:
    """``index_add``, ``index_copy``: the index selects positions of a dim."""
    dims = list(call.dims("self"))
    number = call.number(call.given["dim"], len(dims))
    index = call.dims("index")
    source = call.dims("source")
    if not is_whole(dims[number]):
        if not _has_places_of(index, dims[number]):
            raise at_dim("writes to positions in a shard of", number, dims[number])
    elif _chosen_of(index) is not None:  # writes this rank's number of rows
        raise MixesError("writes a shard into a tensor that is the same on every rank")
    elif index and not is_whole(index[0]):
        raise at_dim("writes to positions that each rank counts from 0, along", number, index[0])
    for place, dim in enumerate(source):
        if place != number and is_split(dim) and not is_split(dims[place]):
            dims[place] = dim
    return [tuple(dims)]


def _loss(call: Call) -> list[Dims]:
    """Return the dims of a loss of split tokens, whose labels have the same split: the caller weights each rank's mean."""
    dims, target = call.dims("self"), call.dims("target")
    classes = 1 if len(dims) > 1 else 0
    require_whole(dims, (classes,), "looks up classes in a shard of")
    rows = tuple(dim for place, dim in enumerate(dims) if place != classes)
    if int(call.given.get("reduction", 1)):
        loss_of_rows(rows, target, sums=True)
        return [() for _ in call.out]
    return [loss_of_rows(rows, target, sums=False), ()]


def loss_of_rows(rows: Dims, target: Dims, *, sums: bool) -> Dims:
    """Return the dims of a loss of rows and targets; ``sums``: over the rows.

    Raises:
        MixesError: if they are not split in the same way, or a sum is over a dim that is split other than by tokens.
    """
    alike = len(rows) == len(target) and all(len(distinct_splits(pair)) == 1 for pair in zip(rows, target, strict=True))
    if not alike:
        raise MixesError("combines a shard with labels that are not split in the same way")
    if not sums:
        return target
    for place, dim in enumerate(rows):
        if any(f.split is not None and f.split.kind != "tokens" for f in dim):
            raise at_dim("reduces over", place, dim)
    return ()


RULES: dict[str, Rule] = {
    "nonzero": _nonzero,
    "index": _index,
    **dict.fromkeys(("index_put", "_index_put_impl"), _index_put),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce", "take_along_dim"), _along),
    "index_select": _index_select,
    **dict.fromkeys(("index_add", "index_copy", "index_reduce"), _index_add),
    "masked_select": _masked_select,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _loss),
}
