"""Chunks that are gathered and reduced by pushes train to the bits of those that the process group carries."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from meshfold.mesh import Mesh, record
from meshfold.mesh.collectives.push import pushes, why_not
from meshfold.mesh.testing import ranks
from meshfold.zero_gemini.chunks.placement import EVERYTHING_ON_THE_DEVICE

sys.path.append(str(Path(__file__).parent))
from training_cases import batches, in_chunks, loss_of, make_model

STEPS = 3


def train(stage: int, transport: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[float], object]:
    """Parameters after some steps, losses, and what was communicated."""
    model = make_model()
    with record() as log:
        gemini = in_chunks(model, dtype, EVERYTHING_ON_THE_DEVICE, stage=stage, world=2, transport=transport)
        rank = gemini.chunks[0].group.index
        losses = []
        for ids, extra in batches(STEPS):
            gemini.begin(last=True)
            loss = loss_of(model, ids, extra, rank=rank, world=2)
            loss.backward()
            losses.append(float(loss))
            gemini.finish()
            gemini.step()
        found = {name: gemini.read(p).clone() for name, p in model.named_parameters()}
        gemini.close()
    return found, losses, log.count()


def same(stage: int) -> None:
    assert why_not(Mesh(dict(data=2)).group("data"), torch.device("cpu")) == ""
    for dtype in (torch.float32, torch.bfloat16):
        (wanted, losses, sent), (found, again, pushed) = (train(stage, way, dtype) for way in ("nccl", "push"))
        assert again == losses and pushed == sent
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (dtype, name)  # of two parts there is one sum


@ranks(2)
def test_stage_1() -> None:
    same(1)


@ranks(2)
def test_stage_2() -> None:
    same(2)


@ranks(2)
def test_stage_3() -> None:
    same(3)


def test_auto_pushes_large_blocks_of_gpus_alone() -> None:
    gpu, cpu, large = torch.device("cuda", 0), torch.device("cpu"), 16 * 2**20
    assert pushes("auto", large, gpu) and not pushes("auto", large - 1, gpu) and not pushes("auto", large, cpu)
    assert pushes("push", 1, cpu) and not pushes("nccl", large, gpu)
