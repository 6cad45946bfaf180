"""Faults of one rank's disk in training, saving and loading: one error everywhere, nothing hangs, nothing that was good is lost."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.tensors import TensorWriter
from meshfold.engine import Engine
from meshfold.engine.zero import states as zero_module
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig
from meshfold.zero_gemini import DiskError
from meshfold.zero_gemini.optimizer import DiskSettings

LIMIT_S = 240.0


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=37, hidden=32, layers=2, heads=4, max_positions=16))


def engine_of(folder: str | None, world: int = 1, *, tensor: int = 1, stage: int = 3, **options: Any) -> Engine:
    zero = {} if folder is None else dict(zero=dict(stage=stage, placement="cpu", offload_path=folder))
    parallel: dict[str, Any] = dict(data=world // tensor, **zero)
    if tensor > 1:
        parallel["tensor"] = tensor
    small = partial(DiskSettings, piece_bytes=8192)  # so that not all of it stays in the buffers
    with mock.patch.object(zero_module, "DiskSettings", small):
        return Engine(gpt, parallel, optimizer=dict(name="adamw", lr=1e-2), precision="bf16", **options)


def batch(engine: Engine, number: int) -> Tensor:
    ids: Tensor = engine.shard_batch(torch.randint(37, (4, 8), generator=torch.Generator().manual_seed(number)))
    return ids


@contextmanager
def broken(call: str, here: bool) -> Iterator[None]:
    """A disk that takes or gives nothing, on this rank."""
    real, lock = getattr(os, call), threading.Lock()

    def failing(*arguments: Any) -> Any:
        with lock:
            if here:
                raise OSError(errno.EIO, "the cable is out")
            return real(*arguments)

    with mock.patch.object(os, call, failing):
        yield


def raised(action: Callable[[], object]) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def train(engine: Engine, *numbers: int) -> list[float]:
    return [engine.train_step(batch(engine, number)) for number in numbers]


# -- training ---------------------------------------------------------------------------------------------------------


def break_in_training(world: int, bad: int, folder: str, tensor: int) -> None:
    here = torch.distributed.get_rank() == bad
    for clip in (None, 0.5):
        engine = engine_of(folder, world, tensor=tensor, clip_grad_norm=clip)
        train(engine, 0, 1)
        with broken("preadv", here):
            error = raised(lambda: train(engine, *range(2, 9)))  # noqa: B023
        assert isinstance(error, DiskError), error
        assert str(error).startswith(f"rank {bad}: the optimizer state of chunk of "), error
        assert "the cable is out" in str(error)
        engine.close()


@pytest.mark.few(1)
@pytest.mark.parametrize(("world", "bad", "tensor"), [(2, 1, 1), (4, 3, 2)])
def test_a_disk_that_breaks_in_training(world: int, bad: int, tensor: int, tmp_path: Path) -> None:
    """Also for the ranks of another data group, which only meet this one in tensor parallelism."""
    run_on_ranks(world, break_in_training, world, bad, str(tmp_path), tensor, timeout_s=LIMIT_S)


def evaluation_goes_on(world: int, folder: str) -> None:
    engine = engine_of(folder, world)
    train(engine, 0, 1)
    losses = [engine.eval_step(batch(engine, 5)) for _ in range(2)]
    assert losses[0] == losses[1]
    with broken("preadv", torch.distributed.get_rank() == 1):
        train(engine, 2)
        error = raised(lambda: engine.eval_step(batch(engine, 5)))
    assert str(error).startswith("rank 1: the optimizer state of chunk of "), error
    engine.close()


def test_no_loss_is_returned_of_weights_that_are_lost(tmp_path: Path) -> None:
    run_on_ranks(2, evaluation_goes_on, 2, str(tmp_path), timeout_s=LIMIT_S)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def break_in_saving(world: int, bad: int, folder: str, path: str, tensor: int) -> None:
    here = torch.distributed.get_rank() == bad
    engine = engine_of(folder, world, tensor=tensor)
    train(engine, 0, 1)
    engine.save(path)
    engine.close()
    engine = engine_of(folder, world, tensor=tensor)
    train(engine, 0, 1)
    wanted = train(engine, 2, 3)
    engine.full_state_dict()  # all steps are done: what fails now is reading
    with broken("preadv", here):
        error = raised(lambda: engine.save(path))
        state = raised(engine.full_state_dict)
        stepped = raised(lambda: train(engine, 4, 5))  # the step that follows is lost, and said by the next
    assert isinstance(error, CheckpointError), error
    assert f"cannot write the checkpoint {path}: rank {bad}: the optimizer state of chunk of" in str(error)
    assert isinstance(state, CheckpointError) and f"rank {bad}: the optimizer state" in str(state)
    assert isinstance(stepped, DiskError) and f"rank {bad}: the optimizer state" in str(stepped)
    engine.close()
    again = engine_of(folder, world, tensor=tensor)
    again.load(path)
    assert again.steps == 2 and train(again, 2, 3) == wanted
    with broken("preadv", here):
        assert f"rank {bad}: " in str(raised(lambda: again.load(path)))
    again.close()


@pytest.mark.few(1)
@pytest.mark.parametrize(("world", "bad", "tensor"), [(2, 1, 1), (4, 3, 2)])
def test_a_disk_that_breaks_in_saving(world: int, bad: int, tensor: int, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    arguments = (world, bad, str(tmp_path / "scratch"), str(tmp_path / "ckpt"), tensor)
    run_on_ranks(world, break_in_saving, *arguments, timeout_s=LIMIT_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "scratch"]
    assert not [*(tmp_path / "scratch").iterdir()]


def test_two_runs_do_not_write_into_one_checkpoint(tmp_path: Path) -> None:
    """Else one would give its name to a folder in which the other is at work."""
    path, real = tmp_path / "ckpt", TensorWriter.close
    engine, other = engine_of(None), engine_of(None)
    begun, go_on = threading.Event(), threading.Event()

    def slowly(writer: TensorWriter) -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)
        real(writer)

    with mock.patch.object(TensorWriter, "close", slowly), ThreadPoolExecutor(1) as beside:
        saving = beside.submit(other.save, path)
        assert begun.wait(LIMIT_S)
        with pytest.raises(CheckpointError, match=r"is in use: process .* has been saving into it"):
            engine.save(path)
        go_on.set()
        saving.result()
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    engine.load(path)
    engine.save(path)  # of whoever is done it may be replaced
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_a_link_to_a_checkpoint_stays_a_link(tmp_path: Path) -> None:
    engine = engine_of(None)
    engine.save(tmp_path / "runs" / "deep" / "one")
    (tmp_path / "latest").symlink_to(tmp_path / "runs" / "deep" / "one")
    train(engine, 0)
    for _ in range(2):
        engine.save(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert [p.name for p in (tmp_path / "runs" / "deep").iterdir()] == ["one"]
    again = engine_of(None)
    again.load(tmp_path / "latest")
    assert again.steps == 1


def test_a_folder_that_takes_nothing(tmp_path: Path) -> None:
    engine = engine_of(None)
    (tmp_path / "file").touch()
    for path in (Path("/proc/ckpt"), tmp_path / "file" / "ckpt"):
        with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
            engine.save(path)


def test_what_was_there_is_removed_as_far_as_that_can_be(tmp_path: Path) -> None:
    """The new checkpoint is complete by then, so it is no error."""
    engine, real = engine_of(None), os.rmdir
    engine.save(tmp_path / "ckpt")
    train(engine, 0)

    def busy(path: Any, **options: Any) -> None:
        if ".saved-" in str(path):
            raise OSError(errno.EBUSY, "somebody reads it")
        real(path, **options)

    with mock.patch.object(os, "rmdir", busy):
        engine.save(tmp_path / "ckpt")
    assert len([*(tmp_path / "ckpt").glob(".saved-*")]) == 1
    again = engine_of(None)
    again.load(tmp_path / "ckpt")
    assert again.steps == 1
    engine.save(tmp_path / "ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    assert not [*(tmp_path / "ckpt").glob(".*")]


# -- the folder of the state ------------------------------------------------------------------------------------------


def test_the_folder_goes_while_it_trains(tmp_path: Path) -> None:
    """Open files stay; what needs a new one says what is missing."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    engine, other = engine_of(str(scratch)), engine_of(None)
    other.close()
    train(engine, 0)
    for path in scratch.iterdir():
        path.unlink()
    scratch.rmdir()
    wanted = train(engine, 1, 2)
    engine.save(tmp_path / "ckpt")
    with pytest.raises(DiskError, match="does not exist"):
        engine_of(str(scratch))
    engine.close()
    scratch.mkdir()
    again = engine_of(str(scratch))
    assert train(again, 0, 1, 2)[1:] == wanted
    again.close()


def test_two_engines_in_one_process_name_one_folder(tmp_path: Path) -> None:
    one, two, alone = engine_of(str(tmp_path)), engine_of(str(tmp_path)), engine_of(str(tmp_path))
    assert len([*tmp_path.iterdir()]) == 3
    assert one.residency is not None and one.residency.notes == ()
    losses = [train(engine, 0, 1) for engine in (one, two)]
    assert losses[0] == losses[1] == train(alone, 0, 1)
    two.close()
    assert train(one, 2) == train(alone, 2)
    one.close()
    alone.close()
    assert not [*tmp_path.iterdir()]
