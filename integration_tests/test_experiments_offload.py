"""Experiments on offloading and on parity: pages follow from the committed numbers and can fail, and what makes these is sane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.gemini_ablation import measured as ablation_measured
from experiments.gemini_ablation import run as ablation
from experiments.gemini_ablation import simulated as ablation_plans
from experiments.parity import run as parity
from experiments.parity import training
from experiments.parity.claims import off
from experiments.patrickstar import run as patrickstar
from experiments.patrickstar import simulated as patrickstar_plans
from experiments.planned import Size, limits_of
from experiments.report import Experiment
from experiments.speculative_steps import run as speculative
from experiments.speculative_steps import simulated as speculative_plans
from integration_tests.committed import check_can_fail, check_committed, committed
from meshfold.mesh.testing import run_on_ranks

SMALL = Size(layers=3, hidden=256, heads=4)


def spoil_parity(found: dict[str, Any]) -> None:
    (row,) = (row for row in found["rows"] if row["spec"] == "tensor-2d")
    row["losses"][3] *= 1.0001


def spoil_patrickstar(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        if (row["gpus"], row["billions"], row["placement"]) == (8, 15, "planned"):
            row["TFLOPS"] *= 1.3


def spoil_ablation(found: dict[str, Any]) -> None:
    found["rows"][1]["seconds"] = found["rows"][0]["seconds"] * 1.1


def spoil_speculative(found: dict[str, Any]) -> None:
    found["trained"]["differ"]["weights"] = 1


ALL: dict[str, tuple[Experiment, Callable[[dict[str, Any]], None], str]] = {
    "parity": (parity.EXPERIMENT, spoil_parity, "1D, 2D, 2.5D and 3D tensor parallelism"),
    "patrickstar": (patrickstar.EXPERIMENT, spoil_patrickstar, "speed does not fall up to 15 billion"),
    "gemini-ablation": (ablation.EXPERIMENT, spoil_ablation, "no technique makes a step slower"),
    "speculative-steps": (speculative.EXPERIMENT, spoil_speculative, "steps made ahead are exact"),
}


@pytest.mark.parametrize("name", ALL)
def test_pages_are_made_from_the_committed_numbers_and_can_fail(name: str) -> None:
    experiment, spoil, claim = ALL[name]
    check_committed(experiment)
    check_can_fail(experiment, spoil, claim)


def test_specs_that_were_trained_are_those_of_the_settings() -> None:
    rows = {row["spec"]: row for row in committed(parity.EXPERIMENT)["rows"]}
    found = training.settings()
    assert list(rows) == list(found)
    assert all((rows[name]["parallel"], rows[name]["ranks"]) == (one.spec, one.ranks) for name, one in found.items())


def test_a_schedule_changes_no_bit_of_a_loss() -> None:
    then, found = committed(parity.EXPERIMENT), training.settings()
    plain, split = (training.run(found[name], steps=2) for name in ("1f1b", "zb-h1"))
    assert plain == split
    assert off(plain, then["serial"][:2]) < 1e-5


def test_what_does_not_fit_on_the_host_may_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    most, host = patrickstar_plans.planned(SMALL, 1, 1, rows=1)
    assert most["fits"] and host["fits"] and most["GB"] >= host["GB"] and most["seconds"] <= host["seconds"]
    less = int(1e9 * host["host GB"]) - 1000
    monkeypatch.setattr(patrickstar_plans, "limits_of", lambda machine: replace(limits_of(machine), host_bytes=less))
    assert [row["fits"] for row in patrickstar_plans.planned(SMALL, 1, 1, rows=1)] == [True, False]


def test_compute_waits_for_copies_that_nothing_prefetches() -> None:
    one = replace(ablation_plans.settings()["4b"], layers=3, hidden=256, heads=4, batch=1)
    rows = {row["stage"]: row for row in ablation_plans.stages(one)}
    assert list(rows) == list(ablation_plans.STAGES)
    assert rows["none"]["seconds"] > rows["prefetch"]["seconds"] >= rows["hybrid Adam"]["seconds"]
    assert rows["cache"]["GB"] >= rows["prefetch"]["GB"] and rows["cache"]["host GB"] == rows["prefetch"]["host GB"]


def test_placements_run() -> None:
    options = ablation_measured.MEASURED.options([])
    found = ablation_measured.MEASURED.take(options, 1, torch.device("cpu"))
    assert [row["placement"] for row in found["rows"]] == [*reversed(ablation_plans.PLACEMENTS), "planned"]
    assert all(row["fits"] for row in found["rows"]) and len({row["loss"] for row in found["rows"]}) == 1
    found["rows"][0] = {"placement": "half", "fits": False, "why": ""}
    assert "| half | – | does not fit | – | – |" in ablation_measured.page(found)


@pytest.mark.slow
def test_steps_made_ahead_change_no_bit() -> None:
    waited, ahead = (run_on_ranks(1, speculative_plans.train, flag)[0] for flag in (False, True))
    assert waited["ahead"] == [] and ahead["ahead"] == committed(speculative.EXPERIMENT)["trained"]["ahead"]
    assert speculative_plans.CLIPPED in ahead["ahead"]
    assert speculative_plans.differences(waited, ahead) == {"losses": 0, "norms": 0, "weights": 0}


def test_the_planner_chooses_what_is_fastest() -> None:
    small: dict[str, Any] = dict(
        layers=2, hidden=128, heads=4, kv_heads=4, inner=256, vocabulary=512, sequence=64, batch=2
    )
    made = speculative_plans.clock(replace(speculative_plans.settings()["5b"], **small))
    assert 0 < made["planned"] <= min(made["host"], made["ahead"])
