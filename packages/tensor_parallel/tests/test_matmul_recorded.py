"""The cost of a plan is an oracle: what was handed to torch.distributed has exactly its kinds, axes and bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from meshfold.mesh import Mesh, Placement, record
from meshfold.mesh.testing import fake_world, run_on_ranks
from meshfold.tensor_parallel import matmul_cost, plan
from meshfold.tensor_parallel.lowerings import LOWERINGS
from meshfold.tensor_parallel.matmul import matmul
from meshfold.tensor_parallel.modes import MODES
from meshfold.tensor_parallel.plan import MatmulPlan, Phase

KEEPS = (frozenset[str](), frozenset({"x"}), frozenset({"w"}), frozenset({"x", "w"}))
Difference = tuple[Counter[object], Counter[object]]

SQUARE, CUBE = {"row": 2, "col": 2}, {"a": 2, "b": 2, "c": 1}
MESHES: dict[str, tuple[dict[str, int], ...]] = {
    "1d": ({"tensor": 2}, {"tensor": 8}, {"data": 8, "tensor": 64}),
    "1d+sequence": ({"tensor": 4}, {"data": 2, "tensor": 3}, {"data": 8, "tensor": 64}),
    "1d+tokens": ({"tensor": 4}, {"data": 8, "tensor": 64}),
    "2d": (
        SQUARE,
        {"row": 2, "col": 3},
        {"row": 6, "col": 4},
        {"row": 1, "col": 8},
        {"data": 2, "row": 16, "col": 16},
    ),
    "2.5d": tuple(
        {"depth": depth, "row": row, "col": col} for depth, row, col in ((1, 2, 2), (2, 2, 2), (2, 2, 4), (8, 8, 8))
    ),
    "3d": (CUBE, {"a": 2, "b": 3, "c": 4}, {"a": 8, "b": 8, "c": 8}),
}

ROWS = {
    "2.5d, w also over depth": ("m:d,r k:c | k:r,d n:c | m:d,r n:c", {"d": 2, "r": 4, "c": 3}),
    "fsdp": ("m:dp k | k n:dp | m:dp n", {"dp": 16}),
    "data parallel × 2d": ("m:dp,r k:c | k:r n:c | m:dp,r n:c", {"dp": 4, "r": 2, "c": 2}),
    "fsdp × 1d row + sequence": ("m:dp k:t | k:t,dp n | m:dp,t n", {"dp": 4, "t": 4}),
    "fsdp × 2d": ("m:dp,r k:c | k:r,dp n:c | m:dp,r n:c", {"dp": 4, "r": 2, "c": 4}),
    "stream and scatter": ("m:r k:t,c | k:t,r n:c | m:r,t n:c", {"t": 2, "r": 4, "c": 2}),
    "two dims at once": ("m:a,b k | k:b n:a | m:a,b n", {"a": 2, "b": 4}),
}


def cases() -> Iterator[tuple[str, MatmulPlan, dict[str, int]]]:
    for mode, meshes in MESHES.items():
        for axes in meshes:
            found = MODES[mode]
            by_tokens = {f"{role} of attention": derived for role, derived in found.attention_plans.items()}
            for role, derived in {**found.plans, **by_tokens}.items():
                yield f"{mode} {role}", derived, axes
    for name, (layouts, axes) in ROWS.items():
        yield name, plan(*layouts.split(" | ")), axes


@cache
def mesh_of(axes: tuple[tuple[str, int], ...]) -> Mesh:
    return Mesh(dict(axes))


def small_sizes(p: MatmulPlan, mesh: Mesh) -> dict[str, int]:
    """The smallest sizes that can be split, times a small number of its own for each dim."""
    blocks = {
        dim: math.lcm(*(mesh.size(*layout[dim]) for layout in (p.x, p.w, p.y) if dim in layout))
        for dim in (p.m, p.k, p.n)
    }
    return {dim: count * times for (dim, count), times in zip(blocks.items(), (1, 3, 2), strict=True)}


def run_recorded(
    p: MatmulPlan, mesh: Mesh, lowering: str, keep: frozenset[str], wants: tuple[bool, bool] = (True, True)
) -> Difference:
    """(recorded and not planned, planned and not recorded), each with its phase."""
    sizes = small_sizes(p, mesh)
    x_at = Placement(shape=(sizes[p.m], sizes[p.k]), axes=(p.x[p.m], p.x[p.k]))
    w_at = Placement(shape=(sizes[p.n], sizes[p.k]), axes=(p.w[p.n], p.w[p.k]))
    x = torch.ones(x_at.local_shape(mesh), requires_grad=wants[0])
    w = torch.ones(w_at.local_shape(mesh), requires_grad=wants[1])
    with record() as log:
        y = matmul(x, w, p, mesh, lowering=lowering, keep=keep)
        log.phase = "backward"
        y.backward(torch.ones_like(y))
    backward: tuple[Phase, ...] = tuple(phase for phase, wanted in zip(("dx", "dw"), wants, strict=True) if wanted)  # type: ignore[misc]
    cost = matmul_cost(p, sizes, mesh, itemsize=4, lowering=lowering, keep=keep, phases=("forward", *backward))
    seen = Counter({("forward", *key): n for key, n in log.count("forward").items()})
    seen += Counter({("backward", *key): n for key, n in log.count("backward").items()})
    planned = Counter({("forward", *key): n for key, n in cost.count("forward").items()})
    planned += Counter({("backward", *key): n for key, n in cost.count("dx", "dw").items()})
    return seen - planned, planned - seen


WORLDS = sorted({math.prod(axes.values()) for _, _, axes in cases()})


@pytest.mark.few(1)
@pytest.mark.parametrize("world", WORLDS)
def test_recorded_is_planned(world: int) -> None:
    """Every mode and role, every lowering, whatever is kept: on the last rank of a world that is not there."""
    done, meshes = 0, dict[object, Mesh]()
    with fake_world(world, rank=world - 1):
        for name, p, axes in cases():
            if math.prod(axes.values()) != world:
                continue
            mesh = meshes.setdefault(tuple(axes.items()), Mesh(axes))
            for lowering, way in LOWERINGS.items():
                if not way.refuses(p):
                    for keep in KEEPS:
                        difference = run_recorded(p, mesh, lowering, keep)
                        assert difference == (Counter(), Counter()), f"{name} {mesh} {lowering} keep={sorted(keep)}"
                        done += 1
    assert done >= 8


@pytest.mark.parametrize("wants", [(True, False), (False, True)])
def test_recorded_is_planned_with_a_frozen_operand(wants: tuple[bool, bool]) -> None:
    with fake_world(8, rank=5):
        for name, p, axes in cases():
            if math.prod(axes.values()) == 8:
                for lowering, way in LOWERINGS.items():
                    if not way.refuses(p):
                        difference = run_recorded(p, Mesh(axes), lowering, frozenset(), wants)
                        assert difference == (Counter(), Counter()), f"{name} {lowering}"


def recorded_by_gloo() -> list[Difference]:
    some = [
        ("2d", "column"),
        ("1d+sequence", "column"),
        ("1d+sequence", "row"),
        ("2d", "tied_head"),
        ("3d", "row"),
    ]
    axes = {"1d+sequence": {"tensor": 4}, "2d": {"row": 2, "col": 2}, "3d": {"a": 2, "b": 2, "c": 1}}
    found = []
    for mode, role in some:
        p, mesh = MODES[mode].plans[role], mesh_of(tuple(axes[mode].items()))
        for lowering, way in LOWERINGS.items():
            if not way.refuses(p):
                found.append(run_recorded(p, mesh, lowering, frozenset({"w"})))
    return found


def test_recorded_is_planned_on_real_ranks() -> None:
    for found in run_on_ranks(4, recorded_by_gloo):
        assert len(found) >= 15 and found == [(Counter(), Counter())] * len(found)


def test_the_lowerings_move_the_same_bytes_but_for_broadcasts() -> None:
    """Ring and stream take collectives apart; only SUMMA's broadcasts, which each count their block, weigh more."""
    p, mesh = MODES["2d"].plans["column"], Mesh({"row": 4, "col": 4})
    sizes = {"m": 64, "k": 64, "n": 64}
    cost = {name: matmul_cost(p, sizes, mesh, lowering=name) for name in ("gather", "ring", "stream")}
    assert cost["gather"].bytes == cost["ring"].bytes
    forward = {name: sum(e.bytes for e in c.entries if e.phase == "forward") for name, c in cost.items()}
    assert forward["stream"] == forward["gather"] * 4 / 3
    assert cost["stream"].bytes - forward["stream"] == cost["gather"].bytes - forward["gather"]


def test_stream_holds_panels_that_are_a_fraction_of_what_gather_holds() -> None:
    p, mesh = MODES["2d"].plans["column"], Mesh({"row": 4, "col": 4})
    sizes = {"m": 64, "k": 64, "n": 64}
    for name, share in (("gather", 1), ("stream", 4)):
        blocks = [e.block_bytes for e in matmul_cost(p, sizes, mesh, lowering=name).entries]
        assert max(blocks) == 64 * 16 * 2 // share


def test_keeping_an_operand_saves_its_second_gather() -> None:
    p, mesh = MODES["2d"].plans["column"], Mesh({"row": 4, "col": 4})
    sizes = {"m": 64, "k": 64, "n": 64}
    for name in ("gather", "ring", "stream"):
        without, kept = (
            matmul_cost(p, sizes, mesh, lowering=name, keep=k) for k in (frozenset[str](), frozenset({"x"}))
        )
        gathered = 64 * 16 * 2 * 3 // 4  # bytes of the x of a row of ranks, all but this rank's own
        assert without.bytes - kept.bytes == gathered


def test_a_mesh_of_one_rank_moves_nothing() -> None:
    for name, way in LOWERINGS.items():
        for mode in MODES.values():
            for p in mode.plans.values():
                if not way.refuses(p):
                    sizes = dict.fromkeys((p.m, p.k, p.n), 4)
                    assert matmul_cost(p, sizes, Mesh({}), lowering=name).entries == ()
                    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
                    y = matmul(x, w, p, Mesh({}), lowering=name)
                    y.sum().backward()
                    assert torch.allclose(y, x @ w.t()) and torch.allclose(x.grad, torch.ones(4, 4) @ w)  # type: ignore[arg-type]
