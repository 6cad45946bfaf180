"""Experiments on memory and long sequences: their pages follow from the committed numbers, and what makes these is sane."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.attention_schemes import measured as attention_measured
from experiments.attention_schemes import run as attention
from experiments.attention_schemes import simulated as schemes
from experiments.attention_schemes.counting import Problem, Scheme, count
from experiments.auto_checkpointing import measured as budgets_measured
from experiments.auto_checkpointing import run as budgets
from experiments.auto_checkpointing import simulated as budget_plans
from experiments.gpt2_xl import measured as xl_measured
from experiments.gpt2_xl import run as xl
from experiments.gpt2_xl import simulated as xl_plans
from experiments.largest_model import run as largest
from experiments.largest_model import simulated as largest_plans
from experiments.planned import GB, Node, Size, planned
from experiments.report import Experiment, read_csv, rounded, summary, with_results
from experiments.ring_attention import measured as ring_measured
from experiments.ring_attention import run as ring
from experiments.ring_attention import simulated as lengths
from experiments.torchtitan import run as torchtitan
from experiments.torchtitan import simulated as titan_plans
from experiments.trained import Job, trained
from integration_tests.committed import committed
from meshfold.engine.zero import USUAL_CONTEXT_BYTES, DeviceLimit
from meshfold.mesh.testing import ranks
from meshfold.planner import Machine, find_machine
from meshfold.zero_gemini.machine_rates import ALLOCATOR_MARGIN

CPU = torch.device("cpu")
SMALL = Size(layers=3, hidden=256, heads=4)
EXPERIMENTS = (
    xl.EXPERIMENT,
    attention.EXPERIMENT,
    ring.EXPERIMENT,
    budgets.EXPERIMENT,
    torchtitan.EXPERIMENT,
    largest.EXPERIMENT,
)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_pages_follow_from_the_numbers(experiment: Experiment) -> None:
    numbers = committed(experiment)
    made = experiment.claims(numbers)
    assert [one.name for one in made if one.holds != one.expected] == []
    results = experiment.folder / "results"
    assert (results / "table.md").read_text(encoding="utf-8") == experiment.page(numbers, made)
    readme = (experiment.folder / "README.md").read_text(encoding="utf-8")
    assert with_results(readme, summary(made)) == readme


def test_a_plan_says_what_fits() -> None:
    node = Node(preset="a100x8", devices=2, gpu_gib=40, host_gb=100, source="")
    machine = node.machine()
    assert (machine.devices, machine.host.memory) == (2, 100 * GB)
    spec = dict(data=2, zero=dict(stage=3, placement="cuda"))
    few, more = (planned(SMALL, spec, machine, batch=batch, sequence=128) for batch in (8, 32))
    assert few["fits"] and few["GB"] < more["GB"] and few["parameters"] == more["parameters"]
    work = 8 * few["parameters"] * 8 * 128
    assert few["TFLOP/s"] * 1e12 * 2 * few["seconds"] == pytest.approx(work)
    assert not planned(SMALL, spec, replace(machine, memory=1e7), batch=8, sequence=128)["fits"]


def test_the_largest_batch_is_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(size: Size, spec: object, machine: Machine, *, batch: int) -> dict[str, Any]:
        held = 1.0 + 0.24 * batch / 4 + 0.001 * (batch / 4) ** 1.5  # nearly a line
        return {"GB": held, "fits": held * GB <= machine.memory}

    monkeypatch.setattr(xl_plans, "planned", plan)
    most = xl_plans.largest("ddp", replace(xl_plans.node(), memory=10 * GB))
    assert [1.0 + 0.24 * rows + 0.001 * rows**1.5 <= 10 for rows in (most, most + 1)] == [True, False]


def test_strategies_run() -> None:
    found = xl_measured.MEASURED.take(
        xl_measured.MEASURED.options(["--layers", "1", "--sequence", "8", "--steps", "1"]), 1, CPU
    )
    assert [row["fits"] for row in found["rows"]] == [True] * 3
    assert found["rows"][1]["loss"] == pytest.approx(found["rows"][2]["loss"], rel=1e-5)
    assert "1 ranks on CPU" in xl_measured.page(found)
    found["rows"][1] = {"strategy": "ddp", "batch": 2, "fits": False, "why": ""}
    assert "| ddp | 2 | – | does not fit | – |" in xl_measured.page(found)


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore.")

    monkeypatch.setattr("experiments.trained._steps", full)
    job = Job(sequence=8, steps=1, recompute=None, device=torch.device("cpu"))
    assert trained(torch.nn.Identity, 8, {}, job, batch=1) == {"fits": False, "why": "CUDA out of memory."}


def test_attention_is_counted_as_committed() -> None:
    then = committed(attention.EXPERIMENT)
    readme, degrees = (read_csv(schemes.FOLDER / f"published_{name}.csv") for name in ("readme", "degrees"))
    for row, numbers in (
        (schemes.of_readme(readme[0]), then["readme"][0]),
        (schemes.of_degrees(degrees[9]), then["degrees"][9]),
    ):
        assert row["ours"] == pytest.approx(numbers["ours"], rel=0.1)
    assert rounded(schemes.volume(Scheme(ring=2, ulysses=4))) in then["volumes"]
    assert [schemes.refused(n) for n in (32, 64)] == then["refused"][:2]


def test_the_busiest_rank_of_a_basic_ring_has_nearly_twice_the_pairs() -> None:
    problem = Problem(tokens=1024, heads=4, kv_heads=2, head_dim=16)
    basic, zigzag = (count(problem, Scheme(ring=4, ulysses=1, order=order)) for order in ("contiguous", "zigzag"))
    for phase, products in (("forward", 2), ("backward", 5)):
        assert zigzag[phase].work.flop == 2 * products * 1024 * 1025 // 2 // 4 * 4 * 16
        assert basic[phase].work.flop / zigzag[phase].work.flop == pytest.approx(3.5 / 2, rel=0.01)
        assert basic[phase].ring_bytes == zigzag[phase].ring_bytes and basic[phase].exchange_bytes == 0


@ranks(2)
def test_schemes_run() -> None:
    options = attention_measured.MEASURED.options(["--tokens", "16", "--repeats", "1"])
    found = attention_measured.MEASURED.take(options, 2, CPU)
    made = [(row["ring"], row["ulysses"], row["order"]) for row in found["rows"]]
    assert made == [(1, 2, "zigzag"), (2, 1, "contiguous"), (2, 1, "zigzag")]
    assert all(row["forward"] > 0 and row["both"] > 0 for row in found["rows"])
    assert "| 2 | 1 | contiguous |" in attention_measured.page(found)


def test_a_ring_needs_as_much_for_longer_sequences() -> None:
    size = lengths.Size(layers=2, hidden=64, heads=4, inner=128)
    alone, one = (lengths.plan(size, ring, 2, tokens)["GB"] for ring, tokens in ((False, 4096), (True, 8192)))
    assert one == pytest.approx(alone, rel=0.01)


def test_a_block_hides_messages_over_a_faster_link_sooner() -> None:
    gpu = find_machine(lengths.MACHINE)
    blocks = [lengths.hiding_block(gpu, link) for link in (gpu.inside, gpu.between)]
    assert blocks[0] < 1000 < blocks[1]
    assert [
        lengths.block(row)["clock"] for row in read_csv(lengths.FOLDER / "published_blocks.csv")[:2]
    ] == pytest.approx([block / 1e3 for block in blocks])


def test_a_long_sequence_runs() -> None:
    found = ring_measured.MEASURED.take(ring_measured.MEASURED.options(["--tokens", "8"]), 1, CPU)
    assert [row["tokens"] for row in found["rows"]] == [8] and found["rows"][0]["fits"]
    found["rows"].append({"tokens": 16, "fits": False, "why": ""})
    assert "| 16 | – | does not fit |" in ring_measured.page(found)


def test_a_smaller_budget_takes_longer() -> None:
    one = replace(budget_plans.setting(), layers=3, hidden=128, heads=2, sequence=128)
    whole = budget_plans.plan(one, 16, None)
    blocks = budget_plans.plan(one, 16, None, "blocks")
    budget = (whole["GB"] + blocks["GB"]) / 2
    limit = DeviceLimit(
        bytes=round(budget * GB / (1 - ALLOCATOR_MARGIN)) + USUAL_CONTEXT_BYTES, outside=USUAL_CONTEXT_BYTES
    )
    between = budget_plans.plan(one, 16, limit.bytes / GB)
    assert limit.plan_bytes == pytest.approx(budget * GB)
    assert blocks["GB"] < between["GB"] < whole["GB"]
    assert whole["seconds"] <= between["seconds"] <= blocks["seconds"]


def test_the_batch_of_a_budget_is_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_plans, "plan", lambda one, batch, budget: {"GB": 4.0 + 0.9 * batch})
    assert budget_plans.largest(budget_plans.setting(), 53.0) == 48  # in 50.4 GB


def test_a_budget_runs() -> None:
    found = budgets_measured.MEASURED.take(budgets_measured.MEASURED.options([]), 1, CPU)
    assert [(row["budget"], row["fits"]) for row in found["rows"]] == [(53, True)]
    found["rows"].append({"budget": 11, "fits": False, "why": ""})
    assert "| 11 | – | does not fit | – |" in budgets_measured.page(found)


def test_what_was_measured_within_budgets_is_what_the_page_shows() -> None:
    folder = budgets.EXPERIMENT.folder / "results"
    found = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    assert (folder / "measured.md").read_text(encoding="utf-8") == budgets_measured.page(found)
    shown = committed(budgets.EXPERIMENT)["measured"]
    for key in ("budget", "GB", "seconds"):
        assert [row[key] for row in shown] == [row[key] for row in found["rows"]]


def test_asynchronous_traffic_is_what_a_layer_no_longer_waits_for() -> None:
    size = titan_plans.Size(layers=2, hidden=2048, heads=16, kv_heads=8, inner=4096)
    row = dict(data="2", tensor="4", sequence="8192", rows="8", saved="full", technique="compile")
    shared = titan_plans.plan(size, row)
    assert shared["most"] > shared["TPS"] > 0
    alone = titan_plans.plan(size, row | dict(tensor="1"))
    assert alone["most"] == pytest.approx(alone["TPS"], rel=0.01)
    slower = replace(titan_plans.node(), inside=1e9)
    assert titan_plans.plan(size, row, slower)["TPS"] < shared["TPS"]
    # Every second product is repeated and attention is not; a limit of power slows matmuls down.
    selective = titan_plans.plan(size, row | dict(tensor="1", saved="selective"))
    assert 1.05 < selective["TPS"] / alone["TPS"] < 1.3 and selective["GiB"] > alone["GiB"]
    free = replace(titan_plans.node(), flops=find_machine("h100x8").flops)
    clock = ((500 - 70) / 630) ** (1 / 3)
    assert clock < alone["TPS"] / titan_plans.plan(size, row | dict(tensor="1"), free)["TPS"] < 0.95


def test_placement_on_the_host_leaves_more_of_a_gpu() -> None:
    plans = {name: largest_plans.plan(SMALL, name, 1, largest_plans.node()) for name in ("cuda", "cpu")}
    assert plans["cpu"]["GB"] < plans["cuda"]["GB"] and plans["cpu"]["host GB"] > plans["cuda"]["host GB"]
    sizes = largest_plans.zoo()
    assert {row["model"] for row in read_csv(largest_plans.FOLDER / "published.csv")} <= set(sizes)
    assert {name for names in largest_plans.TRIED.values() for name in names} <= set(sizes)
