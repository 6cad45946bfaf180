"""The choice of a mixture's products: torch's grouped ones, or fused ones if a measurement at their first use finds them faster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshfold.experts.fused_products import ProductPlan
from meshfold.experts.grouped import product_of_runs
from meshfold.kernels import (
    ProductTile,
    gated_row_gradients,
    gated_rows,
    outer_rows,
    rows_times,
    take_rows,
    tile_fits,
    weighted_swiglu,
    weighted_swiglu_backward,
)

ENVIRONMENT = "MESHFOLD_EXPERT_PRODUCTS"
CHOICES = ("torch", "measured")
FEWEST_ROWS = 8192
"""Rows below which nothing is measured: launches take longer than products."""
GAIN = 0.98
"""The share of the time of torch's products that fused ones must stay below."""

TILES = (ProductTile(128, 256, stages=4), ProductTile(128, 128, warps=4))
"""Tiles that are tried. One program of the first fills a multiprocessor; two of the second share one."""

_setting: str | ProductPlan | None = None
_measured: dict[tuple[Any, ...], ProductPlan | None] = {}


class Operands(NamedTuple):
    """The operands of a layer's products, as :func:`.fused_products.fused_experts` takes them."""

    tokens: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    places: Tensor
    pairs: Tensor
    ends: Tensor


def expert_products() -> str | ProductPlan:
    """Return the setting: that of :func:`use_expert_products`, else the environment's, else ``"torch"``."""
    global _setting
    if _setting is None:
        _setting = _checked(os.environ.get(ENVIRONMENT, "torch"), f"the environment variable {ENVIRONMENT}")
    return _setting


@contextmanager
def use_expert_products(setting: str | ProductPlan) -> Iterator[None]:
    """Context manager: choose the products of experts with the weights in their activation.

    Args:
        setting: ``"torch"``: torch's grouped products. ``"measured"``: on a GPU, what the first use with operands of a kind finds
            fastest, which compiles and times some kernels for up to a minute. A plan: its products, where their tiles fit.

    Raises:
        ValueError: for another word.
    """
    global _setting
    before, _setting = expert_products(), _checked(setting, "the setting given to use_expert_products()")
    try:
        yield
    finally:
        _setting = before


def plan_for(operands: Operands) -> ProductPlan | None:
    """Return the plan for operands, measured at their first use; None for torch's products and separate operations."""
    setting, tokens = expert_products(), operands.tokens
    if setting == "torch" or type(tokens) is not Tensor or tokens.is_meta or not operands.pairs.shape[0]:
        return None
    if not tokens.dtype == operands.gate_up.dtype == operands.down.dtype:
        return None
    if isinstance(setting, ProductPlan):
        return setting if _fits(setting, operands) else None
    rows = operands.pairs.shape[0]
    if not tokens.is_cuda or tokens.dtype not in (torch.bfloat16, torch.float16) or rows < FEWEST_ROWS:
        return None
    sizes = operands.gate_up.shape, operands.down.shape, operands.places.shape[1]
    kind = (tokens.device, tokens.dtype, *sizes, rows.bit_length())
    if kind not in _measured and torch.cuda.is_current_stream_capturing():
        return None  # a graph cannot be timed while it is recorded
    if kind not in _measured:
        _measured[kind] = best_plan(measured_products(operands))
    return _measured[kind]


Times = Mapping[tuple[str, ProductTile | None, bool], float]
"""Milliseconds of each product: its name, its tile (None: torch's), whether it gathers; and of copies, by ``COPIES``."""
COPIES = ("rows of tokens", "rows of gradients")


@torch.no_grad()
def measured_products(operands: Operands, tiles: Sequence[ProductTile] = TILES, repeats: int = 5) -> Times:
    """Return the times of all products with all tiles that fit. Waits for the device."""
    tokens, weights, gate_up, down, places, pairs, ends = (each.detach() for each in operands)
    sources = (pairs // places.shape[1]).to(torch.int32)
    rows = take_rows(tokens, pairs, places)
    of_rows = take_rows(weights.reshape(-1, 1), pairs, places.reshape(-1, 1)).squeeze(1)
    both = product_of_runs(rows, gate_up.transpose(1, 2), ends, None)
    hidden = weighted_swiglu(both, of_rows, ends[-1:])
    times: dict[tuple[str, ProductTile | None, bool], float] = {}

    def torch_gate_up() -> None:
        weighted_swiglu(product_of_runs(rows, gate_up.transpose(1, 2), ends, None), of_rows, ends[-1:])

    def torch_back() -> None:
        weighted_swiglu_backward(product_of_runs(rows, down, ends, None), both, of_rows, ends[-1:])

    # Gradients of sums are as tokens are: these stand for them.
    for name in COPIES:
        times[name, None, False] = _time(lambda: take_rows(tokens, pairs, places), repeats)
    times["gate_up", None, False] = _time(torch_gate_up, repeats)
    times["back", None, False] = _time(torch_back, repeats)
    times["down", None, False] = _time(lambda: product_of_runs(hidden, down.transpose(1, 2), ends, None), repeats)
    times["token_gradient", None, False] = _time(lambda: product_of_runs(both, gate_up, ends, None), repeats)
    times["gate_up_gradient", None, False] = _time(lambda: product_of_runs(both.t(), rows, ends, None), repeats)
    times["down_gradient", None, False] = _time(lambda: product_of_runs(rows.t(), hidden, ends, None), repeats)
    gathered, copied = (True, tokens, sources), (False, rows, None)
    for tile, (gathers, given, taken) in product(tiles, (gathered, copied)):
        calls: dict[str, Callable[[], object]] = {
            "gate_up": partial(gated_rows, given, taken, gate_up, ends, of_rows, tile),
            "back": partial(gated_row_gradients, given, taken, down, ends, both, of_rows, tile),
        }
        if gathers:
            calls["gate_up_gradient"] = partial(outer_rows, both, None, given, taken, ends, tile)
            calls["down_gradient"] = partial(outer_rows, given, taken, hidden, None, ends, tile)
        else:
            calls["down"] = partial(rows_times, hidden, down.transpose(1, 2), ends, tile)
            calls["token_gradient"] = partial(rows_times, both, gate_up, ends, tile)
        for name, call in calls.items():
            alone: dict[str, Any] = {name: tile}
            if _fits(ProductPlan(**alone), operands):
                times[name, tile, gathers] = _time(call, repeats)
    return times


def best_plan(times: Times) -> ProductPlan | None:
    """Return the plan of the least time, copies of rows included; None if torch's products take less than 1 / GAIN of it."""
    first, first_ms, today = _best_pair(times, "gate_up", "gate_up_gradient", COPIES[0])
    second, second_ms, today_too = _best_pair(times, "back", "down_gradient", COPIES[1])
    (down, down_ms, down_today), (back_on, on_ms, on_today) = (
        _best_alone(times, name) for name in ("down", "token_gradient")
    )
    if first_ms + second_ms + down_ms + on_ms > GAIN * (today + today_too + down_today + on_today):
        return None
    (gate_up, gathers), gate_up_gradient = first
    (back, back_gathers), down_gradient = second
    return ProductPlan(
        gate_up=gate_up,
        gate_up_gathers=gathers,
        back=back,
        back_gathers=back_gathers,
        gate_up_gradient=gate_up_gradient,
        down_gradient=down_gradient,
        down=down,
        token_gradient=back_on,
    )


_Pair = tuple[tuple[ProductTile | None, bool], ProductTile | None]


def _best_pair(times: Times, name: str, gradient: str, copy: str) -> tuple[_Pair, float, float]:
    """Return the best tiles of two products that read the same rows, their time, and that of torch's products."""
    rows = times[copy, None, False]
    firsts = [(tile, gathers, ms) for (of, tile, gathers), ms in times.items() if of == name]
    seconds = [(tile, ms) for (of, tile, _), ms in times.items() if of == gradient]
    found: dict[_Pair, float] = {}
    for (tile, gathers, ms), (other, more) in product(firsts, seconds):
        found[(tile, gathers), other] = ms + more + (0.0 if gathers and other is not None else rows)
    best = min(found, key=lambda pair: found[pair])
    return best, found[best], found[(None, False), None]


def _best_alone(times: Times, name: str) -> tuple[ProductTile | None, float, float]:
    """Return the best tile of a product, its time, and that of torch's."""
    found = {tile: ms for (of, tile, _), ms in times.items() if of == name}
    best = min(found, key=lambda tile: found[tile])
    return best, found[best], found[None]


def _time(call: Callable[[], object], repeats: int) -> float:
    """Return the milliseconds of a call on the current stream; infinity for a kernel that the device cannot hold."""
    try:
        call()
    except Exception as error:
        if type(error).__name__ not in ("OutOfResources", "PTXASError", "CompilationError"):
            raise
        return float("inf")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def _fits(plan: ProductPlan, operands: Operands) -> bool:
    """Return True if all results consist of whole tiles."""
    hidden, ffn = operands.down.shape[1:]
    return all(
        (
            plan.gate_up is None or tile_fits(plan.gate_up, None, 2 * ffn, hidden),
            plan.back is None or tile_fits(plan.back, None, ffn, hidden),
            plan.gate_up_gradient is None or tile_fits(plan.gate_up_gradient, 2 * ffn, hidden, None),
            plan.down_gradient is None or tile_fits(plan.down_gradient, hidden, ffn, None),
            plan.down is None or tile_fits(plan.down, None, hidden, ffn),
            plan.token_gradient is None or tile_fits(plan.token_gradient, None, hidden, 2 * ffn),
        )
    )


def _checked(setting: str | ProductPlan, source: str) -> str | ProductPlan:
    if not isinstance(setting, ProductPlan) and setting not in CHOICES:
        raise ValueError(f"{source} is {setting!r}; write one of {', '.join(map(repr, CHOICES))}")
    return setting
