"""Planned memory is what a real step has alive, tensor by tensor; kernels of a GPU count in plans as there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.kernels import count_kernels, dropout, on_gpu, use
from meshfold.kernels.fuse import fuse
from meshfold.mesh import ParallelSpec
from meshfold.mesh.model_io import DryRun, LiveBytes
from meshfold.mesh.testing import run_on_ranks
from meshfold.planner import MACHINES, estimate
from meshfold.planner.clock import Work
from meshfold.planner.step_bytes import WORKSPACE_BYTES

WORDS, WIDTH, ROWS, TOKENS = 64, 64, 16, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Perceptron(nn.Module):
    """Without attention, and without our kernels, whose references on a CPU make what no GPU has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Layer() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)[:, :-1].flatten(0, 1)
        return {"loss": F.cross_entropy(logits, torch.flatten(labels[:, 1:]))}


def alive_in_a_step(spec: dict[str, Any], accumulate: int, precision: str, kernels: str = "off") -> int:
    """Return the most bytes that a rank has alive in its second step: parameters, their state, and all else.

    Without our kernels it is what a GPU has; with them it is what their references on a CPU make.
    """
    live = LiveBytes(round_bytes=512 if kernels == "off" else 1)
    with (
        live,
        Engine(
            Perceptron,
            parallel=spec,
            optimizer=dict(name="adamw", lr=1e-4),
            precision=precision,
            clip_grad_norm=1.0,
            gradient_accumulation=accumulate,
            kernels=kernels,
            device="cpu",
        ) as engine,
    ):
        ids = torch.randint(WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
        shards = [engine.shard_batch(dict(input_ids=rows, labels=rows)) for rows in ids.chunk(accumulate)]
        for _ in range(2):
            live.take()
            for shard in shards:
                engine.train_step(shard)
        return live.take()[0]


def planned(spec: dict[str, Any], ranks: int, accumulate: int, precision: str) -> int:
    found = estimate(
        Perceptron,
        ParallelSpec.parse(spec, ranks),
        batch_size=ROWS,
        seq_len=TOKENS,
        precision=precision,
        accumulate=accumulate,
        kernels="off",
    )
    return found.memory.total - WORKSPACE_BYTES


@pytest.mark.few(2)
@pytest.mark.parametrize(("accumulate", "precision"), [(1, "fp32"), (1, "bf16"), (2, "bf16")])
def test_a_plan_is_what_a_step_has_alive(accumulate: int, precision: str) -> None:
    measured = run_on_ranks(1, alive_in_a_step, {}, accumulate, precision)[0]
    assert planned({}, 1, accumulate, precision) == pytest.approx(measured, rel=0.01)


def test_a_plan_for_a_cpu_has_what_the_kernels_references_make_and_no_workspace() -> None:
    measured = run_on_ranks(1, alive_in_a_step, {}, 1, "bf16", "auto")[0]
    sizes = dict(batch_size=ROWS, seq_len=TOKENS, precision="bf16")
    found = estimate(Perceptron, ParallelSpec.parse({}, 1), machine=MACHINES["laptop"], **sizes)  # type: ignore[arg-type]
    assert found.memory.total == pytest.approx(measured, rel=0.01)
    of_gpu = estimate(Perceptron, ParallelSpec.parse({}, 1), **sizes)  # type: ignore[arg-type]
    assert of_gpu.memory.total > found.memory.total + WORKSPACE_BYTES / 2


@pytest.mark.parametrize(
    "spec",
    [
        dict(data=4),
        pytest.param(dict(tensor=4), marks=pytest.mark.slow),
        pytest.param(dict(tensor=dict(mode="2d", size=4)), marks=pytest.mark.slow),
        pytest.param(dict(tensor=dict(mode="2.5d", size=4, depth=1)), marks=pytest.mark.slow),
        pytest.param(dict(tensor=dict(mode="3d", grid=(2, 2, 1))), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_plan_is_what_the_fullest_rank_has_alive(spec: dict[str, Any]) -> None:
    measured = max(run_on_ranks(4, alive_in_a_step, spec, 1, "fp32"))
    # Gloo decides when a collective that nobody waits for yet ends.
    assert planned(spec, 4, 1, "fp32") == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    "spec",
    [
        dict(data=2, pipeline=dict(size=2, microbatches=4)),
        pytest.param(dict(pipeline=dict(size=4, microbatches=8)), marks=pytest.mark.slow),
        pytest.param(dict(pipeline=dict(size=4, schedule="zb-h1", microbatches=8)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_plan_is_what_a_pipelines_fullest_rank_has_alive(spec: dict[str, Any]) -> None:
    """Gloo tells of a message that it has been sent when it is waited for, at the end of a step: until then it is alive.

    Messages gather until then, so at the peak there are some or all of them.
    """
    measured = max(run_on_ranks(4, alive_in_a_step, spec, 1, "fp32"))
    count = spec["pipeline"]["microbatches"]
    messages = ROWS // spec.get("data", 1) * TOKENS * WIDTH * 4 * (count - 1) // count
    found = planned(spec, 4, 1, "fp32")
    assert 0.99 * found < measured < 1.01 * (found + messages)


class Mean(nn.Module):
    """RMSNorm as models of Hugging Face write it: several operators, which keep two tensors in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def test_meta_tensors_that_stand_for_a_gpus_run_its_kernels() -> None:
    norm = Mean().to("meta", torch.bfloat16)
    fuse(norm)
    x = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert not on_gpu(x)
    memory = LiveBytes()
    with DryRun() as stand_in, Work.counted(stand_in, memory) as counter:
        assert on_gpu(x)
        y = norm(x)
        assert memory.take() == (ROWS * (2 * WIDTH + 4),) * 2  # the result, and a number of each row
    assert counter.counts.total() == 1 and y.shape == x.shape
    with count_kernels(lambda function: function):
        assert not on_gpu(torch.empty(1))  # a CPU's stays what it is


def test_meta_tensors_that_stand_for_a_cpus_run_its_kernels() -> None:
    """Dropout is one operator of numba, with its argument and its result; a norm has no kernel there."""
    x = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    with DryRun() as stand_in, Work.counted(stand_in, kind="cpu") as counter:
        dropout(x, 0.1, 1, 2).sum().backward()
        assert not on_gpu(x)
    moved = [operator.bytes for operator in counter.counts.elements() if operator.name == "dropout.drop"]
    assert moved == [2 * 4 * ROWS * WIDTH] * 2  # forward and backward
    assert not [operator for operator in counter.counts if "xor" in operator.name or "shift" in operator.name]
    with DryRun() as stand_in, Work.counted(stand_in, kind="cpu") as counter, use("reference"):
        dropout(x, 0.1, 1, 2)
    assert {operator.name for operator in counter.counts} > {"aten.bitwise_xor"}
