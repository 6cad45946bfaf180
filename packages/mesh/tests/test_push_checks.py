"""The checks of pushes, on two GPUs where there are two, else on two CPU ranks in small."""

from __future__ import annotations

from pathlib import Path

import push_checks
import pytest
import torch

from meshfold.mesh import Mesh
from meshfold.mesh.processes import launch
from meshfold.mesh.testing import ranks


@ranks(2)
def test_pushes_lose_no_block_when_ranks_are_late() -> None:
    push_checks.races(Mesh(dict(tensor=2)).group("tensor"), torch.device("cpu"), calls=40)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="pushes between two GPUs; there are not two")
def test_two_gpus_push_right() -> None:
    assert launch([str(Path(push_checks.__file__))], 2) == 0
