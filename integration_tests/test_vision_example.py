"""The vision example: the same losses under every spec."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "vision"))
from large_batch import CLASSES, OPTIMIZERS, draw, factor_of, main, train  # type: ignore[import-not-found]


def test_images_are_of_their_class_and_the_same_for_a_seed() -> None:
    one, again, other = draw(64, 3), draw(64, 3), draw(64, 4)
    assert torch.equal(one["images"], again["images"])
    assert not torch.equal(one["images"], other["images"])
    assert set(one["labels"].tolist()) == set(range(len(CLASSES)))
    assert [factor_of(step, 100) for step in (0, 10, 100)] == pytest.approx([1 / 11, 1.0, 0.0])


def losses(spec: dict[str, Any], optimizer: str) -> float:
    found: float = train(spec, optimizer, batch=32, small=16, samples=128)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("optimizer", "spec"),
    [
        ("lamb", dict(tensor=2)),
        ("lars", dict(sequence=dict(mode="ring", size=2))),
        *(pytest.param(name, dict(data=2, zero=dict(stage=3)), marks=pytest.mark.slow) for name in OPTIMIZERS),
    ],
)
def test_a_run_is_that_of_one_process(optimizer: str, spec: dict[str, Any]) -> None:
    wanted = losses({}, optimizer)
    for found in run_on_ranks(2, losses, spec, optimizer):
        assert found == pytest.approx(wanted, abs=1e-3)


def test_it_prints_losses_by_batch(capsys: pytest.CaptureFixture[str]) -> None:
    found = main(["--parallel", "{}", "--samples", "64", "--batches", "16", "32", "--optimizers", "lars"])
    assert capsys.readouterr().out.startswith("lars   loss by batch  16: ")
    assert set(found["lars"]) == {16, 32}
