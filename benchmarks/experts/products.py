"""Fused products of a layer of experts beside torch's: the time of each with each tile, and plans made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshfold.experts import MixtureOfExperts, Operands, ProductPlan, best_plan, measured_products
from meshfold.kernels import ProductTile, expert_places

Times = Mapping[tuple[str, ProductTile | None, bool], float]
TRIED = (
    ProductTile(128, 256, stages=4),
    ProductTile(128, 128, warps=4),
    ProductTile(128, 128),
    ProductTile(256, 128),
)
GATE_UP, BACK, GATE_UP_GRADIENT, DOWN_GRADIENT = "gate_up", "back", "gate_up_gradient", "down_gradient"


def times_of(layer: MixtureOfExperts, x: Tensor) -> Times:
    """Return the milliseconds of each product of a layer on tokens ``[.., h]``; empty where there is no GPU."""
    if not x.is_cuda:
        return {}
    tokens = x.detach().reshape(-1, x.shape[-1])
    with torch.no_grad():
        routing = layer.router(tokens)
    experts = layer.experts
    places = expert_places(routing.index, experts.num_experts)
    return measured_products(Operands(tokens, routing.weights, experts.gate_up, experts.down, *places), TRIED)


def plans_of(times: Times) -> dict[str, ProductPlan]:
    """Return plans by name: the best one if it is not torch's, and those that fuse as much as they can with the best tiles."""
    if not times:
        tile = ProductTile(16, 16, 16, 4, 2)  # any: without a GPU these are computed by their references
        return {"gathers": ProductPlan(gate_up=tile, gate_up_gathers=True, back=tile, gate_up_gradient=tile)}
    best = best_plan(times)
    plans = {} if best is None else {"measured": best}
    plans["gathers"] = ProductPlan(
        gate_up=_fastest(times, GATE_UP, True),
        gate_up_gathers=True,
        back=_fastest(times, BACK, True),
        back_gathers=True,
        gate_up_gradient=_fastest(times, GATE_UP_GRADIENT, True),
        down_gradient=_fastest(times, DOWN_GRADIENT, True),
    )
    plans["all in Triton"] = replace(
        plans["gathers"], down=_fastest(times, "down", False), token_gradient=_fastest(times, "token_gradient", False)
    )
    plans["fused activations"] = ProductPlan(gate_up=_fastest(times, GATE_UP, False), back=_fastest(times, BACK, False))
    return plans


def lines_of_times(times: Times, settings: Mapping[str, Any]) -> list[str]:
    """Return a line for each product and tile, with the TFLOP/s of the product alone."""
    pairs = 2e-9 * settings["tokens"] * settings["top_k"] * settings["hidden"] * settings["ffn"]
    lines = []
    for (name, tile, gathers), ms in sorted(times.items(), key=lambda item: (item[0][0], item[1])):
        double = name in (GATE_UP, GATE_UP_GRADIENT, "token_gradient")
        rate = "" if "rows" in name else f"{pairs * (2 if double else 1) / ms:7.0f} TFLOP/s"
        how = "torch" if tile is None else f"{'gathers' if gathers else 'rows'}, {tuple(tile)}"
        lines.append(f"{ms:9.4f} ms {rate:16} {name}: {how}")
    return lines


def _fastest(times: Times, name: str, gathers: bool) -> ProductTile | None:
    found = {
        tile: ms for (of, tile, how), ms in times.items() if of == name and tile and how == gathers and ms < math.inf
    }
    return min(found, key=lambda tile: found[tile], default=None)
