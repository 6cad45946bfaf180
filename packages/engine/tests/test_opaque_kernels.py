"""Layouts are followed through Triton kernels, whose writes no mode of torch can see, as they are on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from meshfold.engine import Engine
from meshfold.kernels import use
from meshfold.mesh.testing import pool, run_on_ranks
from meshfold.models import build, preset


@contextlib.contextmanager
def opaque() -> Iterator[None]:
    """Have operations of the interpreter, which copies results back, be as unseen as a GPU's."""
    from meshfold.kernels import _triton, activations_triton, norms_triton

    def unseen(launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return launch(*args, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        plain = _triton.launch
        for module in (_triton, activations_triton, norms_triton):
            patch.setattr(module, "launch", unseen(plain))
        yield


def steps(parallel: dict[str, Any], kernels: str) -> list[str]:
    """Loss and gradient norm of two steps."""
    config = preset("llama-tiny", kv_heads=2, layers=1)
    # As many rows as a rank has heads of keys: a tensor that lost its layout is not found by its sizes.
    ids = torch.arange(2 * 8).reshape(2, 8) % 256
    found = []
    with (
        opaque() if kernels == "triton" else contextlib.nullcontext(),
        use(kernels),
        Engine(
            lambda: build(config), parallel, optimizer=dict(name="sgd", lr=0.1), precision="fp32", clip_grad_norm=1.0
        ) as engine,
    ):
        for _ in range(2):
            loss = engine.train_step(engine.shard_batch(dict(input_ids=ids, labels=ids)))
            assert engine.last is not None
            found.append(f"{loss:.5f} {engine.last.grad_norm:.4f}")
    return found


@pytest.fixture
def interpreting_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks whose Triton interprets: it asks whether to when it is imported, so they come from a process of their own."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pools = pool.Pools()
    monkeypatch.setattr("meshfold.mesh.testing.run.POOLS", pools)
    monkeypatch.setattr(pool.ForkServer, "preload", lambda self: self.preload_what(["meshfold.engine", "triton"]))
    yield
    pools.close()


def test_a_llama_of_triton_kernels_trains_under_tensor_parallelism(request: pytest.FixtureRequest) -> None:
    """Rotary embeddings, norms and gated activations hand the layouts of their inputs on to attention and reshapes."""
    pytest.importorskip("triton", reason="Triton's interpreter runs the kernels here")
    [serial] = run_on_ranks(1, steps, dict(data=1), "reference")
    request.getfixturevalue("interpreting_ranks")
    assert run_on_ranks(2, steps, dict(tensor=2), "triton") == [serial, serial]
