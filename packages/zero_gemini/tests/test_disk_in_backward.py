"""Optimizers of elements with a disk step chunks in the backward: to the same bits, in order, and with one error for all ranks."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank

from broken_disk import broken, raised
from stepping_cases import same
from training_cases import WIDTH, Block, batches, in_chunks, loss_of, make_model

from meshfold.mesh import Mesh
from meshfold.mesh.parameters import state_layout
from meshfold.mesh.testing import run_on_ranks
from meshfold.optimizers import Lamb, Lion
from meshfold.zero_gemini import ChunkPlacement, Gemini
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.errors import ChunkError, DiskError
from meshfold.zero_gemini.memory.pinned import PAGE_BYTES
from meshfold.zero_gemini.optimizer import DiskSettings
from meshfold.zero_gemini.optimizer.disk_steps import DiskSteps

HOST, DISK = ChunkPlacement(parameters="host", state="host"), ChunkPlacement(parameters="host", state="disk")
STATE_ON_DISK = ChunkPlacement(parameters="device", state="disk")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lion": partial(Lion, lr=1e-3, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "plain sgd": partial(torch.optim.SGD, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "radam": partial(torch.optim.RAdam, lr=1e-2),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
}


def place() -> tuple[int, int]:
    world = torch.distributed.get_world_size()
    return Mesh({"data": world}).index("data"), world


def chunks_of(
    make: Any,
    folder: str,
    *placements: ChunkPlacement,
    dtype: torch.dtype = torch.bfloat16,
    stage: int = 3,
    model: nn.Module | None = None,
) -> tuple[nn.Module, Gemini]:
    """Each chunk has several pieces."""
    rank, world = place()
    model = model or make_model()
    disk = DiskSettings(folder=folder, rank=rank, piece_bytes=PAGE_BYTES)

    def everywhere(sizes: Any) -> list[ChunkPlacement]:
        return [placements[index % len(placements)] for index in range(len(sizes))]

    return model, in_chunks(model, dtype, everywhere, world=world, disk=disk, make_optimizer=make, stage=stage)


def train(model: nn.Module, gemini: Gemini, kind: Any, steps: int = 6, accumulate: int = 1) -> list[Tensor]:
    """Train with a rate that changes after each step; return losses and norms."""
    rank, world = place()
    seen: list[Tensor] = []
    for number, (ids, extra) in enumerate(batches(steps * accumulate)):
        last = number % accumulate == accumulate - 1
        gemini.begin(last=last)
        loss = loss_of(model, ids, extra, rank=rank, world=world)
        gemini.expect(kind if last else "more")
        loss.backward()
        seen.append(loss.detach())
        if last:
            gemini.finish()
            seen.append(gemini.norm())
            gemini.step()
            assert gemini.optimizer is not None
            for group in gemini.optimizer.param_groups:
                group["lr"] *= 0.9
        if number == 2:
            with torch.no_grad():
                seen.append(loss_of(model, ids, extra, rank=rank, world=world))
    return seen


def contents(model: nn.Module, gemini: Gemini) -> list[Tensor]:
    found = [gemini.read(p).clone() for p in model.parameters()]
    for name, entries in gemini.state_entries().items():
        found += [gemini.read_state(name, key, entry).clone() for key, entry in entries.items()]
    return found


MIXED = (DISK, HOST, ChunkPlacement(), STATE_ON_DISK)
# Placements, dtype, stage, micro-steps.
CASES: list[tuple[tuple[ChunkPlacement, ...], torch.dtype, int, int]] = [
    ((DISK,), torch.bfloat16, 3, 1),
    (MIXED, torch.float32, 3, 1),
    ((STATE_ON_DISK, ChunkPlacement()), torch.bfloat16, 2, 2),
    ((STATE_ON_DISK,), torch.float32, 1, 1),
]


def same_bits(folder: str, names: list[str], cases: list[Any]) -> None:
    train(*chunks_of(OPTIMIZERS["sgd"], folder, ChunkPlacement()), "last", 1)  # a process's first sums have other bits
    for name in names:
        for placements, dtype, stage, accumulate in cases:
            found = []
            for kind in ("last", "final"):
                model, gemini = chunks_of(OPTIMIZERS[name], folder, *placements, dtype=dtype, stage=stage)
                seen = train(model, gemini, kind, accumulate=accumulate)
                assert gemini.holds_gradients == (kind == "last")
                found.append(seen + contents(model, gemini))
                gemini.close()
            assert same(*found), (name, placements, dtype, stage, accumulate)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_in_the_backward_have_the_bits_of_steps_after_it(name: str, tmp_path: Path) -> None:
    run_on_ranks(1, same_bits, str(tmp_path), [name], CASES[:2])


def test_steps_over_ranks_have_the_bits_of_steps_after_the_backward(tmp_path: Path) -> None:
    run_on_ranks(2, same_bits, str(tmp_path), ["lion", "sgd"], CASES[1:])


def stepped_on_the_way(folder: str) -> None:
    """The last block's state has been read, stepped and written before backward comes to the first block's gradients."""
    for name in ("lion", "sgd"):
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block() for _ in range(4)))
        _, gemini = chunks_of(OPTIMIZERS[name], folder, DISK, model=blocks)
        assert len(gemini.chunks) > 3
        last = gemini.chunks[-1]
        stepped, seen = Event(), list[bool]()
        one = DiskSteps.step_one

        def step_one(steps: DiskSteps, chunk: Chunk, *given: Any, stepped: Any = stepped, last: Any = last) -> None:
            one(steps, chunk, *given)  # noqa: B023
            if chunk is last:
                stepped.set()

        blocks[0].gate.register_hook(lambda gradient, stepped=stepped, seen=seen: seen.append(stepped.wait(100.0)))
        with mock.patch.object(DiskSteps, "step_one", step_one):
            for number in range(2):
                stepped.clear()
                gemini.begin(last=True)
                loss = blocks(torch.randn(4, WIDTH).to(torch.bfloat16)).float().square().sum()
                gemini.expect("final")
                loss.backward()
                gemini.finish()
                gemini.step()
                assert seen == [True] * (number + 1)
        gemini.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2])
def test_chunks_on_disk_are_stepped_on_the_way(world: int, tmp_path: Path) -> None:
    run_on_ranks(world, stepped_on_the_way, str(tmp_path))


class InGroups(torch.optim.SGD):
    """Its step changes a setting."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class Drawing(torch.optim.SGD):
    """Its step draws random numbers, as the model's dropout may beside it."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(torch.randn_like(parameter.grad), alpha=1e-3)
        return super().step(closure)


def others_hold(folder: str) -> None:
    for make, placement in (
        (partial(Lamb, lr=0.02), DISK),  # needs the norms of all tensors
        (partial(InGroups, lr=0.1), DISK),
        (partial(Drawing, lr=0.1), DISK),
    ):
        model, gemini = chunks_of(make, folder, placement)
        train(model, gemini, "final", 2)
        assert gemini.holds_gradients
        gemini.close()


def test_what_cannot_step_chunk_by_chunk_steps_after_the_backward(tmp_path: Path) -> None:
    for cls, names, draws in ((InGroups, ("count",), False), (Drawing, (), True), (Lion, (), False)):
        layout = state_layout(cls([nn.Parameter(torch.ones(2))], lr=0.1), torch.float32)
        assert (layout.settings, layout.draws, layout.steps_one_by_one) == (names, draws, cls is Lion)
    run_on_ranks(1, others_hold, str(tmp_path))


def hooks_once(folder: str) -> None:
    model, gemini = chunks_of(OPTIMIZERS["lion"], folder, *MIXED)
    called: list[Any] = []
    assert gemini.optimizer is not None
    gemini.optimizer.register_step_post_hook(lambda optimizer, *_: called.append(optimizer))
    train(model, gemini, "final", 3)
    gemini.close()
    assert called == [gemini.optimizer] * 3


def test_hooks_of_the_optimizer_are_called_once_a_step(tmp_path: Path) -> None:
    run_on_ranks(1, hooks_once, str(tmp_path))


def disk_breaks(bad: int, folder: str) -> None:
    """In the middle of a backward: all ranks are told, at the latest when the next one is over."""
    rank, world = place()
    for name, call, after in (
        ("sgd", "preadv", 4),
        ("sgd", "pwritev", 0),
        ("sgd", "pwritev", 5),
        ("adamw", "preadv", 4),
    ):
        model, gemini = chunks_of(OPTIMIZERS[name], folder, DISK)
        train(model, gemini, "final", 2)
        with broken(call, after if rank == bad else 10**9):
            error = raised(lambda: train(model, gemini, "final", 4))  # noqa: B023
        assert isinstance(error, DiskError) and error.errno == errno.EIO, error
        assert "resume from the last checkpoint" in str(error)
        assert str(error).startswith(f"rank {bad}: ") or world == 1
        for again in (
            gemini.flush,
            lambda: gemini.read(next(model.parameters())),  # noqa: B023
            lambda: gemini.move(dict.fromkeys(gemini.chunks, HOST)),  # noqa: B023
        ):
            # A rank that is alone raises at once, in the middle of its backward.
            assert isinstance(raised(again), DiskError if world > 1 else DiskError | ChunkError)
        gemini.close()
    assert not [*Path(folder).iterdir()] or world > 1


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2])
def test_a_disk_that_breaks_in_a_backward_is_told_to_all_ranks(world: int, tmp_path: Path) -> None:
    run_on_ranks(world, disk_breaks, world - 1, str(tmp_path))
