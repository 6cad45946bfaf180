"""Weights from one engine to another on other ranks: equal whatever both specs, and each rank gets the bytes of its part, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshfold.engine import Engine, WeightTransfer
from meshfold.engine.world import join_world
from meshfold.mesh import SpecError, record
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.processes import only_ranks
from meshfold.mesh.testing import ranks
from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig, MoELlamaConfig


def tied(layers: int = 2) -> nn.Module:
    """Embedding and head are one tensor."""
    return GPT(GPTConfig(vocab_size=37, hidden=16, layers=layers, heads=2, max_positions=16))


def grouped() -> nn.Module:
    """Fewer heads of keys than ranks of a tensor axis: some have the same."""
    return Llama(LlamaConfig(vocab_size=37, hidden=16, layers=2, heads=4, kv_heads=1, ffn=24))


def experts() -> nn.Module:
    """Ranks of the axis of experts have different ones."""
    return Llama(MoELlamaConfig(vocab_size=37, hidden=16, layers=1, heads=2, ffn=16, experts=4, top_k=2, balance=0.0))


def with_buffers() -> nn.Module:
    """Statistics, and a whole number, beside parameters."""
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))


def moved(build: Any, train: int, specs: tuple[Any, Any], **settings: Any) -> tuple[int, int, bool]:
    """Send weights after a change, twice; return the bytes that this rank sends or gets, those recorded, and whether it sends."""
    world = join_world({}, "cpu")
    sends = world.mesh.rank < train
    with only_ranks(range(train) if sends else range(train, world.mesh.world_size)):
        own = dict(optimizer=dict(name="sgd", lr=0.1), seed=1) if sends else dict(seed=2)
        engine = Engine(build, specs[0 if sends else 1], device="cpu", **own, **settings)
    transfer = WeightTransfer(world, engine, sends=sends, bucket=900)
    recorded = []
    for factor in (1.5, 2.0):
        if sends:
            state = engine.full_state_dict()
            engine.load_state_dict({name: value * factor for name, value in state.items()})
        with record() as log:
            transfer.run()
        recorded.append(sum(entry.block_bytes for entry in log.entries if entry.kind == "exchange_rows"))
        dtype = engine.precision.dtype  # masters are rounded
        weights = {name: value.to(dtype).flatten().tolist() for name, value in engine.full_state_dict().items()}
        told = all_gather_object(weights, world.everyone, world.device)
        assert told[0] == told[-1]
    assert recorded[0] == recorded[1]
    engine.close()
    world.mesh.close()
    return transfer.bytes, recorded[0], sends


def check(
    build: Any, train: int, *specs: Any, copies: int = 1, more: int = 0, largest: float = 1.0, **settings: Any
) -> None:
    """Check a transfer between two specs.

    Args:
        copies: how many times the receivers have the whole model together.
        more: elements that they have beside that.
        largest: the most that one of them has, as a share of the model.
    """
    settings = {"precision": "fp64", **settings}
    width = 8 if settings["precision"] == "fp64" else 2
    whole = width * sum(p.numel() for p in build().parameters())
    nbytes, recorded, sends = moved(build, train, specs, **settings)
    assert recorded == (nbytes if sends else 0)
    everyone = join_world({}, "cpu").everyone
    told = all_gather_object([nbytes, sends], everyone, torch.device("cpu"))
    sent, got = ([n for n, sender in told if sender is which] for which in (True, False))
    assert sum(sent) == sum(got) == whole * copies + width * more
    assert max(got) <= (whole + width * more) * largest


ZERO = dict(data=2, zero=dict(stage=3))
EMBEDDING = 37 * 16
BOTH = 2 * 6 * 16 + 2 * 16 + 16 * 16  # norms, biases of what is summed, positions: on each tensor rank


@ranks(3)
def test_on_three_ranks() -> None:
    check(tied, 2, ZERO, {})
    check(tied, 1, {}, dict(data=2), copies=2)
    check(tied, 1, {}, ZERO, largest=0.51)
    check(tied, 2, dict(data=2), {}, precision="bf16")
    check(experts, 2, dict(expert=2), {})
    check(with_buffers, 2, dict(data=2), {}, more=6 + 6 + 1)


@ranks(4)
def test_on_four_ranks() -> None:
    two_stages = dict(pipeline=dict(size=2))
    check(tied, 2, ZERO, two_stages, more=EMBEDDING, largest=0.6)  # the embedding is the head of the last stage too
    check(tied, 2, two_stages, dict(tensor=2), more=BOTH, largest=0.6)
    check(grouped, 2, dict(tensor=2), ZERO, largest=0.55)
    check(grouped, 3, dict(data=3), dict(tensor=1))


@ranks(3)
def test_other_models_are_refused() -> None:
    world = join_world({}, "cpu")
    sends = world.mesh.rank < 2
    with only_ranks(range(2) if sends else range(2, 3)):
        engine = Engine(tied if sends else grouped, {})
    with pytest.raises(SpecError, match="in the engine that sends its weights"):
        WeightTransfer(world, engine, sends=sends)
    engine.close()
    world.mesh.close()
