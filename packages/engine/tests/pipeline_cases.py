"""What tests of the engine's pipelines share: small models, batches, and the same run in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfold.engine import Engine
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig
from meshfold.zero_gemini import Gemini

VOCABULARY = 37
# A large epsilon: Adam divides gradients that are zero but for rounding, such as those of key biases, by themselves.
ADAMW: dict[str, Any] = dict(name="adamw", lr=1e-2, weight_decay=0.1, no_decay="norms_and_biases", eps=1e-4)
SIZES: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden=16, layers=4, heads=4, max_positions=16)


def gpt(**changes: Any) -> GPT:
    return GPT(GPTConfig(**{**SIZES, **changes}))


def llama(**changes: Any) -> Llama:
    return Llama(LlamaConfig(**{**SIZES, "kv_heads": 2, "ffn": 24, **changes}))


Case = tuple[dict[str, Any], str, dict[str, Any]]
"""spec, model, the engine's other settings"""

MODELS: dict[str, Any] = {
    "gpt": gpt,
    "long": partial(gpt, max_positions=24),
    "tied": partial(gpt, tie=True),
    "dropping": partial(gpt, tie=True, dropout=0.2),
    "llama": llama,
    # For specs that need no more blocks: each costs every rank as much again.
    "two": partial(llama, layers=2),
    "two tied": partial(gpt, layers=2, tie=True),
    "two dropping": partial(gpt, layers=2, tie=True, dropout=0.2),
    "shallow": partial(llama, layers=1),
}


def batches(count: int, rows: int = 8, seed: int = 1, length: int = 8) -> list[dict[str, Tensor]]:
    """Rows have different numbers of labels that count; the first one none."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
        labels[0] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def engine_of(parallel: dict[str, Any], model: str = "gpt", **settings: Any) -> Engine:
    arguments: dict[str, Any] = {"optimizer": ADAMW, "precision": "fp64", "clip_grad_norm": 0.3}
    return Engine(MODELS[model], parallel, **{**arguments, **settings})


def train(engine: Engine, given: list[dict[str, Tensor]], evaluate: bool = True) -> list[float]:
    """The loss of every micro-step, the gradient's norm of every step, and the loss of an evaluation behind the second."""
    seen = []
    for number, batch in enumerate(given):
        seen.append(engine.train_step(engine.shard_batch(batch)))
        assert engine.last is not None
        if engine.last.stepped:
            assert engine.last.grad_norm is not None
            seen.append(engine.last.grad_norm)
        if evaluate and number == 1:
            seen.append(engine.eval_step(engine.shard_batch(batch)))
    return seen


def run(
    parallel: dict[str, Any], model: str, given: list[dict[str, Tensor]], evaluate: bool = True, **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """What was seen, and the whole model afterwards."""
    with engine_of(parallel, model, **settings) as engine:
        return train(engine, given, evaluate), engine.full_state_dict()


def runs(cases: list[Case], given: list[dict[str, Tensor]]) -> list[Any]:
    return [run(parallel, model, given, **settings) for parallel, model, settings in cases]


def steps_alone(cases: list[Case], given: list[dict[str, Tensor]]) -> list[Any]:
    """As :func:`runs`, without evaluations, which nothing of an optimizer is in."""
    return [run(parallel, model, given, evaluate=False, **settings) for parallel, model, settings in cases]


def compare(
    size: int,
    cases: list[Case],
    given: list[dict[str, Tensor]],
    runs: Callable[..., list[Any]] = runs,
    tolerance: float = 1e-9,
) -> None:
    """Every case on so many ranks, against one process, which trains each model once."""
    alone: list[Case] = []
    for _, model, settings in cases:
        if ({}, model, settings) not in alone:
            alone.append(({}, model, settings))
    serial = runs(alone, given)
    wanted = [serial[alone.index(({}, model, settings))] for _, model, settings in cases]
    for rank in run_on_ranks(size, runs, cases, given):
        for found, serial, case in zip(rank, wanted, cases, strict=True):
            assert_same(found, serial, str(case), tolerance)


def assert_same(
    found: tuple[list[float], dict[str, Tensor]],
    wanted: tuple[list[float], dict[str, Tensor]],
    what: str,
    tolerance: float = 1e-9,
) -> None:
    """Losses, norms and every tensor of the whole model."""
    seen = [torch.tensor(numbers, dtype=torch.float64) for numbers, _ in (found, wanted)]
    pairs = {"losses and norms": seen, **{n: [found[1].get(n), value] for n, value in wanted[1].items()}}
    assert list(found[1]) == list(wanted[1]), what
    for name, (value, other) in pairs.items():
        torch.testing.assert_close(
            value, other, rtol=tolerance, atol=tolerance, msg=partial("{}: {}: {}".format, what, name)
        )


@contextmanager
def watched(gemini: Gemini) -> Iterator[list[int]]:
    """The peak of the device's chunks whenever it is about to be forgotten."""
    arena, seen = gemini.memory.compute, list[int]()
    reset = arena.reset_peak

    def note() -> None:
        seen.append(arena.peak_bytes)
        reset()

    arena.reset_peak = note  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        arena.reset_peak = reset  # type: ignore[method-assign]
    seen.append(arena.peak_bytes)


def relay(legs: list[tuple[int, dict[str, Any]]], leg: Callable[..., Any], folder: Path, *first: Any) -> None:
    """A run handed from spec to spec by checkpoints, two steps each, is the unbroken run of one process.

    ``leg(*first, parallel, load, save, batches)``: its losses, what it loaded, and the whole model afterwards.
    """
    given = batches(2 * len(legs))
    unbroken = leg(*first, {}, "", str(folder / "unbroken"), given)
    losses: list[float] = []
    state: dict[str, Tensor] = {}
    for number, (size, parallel) in enumerate(legs):
        load = str(folder / f"leg{number - 1}") if number else ""
        arguments = (*first, parallel, load, str(folder / f"leg{number}"), given[2 * number : 2 * number + 2])
        found = [leg(*arguments)] if size == 1 else run_on_ranks(size, leg, *arguments)
        for rank in found:
            assert rank[0] == found[0][0]
            for loaded in (rank[1],) if number else ():
                assert list(loaded) == list(state)
                assert all(torch.equal(loaded[name], state[name]) for name in state)
        losses += found[0][0]
        state = found[0][2]
    assert_same((losses, state), (unbroken[0], unbroken[2]), "relay", 1e-8)


def optimizer_leg(
    optimizer: dict[str, Any], parallel: dict[str, Any], load: str, save: str, given: list[dict[str, Tensor]]
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """A leg of :func:`relay` with an optimizer."""
    with engine_of(parallel, "two", optimizer=optimizer) as engine:
        if load:
            engine.load(load)
        loaded = engine.full_state_dict()
        losses = [engine.train_step(engine.shard_batch(batch)) for batch in given]
        engine.save(save)
        return losses, loaded, engine.full_state_dict()
