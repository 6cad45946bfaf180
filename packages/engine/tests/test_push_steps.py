"""Steps whose collectives are pushes have the losses of as many whose collectives are the process group's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshfold.engine import Engine
from meshfold.mesh.collectives.push.channel import Channel, Exchange
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import build

STEPS = 25
WORDS, ROWS, LENGTH = 48, 6, 8


def train(spec: dict[str, Any], precision: str) -> tuple[list[float], int]:
    """Return the losses of the steps, and how many exchanges of pushed blocks there were."""
    exchanges = 0
    begin = Channel.begin

    def counted(self: Channel, *args: Any) -> Exchange:
        nonlocal exchanges
        exchanges += 1
        return begin(self, *args)

    torch.manual_seed(0)
    sizes = dict(hidden=16, layers=2, heads=4, kv_heads=2, ffn=32)
    model = build("llama-tiny", vocab_size=WORDS, max_positions=LENGTH, **sizes)
    settings: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=2e-2), precision=precision, clip_grad_norm=0.5)
    generator = torch.Generator().manual_seed(1)
    with pytest.MonkeyPatch.context() as patch, Engine(model, spec, **settings) as engine:
        patch.setattr(Channel, "begin", counted)
        batches = [torch.randint(WORDS, (ROWS, LENGTH), generator=generator) for _ in range(4)]
        losses = [engine.train_step(engine.shard_batch(batches[step % 4])) for step in range(STEPS)]
    return losses, exchanges


def compare(plain: dict[str, Any], pushing: dict[str, Any], precision: str, rel: float) -> None:
    (wanted, none), (found, exchanges) = (train(spec, precision) for spec in (plain, pushing))
    assert none == 0 and exchanges >= 2 * STEPS
    assert wanted[-1] < wanted[0] / 2  # they have learned: a mistake would have grown
    assert found == pytest.approx(wanted, rel=rel)


def zero(stage: int, transport: str, data: int) -> dict[str, Any]:
    return dict(data=data, zero=dict(stage=stage, placement="cuda", transport=transport))


def split(overlap: str) -> dict[str, Any]:
    return dict(tensor=dict(size=2, overlap=overlap), sequence=dict(mode="megatron"))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_zero_over_three_ranks_to_rounding(stage: int) -> None:
    run_on_ranks(3, compare, zero(stage, "nccl", 3), zero(stage, "push", 3), "fp64", 1e-9)


@pytest.mark.slow
def test_zero_in_16_bits_over_two_ranks_to_the_bit() -> None:
    run_on_ranks(2, compare, zero(3, "nccl", 2), zero(3, "push", 2), "bf16", 0.0)


def test_split_layers_to_rounding() -> None:
    run_on_ranks(2, compare, split("gather"), split("push"), "fp64", 1e-9)
