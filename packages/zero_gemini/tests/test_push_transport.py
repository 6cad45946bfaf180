"""Chunks that are gathered and reduced by pushes train to the bits of those that the process group carries."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshfold.kernels import sum_of_squares
from meshfold.mesh import Mesh, all_reduce, record
from meshfold.mesh.collectives.push import pushes, why_not
from meshfold.mesh.testing import ranks
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.placement import EVERYTHING_ON_THE_DEVICE
from meshfold.zero_gemini.chunks.whole_gradient import WholeGradient
from meshfold.zero_gemini.memory.arena import Block
from meshfold.zero_gemini.norm import _KERNELS

sys.path.append(str(Path(__file__).parent))
from training_cases import batches, in_chunks, loss_of, make_model

STEPS = 3
KINDS = ("all_gather", "reduce_scatter")


@dataclass
class Found:
    """Parameters after some steps, the losses and norms of the steps, and bytes by kind of collective."""

    parameters: dict[str, Tensor]
    losses: list[float]
    norms: list[Tensor]
    bytes: dict[str, Fraction]


def train(stage: int, transport: str, dtype: torch.dtype, backwards: int = 1) -> Found:
    """Train some steps of so many backwards each."""
    model = make_model()
    losses, norms = [], []
    with record() as log:
        gemini = in_chunks(model, dtype, EVERYTHING_ON_THE_DEVICE, stage=stage, world=2, transport=transport)
        rank = gemini.chunks[0].group.index
        for step in range(STEPS):
            for number, (ids, extra) in enumerate(batches(backwards * STEPS)[step * backwards :][:backwards], 1):
                gemini.begin(last=number == backwards)
                loss = loss_of(model, ids, extra, rank=rank, world=2)
                loss.backward()
                losses.append(float(loss))
            gemini.finish()
            norms.append(gemini.clip(0.5))
            gemini.step()
        found = {name: gemini.read(p).clone() for name, p in model.named_parameters()}
        gemini.close()
    return Found(found, losses, norms, {kind: sum(e.bytes for e in log.entries if e.kind == kind) for kind in KINDS})


def same(stage: int, backwards: int = 1) -> None:
    assert why_not(Mesh(dict(data=2)).group("data"), torch.device("cpu")) == ""
    for dtype in (torch.float32, torch.bfloat16):
        wanted, found = (train(stage, way, dtype, backwards) for way in ("nccl", "push"))
        assert found.losses == wanted.losses
        assert all(map(torch.equal, found.norms, wanted.norms))
        for name, value in wanted.parameters.items():
            assert torch.equal(found.parameters[name], value), (dtype, name)  # of two parts there is one sum
        gathered, summed = (found.bytes[kind] / wanted.bytes[kind] for kind in KINDS)
        adds_up_first = stage == 1 and backwards > 1
        assert gathered == 1 and summed == (0.5 if dtype is torch.bfloat16 and not adds_up_first else 1)


@ranks(2)
def test_stage_1() -> None:
    same(1)


@ranks(2)
def test_stage_2() -> None:
    same(2)


@ranks(2)
def test_stage_3() -> None:
    same(3)


@ranks(2)
def test_sums_over_several_backwards_are_in_the_masters_precision() -> None:
    for stage in (1, 2):
        same(stage, backwards=2)


def _has_unused(chunk: Chunk) -> bool:
    return any(name.startswith("never") for name in chunk.spec.names)


@ranks(2)
def test_pushed_gradients_are_not_copied_together() -> None:
    copied: set[str] = set()
    own = WholeGradient._copy_together

    def copy_together(whole: WholeGradient, dtype: torch.dtype) -> Block:
        copied.update(whole._chunk.spec.names)
        return own(whole, dtype)

    shards = []
    for transport in ("nccl", "push"):
        model = make_model()
        gemini = in_chunks(model, torch.bfloat16, EVERYTHING_ON_THE_DEVICE, stage=3, world=2, transport=transport)
        gemini.begin(last=True)
        with pytest.MonkeyPatch.context() as patch:
            if transport == "push":
                patch.setattr(WholeGradient, "_copy_together", copy_together)
            [(ids, _)] = batches(1)
            loss_of(model, ids, True, rank=gemini.chunks[0].group.index, world=2).backward()
            gemini.finish()
        shards.append([shard.clone() for shard in gemini._flow.shards().values()])
        incomplete = {name for chunk in gemini.chunks for name in chunk.spec.names if _has_unused(chunk)}
        assert copied == (incomplete if transport == "push" else set()) and len(incomplete) < len(
            list(model.parameters())
        )
        gemini.close()
    assert all(map(torch.equal, *shards))


class Twice(nn.Module):
    """A weight that is used twice, one that is not used, and one whose gradient is a view of more memory than it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.part = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.part, self.part.detach()])
        return torch.as_tensor(self.twice(self.twice(x)) @ both.t())


@ranks(2)
def test_gradients_that_do_not_come_or_share_memory_are_pushed_too() -> None:
    found = []
    for transport in ("nccl", "push"):
        torch.manual_seed(0)
        model = Twice()
        gemini = in_chunks(model, torch.bfloat16, EVERYTHING_ON_THE_DEVICE, stage=3, world=2, transport=transport)
        for _ in range(2):
            gemini.begin(last=True)
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(gemini.chunks[0].group.index))
            model(x.bfloat16()).square().sum().backward()
            gemini.finish()
            gemini.step()
        found.append({name: gemini.read(p).clone() for name, p in model.named_parameters()})
        gemini.close()
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


@ranks(2)
def test_backwards_apart_travel_added_up_in_the_masters_precision() -> None:
    found = []
    for transport in ("nccl", "push"):
        model = make_model()
        settings = dict(stage=2, world=2, transport=transport)
        gemini = in_chunks(model, torch.bfloat16, EVERYTHING_ON_THE_DEVICE, **settings)
        for ids, extra in batches(2):
            gemini.expect("apart")
            loss_of(model, ids, extra, rank=gemini.chunks[0].group.index, world=2).backward()
        gemini.reduce_rest()
        gemini.finish()
        found.append((gemini.norm(), [gradient.clone() for gradient in gemini._flow.shards().values()]))
        gemini.close()
    (wanted, shards), (norm, pushed) = found
    assert torch.equal(norm, wanted) and all(map(torch.equal, pushed, shards))


@ranks(2)
def test_a_norm_reads_no_gradient_again_that_was_pushed() -> None:
    norms: dict[str, Tensor] = {}
    for transport in ("nccl", "push"):
        model = make_model()
        gemini = in_chunks(model, torch.bfloat16, EVERYTHING_ON_THE_DEVICE, stage=3, world=2, transport=transport)
        [(ids, extra)] = batches(1)
        gemini.begin(last=True)
        loss_of(model, ids, extra, rank=gemini.chunks[0].group.index, world=2).backward()
        gemini.finish()
        calls = 0

        def counted(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return sum_of_squares(x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(_KERNELS, 2.0, counted)
            norms[transport] = gemini.norm()
        assert calls == (0 if transport == "push" else len(gemini._flow.shards()))
        exact = sum(shard.double().square().sum() for shard in gemini._flow.shards().values())
        everyone = all_reduce(exact, gemini.chunks[0].group).sqrt()
        torch.testing.assert_close(norms[transport], everyone, rtol=1e-13, atol=0.0)
        gemini.clip_value(1e-4)  # changes gradients: the norm is another
        assert float(gemini.norm()) < float(norms[transport])
        gemini.close()
    assert torch.equal(norms["push"], norms["nccl"])


def test_auto_pushes_large_blocks_of_gpus_alone() -> None:
    gpu, cpu, large = torch.device("cuda", 0), torch.device("cpu"), 16 * 2**20
    assert pushes("auto", large, gpu) and not pushes("auto", large - 1, gpu) and not pushes("auto", large, cpu)
    assert pushes("push", 1, cpu) and not pushes("nccl", large, gpu)
