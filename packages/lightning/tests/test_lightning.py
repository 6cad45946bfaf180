"""MeshfoldStrategy trains Lightning's own example modules as Lightning alone does on one device."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("lightning", reason="needs meshfold[lightning]")

from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from lightning_cases import MODULES, assert_same, parallel_run, serial

SPECS: dict[str, dict[str, Any]] = {
    "data 4": {},
    "tensor 4": {"tensor": 4},
    "data 2 × tensor 2": {"data": 2, "tensor": 2},
    "zero 1": {"zero": {"stage": 1}},
    "zero 3 cuda": {"zero": {"stage": 3, "placement": "cuda"}},
    "zero 3 cpu": {"zero": {"stage": 3, "placement": "cpu"}},
    "zero 3 auto": {"zero": {"stage": 3, "placement": "auto"}},
    "zero 3 × tensor 2": {"data": 2, "tensor": 2, "zero": {"stage": 3, "placement": "cuda"}},
}


@functools.cache
def wanted(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    return serial(kind)


def runs(parallel: dict[str, Any]) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    return {kind: parallel_run(kind, parallel) for kind in MODULES}


SLOW = ("data 2 × tensor 2", "zero 1", "zero 3 cpu")
"""Each beside others of its kind"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=pytest.mark.slow) if spec in SLOW else spec for spec in SPECS]
)
def test_example_modules_train_as_on_one_device(spec: str) -> None:
    for rank in run_on_ranks(4, runs, SPECS[spec]):
        for kind, found in rank.items():
            assert_same(found, wanted(kind))
