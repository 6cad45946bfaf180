"""Attention over pages: the Triton kernel against the reference, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")


def test_the_triton_kernel_is_the_reference() -> None:
    chosen = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "paged_attention_in_triton.py"],
        cwd=Path(__file__).parent,
        env={**os.environ, **chosen},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
