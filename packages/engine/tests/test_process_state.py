"""A closed engine leaves the process as it was: environment, torch's settings, hooks, signals and threads."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks_of_all

from meshfold.engine import Engine
from meshfold.mesh.recording import flight_recorder
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig

SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "zero on the host": dict(data=2, zero=dict(stage=3, placement="cpu")),
    "zero under a plan": dict(data=2, zero=dict(stage=2, gpu_memory_limit="1GiB")),
    "tensor": dict(tensor=2),
    "sequence": dict(sequence=dict(mode="ring", size=2)),
    "pipeline": dict(pipeline=dict(size=2, microbatches=2)),
}


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=32, hidden=16, layers=2, heads=4, max_positions=16, dropout=0.1))


def process_state() -> dict[str, Any]:
    """Return what an engine could change for the whole process."""
    state: dict[str, Any] = {f"environ {name}": value for name, value in os.environ.items()}
    for number in signal.valid_signals():
        state[f"signal {number}"] = signal.getsignal(number)
    for name in dir(hooks_of_all):
        if name.startswith("_global_") and isinstance(value := getattr(hooks_of_all, name), dict):
            state[name] = len(value)
    for thread in threading.enumerate():
        if thread.name != "meshfold watchdog":  # one for the world, which stays
            state[f"thread {thread.name}"] = True
    return state | {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "mha": torch.backends.mha.get_fastpath_enabled(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "random state": torch.get_rng_state().tolist(),
        "warnings": [*warnings.filters],
        "exception hooks": (sys.excepthook, threading.excepthook),
        "working folder": os.getcwd(),
        "flight recorder": (flight_recorder.active, flight_recorder.limit),
    }


def changed(parallel: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Train and evaluate; name what is not as it was."""
    ids = torch.arange(8 * 16).view(8, 16) % 32

    def train() -> None:
        with Engine(gpt, parallel, optimizer=dict(name="adamw", lr=1e-3), clip_grad_norm=1.0, **settings) as engine:
            for _ in range(3):
                engine.train_step(engine.shard_batch(dict(input_ids=ids, labels=ids)))
            engine.eval_step(engine.shard_batch(dict(input_ids=ids, labels=ids)))

    before = process_state()
    train()
    after = process_state()
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


@pytest.mark.few(2)
@pytest.mark.parametrize("spec", SPECS)
def test_the_process_is_as_it_was(spec: str) -> None:
    assert run_on_ranks(2, changed, SPECS[spec], {}) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_the_process_is_as_it_was_under_other_settings(spec: str) -> None:
    settings: dict[str, Any] = dict(precision="bf16", nonfinite="skip", watchdog=60.0)
    assert run_on_ranks(2, changed, SPECS[spec], settings) == [[], []]


def test_the_process_is_as_it_was_when_an_engine_cannot_be_built() -> None:
    model = nn.Linear(2, 2)
    before = process_state()
    with pytest.raises(ValueError, match="no optimizer today"):
        Engine(model, dict(zero=dict(stage=3)), optimizer=refuse)
    after = process_state()
    assert [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)] == []


def refuse(parameters: object) -> torch.optim.Optimizer:
    raise ValueError("no optimizer today")
