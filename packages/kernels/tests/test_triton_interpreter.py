"""Runs the tests of Triton kernels on the CPU, in Triton's interpreter, in a process that chose it from the start."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("test_triton_twins.py", "not torch.float16"),
        pytest.param("test_triton_twins.py", "torch.float16", marks=pytest.mark.slow),
        ("test_adam_triton.py", ""),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: the file runs on it by itself")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_agree_with_the_reference_in_the_interpreter(
    file: str, chosen: str, tmp_path: Path
) -> None:
    twins = Path(__file__).with_name(file)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--import-mode=importlib",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path}/inner", "-k", chosen, str(twins)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout  # and not skipped from the first line on
