"""Runs the tests of Triton kernels on the CPU, in Triton's interpreter, in a process that chose it from the start."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TWINS = "test_triton_twins.py"
FILES = (
    TWINS,
    "test_adam_triton.py",
    "test_tensor_lists.py",
    "test_factored_lists.py",
    "test_row_product.py",
    "test_one_shot_triton.py",
    "test_word_choice_triton.py",
)


# Everything takes minutes: in pieces, each in a process of its own.
_CASTS, _ATTENTION = "cast or scales", "pair_attention"
_PIECES: dict[str, tuple[str, ...]] = {
    "casts": ("-k", _CASTS, TWINS),
    "attention": ("-k", f"{_ATTENTION} and not ({_CASTS})", TWINS),
    "other twins": ("-k", f"not ({_CASTS} or {_ATTENTION})", TWINS),
    **{name: (name,) for name in FILES if name != TWINS},
}


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(("-k", "not torch.float16", "-m", "not slow", *FILES), id="quick"),
        *(
            pytest.param(chosen, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id=f"all of {name}")
            for name, chosen in _PIECES.items()
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: the file runs on it by itself")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_agree_with_the_reference_in_the_interpreter(chosen: tuple[str, ...], tmp_path: Path) -> None:
    """The quick pass has all files in one process: Triton takes longer to import than many of them take to run."""
    words = [str(Path(__file__).with_name(word)) if word in FILES else word for word in chosen]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--import-mode=importlib",
        "-q",
        "-x",
        "-rs",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path}/inner", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout and "no GPU" not in done.stdout  # no file skipped from its first line on
