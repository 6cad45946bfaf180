"""A closed engine and its model are gone when nothing refers to them any more, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshfold.engine import Engine
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig

SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "zero 2": dict(data=2, zero=dict(stage=2)),
    "zero 3": dict(data=2, zero=dict(stage=3)),
    "zero on the host": dict(data=2, zero=dict(stage=3, placement="cpu")),
    "zero under a plan": dict(data=2, zero=dict(stage=3, gpu_memory_limit="1GiB")),
    "tensor 1d": dict(tensor=2),
    "tensor ring": dict(tensor=dict(mode="1d", size=2, overlap="ring")),
    "sequence": dict(sequence=dict(mode="ring", size=2)),
    "ulysses": dict(sequence=dict(mode="ulysses", size=2)),
    "pipeline": dict(pipeline=dict(size=2, microbatches=2)),
    "zero bubble": dict(pipeline=dict(size=2, microbatches=2, schedule="zb-h1")),
    "pipeline and zero": dict(pipeline=dict(size=2, microbatches=2), zero=dict(stage=3)),
}
FOUR: dict[str, dict[str, Any]] = {
    "tensor 2d": dict(tensor=dict(mode="2d", size=4)),
    "tensor 2.5d": dict(tensor=dict(mode="2.5d", size=4, depth=1)),
    "data and tensor": dict(data=2, tensor=2, zero=dict(stage=3)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": dict(precision="bf16"),
    "recompute": dict(recompute="blocks"),
    "compile": dict(compile=dict(backend="aot_eager")),
    "nonfinite": dict(nonfinite="error"),
}


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=32, hidden=16, layers=2, heads=4, max_positions=16, dropout=0.1))


def not_waited_for() -> int:
    """Return the number of collectives that were begun, with results that nobody has waited for: torch keeps their memory."""
    return int(torch._C._distributed_c10d._get_work_registry_size())


def kept(model: Callable[[], nn.Module] | nn.Module, parallel: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Evaluate, train three steps, save nothing, close; name what is still there."""
    begun = not_waited_for()
    engine = Engine(model, parallel, optimizer=dict(name="adamw", lr=1e-3), clip_grad_norm=1.0, **settings)
    ids = torch.arange(8 * 16).view(8, 16) % 32
    with engine:
        engine.eval_step(engine.shard_batch(dict(input_ids=ids, labels=ids)))
        for _ in range(3):
            engine.train_step(engine.shard_batch(dict(input_ids=ids, labels=ids)))
    found: dict[str, Callable[[], object]] = {"engine": weakref.ref(engine), "model": weakref.ref(engine.model)}
    found |= {name: weakref.ref(parameter) for name, parameter in engine.model.named_parameters()}
    del engine, model
    left = [name for name, reference in found.items() if reference() is not None]
    return [*left, *["a collective that nobody waited for, with its memory"] * (not_waited_for() - begun)]


def kept_without_collector(parallel: dict[str, Any], settings: dict[str, Any], whole: bool = False) -> list[str]:
    gc.collect()
    gc.disable()
    try:
        return kept(gpt() if whole else gpt, parallel, settings)
    finally:
        gc.enable()


QUICK = ("data", "zero 1", "zero under a plan", "tensor 1d", "sequence", "pipeline and zero")


@pytest.mark.few(3)
@pytest.mark.parametrize("spec", [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in SPECS])
def test_nothing_is_kept(spec: str) -> None:
    assert run_on_ranks(2, kept_without_collector, SPECS[spec], {}) == [[], []]


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", FOUR)
def test_nothing_is_kept_by_four(spec: str) -> None:
    assert run_on_ranks(4, kept_without_collector, FOUR[spec], {}) == [[]] * 4


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings", [s if s != "compile" else pytest.param(s, marks=pytest.mark.slow) for s in SETTINGS]
)
@pytest.mark.parametrize("spec", ["data", "zero 3", "tensor 1d", "pipeline"])
def test_nothing_is_kept_under_settings(spec: str, settings: str) -> None:
    assert run_on_ranks(2, kept_without_collector, SPECS[spec], SETTINGS[settings]) == [[], []]


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", ["data", "zero 3", "tensor 1d", "pipeline"])
def test_nothing_is_kept_of_a_module(spec: str) -> None:
    assert run_on_ranks(2, kept_without_collector, SPECS[spec], {}, True) == [[], []]


@pytest.mark.parametrize("parallel", [{}, dict(zero=dict(stage=1)), dict(zero=dict(stage=3)), dict(tensor=1)], ids=str)
def test_an_engine_that_is_dropped_without_close_goes_at_a_collection(parallel: dict[str, Any]) -> None:
    engine = Engine(gpt, parallel, optimizer=dict(name="adamw", lr=1e-3))
    ids = torch.arange(4 * 16).view(4, 16) % 32
    engine.train_step(dict(input_ids=ids, labels=ids))
    found = [weakref.ref(engine), weakref.ref(engine.model), *map(weakref.ref, engine.model.parameters())]
    del engine
    gc.collect()
    assert not any(reference() is not None for reference in found)
