"""The chunks of a loss are counted once for all: plans and traces are those of every chunk."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from meshfold.kernels import logit_chunks
from meshfold.kernels.fuse import heads
from meshfold.mesh import ParallelSpec
from meshfold.models import Llama, LlamaConfig
from meshfold.planner import MACHINES, Estimate, clock, estimate
from meshfold.planner.suggestions.profiler import Profiler

ROWS, TOKENS = 11, 192  # 17 chunks of 128 tokens on one rank, and the last of 64


def small() -> nn.Module:
    return Llama(LlamaConfig(vocab_size=512, hidden=64, layers=2, heads=4, kv_heads=4, ffn=128, max_positions=TOKENS))


def chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "count_parts", lambda repeats: nullcontext())


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks of 128 tokens; the rows of those that run."""
    monkeypatch.setattr(heads, "WORTHWHILE", 1)
    monkeypatch.setattr(logit_chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(logit_chunks, "LARGE_CHUNK_BYTES", 1)
    ran: list[int] = []
    operands = logit_chunks.LogitChunks.operands

    def seen(chunks: logit_chunks.LogitChunks) -> logit_chunks.ChunkOperands:
        found = operands(chunks)
        ran.append(len(found.rows))
        return found

    monkeypatch.setattr(logit_chunks.LogitChunks, "operands", seen)
    return ran


def planned(spec: dict[str, Any], ranks: int, machine: str, rows: int) -> Estimate:
    found = estimate(
        small,
        ParallelSpec.parse(spec, ranks),
        batch_size=rows,
        seq_len=TOKENS,
        precision="bf16",
        machine=MACHINES[machine],
    )
    return replace(found, seconds=0.0)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("spec", "ranks", "machine"),
    [
        ({}, 1, "h100x8"),
        ({}, 1, "laptop"),  # whose kernels are many operators
        (dict(tensor=2), 2, "h100x8"),  # messages in each chunk
        (dict(zero=dict(stage=3)), 1, "h100x8"),
        (dict(pipeline=dict(size=2, microbatches=2)), 2, "h100x8"),  # chunks of the backward
    ],
)
def test_plan_is_that_of_every_chunk(
    spec: dict[str, Any], ranks: int, machine: str, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 2 * ROWS if "pipeline" in spec else ROWS
    once = planned(spec, ranks, machine, rows)
    taken = len(products)
    chunk_by_chunk(monkeypatch)
    every = planned(spec, ranks, machine, rows)
    assert len(products) - taken > 5 * taken > 0  # of 17 chunks three run
    assert once.memory == every.memory
    assert once.traffic == every.traffic
    assert once.work == every.work
    assert once.work.operators.keys() == every.work.operators.keys()
    for name in (field for field in vars(every) if field != "plan"):
        assert getattr(once, name) == getattr(every, name), name


@pytest.mark.parametrize("spec", [{}, dict(tensor=2)])
def test_profile_is_that_of_every_chunk(
    spec: dict[str, Any], products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile() -> object:
        profiler = Profiler(
            build=small, seq_len=TOKENS, batch_size=16, optimizer="adamw", kind="gpu", settings=dict(precision="bf16")
        )
        return profiler.of(ParallelSpec.parse(spec, 2 if spec else 1))

    once, taken = profile(), len(products)
    chunk_by_chunk(monkeypatch)
    assert profile() == once
    assert len(products) - taken > taken > 0


def test_a_million_tokens_take_three_chunks(products: list[int]) -> None:
    found = planned({}, 1, "h100x8", 8192)
    assert found.tokens == 8192 * TOKENS
    assert products == [128, 128, 128]
