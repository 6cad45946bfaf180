"""Layouts are followed through Triton kernels, whose writes no mode of torch can see, as they are on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from torch.utils._python_dispatch import _disable_current_modes
from meshfold.engine import Engine
from meshfold.kernels import _triton, activations_triton, norms_triton, rotary_triton
from meshfold.models import build, preset

def opaque(launch):
    def run(*args, **options):
        # The interpreter copies results back by operations of torch; a GPU does not.
        with _disable_current_modes():
            return launch(*args, **options)
    return run

for module in (activations_triton, norms_triton, rotary_triton):
    module.launch = opaque(_triton.launch)

config = preset("llama-tiny", kv_heads=2, layers=1)
spec = eval(sys.argv[1])
engine = Engine(lambda: build(config), spec, optimizer=dict(name="sgd", lr=0.1), precision="fp32", clip_grad_norm=1.0)
# As many rows as a rank has heads of keys: a tensor that lost its layout is not found by its sizes.
ids = torch.arange(2 * 8).reshape(2, 8) % 256
for step in range(2):
    loss = engine.train_step(engine.shard_batch(dict(input_ids=ids, labels=ids)))
    engine.print(f"{loss:.5f} {engine.last.grad_norm:.4f}")
"""


def test_a_llama_of_triton_kernels_trains_under_tensor_parallelism(tmp_path: Path, warm_python: str) -> None:
    """Rotary embeddings, norms and gated activations hand the layouts of their inputs on to attention and reshapes."""
    pytest.importorskip("triton", reason="Triton's interpreter runs the kernels here")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def printed(python: str, spec: str, ranks: int, **environment: str) -> str:
        words = [python, "-m", "meshfold.cli", "run", "--ranks", str(ranks), str(script), spec]
        ended = subprocess.run(
            words, capture_output=True, text=True, timeout=240, env={**os.environ, **environment}, cwd=tmp_path
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    serial = printed(warm_python, "dict(data=1)", 1, MESHFOLD_KERNELS="reference")
    # Triton asks whether to interpret when it is imported, which the warm Python has done.
    with_triton = dict(TRITON_INTERPRET="1", MESHFOLD_KERNELS="triton")
    assert printed(sys.executable, "dict(tensor=2)", 2, **with_triton) == serial
