"""A rank or a run that goes on although another has begun: it spoils nothing of the other's checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.checkpoint.folder import replacement, writing
from meshfold.checkpoint.tensors import BackgroundWriter
from meshfold.engine import CheckpointError, Engine
from meshfold.engine.checkpoints.checkpoint import MODEL_FILE, Checkpoint
from meshfold.engine.checkpoints.rank_file import RankFile
from meshfold.models import build


def engine_of() -> Engine:
    return Engine(lambda: build("gpt-tiny"), optimizer=dict(name="sgd", lr=1e-2))


@pytest.fixture
def sources() -> Iterator[tuple[Any, Any]]:
    engine = engine_of()
    yield engine.model_state.sources(), engine.world
    engine.close()


@pytest.mark.parametrize("done", ["noted", "laid out", "failed"])
def test_a_rank_that_outlives_its_run_writes_nothing_into_the_folder_of_the_next(
    done: str, sources: Any, tmp_path: Path
) -> None:
    """It has begun a file in a folder that is gone, and one of the same name is there, with a file of the same name."""
    folder = tmp_path / ".ckpt.writing"
    folder.mkdir()
    outlived = RankFile(folder, MODEL_FILE, *sources)
    if done == "laid out":
        outlived.lay_out(None)
        for copy, tensor in outlived.copies(lambda _, like: torch.empty_like(like)):
            copy.copy_(tensor)
    shutil.rmtree(folder)
    folder.mkdir()
    mine = RankFile(folder, MODEL_FILE, *sources)
    mine.part.write_text("mine")
    if done == "failed":
        outlived.give_up(OSError("no room"))
    else:
        with pytest.raises(OSError, match="No such file"):
            outlived.lay_out(None) if done == "noted" else outlived.write()
        outlived.abandon()
    assert {path.name: path.read_text() for path in folder.iterdir()} == {mine.part.name: "mine"}
    mine.abandon()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    """Each rank begins a file of its own in a new folder: what is there is another run's."""
    (tmp_path / MODEL_FILE).write_text("mine")
    with pytest.raises(OSError, match="File exists"):
        BackgroundWriter(tmp_path / MODEL_FILE, {})
    assert (tmp_path / MODEL_FILE).read_text() == "mine"


@pytest.mark.parametrize("before", [True, False], ids=["again", "first"])
def test_while_one_saves_no_other_does(before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while the files of the new checkpoint take the places of those before."""
    engine, other = engine_of(), engine_of()
    if before:
        engine.save(tmp_path / "ckpt")
    real, refused = writing.fsync_path, []

    def late(path: Path) -> None:
        if path == tmp_path:  # it has its name, and is complete
            return real(path)
        with pytest.raises(CheckpointError, match=r"is in use: process \d+ on .* has been saving into it") as caught:
            other.save(tmp_path / "ckpt")
        refused.append(caught.value)
        return real(path)

    monkeypatch.setattr(replacement if before else writing, "fsync_path", late)
    engine.save(tmp_path / "ckpt")
    monkeypatch.undo()
    assert refused
    Checkpoint(tmp_path / "ckpt").verify()
    other.save(tmp_path / "ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_what_another_begins_while_one_ends_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name that was written under may be another's by then."""
    engine = engine_of()
    real, begun = writing.fsync_path, tmp_path / ".ckpt.writing"

    def late(path: Path) -> None:
        real(path)
        if path == tmp_path and not begun.exists():
            begun.mkdir()
            (begun / "mine").touch()

    monkeypatch.setattr(writing, "fsync_path", late)
    engine.save(tmp_path / "ckpt")
    assert (tmp_path / "ckpt" / "state.json").exists()
    assert (begun / "mine").exists()
