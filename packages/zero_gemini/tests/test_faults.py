"""A fault on one rank of several: all of them raise, and say whose it is, and none waits for one that is gone."""

from __future__ import annotations

import errno
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank

from broken_disk import broken, raised
from training_cases import CPU, batches, in_chunks, loss_of, make_model

from meshfold.mesh import Mesh
from meshfold.mesh.errors import MeshfoldError
from meshfold.mesh.testing import run_on_ranks
from meshfold.zero_gemini import ChunkPlacement, Gemini, Memory
from meshfold.zero_gemini.errors import DiskError, Faults, OutOfBudget, RankError
from meshfold.zero_gemini.optimizer import DiskSettings
from meshfold.zero_gemini.optimizer import kernel_runs as runs_module

LIMIT_S = 240.0
HOST, DISK = ChunkPlacement(parameters="host", state="host"), ChunkPlacement(parameters="host", state="disk")
RESIDENT_DISK = ChunkPlacement(state="disk")


def place(world: int) -> int:
    return Mesh({"data": world}).index("data")


def chunks_of(
    world: int, folder: Path | str | None, placement: ChunkPlacement = DISK, *, stage: int = 3, **options: Any
) -> tuple[nn.Module, Gemini]:
    disk = None if folder is None else DiskSettings(folder=folder, rank=place(world), piece_bytes=4096)
    model = make_model()
    placements = lambda sizes: [placement] * len(sizes)  # noqa: E731
    return model, in_chunks(model, torch.bfloat16, placements, stage=stage, world=world, disk=disk, **options)


def train(model: nn.Module, gemini: Gemini, world: int, steps: range, *, clip: bool = True) -> None:
    for ids, extra in batches(steps.stop)[steps.start :]:
        gemini.begin(last=True)
        loss_of(model, ids, extra, rank=place(world), world=world).backward()
        if clip:
            gemini.clip(0.5)
        gemini.step()


def bits(model: nn.Module, gemini: Gemini) -> list[Tensor]:
    return [gemini.read(p) for p in model.parameters()] + [
        gemini.read_state(name, key, entry)
        for name, entries in gemini.state_entries().items()
        for key, entry in entries.items()
    ]


# -- in a step --------------------------------------------------------------------------------------------------------


def disk_breaks(world: int, bad: int, folder: str, cases: list[tuple[str, int, int, bool]]) -> None:
    rank = place(world)
    for call, after, stage, clip in cases:
        model, gemini = chunks_of(world, folder, DISK if stage == 3 else RESIDENT_DISK, stage=stage)
        train(model, gemini, world, range(2), clip=clip)
        with broken(call, after if rank == bad else 10**9):
            error = raised(lambda: train(model, gemini, world, range(2, 8), clip=clip))  # noqa: B023
        doing = "written to" if call == "pwritev" else "read from"
        assert isinstance(error, DiskError) and error.errno == errno.EIO, error
        words = str(error)
        assert words.startswith(f"rank {bad}: the optimizer state of chunk of "), words
        assert f"could not be {doing} disk" in words and "the cable is out" in words, words
        assert isinstance(error.__cause__, DiskError) == (rank == bad)
        # What was lost is lost: nothing goes on from here, and nobody waits for anybody.
        before = time.perf_counter()
        ids, extra = batches(1)[0]
        for again in (
            gemini.step,
            gemini.flush,
            gemini.norm,
            lambda: gemini.read(next(model.parameters())),  # noqa: B023
            lambda: gemini.move(dict.fromkeys(gemini.chunks, HOST)),  # noqa: B023
            gemini.publish,
        ):
            assert str(raised(again)) == words
        gemini.close()
        assert time.perf_counter() - before < LIMIT_S
    assert ids.numel() and extra is not None
    assert not [path for path in Path(folder).iterdir() if f"rank{rank:05}" in path.name]


CASES = [("preadv", 0, 3, True), ("pwritev", 5, 3, False), ("preadv", 7, 2, False), ("pwritev", 0, 1, True)]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_disk_that_breaks_on_one_rank_of_two(tmp_path: Path, bad: int) -> None:
    run_on_ranks(2, disk_breaks, 2, bad, str(tmp_path), CASES, timeout_s=LIMIT_S)


def test_a_disk_that_breaks_on_one_rank_of_four(tmp_path: Path) -> None:
    run_on_ranks(4, disk_breaks, 4, 2, str(tmp_path), [CASES[0], CASES[2]], timeout_s=LIMIT_S)


def kernel_fails(world: int, bad: int) -> None:
    """Whatever it is that a promised step raises."""
    for name, after in (("adam_update_parameters", 1), ("adam_update_moments", 2)):
        model, gemini = chunks_of(world, None, HOST)
        train(model, gemini, world, range(2))
        real, left = getattr(runs_module, name), [after]

        def failing(*arguments: Any, real: Any = real, left: list[int] = left, **options: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise ValueError("no such number")
            real(*arguments, **options)

        with mock.patch.object(runs_module, name, failing if place(world) == bad else real):
            error = raised(lambda: train(model, gemini, world, range(2, 6)))  # noqa: B023
        assert isinstance(error, RankError), error
        assert str(error) == f"rank {bad}: ValueError: no such number"
        gemini.close()


def test_a_step_that_fails_for_another_reason() -> None:
    run_on_ranks(2, kernel_fails, 2, 1, timeout_s=LIMIT_S)


def evaluation(world: int, bad: int, folder: str) -> None:
    """Never a number that was computed from what is lost."""
    rank, (ids, extra) = place(world), batches(1)[0]
    for training in (False, True):
        model, gemini = chunks_of(world, folder)
        train(model, gemini, world, range(2))
        gemini.flush()
        with broken("preadv", 0 if rank == bad else 10**9):
            train(model, gemini, world, range(2, 3))
            if training:  # in the middle of an accumulation: what is seen before all agree is NaN
                gemini.begin(last=False)
                loss = loss_of(model, ids, extra)
                assert loss.isnan()
                loss.backward()
                error = raised(gemini.finish)
            else:
                with torch.no_grad():
                    error = raised(lambda: model(ids, extra))  # noqa: B023
        assert str(error).startswith(f"rank {bad}: the optimizer state")
        gemini.close()


def test_an_evaluation_after_a_step_that_failed(tmp_path: Path) -> None:
    run_on_ranks(2, evaluation, 2, 1, str(tmp_path), timeout_s=LIMIT_S)


def evaluates_alike(world: int) -> None:
    """An evaluation between two steps changes no bit, and a second one asks nobody anything."""
    found = []
    for placement in (ChunkPlacement(), HOST):
        model, gemini = chunks_of(world, None, placement)
        train(model, gemini, world, range(2))
        ids, extra = batches(3)[2]
        with (
            torch.no_grad(),
            mock.patch.object(Faults, "agree", side_effect=Faults.agree, autospec=True) as agree,
        ):
            one, two = model(ids, extra), model(ids, extra)
        assert agree.call_count == (placement == HOST) and torch.equal(one, two)
        train(model, gemini, world, range(2, 4))
        found.append([one, *bits(model, gemini)])
        gemini.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_evaluations_between_steps() -> None:
    run_on_ranks(2, evaluates_alike, 2)


# -- before and between steps -----------------------------------------------------------------------------------------


def construction(world: int, bad: int, folder: str) -> None:
    rank, good = place(world), Path(folder)
    error = raised(lambda: chunks_of(world, good / "missing" if rank == bad else good))
    assert isinstance(error, DiskError) and str(error).startswith(f"rank {bad}: The folder "), error
    memory = Memory(CPU, host_bytes=2000 if rank == bad else None)
    error = raised(lambda: chunks_of(world, None, HOST, memory=memory))
    assert isinstance(error, OutOfBudget) and str(error).startswith(f"rank {bad}: arena 'host' has no"), error
    with broken("pwritev", 1 if rank == bad else 10**9):  # while first values are written
        error = raised(lambda: chunks_of(world, good))
    assert isinstance(error, DiskError) and str(error).startswith(f"rank {bad}: the optimizer state of"), error


def test_a_model_that_one_rank_has_no_room_for(tmp_path: Path) -> None:
    run_on_ranks(2, construction, 2, 1, str(tmp_path), timeout_s=LIMIT_S)


def moving(world: int, bad: int, folder: str) -> None:
    """A move that fails on one rank is made by none; training goes on as if nobody had tried."""
    rank, found = place(world), []
    for tries in (False, True):
        model, gemini = chunks_of(world, folder, HOST)
        train(model, gemini, world, range(2))
        if tries:
            gemini.flush()
            used = gemini.memory.host_arena.used_bytes
            with broken("pwritev", 0 if rank == bad else 10**9):
                error = raised(lambda: gemini.move(dict.fromkeys(gemini.chunks, DISK)))  # noqa: B023
            assert isinstance(error, DiskError) and str(error).startswith(f"rank {bad}: "), error
            assert set(gemini.placements.values()) == {HOST} and gemini.memory.host_arena.used_bytes == used
            gemini.memory.compute.budget_bytes = gemini.memory.compute.used_bytes if rank == bad else None
            error = raised(lambda: gemini.move(dict.fromkeys(gemini.chunks, ChunkPlacement())))  # noqa: B023
            assert isinstance(error, OutOfBudget) and str(error).startswith(f"rank {bad}: "), error
            assert set(gemini.placements.values()) == {HOST}
            gemini.memory.compute.budget_bytes = None
            train(model, gemini, world, range(2, 3))
            gemini.move(dict.fromkeys(gemini.chunks, DISK))
            train(model, gemini, world, range(3, 5))
        else:
            train(model, gemini, world, range(2, 5))
        found.append(bits(model, gemini))
        gemini.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_move_that_fails_on_one_rank(tmp_path: Path) -> None:
    run_on_ranks(2, moving, 2, 0, str(tmp_path), timeout_s=LIMIT_S)


def reading(world: int, bad: int, folder: str) -> None:
    rank, shapes = place(world), [parameter.shape for parameter in make_model().parameters()]
    for write in (False, True):
        model, gemini = chunks_of(world, folder)
        train(model, gemini, world, range(2))
        gemini.flush()
        with broken("preadv", 0 if rank == bad else 10**9):
            if write:
                for parameter, shape in zip(model.parameters(), shapes, strict=True):
                    gemini.write(parameter, torch.zeros(shape))
                error = raised(gemini.publish)
            else:
                found = bits(model, gemini)
                assert any(value.isnan().any() for value in found)
                error = raised(gemini.agree)
        assert isinstance(error, MeshfoldError) and "read from disk" in str(error), error
        assert str(error).startswith(f"rank {bad}: the optimizer state of chunk of ")
        gemini.close()


def test_state_that_cannot_be_read_on_one_rank(tmp_path: Path) -> None:
    run_on_ranks(2, reading, 2, 1, str(tmp_path), timeout_s=LIMIT_S)


# -- alone ------------------------------------------------------------------------------------------------------------


def test_alone_everything_raises_at_once() -> None:
    def fails() -> None:
        raise ValueError("here")

    for faults in (Faults(), Faults(Mesh({}).group(), CPU)):
        with pytest.raises(ValueError, match="here"):
            faults.keep(fails)
        with pytest.raises(ValueError, match="here"), faults.raised_on_all():
            fails()
        assert faults.keep(lambda: None)
        faults.agree()
        faults.check_own()
