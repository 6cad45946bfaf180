"""A checkpoint that takes another's place: at every instant there is one, whoever dies or reads."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.engine import CheckpointError, Engine
from meshfold.engine.checkpoints import persistence, place
from meshfold.engine.checkpoints.checkpoint import Checkpoint
from meshfold.engine.checkpoints.exchange import exchange
from meshfold.engine.models import build
from meshfold.engine.together import fail_together
from meshfold.mesh.testing import RankFailure, run_on_ranks

WAYS = pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "renames"])


def engine_of(parallel: dict[str, Any] | None = None) -> Engine:
    return Engine(lambda: build("gpt-tiny"), parallel or {}, optimizer=dict(name="adamw", lr=1e-2))


def train(engine: Engine) -> None:
    rows = torch.randint(256, (4, 8), generator=torch.Generator().manual_seed(engine.steps))
    engine.train_step(engine.shard_batch(rows))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- deaths -----------------------------------------------------------------------------------------------------------


def die_at_the_end_of_the_last_save(path: str, exchanges: bool) -> None:
    engine = engine_of()
    engine.save(path)
    train(engine)
    if not exchanges:
        place.exchange = lambda *_: False
    removed: list[object] = []
    unlink = os.unlink

    def dying(*arguments: Any, **options: Any) -> None:
        if removed:
            os.kill(os.getpid(), signal.SIGKILL)
        removed.append(unlink(*arguments, **options))

    os.unlink = dying
    engine.save(path)


def go_on(path: str) -> tuple[int, list[str], list[str]]:
    engine = engine_of()
    engine.load(path)
    found = names(Path(path).parent)
    engine.save(path)
    engine.close()
    return engine.steps, found, names(Path(path).parent)


@WAYS
def test_a_death_after_the_last_save_leaves_the_rest_of_the_one_before_until_the_next(
    exchanges: bool, tmp_path: Path
) -> None:
    """The run that goes on from there has nothing more to save, perhaps: then it stays. Loading removes nothing."""
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_on_ranks(1, die_at_the_end_of_the_last_save, str(tmp_path / "ckpt"), exchanges)
    Checkpoint(tmp_path / "ckpt").verify()
    left = ".ckpt.writing" if exchanges else ".ckpt.old"
    assert run_on_ranks(1, go_on, str(tmp_path / "ckpt")) == [(1, [left, "ckpt"], ["ckpt"])]


def can_exchange(folder: Path) -> bool:
    """Whether the system can, asked without the help of what is tested."""
    for name in ("one", "other"):
        (folder / name).mkdir()
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = [os.fsencode(folder / name) for name in ("one", "other")]
    return rename is not None and rename(-100, names[0], -100, names[1], 2) == 0


def test_two_folders_change_places_or_nothing_happens(tmp_path: Path) -> None:
    can = can_exchange(tmp_path)
    (tmp_path / "one" / "a").touch()
    (tmp_path / "other" / "b").touch()
    assert exchange(tmp_path / "one", tmp_path / "other") == can
    assert (names(tmp_path / "one"), names(tmp_path / "other")) == ((["b"], ["a"]) if can else (["a"], ["b"]))
    assert not exchange(tmp_path / "one", tmp_path / "nowhere")
    assert names(tmp_path) == ["one", "other"]


def test_the_name_is_there_at_every_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ``if path.exists(): engine.load(path)`` begins anew after an unlucky death, and then saves over all that was."""
    if not can_exchange(tmp_path):
        pytest.skip(f"the file system of {tmp_path} cannot exchange two folders")
    engine, there = engine_of(), []

    def looking(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def looked(*arguments: Any, **options: Any) -> Any:
            found = real(*arguments, **options)
            there.append((tmp_path / "ckpt" / "state.json").exists())
            return found

        monkeypatch.setattr(owner, name, looked)

    engine.save(tmp_path / "ckpt")
    for owner, name in ((os, "rename"), (place, "exchange"), (os, "unlink"), (os, "rmdir")):
        looking(owner, name)
    engine.save(tmp_path / "ckpt")
    engine.save(tmp_path / "ckpt", asynchronous=True)
    engine.close()
    assert len(there) > 6 and all(there)


@WAYS
def test_an_empty_folder_of_that_name_is_not_taken_for_the_one_before(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has made it, after a death between two renames: what is aside is all there is until the end."""
    engine = engine_of()
    engine.save(tmp_path / "ckpt")
    (tmp_path / "ckpt").rename(tmp_path / ".ckpt.old")
    (tmp_path / "ckpt").mkdir()
    if not exchanges:
        monkeypatch.setattr(place, "exchange", lambda *_: False)
    removed = shutil.rmtree

    def checked(path: Any, *arguments: Any, **options: Any) -> None:
        Checkpoint(tmp_path / "ckpt")
        removed(path, *arguments, **options)
        Checkpoint(tmp_path / "ckpt")

    monkeypatch.setattr(shutil, "rmtree", checked)
    engine.save(tmp_path / "ckpt")
    assert names(tmp_path) == ["ckpt"]


def test_a_rename_that_fails_leaves_the_one_before_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    engine.save(tmp_path / "ckpt")
    train(engine)
    monkeypatch.setattr(place, "exchange", lambda *_: False)
    real = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".writing"):
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        engine.save(tmp_path / "ckpt")
    assert (names(tmp_path), Checkpoint(tmp_path / "ckpt").state["step"]) == (["ckpt"], 0)


# -- reading ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["model", "optimizer"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_never_two_halves(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = engine_of(), engine_of()
    train(engine)
    engine.save(tmp_path / "ckpt")
    found = Checkpoint(tmp_path / "ckpt")
    model = {name: value.clone() for name, value in found.model.items()}
    opened = found.model
    train(engine)
    engine.save(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="was replaced while it was read"):
        getattr(found, at)
    assert all(torch.equal(opened[name], value) for name, value in model.items())  # what was opened stays
    other.load(tmp_path / "ckpt")
    assert other.steps == 2


def load_while_it_is_replaced(path: str) -> tuple[str, int, bool]:
    """Rank 0 has opened it, and rank 1 finds another one there."""
    engine, opened = engine_of(dict(data=2)), Path(f"{path}-opened")
    before = engine.full_state_dict()

    def told(*arguments: Any) -> None:
        opened.touch()
        fail_together(*arguments)

    def late(where: Any) -> Checkpoint:
        while not opened.exists():
            time.sleep(0.01)
        os.rename(path, f"{path}-before")
        os.rename(f"{path}-after", path)
        return Checkpoint(where)

    with pytest.MonkeyPatch.context() as patch:
        if engine.mesh.rank == 0:
            patch.setattr(persistence, "fail_together", told)
        else:
            patch.setattr(persistence, "Checkpoint", late)
        with pytest.raises(CheckpointError) as caught:
            engine.load(path)
    after = engine.full_state_dict()
    same = all(torch.equal(after[name], before[name]) for name in before)
    engine.close()
    return str(caught.value), engine.steps, same


def test_ranks_that_have_opened_different_checkpoints_take_none(tmp_path: Path) -> None:
    engine = engine_of()
    train(engine)
    engine.save(tmp_path / "ckpt")
    train(engine)
    engine.save(tmp_path / "ckpt-after")
    engine.close()
    for text, steps, same in run_on_ranks(2, load_while_it_is_replaced, str(tmp_path / "ckpt")):
        assert "the ranks opened it, and they have opened different ones" in text
        assert (steps, same) == (0, True)
