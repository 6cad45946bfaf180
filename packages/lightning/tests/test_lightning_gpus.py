"""Lightning's own example modules on the GPUs that are there, under specs for as many, beside Lightning alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="needs meshfold[lightning]")

SCRIPT = Path(__file__).with_name("lightning_on_gpus.py")
SPECS: dict[int, list[dict[str, Any]]] = {
    1: [{"zero": {"stage": 3, "placement": "cuda"}}, {"zero": {"stage": 3, "placement": "cpu"}}],
    2: [{"data": 2}, {"tensor": 2}, {"zero": {"stage": 3, "placement": "cuda"}}],
    4: [{"data": 2, "tensor": 2}, {"data": 2, "tensor": 2, "zero": {"stage": 2, "placement": "cuda"}}],
}
CASES = [pytest.param(count, spec, id=f"{count} {json.dumps(spec)}") for count, all_ in SPECS.items() for spec in all_]
Runs = dict[tuple[str, str], tuple[list[float], dict[str, torch.Tensor]]]


def trained(out: Path, spec: dict[str, Any], ranks: int, accelerator: str = "gpu") -> Runs:
    """Every example in every precision."""
    words = [str(SCRIPT), str(out), accelerator, json.dumps(spec)]
    start = ["-m", "meshfold.cli", "run", "--ranks", str(ranks)] if spec else []
    ended = subprocess.run([sys.executable, *start, *words], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    found: Runs = torch.load(out)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return trained(tmp_path_factory.mktemp("alone") / "runs.pt", {}, 1)


@pytest.mark.parametrize(("devices", "spec"), CASES)
def test_lightnings_examples_train_on_gpus(
    tmp_path: Path, request: pytest.FixtureRequest, devices: int, spec: dict[str, Any]
) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"trains on {devices} GPUs, and there are {torch.cuda.device_count()}")
    wanted: Runs = request.getfixturevalue("alone")
    found = trained(tmp_path / "runs.pt", spec, devices)
    assert found.keys() == wanted.keys()
    for (kind, precision), (losses, weights) in wanted.items():
        near = 1e-4 if precision == "32-true" else 2e-2  # products round otherwise on a part of a matrix
        mine, whole = found[kind, precision]
        assert len(mine) == len(losses) > 3 and whole.keys() == weights.keys()
        for step, (one, other) in enumerate(zip(mine, losses, strict=True)):
            assert one == pytest.approx(other, rel=near, abs=near), (kind, precision, step)
        for name, value in weights.items():
            torch.testing.assert_close(
                whole[name], value.cpu(), rtol=10 * near, atol=10 * near, msg=f"{kind} {precision} {name}"
            )
