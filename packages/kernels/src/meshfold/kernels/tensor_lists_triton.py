"""Steps over lists of tensors in Triton: a table has the tensors' addresses, and each program finds its tensor and tile in it."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import cdiv, launch
from meshfold.kernels.float_bits_triton import from_bfloat16, to_bfloat16

_TILE = 4096
ALIGNED = 16  # bytes of an address and elements of a tensor: many are loaded and stored at a time then
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NO_COPY = 3
Tensors = Sequence[Tensor]


@triton.jit
def _tile(owners, begins, sizes, EVEN: tl.constexpr, TILE: tl.constexpr):
    """Return the number of the program's tensor, its elements, and which of them exist."""
    program = tl.program_id(0)
    number = tl.load(owners + program)
    place = (program - tl.load(begins + number)).to(tl.int64) * TILE + tl.arange(0, TILE)
    size = tl.load(sizes + number)
    if EVEN:
        size = tl.multiple_of(size, 16)
    return number, place, place < size


@triton.jit
def _address(table, row, count, number, EVEN: tl.constexpr, DTYPE: tl.constexpr):
    """Return the address of a tensor of a dtype."""
    address = tl.load(table + row * count + number).to(tl.pointer_type(DTYPE))
    if EVEN:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _float32(table, row, count, number, EVEN: tl.constexpr):
    return _address(table, row, count, number, EVEN, tl.float32)


@triton.jit
def _store(x, table, row, count, number, place, mask, EVEN: tl.constexpr, CODE: tl.constexpr):
    """Store float32 numbers in a tensor of the dtype of ``CODE``."""
    if CODE == 0:
        tl.store(_float32(table, row, count, number, EVEN) + place, x, mask=mask)
    if CODE == 1:
        tl.store(_address(table, row, count, number, EVEN, tl.int16) + place, to_bfloat16(x), mask=mask)
    if CODE == 2:
        tl.store(_address(table, row, count, number, EVEN, tl.float16) + place, x.to(tl.float16), mask=mask)


@triton.jit
def _load(table, row, count, number, place, mask, EVEN: tl.constexpr, CODE: tl.constexpr):
    """Load float32 numbers from a tensor of the dtype of ``CODE``."""
    if CODE == 0:
        x = tl.load(_float32(table, row, count, number, EVEN) + place, mask=mask, other=0.0)
    if CODE == 1:
        x = from_bfloat16(tl.load(_address(table, row, count, number, EVEN, tl.int16) + place, mask=mask, other=0))
    if CODE == 2:
        x = tl.load(_address(table, row, count, number, EVEN, tl.float16) + place, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _direction(p, m, v, eps, weight_decay, inverse1, inverse2):
    return m * inverse1 / (tl.sqrt(v) * inverse2 + eps) + weight_decay * p


@triton.jit(do_not_specialize=["count", "tiles"])
def _lamb_moments(
    table,
    owners,
    begins,
    sizes,
    count,
    partials,
    tiles,
    rest1,
    beta2,
    rest2,
    eps,
    weight_decay,
    inverse1,
    inverse2,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    number, place, mask = _tile(owners, begins, sizes, EVEN, TILE)
    at_m, at_v = _float32(table, 2, count, number, EVEN) + place, _float32(table, 3, count, number, EVEN) + place
    p = _load(table, 0, count, number, place, mask, EVEN, 0)
    g = _load(table, 1, count, number, place, mask, EVEN, 0)
    m = tl.load(at_m, mask=mask, other=0.0)
    v = tl.load(at_v, mask=mask, other=0.0)
    m += (g - m) * rest1
    v = v * beta2 + g * g * rest2
    tl.store(at_m, m, mask=mask)
    tl.store(at_v, v, mask=mask)
    u = tl.where(
        mask, _direction(p, m, v, eps, weight_decay, inverse1, inverse2), 0.0
    )  # without eps 0 / 0 after the end
    tl.store(partials + tl.program_id(0), tl.sum(p * p, 0))
    tl.store(partials + tiles + tl.program_id(0), tl.sum(u * u, 0))


@triton.jit(do_not_specialize=["count", "tiles"])
def _sum_tiles(partials, begins, sums, count, tiles, BLOCK: tl.constexpr):
    """Add up what the tiles of a tensor found, in float64 and always in the same order."""
    number, row = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(begins + number), tl.load(begins + number + 1)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for first in range(begin, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total += tl.load(partials + row * tiles + place, mask=place < end, other=0.0).to(tl.float64)
    tl.store(sums + row * count + number, tl.sum(total, 0))


@triton.jit(do_not_specialize=["count"])
def _lamb_apply(
    table,
    owners,
    begins,
    sizes,
    count,
    rates,
    eps,
    weight_decay,
    inverse1,
    inverse2,
    COPY: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    number, place, mask = _tile(owners, begins, sizes, EVEN, TILE)
    at_p = _float32(table, 0, count, number, EVEN) + place
    p = tl.load(at_p, mask=mask, other=0.0)
    m = _load(table, 1, count, number, place, mask, EVEN, 0)
    v = _load(table, 2, count, number, place, mask, EVEN, 0)
    p -= tl.load(rates + number) * _direction(p, m, v, eps, weight_decay, inverse1, inverse2)
    tl.store(at_p, p, mask=mask)
    _store(p, table, 3, count, number, place, mask, EVEN, COPY)


@triton.jit(do_not_specialize=["count"])
def _adamw(
    table,
    owners,
    begins,
    sizes,
    count,
    lr,
    rest1,
    beta2,
    rest2,
    eps,
    keep,
    inverse1,
    inverse2,
    COPY: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    number, place, mask = _tile(owners, begins, sizes, EVEN, TILE)
    at_p = _float32(table, 0, count, number, EVEN) + place
    at_m, at_v = _float32(table, 2, count, number, EVEN) + place, _float32(table, 3, count, number, EVEN) + place
    p = tl.load(at_p, mask=mask, other=0.0)
    g = _load(table, 1, count, number, place, mask, EVEN, 0)
    m = tl.load(at_m, mask=mask, other=0.0)
    v = tl.load(at_v, mask=mask, other=0.0)
    m += (g - m) * rest1
    v = v * beta2 + g * g * rest2
    p = p * keep - lr * _direction(p, m, v, eps, 0.0, inverse1, inverse2)
    tl.store(at_m, m, mask=mask)
    tl.store(at_v, v, mask=mask)
    tl.store(at_p, p, mask=mask)
    _store(p, table, 4, count, number, place, mask, EVEN, COPY)


@triton.jit(do_not_specialize=["count"])
def _lion(
    table,
    owners,
    begins,
    sizes,
    count,
    lr,
    rest1,
    rest2,
    weight_decay,
    COPY: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    number, place, mask = _tile(owners, begins, sizes, EVEN, TILE)
    at_p, at_m = _float32(table, 0, count, number, EVEN) + place, _float32(table, 2, count, number, EVEN) + place
    p = tl.load(at_p, mask=mask, other=0.0)
    g = _load(table, 1, count, number, place, mask, EVEN, 0)
    m = tl.load(at_m, mask=mask, other=0.0)
    u = m + (g - m) * rest1
    sign = tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, u))  # of 0 and of NaN itself
    p -= lr * (sign + weight_decay * p)
    tl.store(at_m, m + (g - m) * rest2, mask=mask)
    tl.store(at_p, p, mask=mask)
    _store(p, table, 3, count, number, place, mask, EVEN, COPY)


@triton.jit(do_not_specialize=["count"])
def _average(
    table,
    owners,
    begins,
    sizes,
    count,
    rest,
    momentum,
    NESTEROV: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    number, place, mask = _tile(owners, begins, sizes, EVEN, TILE)
    at_m = _float32(table, 1, count, number, EVEN) + place
    g = _load(table, 0, count, number, place, mask, EVEN, 0)
    m = tl.load(at_m, mask=mask, other=0.0)
    m += (g - m) * rest
    tl.store(at_m, m, mask=mask)
    if NESTEROV:
        m = g + (m - g) * momentum
    _store(m, table, 2, count, number, place, mask, EVEN, AHEAD)


@triton.jit(do_not_specialize=["count"])
def _apply(
    table,
    owners,
    begins,
    sizes,
    count,
    keep,
    rate,
    UPDATE: tl.constexpr,
    COPY: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    number, place, mask = _tile(owners, begins, sizes, EVEN, TILE)
    at_p = _float32(table, 0, count, number, EVEN) + place
    p = tl.load(at_p, mask=mask, other=0.0)
    p = p * keep - rate * _load(table, 1, count, number, place, mask, EVEN, UPDATE)
    tl.store(at_p, p, mask=mask)
    _store(p, table, 2, count, number, place, mask, EVEN, COPY)


class _Tiles(NamedTuple):
    """Map from programs to tensors.

    Attributes:
        owners: the number of each program's tensor, int32.
        begins: the first program of each tensor and the number of programs, int32.
        sizes: elements of each tensor, int64.
        programs: how many there are.
    """

    owners: Tensor
    begins: Tensor
    sizes: Tensor
    programs: int


@functools.lru_cache(maxsize=64)
def _tiles(sizes: tuple[int, ...], device: torch.device) -> _Tiles:
    counts = torch.tensor([cdiv(size, _TILE) for size in sizes])
    begins = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    return _Tiles(
        owners.to(device, torch.int32), begins.to(device, torch.int32), torch.tensor(sizes).to(device), int(begins[-1])
    )


_tables: OrderedDict[tuple[torch.device, tuple[int, ...]], Tensor] = OrderedDict()


def addresses_on(device: torch.device, addresses: tuple[int, ...]) -> Tensor:
    """Return addresses on a device; recent ones are cached."""
    key = device, addresses
    if key not in _tables:
        _tables[key] = torch.tensor(addresses).to(device, non_blocking=True)
        while len(_tables) > 64:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    return _tables[key]


def _run(kernel: Any, lists: Sequence[Tensors], *arguments: Any, **settings: Any) -> None:
    """Launch a kernel over all tiles of the first list's tensors."""
    first = lists[0][0]
    sizes = tuple(tensor.numel() for tensor in lists[0])
    tiles = _tiles(sizes, first.device)
    addresses = tuple(tensor.data_ptr() for tensors in lists for tensor in tensors)
    table = addresses_on(first.device, addresses)
    even = all(number % ALIGNED == 0 for number in (*sizes, *addresses))
    given = (table, tiles.owners, tiles.begins, tiles.sizes, len(sizes))
    launch(kernel, (tiles.programs,), first, *given, *arguments, **settings, EVEN=even, TILE=_TILE, num_warps=8)


def _with_copies(lists: Sequence[Tensors], copies: Tensors | None) -> tuple[list[Tensors], int]:
    return ([*lists], NO_COPY) if copies is None else ([*lists, copies], CODES[copies[0].dtype])


def _floats(*numbers: float) -> tuple[float, ...]:
    """Return numbers that Triton compiles for as floats, whatever their values."""
    return tuple(map(float, numbers))


def lamb_moments(
    parameters: Tensors,
    gradients: Tensors,
    means: Tensors,
    squares: Tensors,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> Tensor:
    first = parameters[0]
    tiles = _tiles(tuple(tensor.numel() for tensor in parameters), first.device)
    partials = torch.empty(2, tiles.programs, dtype=torch.float32, device=first.device)
    sums = torch.zeros(2, len(parameters), dtype=torch.float64, device=first.device)
    _run(
        _lamb_moments,
        (parameters, gradients, means, squares),
        partials,
        tiles.programs,
        *_floats(1 - betas[0], betas[1], 1 - betas[1], eps, weight_decay, 1 / corrections[0], 1 / corrections[1]),
    )
    if tiles.programs:
        grid = (len(parameters), 2)
        launch(_sum_tiles, grid, first, partials, tiles.begins, sums, len(parameters), tiles.programs, BLOCK=1024)
    return sums


def lamb_apply(
    parameters: Tensors,
    means: Tensors,
    squares: Tensors,
    copies: Tensors | None,
    rates: Tensor,
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> None:
    lists, copy = _with_copies((parameters, means, squares), copies)
    numbers = _floats(eps, weight_decay, 1 / corrections[0], 1 / corrections[1])
    _run(_lamb_apply, lists, rates.to(torch.float32), *numbers, COPY=copy)


def adamw(
    parameters: Tensors,
    gradients: Tensors,
    means: Tensors,
    squares: Tensors,
    copies: Tensors | None,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
) -> None:
    lists, copy = _with_copies((parameters, gradients, means, squares), copies)
    means_and_rate = lr, 1 - betas[0], betas[1], 1 - betas[1], eps, 1 - lr * weight_decay
    _run(_adamw, lists, *_floats(*means_and_rate, 1 / corrections[0], 1 / corrections[1]), COPY=copy)


def lion(
    parameters: Tensors,
    gradients: Tensors,
    means: Tensors,
    copies: Tensors | None,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    lists, copy = _with_copies((parameters, gradients, means), copies)
    _run(_lion, lists, *_floats(lr, 1 - betas[0], 1 - betas[1], weight_decay), COPY=copy)


def average(gradients: Tensors, means: Tensors, ahead: Tensors, momentum: float, nesterov: bool) -> None:
    code = CODES[ahead[0].dtype]
    _run(_average, (gradients, means, ahead), *_floats(1 - momentum, momentum), NESTEROV=nesterov, AHEAD=code)


def apply(parameters: Tensors, updates: Tensors, copies: Tensors | None, keep: float, rate: float) -> None:
    lists, copy = _with_copies((parameters, updates), copies)
    _run(_apply, lists, *_floats(keep, rate), UPDATE=CODES[updates[0].dtype], COPY=copy)
