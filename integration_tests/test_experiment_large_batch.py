"""The experiment large-batch: a small run of it, what is committed, and verdicts that can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from experiments import report
from experiments.large_batch import run
from experiments.large_batch.training import GUESS, METHODS, Setting, everything, factor_of, train
from experiments.report import with_results

SMALL = Setting(samples=2048, large=(256,), held=128, micro=128)


def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.EXPERIMENT.folder / "results" / "measured.json").read_text())
    return found


def test_a_small_run_learns_and_comes_out_again() -> None:
    methods = {name: replace(METHODS[name], rates=METHODS[name].rates[1:2]) for name in ("LARS", "LAMB")}
    found = everything(SMALL, methods)
    for name, one in found["methods"].items():
        assert one["losses"]["32"] < GUESS - 1.0, name
        assert list(one["losses"]) == ["32", "256"] and one["losses"]["256"] > one["losses"]["32"]
    lamb = methods["LAMB"]
    assert train(SMALL, lamb, 256, lamb.rates[0] * 8**0.5) == pytest.approx(found["methods"]["LAMB"]["losses"]["256"])
    assert train(SMALL, METHODS["SGD"], 256, 1e4) == GUESS  # diverged


def test_micro_steps_change_nothing() -> None:
    tiny, lamb = replace(SMALL, samples=512), METHODS["LAMB"]
    assert train(replace(tiny, micro=64), lamb, 256, 0.05) == pytest.approx(train(tiny, lamb, 256, 0.05), abs=1e-4)


def test_rates_rise_and_fall() -> None:
    factors = [factor_of(step, 100) for step in range(100)]
    assert factors[0] < factors[9] < factors[10] == 1.0 and factors[-1] < 0.01
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_what_is_committed_is_made_from_the_committed_numbers() -> None:
    found = committed()
    claims = run.EXPERIMENT.claims(found)
    assert (run.EXPERIMENT.folder / "results" / "table.md").read_text(encoding="utf-8") == run.EXPERIMENT.page(
        found, claims
    )
    readme = (run.EXPERIMENT.folder / "README.md").read_text(encoding="utf-8")
    assert with_results(readme, report.summary(claims)) == readme
    assert [one.name for one in claims if one.holds != one.expected] == []
    assert (run.EXPERIMENT.folder / "results" / "large-batch.png").read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_is_no_lower_is_not_reproduced() -> None:
    found = committed()
    found["methods"]["LAMB"]["losses"]["1024"] = GUESS
    [claim] = [one for one in run.EXPERIMENT.claims(found) if one.name == "LAMB loses less than AdamW"]
    assert claim.expected and not claim.holds and "**not reproduced**" in claim.said
