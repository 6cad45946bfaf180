"""Experiments on tensor parallelism and collectives: a trace made anew, pages of the committed numbers, verdicts that can fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.collectives import measured as collectives_measured
from experiments.collectives import run as collectives
from experiments.megatron_2019 import run as megatron_2019
from experiments.optimus import measured as optimus_measured
from experiments.optimus import run as optimus
from experiments.optimus import simulated as optimus_numbers
from experiments.report import Experiment
from experiments.tensor_layers import Grid, Size, hold, largest_batch, link_rate, memory, seconds, trace
from experiments.tensor_measured import grids, page, plan
from experiments.tensor_parity import on_rank
from experiments.tensor_sweep import at_batch, batch_where, factors, sweep
from experiments.tesseract import run as tesseract
from experiments.tesseract import simulated as tesseract_numbers
from experiments.three_d import run as three_d
from experiments.three_d import simulated as three_d_numbers
from experiments.vit_batch import run as vit_batch
from experiments.vit_batch import simulated as vit_numbers
from integration_tests.committed import check_can_fail, check_committed, committed
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.planner import find_machine

SMALL = Size(hidden=64, heads=8, sequence=16, batch=8)
ONE, TWO, DEEP, CUBE = (
    Grid(mode="1d", sizes=(4,)),
    Grid(mode="2d", sizes=(2, 2)),
    Grid(mode="2.5d", sizes=(2, 2, 2)),
    Grid(mode="3d", sizes=(2, 2, 2)),
)
RTX = find_machine("rtx5000x4")


# -- a layer --------------------------------------------------------------------------------------------------------


def test_a_traced_layer_sends_and_computes_what_formulas_say() -> None:
    one, two = trace(ONE, SMALL), trace(TWO, SMALL)
    stream = SMALL.stream
    assert one.moved("forward") == pytest.approx(2 * 2 * 3 / 4 * stream)  # two ring all-reduces
    flop = 24 * SMALL.batch * SMALL.sequence * SMALL.hidden**2 * (1 + SMALL.sequence / (6 * SMALL.hidden))
    for traced in (one, two):
        assert 4 * traced.forward.flop == pytest.approx(flop)
        assert 4 * traced.backward.flop == pytest.approx(2 * flop)
    weights = SMALL.parameters * SMALL.itemsize
    summa = sum(m.bytes for m in two.sent["forward"] if m.kind == "all_gather")
    # (q - 1) / q² of what the papers count for g = q = 2
    norms = 2 * 2 * 4 * SMALL.batch * SMALL.sequence / 2  # mean and variance of this rank's rows, in float32
    assert summa == pytest.approx((7 * stream + weights) / 4 + norms)
    whole, split = hold(ONE, SMALL), hold(TWO, SMALL)
    assert memory(whole, 2).inputs == 4 * memory(split, 2).inputs == 4 * memory(whole, 2, spread=4).inputs


def test_trees_and_latency_are_charged_on_the_clock() -> None:
    traced = trace(TWO, SMALL)
    rings, trees = (seconds(traced, TWO, SMALL, RTX, trees=which) for which in (False, True))
    assert trees.sent > 1.5 * rings.sent and trees.forward == rings.forward
    slower = seconds(traced, TWO, SMALL, replace(RTX, latency=1.0))
    calls = sum(one.calls for phase in traced.sent.values() for one in phase)
    assert slower.sent == pytest.approx(calls, rel=0.01)
    assert rings.training(recompute=True) == pytest.approx(rings.training(recompute=False) + rings.inference)


def test_groups_that_leave_a_node_share_its_links() -> None:
    line, square, odd = (Grid(mode=m, sizes=s) for m, s in (("1d", (16,)), ("2d", (4, 4)), ("2d", (6, 6))))
    assert link_rate(RTX, ONE, ("tensor",)) == link_rate(RTX, square, ("col",)) == RTX.inside
    assert link_rate(RTX, line, ("tensor",)) == 4 * RTX.between
    assert link_rate(RTX, square, ("row",)) == RTX.between
    assert link_rate(RTX, odd, ("col",)) == 2 * RTX.between  # some nodes have ranks of two groups


def test_the_largest_batch_is_the_last_that_fits() -> None:
    room = 3e6

    def held(batch: int) -> float:
        return memory(hold(TWO, replace(SMALL, batch=batch)), 2).total

    most = largest_batch(TWO, SMALL, 2, room)
    assert most % 2 == 0 and held(most) <= room < held(most + 2)
    assert largest_batch(TWO, SMALL, 2, 1.0) == 0


def test_grids_of_ranks() -> None:
    assert grids(4, ("1d", "2d", "2.5d", "3d")) == [ONE, TWO, Grid(mode="2.5d", sizes=(4, 1, 1))]
    assert grids(8, ("1d", "2d", "3d")) == [Grid(mode="1d", sizes=(8,)), CUBE]
    assert DEEP in grids(8, ("2.5d",))


WORDS = [
    f"--{name}={value}"
    for name, value in dict(layers=2, hidden=64, heads=4, sequence=16, batch=8, repeats=1, half=0, cap=1).items()
]


@ranks(2)
def test_stacks_are_measured() -> None:
    stack = optimus_measured.MEASURED
    nothing = {"sent": 0.0, "held": 1.0, "largest": 1.0}
    found = stack.take(stack.options(WORDS), 2, torch.device("cpu"), plan=[(Grid(mode="1d", sizes=(2,)), nothing)])
    (row,) = found["rows"]
    assert row["sent"] == 2 * 6 * 2 * (2 - 1) / 2 * 8 * 16 * 64 * 4 and row["off"] < 1e-5
    assert row["held"] > 0 and row["largest"] > 4 and row["seconds"] > 0
    assert "2 ranks on CPU" in page(found)


def _measured() -> dict[str, Any]:
    stack = optimus_measured.MEASURED
    found = stack.take(stack.options(WORDS), 2, torch.device("cpu"), plan=[(Grid(mode="1d", sizes=(2,)), {})])
    row: dict[str, Any] = found["rows"][0]
    return row


def test_what_is_measured_was_planned() -> None:
    planned = plan(Grid(mode="1d", sizes=(2,)), optimus_measured.MEASURED.options(WORDS))
    for found in run_on_ranks(2, _measured):
        assert found["sent"] == planned["sent"] == 2 * 6 * 2 * (2 - 1) / 2 * 8 * 16 * 64 * 4
        assert found["held"] == pytest.approx(planned["held"], rel=0.1)


@ranks(4)
def test_a_grid_has_the_gradients_of_one_process() -> None:
    found = on_rank("2d", (2, 2))
    assert found["gradients"] == 29 and found["loss error"] < 1e-13 and found["gradient error"] < 1e-13
    assert found["projection"] == pytest.approx(1, abs=1e-13)


def test_a_published_factor_tells_the_batch() -> None:
    rows = [
        {"batch": batch, "a": {"training": slow}, "b": {"training": 1.0}}
        for batch, slow in ((4, 1.0), (16, 3.0), (64, 4.0))
    ]
    values = factors(rows, "training", "a", "b")
    assert values == [1.0, 3.0, 4.0]
    assert batch_where(rows, values, 2.0) == pytest.approx(8) and at_batch(rows, values, 8) == pytest.approx(2)
    assert math.isnan(batch_where(rows, values, 5.0)) and at_batch(rows, values, math.nan) == 0.0


# -- verdicts -------------------------------------------------------------------------------------------------------


def spoil_optimus(found: dict[str, Any]) -> None:
    found["rows"][0]["training"] *= 1.4


def spoil_tesseract(found: dict[str, Any]) -> None:
    found["runs"][1]["projection"] = 0.5


def spoil_three_d(found: dict[str, Any]) -> None:
    for row in found["sweep"]:
        row["2d, trees"]["training"] *= 2  # then no batch has the published factor


def spoil_collectives(found: dict[str, Any]) -> None:
    found["links"][0]["unseen"] = 0.2


def spoil_vit_batch(found: dict[str, Any]) -> None:
    found["rows"][3]["batch"] *= 2


def spoil_megatron_2019(found: dict[str, Any]) -> None:
    found["rows"][3]["ours, tensor"] *= 0.9


ALL: dict[str, tuple[Experiment, Callable[[dict[str, Any]], None], str]] = {
    "optimus": (optimus.EXPERIMENT, spoil_optimus, "2D loses on 4 GPUs"),
    "tesseract": (tesseract.EXPERIMENT, spoil_tesseract, "gradients whole"),
    "collectives": (
        collectives.EXPERIMENT,
        spoil_collectives,
        "all-reduce, reduce-scatter, broadcast, all-to-all of unseen sizes",
    ),
    "vit-batch": (vit_batch.EXPERIMENT, spoil_vit_batch, "14 times 1D's batch, nothing recomputed"),
    "megatron-2019": (
        megatron_2019.EXPERIMENT,
        spoil_megatron_2019,
        "efficiency of 1 to 8 ranks of tensor parallelism",
    ),
    "three-d": (three_d.EXPERIMENT, spoil_three_d, "3D before 2D before 1D"),
}


@pytest.mark.parametrize("name", ALL)
def test_pages_are_made_from_the_committed_numbers_and_can_fail(name: str) -> None:
    experiment, spoil, claim = ALL[name]
    check_committed(experiment)
    check_can_fail(experiment, spoil, claim)


def test_optimus_is_simulated_as_committed() -> None:
    then = committed(optimus.EXPERIMENT)["rows"][1]
    now = optimus_numbers.row_of("2d", optimus_numbers.settings()[0], then["batch"])
    assert now["training"] == pytest.approx(then["training"], rel=0.1)
    assert now["sent"] == then["sent"] and sum(now["memory"].values()) <= RTX.memory


def test_vit_batch_is_simulated_as_committed() -> None:
    then = committed(vit_batch.EXPERIMENT)["rows"][1]
    now = vit_numbers.row_of("2d", recompute=True, batch=then["batch"])
    assert now["images"] == pytest.approx(then["images"], rel=0.1)
    assert sum(now["memory"].values()) <= 1e9 * vit_numbers.setting().memory


def test_collectives_are_fitted_as_committed() -> None:
    then, now = committed(collectives.EXPERIMENT), collectives.EXPERIMENT.simulate()
    for one, other in zip(now["links"], then["links"], strict=True):
        assert {key: one[key] for key in ("latency", "rate", "unseen")} == pytest.approx(
            {key: other[key] for key in ("latency", "rate", "unseen")}
        )
    assert [one.name for one in collectives.EXPERIMENT.claims(now) if one.holds != one.expected] == []


@ranks(2)
def test_collectives_are_measured() -> None:
    options = collectives_measured.MEASURED.options(["--sizes=3", "--repeats=1"])
    found = collectives_measured.MEASURED.take(options, 2, torch.device("cpu"))
    assert [link["kind"] for link in found["links"]] == [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "shift",
    ]
    assert all(len(link["samples"]) == 3 and link["rate"] > 0 for link in found["links"])
    text = collectives_measured.page(found)
    assert "2 ranks on CPU; blocks of 1 KiB to 16 KiB" in text and "Of 6 kinds" in text


def test_verdicts_on_weak_scaling_are_those_of_the_page() -> None:
    then, now = committed(megatron_2019.EXPERIMENT), megatron_2019.EXPERIMENT.simulate()
    for one, other in zip(now["rows"], then["rows"], strict=True):
        assert one == pytest.approx(other, rel=0.1)
    assert [one.name for one in megatron_2019.EXPERIMENT.claims(now) if one.holds != one.expected] == []


def test_a_batch_of_the_sweeps_is_simulated_as_committed() -> None:
    one, other = tesseract_numbers.settings()["a100"], three_d_numbers.setting()
    for rows, name, known, setting, machine in (
        (
            committed(tesseract.EXPERIMENT)["sweeps"]["a100"],
            "2.5d, trees",
            tesseract_numbers.GRIDS,
            one,
            find_machine(one.machine),
        ),
        (committed(three_d.EXPERIMENT)["sweep"], "3d", three_d_numbers.GRIDS, other, other.nodes()),
    ):
        (now,) = sweep({name: known[name]}, setting.size, (64,), machine, setting.layers)
        assert now[name] == pytest.approx(rows[2][name], rel=0.1)
