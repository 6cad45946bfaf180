"""Which checkpoint of a folder is the last complete one, and which go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshfold.checkpoint.folder import (
    all_checkpoints,
    hold_lock,
    latest,
    prune,
    remove_leftovers,
    step_folder,
)
from meshfold.engine import CheckpointError


def checkpoint(folder: Path, step: int, *, name: str = "") -> Path:
    """A folder that is a complete checkpoint, as far as one can see from outside."""
    path = folder / name if name else step_folder(folder, step)
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"12345678")
    (path / "state.json").write_text(json.dumps({"format": 2, "files": {"model.safetensors": 8}}))
    return path


def test_the_last_complete_one_is_found(tmp_path: Path) -> None:
    assert step_folder(tmp_path, 120) == tmp_path / "step-00000120"
    assert step_folder(tmp_path, 10**9) == tmp_path / "step-1000000000"
    with pytest.raises(CheckpointError, match="step=-1"):
        step_folder(tmp_path, -1)
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    (tmp_path / "step-00000099").mkdir()  # nothing in it
    (tmp_path / "notes.txt").touch()
    assert latest(tmp_path) is None
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 100_000_000)  # a digit more: numbers count, not letters
    checkpoint(tmp_path, 120)
    assert latest(tmp_path) == tmp_path / "step-100000000"
    (tmp_path / "step-100000000" / "model.safetensors").write_bytes(b"1234")
    assert latest(tmp_path) == tmp_path / "step-00000120"
    (tmp_path / "step-00000120" / "state.json").write_text("{")
    assert latest(tmp_path) == tmp_path / "step-00000009"
    checkpoint(tmp_path, 0, name=".step-00000200.writing")  # complete, and has not got its name yet
    assert latest(tmp_path) == tmp_path / "step-00000009"
    (tmp_path / "step-00000009").rename(tmp_path / ".step-00000009.old")  # between two renames
    assert latest(tmp_path) == tmp_path / "step-00000009"


def test_old_ones_go_and_what_is_under_way_stays(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 0, name="mine")
    (tmp_path / "step-00000050").mkdir()
    for step in (15, 25, 60):
        (tmp_path / f".step-{step:08}.writing").mkdir()
    (tmp_path / ".step-00000005.removing").mkdir()
    with hold_lock(tmp_path / ".step-00000025.lock", doing="saving into it"):
        assert prune(tmp_path, 2) == [tmp_path / "step-00000010", tmp_path / "step-00000020"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step-00000025.writing",
        ".step-00000060.writing",
        "mine",
        "step-00000030",
        "step-00000040",
        "step-00000050",
    ]
    assert prune(tmp_path, 2) == []
    assert prune(tmp_path / "nowhere", 1) == []
    for keep in (0, -1, True, 1.5):
        with pytest.raises(CheckpointError, match=f"keep={keep!r}: give the number of checkpoints"):
            prune(tmp_path, keep)  # type: ignore[arg-type]


def test_one_that_stays_and_is_aside_stays(tmp_path: Path) -> None:
    """The run that replaced it died between two renames; it may not be the newest."""
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 20, name=".step-00000020.old")
    checkpoint(tmp_path, 30)
    checkpoint(tmp_path, 30, name=".step-00000030.old")  # goes: the new one is complete under its name
    assert all_checkpoints(tmp_path) == [step_folder(tmp_path, step) for step in (30, 20, 10)]
    assert prune(tmp_path, 2) == [tmp_path / "step-00000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step-00000020.old",
        "step-00000030",
    ]
    checkpoint(tmp_path, 40)
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]


def test_what_dead_processes_left_beside_a_complete_one_goes(tmp_path: Path) -> None:
    hidden = [".mine.old", ".mine.removing", ".mine.writing"]
    for name in hidden:
        checkpoint(tmp_path, 0, name=name)
    remove_leftovers(tmp_path / "mine")  # which is not there
    (tmp_path / "mine").mkdir()
    remove_leftovers(tmp_path / "mine")  # nor complete
    assert sorted(path.name for path in tmp_path.iterdir()) == [*hidden, "mine"]
    (tmp_path / "mine").rmdir()
    checkpoint(tmp_path, 0, name="mine")
    with hold_lock(tmp_path / ".mine.lock", doing="saving into it"):
        remove_leftovers(tmp_path / "mine")
        assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.lock", ".mine.writing", "mine"]
    remove_leftovers(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_one_that_cannot_be_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        checkpoint(tmp_path, step)

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(CheckpointError, match=r"cannot remove an old checkpoint in .*Permission denied"):
        prune(tmp_path, 1)
    assert latest(tmp_path) == tmp_path / "step-00000020"
