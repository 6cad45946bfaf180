"""The planner's choice: estimates that follow the cost, and a lowering that applies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.mesh import Mesh
from meshfold.tensor_parallel import matmul_cost, plan
from meshfold.tensor_parallel.lowerings import LOWERINGS
from meshfold.tensor_parallel.lowerings.select import WAYS, Machine, choose, estimate
from meshfold.tensor_parallel.modes import MODES

SLOW_LINKS = Machine(bandwidth=dict.fromkeys(Machine().bandwidth, 50e9))
MESHES = {
    "1d": Mesh({"tensor": 4}),
    "1d+sequence": Mesh({"tensor": 4}),
    "1d+tokens": Mesh({"tensor": 4}),
    "2d": Mesh({"row": 2, "col": 2}),
    "2.5d": Mesh({"depth": 2, "row": 2, "col": 2}),
    "3d": Mesh({"a": 2, "b": 2, "c": 2}),
}


@given(
    st.sampled_from(sorted(MODES)),
    st.sampled_from(["column", "row", "head", "tied_head"]),
    st.integers(4, 14),
)
def test_the_choice_applies_and_is_the_fastest_estimate(mode: str, role: str, scale: int) -> None:
    p, mesh = MODES[mode].plans[role], MESHES[mode]
    sizes = dict.fromkeys((p.m, p.k, p.n), 2**scale)
    chosen = choose(p, sizes, mesh)
    assert not WAYS[chosen].refuses(p)
    times = {name: estimate(p, name, sizes, mesh) for name, way in WAYS.items() if not way.refuses(p)}
    assert times[chosen] == min(times.values())


def test_small_matmuls_are_not_taken_apart() -> None:
    for mode, mesh in MESHES.items():
        for role in ("column", "row"):
            p = MODES[mode].plans[role]
            assert choose(p, dict.fromkeys((p.m, p.k, p.n), 64), mesh) == "gather"


def test_a_large_scatter_with_much_to_hide_under_is() -> None:
    """The reduce-scatter of y in forward, that of dx where nothing follows: the gather lowering waits for both."""
    down = {"m": 16384, "k": 14336, "n": 4096}
    for machine in (Machine(), SLOW_LINKS):
        assert choose(MODES["1d+sequence"].plans["row"], down, MESHES["1d+sequence"], machine=machine) == "ring"
    up = {"m": 16384, "k": 4096, "n": 28672}
    assert choose(MODES["3d"].plans["column"], up, Mesh({"a": 2, "b": 2, "c": 1})) == "ring"


def test_where_nothing_moves_there_is_nothing_to_choose() -> None:
    assert choose(plan("m k", "k n:t", "m n:t"), {"m": 8, "k": 8, "n": 8}, Mesh({"t": 4})) == "gather"
    p = MODES["2d"].plans["column"]
    assert choose(p, dict.fromkeys("mkn", 8), Mesh({})) == "gather"


def test_the_estimate_of_gather_by_hand() -> None:
    """1d + sequence, row: y is scattered, dy gathered; nothing else moves, nothing is hidden."""
    p, mesh, machine = MODES["1d+sequence"].plans["row"], MESHES["1d+sequence"], Machine()
    sizes = {"m": 4096, "k": 8192, "n": 2048}
    moved = 4096 * 2048 * 2 * 3 / 4
    products = 3 * 2 * 4096 * 8192 * 2048 / 4 / machine.flops
    collectives = sum(machine.latency_s[k] + moved / machine.bandwidth[k] for k in ("all_gather", "reduce_scatter"))
    assert estimate(p, "gather", sizes, mesh) == pytest.approx(products + collectives)


@pytest.mark.parametrize("name", ["gather", "stream", "ring"])
def test_no_estimate_is_below_what_must_be_computed(name: str) -> None:
    p, mesh = MODES["2d"].plans["column"], MESHES["2d"]
    sizes = {"m": 4096, "k": 8192, "n": 2048}
    products = 3 * 2 * 4096 * 8192 * 2048 / 4 / Machine().flops
    alone = sum(Machine().seconds(e) for e in matmul_cost(p, sizes, mesh, lowering=name).entries)
    assert products < estimate(p, name, sizes, mesh) < products + alone + 1e-3


@pytest.mark.parametrize("mode", MESHES)
def test_the_cost_of_auto_is_that_of_its_choice(mode: str) -> None:
    p, mesh = MODES[mode].plans["column"], MESHES[mode]
    for scale in (64, 8192):
        sizes = dict.fromkeys((p.m, p.k, p.n), scale)
        assert matmul_cost(p, sizes, mesh, lowering="auto") == matmul_cost(
            p, sizes, mesh, lowering=choose(p, sizes, mesh)
        )
    assert not LOWERINGS["auto"].refuses(p)


def test_the_method_of_version_0_1_still_counts() -> None:
    p, mesh = MODES["2d"].plans["column"], Mesh({"row": 2, "col": 2})
    sizes = {"m": 64, "k": 64, "n": 64}
    with pytest.warns(DeprecationWarning, match="write matmul_cost"):
        assert p.cost(sizes, mesh, lowering="stream") == matmul_cost(p, sizes, mesh, lowering="stream")  # type: ignore[attr-defined]
