"""Plans count what ``transport="push"`` and ``overlap="push"`` allocate: whole gradients and channels, and the bytes sent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch

from integration_tests.composition import LENGTH, MODELS, ROWS
from meshfold.engine import Engine
from meshfold.engine.zero import USUAL_CONTEXT_BYTES, DeviceLimit
from meshfold.mesh import ParallelSpec, record
from meshfold.mesh.collectives.push import bytes_of_channel, channel_bytes, channels
from meshfold.mesh.testing import run_on_ranks
from meshfold.planner import Estimate, estimate, find_machine
from meshfold.zero_gemini.chunks.whole_gradient import WholeGradient, runs_of

Spec = dict[str, Any]
SLOW = pytest.mark.slow


@contextmanager
def whole_gradients(sizes: dict[str, int]) -> Iterator[None]:
    """Note the largest number of bytes that each whole gradient of a chunk takes, by its first parameter."""
    add = WholeGradient.add

    def noted(self: WholeGradient, *args: Any, **kwargs: Any) -> int:
        noted_bytes = add(self, *args, **kwargs)
        name, complete = self._chunk.spec.names[0], len(self._held) == len(self._chunk.parameters)
        parts = runs_of(self._chunk, self.blocks) if complete else [block.tensor for block in self.blocks]
        sizes[name] = max(sizes.get(name, 0), sum(part.nbytes for part in parts))
        return noted_bytes

    WholeGradient.add = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        WholeGradient.add = add  # type: ignore[method-assign]


def allocated(spec: Spec, precision: str, accumulation: int) -> tuple[dict[str, int], int, Fraction]:
    """Train a step; return the bytes of whole gradients, of channels, and those sent to sum gradients over the data axis."""
    channels._channels.clear()  # of earlier tests on the same ranks
    sizes: dict[str, int] = {}
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 37
    with (
        Engine(
            MODELS["llama"],
            spec,
            optimizer=dict(name="adamw", lr=1e-3),
            precision=precision,
            gradient_accumulation=accumulation,
            clip_grad_norm=1.0,
        ) as engine,
        whole_gradients(sizes),
        record() as log,
    ):
        for rows in ids.chunk(accumulation):
            engine.train_step(engine.shard_batch(rows))
        sums = (each.bytes for each in log.entries if each.kind == "reduce_scatter" and each.axes == ("data",))
        return sizes, channel_bytes(), sum(sums, Fraction())


def planned(spec: Spec, precision: str, accumulation: int, machine: str = "h200x8") -> Estimate:
    return estimate(
        MODELS["llama"],
        ParallelSpec.parse(spec),
        batch_size=ROWS,
        seq_len=LENGTH,
        precision=precision,
        accumulate=accumulation,
        machine=find_machine(machine),
    )


@pytest.mark.parametrize(
    ("stage", "transport", "precision", "accumulation"),
    [
        (3, "push", "bf16", 1),
        pytest.param(1, "push", "bf16", 2, marks=SLOW),
        pytest.param(2, "push", "bf16", 2, marks=SLOW),
        pytest.param(3, "push", "fp32", 1, marks=SLOW),
        pytest.param(3, "nccl", "bf16", 1, marks=SLOW),
        pytest.param(3, "auto", "bf16", 1, marks=SLOW),  # these chunks are too small for it
    ],
)
def test_chunks(stage: int, transport: str, precision: str, accumulation: int) -> None:
    spec: Spec = dict(data=2, zero=dict(stage=stage, transport=transport, placement="cuda"))
    plan = planned(spec, precision, accumulation)
    assert plan.plan is not None
    workload = plan.plan.workload
    wanted = {chunk.name: int(workload.collected(chunk) * chunk.gathered_elems) for chunk in workload.chunks}
    for sizes, taken, sent in run_on_ranks(2, allocated, spec, precision, accumulation):
        assert sizes == wanted
        assert taken == plan.memory.channels == (bytes_of_channel() if transport == "push" else 0)
        assert sent == sum(each.bytes for each in plan.traffic if each.kind == "reduce_scatter")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=SLOW)])
def test_channels_of_tensor_parallelism(size: int) -> None:
    """Each size of a block has a channel."""
    spec: Spec = dict(tensor=dict(mode="1d", size=size, overlap="push"), sequence=dict(mode="megatron"))
    plan = planned(spec, "fp32", 1)
    assert plan.memory.channels > 0
    for _, taken, _ in run_on_ranks(size, allocated, spec, "fp32", 1):
        assert taken == plan.memory.channels
    with_both = planned({**spec, "data": 2, "zero": dict(stage=3, transport="push")}, "fp32", 1)
    assert with_both.memory.channels == plan.memory.channels + bytes_of_channel()


def test_channels_take_room_under_a_limit_and_none_on_several_machines() -> None:
    """The plan keeps the channel free of a limit. Ranks of several machines use NCCL: no channel, gradients as NCCL sums them."""
    spec: Spec = dict(data=2, zero=dict(stage=3, transport="push", gpu_memory_limit=2**31))
    near, far = planned(spec, "bf16", 1), planned(spec, "bf16", 1, machine="h200")
    for one, there in ((near, bytes_of_channel()), (far, 0)):
        room = DeviceLimit(bytes=2**31, outside=USUAL_CONTEXT_BYTES + there).plan_bytes
        assert one.plan is not None and one.plan.limits.gpu_bytes == room
    assert (near.memory.channels, far.memory.channels) == (bytes_of_channel(), 0)
    tight = planned({**spec, "zero": {**spec["zero"], "gpu_memory_limit": 2**26}}, "bf16", 1)
    found = re.search(r"it has to be at least ([\d,]+) bytes", tight.refusal)
    assert found is not None
    least = int(found[1].replace(",", ""))
    assert least > bytes_of_channel()
    limits = [
        planned({**spec, "zero": {**spec["zero"], "gpu_memory_limit": limit}}, "bf16", 1)
        for limit in (least, least - 1)
    ]
    assert [bool(one.refusal) for one in limits] == [False, True]
