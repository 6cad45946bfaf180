"""Tracking of the batch dim of every tensor in a forward: a random number for an element depends on its row.

A batch may be a part of a larger one, such as a data coordinate's batch or a micro-batch. Unlike elements of a dim that the mesh
splits, rows may be mixed, as a norm's statistics do, so nothing is refused here. For results that mix rows, the positions of rows
are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh.tracking import indexing
from meshfold.mesh.tracking.call import Call, Rule, as_list, bind_arguments, tensors_in, written_tensors
from meshfold.mesh.tracking.dims import (
    ROWS,
    UNKNOWN,
    Dim,
    Dims,
    Factor,
    MixesError,
    Split,
    is_split,
    is_unknown,
    shape_of,
    size_of,
    unknown,
    whole,
    whole_dims,
)
from meshfold.mesh.tracking.records import Records

ROWS_INNERMOST = Split(("rows",), "tokens")
"""Split of a dim of tokens that all rows follow; a rank may have a block of these rows."""
TOKENS_EXCHANGED = Split(("tokens",), "unknown")
"""Split of a tensor whose rows are unknown, since ranks have exchanged tokens along a dim other than the batch's."""

_MIXING = frozenset(
    (
        *("sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "logsumexp"),
        *("var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm"),
    )
)
_CHOOSING = frozenset((*indexing.RULES, "slice", "select", "narrow", "split", "split_with_sizes", "unbind"))
"""Operations that make other rows of a batch's."""
_SPREADING = ("expand", "repeat")


@dataclass(frozen=True, kw_only=True)
class _Before:
    """Call that is about to run, with the rows of its operands."""

    function: Any
    name: str
    given: Mapping[str, Any]
    dims: Mapping[int, Dims]
    first: Tensor
    apart: bool


class Rows:
    """Tracks the rows of a batch through a forward.

    Attributes:
        follows: a batch was given; without one nothing is done.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        """Args:
        rules: of operations by name, for split dims: rows move as these do.
        """
        self.follows = False
        self._records, self._counts = Records(), set[int]()
        alike = ("where", "_to_copy", "lerp", "addcmul", "addcdiv")
        spread = {name: self._spread(rules[name]) for name in _SPREADING}
        self._rules = {**rules, **dict.fromkeys(alike, _pointwise), **spread}

    def begin(self, tensors: Iterable[Tensor], rows: int) -> None:
        """Mark the tensors whose first dim has this many elements: it is the batch."""
        self.follows = True
        for tensor in tensors:
            if tensor.dim() and tensor.shape[0] == rows:
                self.put(tensor, ((Factor(rows, ROWS),), *whole_dims(tensor.shape[1:])))

    def dims(self, tensor: Tensor) -> Dims:
        """Return the layout of a tensor's rows."""
        return self._records.dims(tensor)

    def put(self, tensor: Tensor, dims: Dims) -> None:
        """Set where a tensor has its rows."""
        if self.follows:
            self._records.put(tensor, dims)
            self._counts |= {dim[0].size for dim in dims if dim[0].split == ROWS}

    def lose(self, tensor: Tensor, why: Split = UNKNOWN) -> None:
        """Mark a tensor whose rows are unknown."""
        self.put(tensor, tuple((Factor(n, why),) for n in tensor.shape))

    def keep(self, made: Tensor, of: Tensor) -> None:
        """Record that a tensor has its rows in the same dim as the tensor that it was made of; there may be fewer."""
        if self.follows:
            self.put(made, _placed(self.dims(of), tuple(made.shape), fewer=True))

    def flattened(self, made: Tensor, of: Tensor) -> None:
        """Do as :meth:`keep` where all dims but the last were flattened into one that may be split."""
        dims, size = self.dims(of), made.shape[0]
        if not self.follows or made.dim() == of.dim():
            return self.keep(made, of)
        places = [place for place, dim in enumerate(dims) if is_split(dim)]
        split = {0: ROWS, len(dims) - 2: ROWS_INNERMOST}.get(places[0]) if len(places) == 1 else None
        if split is None and (places or any(map(is_unknown, dims))):
            return self.lose(made)
        self.put(made, ((Factor(size, split),), *whole_dims(made.shape[1:])))

    def unflattened(self, made: Tensor, of: Tensor) -> None:
        """Undo :meth:`flattened`."""
        dims, shape = self.dims(of), tuple(made.shape)
        if not self.follows or made.dim() == of.dim():
            return self.keep(made, of)
        if is_unknown(dims[0]):
            return self.lose(made)
        if is_split(dims[0]):
            place = 0 if dims[0][0].split == ROWS else len(shape) - 2
            self.put(made, tuple((Factor(n, ROWS),) if i == place else whole(n) for i, n in enumerate(shape)))

    # -- operations -----------------------------------------------------------------------------------------------------

    def _spread(self, rule: Rule) -> Rule:
        """Return a rule that also marks a new dim with the batch's number of rows as the batch dim."""

        def found(call: Call) -> list[Dims]:
            dims = rule(call)[0]
            shape = tuple(call.tensors[0].shape)
            new = len(dims) - len(shape)
            if not any(map(is_split, dims)):
                for place, size in enumerate(shape_of(dims)):
                    if size in self._counts and (place < new or shape[place - new] == 1 != size):
                        return [(*dims[:place], (Factor(size, ROWS),), *dims[place + 1 :])]
            return [dims]

        return found

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], apart: bool) -> _Before | None:
        """Record a call before it runs; None if none of its operands comes from a batch.

        Args:
            apart: ranks may exchange in it, so its results are recorded by other code.
        """
        if not self.follows:
            return None
        name, given = function._schema.name.rpartition("::")[2], bind_arguments(function, args, kwargs)
        operands = [x for value in given.values() for x in tensors_in(value)]
        dims = {id(x): self.dims(x) for x in operands}
        known = (x for x in operands if any(is_split(dim) or is_unknown(dim) for dim in dims[id(x)]))
        first = next(known, operands[0] if name in _SPREADING else None)
        if first is None:
            return None
        return _Before(function=function, name=name, given=given, dims=dims, first=first, apart=apart)

    def after(self, call: _Before, out: Any) -> None:
        """Mark the results of a recorded call."""
        into = written_tensors(call.function, call.given)
        results = into or [x for x in as_list(out) if isinstance(x, Tensor)]
        if call.apart:
            exchanged = call.given if call.function.namespace == "c10d" else {}
            received = [x for value in exchanged.values() for x in tensors_in(value)]
            for x in (*results, *received):
                if not any(map(is_split, self.dims(x))):  # known from a view of the same memory
                    self.lose(x)
            return
        name = call.name
        if into and name.endswith("_") and not name.endswith("__"):
            name = name[:-1]
        for x, dims in zip(results, self._found(call, name, into[0] if into else out, results), strict=False):
            if shape_of(dims) == tuple(x.shape):
                (self._records.put_into_base if into else self._records.put)(x, dims)

    def _found(self, before: _Before, name: str, out: Any, results: list[Tensor]) -> list[Dims]:
        call = Call(
            function=before.function,
            name=name,
            given=before.given,
            out=out,
            dims_of=lambda x: before.dims.get(id(x)) or self.dims(x),
            is_alike=lambda x, place: True,
        )
        rule = _pointwise if torch.Tag.pointwise in before.function.tags else self._rules.get(name)
        mine, shape = before.dims[id(before.first)], before.first.shape
        if rule is None:
            return [_placed(mine, tuple(x.shape), fewer=False) for x in results]
        try:
            return rule(call)
        except MixesError:
            if joined := _joined(call):
                return [joined]
            if name in _MIXING and _why_unknown(mine) is None:
                return [whole_dims(x.shape) for x in results]
            kept = name not in _CHOOSING
            return [mine if kept and x.shape == shape else tuple(map(unknown, x.shape)) for x in results]


def _placed(dims: Dims, shape: tuple[int, ...], *, fewer: bool) -> Dims:
    """Return the rows in the same dim of another shape; ``fewer``: the dim may have shrunk to this rank's rows."""
    if why := _why_unknown(dims):
        return tuple((Factor(n, why),) for n in shape)
    made = [whole(n) for n in shape]
    for place, dim in enumerate(dims):
        if is_split(dim):
            other = place >= len(shape) or shape[place] != size_of(dim)
            if other and (place >= len(shape) or len(shape) < len(dims) or not fewer):
                return tuple(map(unknown, shape))
            made[place] = _resized(dim, shape[place])
    return tuple(made)


def _resized(dim: Dim, size: int) -> Dim:
    if size == size_of(dim):
        return dim
    if len(dim) == 1:
        return (Factor(size, dim[0].split),)
    turned = len(dim) == 2 and dim[1].split == ROWS
    return (Factor(size, ROWS_INNERMOST),) if turned else unknown(size)


def _pointwise(call: Call) -> list[Dims]:
    """Return the rows of the operand that has them; of several, the one with the most dims."""
    operands = sorted((call.dims_of(x) for x in call.tensors), key=len, reverse=True)
    return [_together(operands, tuple(out.shape)) if isinstance(out, Tensor) else () for out in as_list(call.out)]


def _together(operands: list[Dims], shape: tuple[int, ...]) -> Dims:
    made = [whole(n) for n in shape]
    for dims in operands:
        for back, dim in enumerate(reversed(dims), 1):
            free = not any(map(is_split, made))
            if back <= len(shape) and is_split(dim) and size_of(dim) == shape[-back] and free:
                made[-back] = dim
    why = next((why for dims in operands if (why := _why_unknown(dims))), None)
    return tuple(made) if why is None or any(map(is_split, made)) else tuple((Factor(n, why),) for n in shape)


def _why_unknown(dims: Dims) -> Split | None:
    """Return the mark of a tensor whose rows are in an unknown dim; None without one."""
    return next((factor.split for dim in dims if is_unknown(dim) for factor in dim if factor.split), None)


def _joined(call: Call) -> Dims | None:
    """Return the rows of a ``cat`` of equal batches; None for other calls."""
    if call.name != "cat":
        return None
    several = {call.dims_of(x) for x in call.given["tensors"]}
    number = call.number(call.given.get("dim", 0), call.out.dim())
    if len(several) > 1:
        return None
    dims = list(several.pop())
    dims[number] = (Factor(len(call.given["tensors"])), *dims[number])
    return tuple(dims)
