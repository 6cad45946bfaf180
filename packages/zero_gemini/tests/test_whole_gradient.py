"""Gradients of a chunk's parameters are copied into it some at a time; the chunk has the values that autograd gives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

from training_cases import Model, batches, in_chunks, loss_of, make_model

from meshfold.mesh.testing import ranks
from meshfold.zero_gemini import ChunkPlacement
from meshfold.zero_gemini.chunks.gradient import ChunkGradient
from meshfold.zero_gemini.sharded_model import reducer


def by_autograd(work: list[tuple[Tensor, bool]]) -> dict[str, Tensor]:
    model = make_model()
    for ids, extra in work:
        loss_of(model, ids, extra).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def in_chunk(model: Model, work: list[tuple[Tensor, bool]], **settings: Any) -> dict[str, Tensor]:
    """Gradients of all micro-steps by a parameter's name."""
    gemini = in_chunks(model, torch.float32, lambda sizes: [ChunkPlacement()] * len(sizes), **settings)
    for number, (ids, extra) in enumerate(work):
        last = number == len(work) - 1
        gemini.begin(last=last)
        loss = loss_of(model, ids, extra)
        gemini.expect("last" if last else "more")
        loss.backward()
    gemini.finish()
    found = {}
    for chunk, shard in gemini._flow.shards().items():
        for slot in chunk.spec.slots:
            found[slot.name] = shard[slot.start_elems : slot.start_elems + slot.numel].clone()
    gemini.close()
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_gradients_are_copied_some_at_a_time(micro_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch for each of hundreds of parameters took the host longer than all their copies took the device."""
    made: list[int] = []
    copy = torch._foreach_copy_

    def counted(into: list[Tensor], found: list[Tensor]) -> None:
        made.append(len(into))
        copy(into, found)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    work = batches(micro_steps)
    wanted = by_autograd(work)
    for most in (reducer._MOST_NOTED_BYTES, 0):
        monkeypatch.setattr(reducer, "_MOST_NOTED_BYTES", most)
        made.clear()
        found = in_chunk(make_model(), work)
        for name, gradient in found.items():
            exact = wanted.get(name, torch.zeros_like(gradient))
            torch.testing.assert_close(
                gradient, exact.reshape(-1), rtol=0 if micro_steps == 1 else 1e-6, atol=1e-7, msg=name
            )
        assert set(wanted) <= set(found)
        assert sum(made) >= len(wanted)
        assert max(made) == 1 if most == 0 else len(made) < sum(made) / 2


class Crossed(torch.nn.Module):
    """Registers last what it uses first: backward reaches the layers as b, a, last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = (torch.nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(self.last(x).tanh()).tanh())
        return out


def order_of_reductions(world: int) -> list[str]:
    """Names of the parameters in the order in which their chunks are reduced, checked against autograd's gradients."""
    torch.manual_seed(0)
    model, alone = Crossed(), Crossed()
    alone.load_state_dict(model.state_dict())
    x = torch.randn(3, 32)
    alone(x).square().mean().backward()
    gemini = in_chunks(model, torch.float32, lambda sizes: [ChunkPlacement()] * len(sizes), world=world)
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        reduce = ChunkGradient.reduce

        def noted(self: ChunkGradient, *args: Any, **settings: Any) -> None:
            found.append(self.chunk.spec.names[0])
            reduce(self, *args, **settings)

        patch.setattr(ChunkGradient, "reduce", noted)
        gemini.begin(last=True)
        loss = model(x).square().mean()
        gemini.expect("last")
        loss.backward()
    gemini.finish()
    for chunk, shard in gemini._flow.shards().items():
        exact = alone.get_parameter(chunk.spec.names[0]).grad
        assert exact is not None
        part = exact.reshape(-1).chunk(world)[chunk.group.index]
        torch.testing.assert_close(shard[: part.numel()], part * world, rtol=1e-6, atol=1e-7)  # a sum over the ranks
    gemini.close()
    return found


def test_a_chunk_of_one_rank_waits_for_no_other() -> None:
    """In a U-Net all chunks waited for the middle's, which had the end of the last block too: 20 ms a step of 172 on an H200."""
    assert order_of_reductions(1) == ["b.weight", "a.weight", "last.weight"]


@ranks(2)
def test_chunks_that_ranks_share_are_reduced_in_the_models_order() -> None:
    assert order_of_reductions(2) == ["last.weight", "b.weight", "a.weight"]
