"""Attention over pages and products of one row: Triton kernels against the reference, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")


def test_triton_kernels_are_the_reference() -> None:
    chosen = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    program = "import attention_in_triton, products_in_triton; attention_in_triton.main(); products_in_triton.main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        env={**os.environ, **chosen},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
