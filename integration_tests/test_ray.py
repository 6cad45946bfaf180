"""The Ray Train example of the documentation, where Ray is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integration_tests.house import ROOT
from meshfold.engine import Engine
from meshfold.models import build


@pytest.mark.slow  # half a minute: Ray starts a small cluster
def test_the_example_trains_as_one_process_does(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch", reason='Ray is no dependency: pip install "ray[train]"')
    page = (ROOT / "docs" / "ray-and-trainer.md").read_text()
    block = re.search(r"```python\n(import ray\n.*?)```", page, re.DOTALL)
    assert block is not None
    (tmp_path / "example.py").write_text(block[1])
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "RAY_TRAIN_V2_ENABLED": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(re.findall(r"step (\d)  loss (\d+\.\d+)", done.stdout + done.stderr))
    alone = Engine(lambda: build("gpt-tiny"), optimizer=dict(name="adamw", lr=1e-3), device="cpu")
    batch = torch.randint(255, (8, 32), generator=torch.Generator().manual_seed(0))
    wanted = {str(step + 1): f"{alone.train_step(batch):.4f}" for step in range(3)}
    assert said.keys() == wanted.keys()
    assert [float(said[step]) for step in "123"] == pytest.approx([float(wanted[step]) for step in "123"], abs=2e-4)
