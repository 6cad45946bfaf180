"""Operations without a rule: tried on two pieces and on both together, with random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.mesh.tracking.call import Call, tensors_in
from meshfold.mesh.tracking.dims import (
    Dim,
    Dims,
    Factor,
    MixesError,
    Split,
    check_axes_once,
    whole_dims,
)

_MOST = 1 << 24
"""Elements of all operands up to which an operation is tried."""


def try_on_pieces(call: Call) -> list[Dims]:
    """Return the layouts of the results: split where the results of pieces are the pieces of the result.

    Raises:
        MixesError: if they are not, or the operation cannot be tried.
    """
    outs = list(tensors_in(call.out))
    made: list[list[Dim]] = [list(whole_dims(out.shape)) for out in outs]
    splits = {f.split for x in call.tensors for dim in call.dims_of(x) for f in dim if f.split is not None}
    for split in sorted(splits, key=str):
        for place, number in enumerate(_along(call, split)):
            if number is not None:
                size = outs[place].shape[number]
                if made[place][number] != (Factor(size),):
                    raise _mixes(split, "it merges two split dims")
                made[place][number] = (Factor(size, split),)
    return [check_axes_once(tuple(dims)) for dims in made]


def _mixes(split: Split, why: str) -> MixesError:
    return MixesError(f"works on a dim that {_how(split)}, and tried out on two pieces of it {why}")


def _how(split: Split) -> str:
    return f"is split over {', '.join(split.axes)}" if split.axes else "may be split"


def _along(call: Call, split: Split) -> list[int | None]:
    """Return, for each result, the dim along which it is split if the operands are split this way; None if it is the same."""
    if sum(x.numel() for x in call.tensors) > _MOST or any(x.is_meta for x in call.tensors):
        raise MixesError(f"works on a dim that {_how(split)}, and there is no rule for that")
    first, second, both = ({}, {}, {})  # type: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
    for name, value in call.given.items():
        number = _written_along(call, split) if name == "self" else None
        if number is not None:
            first[name], second[name], both[name] = (
                value.clone(),
                value.clone(),
                torch.cat([value, value], number),
            )
            continue
        first[name], second[name], both[name] = _pieces(call, split, value)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            a, b, c = (_run(call, given) for given in (first, second, both))
    except Exception as error:
        raise _mixes(split, f"it fails ({type(error).__name__})") from None
    return [_found(call, split, *found) for found in zip(a, b, c, strict=True)]


def _written_along(call: Call, split: Split) -> int | None:
    """Return the dim along which an unmarked tensor must be a shard, because a shard is written into it in place.

    One process would write the whole tensor, which does not fit in memory of a rank's size.
    """
    into = call.given.get("self")
    if not isinstance(into, Tensor) or not call.function._schema.name.endswith("_"):
        return None
    if any(f.split == split for dim in call.dims_of(into) for f in dim):
        return None
    for x in call.tensors:
        for back, dim in enumerate(reversed(call.dims_of(x))):
            number = into.dim() - 1 - back
            if number >= 0 and any(f.split == split for f in dim) and into.shape[number] == x.shape[-1 - back]:
                return number
    return None


def _run(call: Call, given: dict[str, Any]) -> list[Tensor]:
    only = {a.name for a in call.function._schema.arguments if a.kwarg_only}
    args = [value for name, value in given.items() if name not in only]
    kwargs = {name: value for name, value in given.items() if name in only}
    return list(tensors_in(call.function(*args, **kwargs)))


def _pieces(call: Call, split: Split, value: Any) -> tuple[Any, Any, Any]:
    """Return an argument in two forms: for two ranks, and for one process with both shards."""
    if isinstance(value, Tensor):
        numbers = [n for n, dim in enumerate(call.dims_of(value)) if any(f.split == split for f in dim)]
        if not numbers:
            return value.clone(), value.clone(), value.clone()
        if len(numbers) > 1 or len(call.dims_of(value)[numbers[0]]) > 1:
            raise _mixes(split, "it splits a dim that was merged from several")
        one, other = _random(value, 1), _random(value, 2)
        return one, other, torch.cat([one, other], numbers[0])
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        found = [_pieces(call, split, item) for item in value]
        return tuple(list(column) for column in zip(*found, strict=True))  # type: ignore[return-value]
    return value, value, value


def _random(like: Tensor, seed: int) -> Tensor:
    """Return random numbers, the same on all ranks; integers within a tensor's range, but never all equal."""
    generator, shape = torch.Generator().manual_seed(seed), tuple(like.shape)
    if like.is_floating_point():
        made = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
    elif like.is_complex():
        made = torch.randn(shape, generator=generator, dtype=torch.complex128)
    else:
        low, high = (int(like.min()), int(like.max())) if like.numel() and like.dtype != torch.bool else (0, 1)
        low = min(low, max(high - 1, 0)) if low == high else low
        made = torch.randint(low, max(high, low + 1) + 1, shape, generator=generator)
    return made.to(like.device, like.dtype)


def _found(call: Call, split: Split, a: Tensor, b: Tensor, c: Tensor) -> int | None:
    for number in range(c.dim()):
        if c.shape[number] == a.shape[number] + b.shape[number]:
            rest = [i for i in range(c.dim()) if i != number]
            if all(a.shape[i] == b.shape[i] == c.shape[i] for i in rest) and _alike(torch.cat([a, b], number), c):
                return number
    if a.shape == b.shape == c.shape and _alike(a, c) and _alike(b, c):
        return None
    raise _mixes(split, "its results differ from those on the whole")


def _alike(a: Tensor, b: Tensor) -> bool:
    wide = a.is_floating_point()
    return torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-3, equal_nan=True) if wide else torch.equal(a, b)
