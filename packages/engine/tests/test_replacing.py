"""A checkpoint that takes another's place: at every instant there is one, whoever dies or reads."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.checkpoint.folder import (
    all_checkpoints,
    complete_checkpoints,
    is_complete,
    prune,
    remove_leftovers,
    replacement,
    writing,
)
from meshfold.engine import CheckpointError, Engine, persistence
from meshfold.engine.checkpoints.checkpoint import Checkpoint
from meshfold.engine.world import fail_together
from meshfold.mesh.testing import RankFailure, run_on_ranks
from meshfold.models import build

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from checkpoint_edits import edit_state


def engine_of(parallel: dict[str, Any] | None = None) -> Engine:
    return Engine(lambda: build("gpt-tiny"), parallel or {}, optimizer=dict(name="adamw", lr=1e-2))


def train(engine: Engine) -> None:
    rows = torch.randint(256, (4, 8), generator=torch.Generator().manual_seed(engine.steps))
    engine.train_step(engine.shard_batch(rows))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- what else is there ------------------------------------------------------------------------------------------------


def test_everything_else_in_the_folder_stays(tmp_path: Path) -> None:
    """Also checkpoints in folders of their own within it, links, and what another kind of save listed goes alone."""
    engine, out = engine_of(), tmp_path / "out"
    engine.save(out)
    listed = names(out)
    for step in (1, 2):
        train(engine)
        engine.save(out / f"checkpoint-{step}")
    (out / "notes.md").write_text("why")
    (out / "src").mkdir()
    (out / "src" / "main.py").write_text("print(1)")
    (tmp_path / "elsewhere").write_text("mine")
    (out / "link").symlink_to(tmp_path / "elsewhere")
    others = {"checkpoint-1", "checkpoint-2", "link", "notes.md", "src"}
    inode = (out / "src" / "main.py").stat().st_ino
    for asynchronous in (False, True, False):
        engine.save(out, asynchronous=asynchronous)
        engine.saver.finish()
        assert others <= {*names(out)}
        Checkpoint(out).verify()
        assert Checkpoint(out / "checkpoint-1").state["step"] == 1
    assert {*names(out)} == {*listed, *others}  # nothing of the save in rectangles is left
    assert (out / "src" / "main.py").stat().st_ino == inode
    assert (out / "link").is_symlink() and (tmp_path / "elsewhere").read_text() == "mine"
    engine.close()


@pytest.mark.parametrize(
    "text",
    ['{"terraform": true}', "{}", '{"format": 2}', '{"format": 2, "files": {"thesis.txt": 17}}', "[1]", "{"],
)
def test_a_folder_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    engine = engine_of()
    (tmp_path / "project" / "src").mkdir(parents=True)
    (tmp_path / "project" / "state.json").write_text(text)
    (tmp_path / "project" / "thesis.txt").write_text("ten years of work")
    for asynchronous in (False, True):
        with pytest.raises(CheckpointError, match=r"state.json is damaged or not a checkpoint's"):
            engine.save(tmp_path / "project", asynchronous=asynchronous)
    assert names(tmp_path / "project") == ["src", "state.json", "thesis.txt"]
    assert names(tmp_path) == ["project"]
    engine.close()


def test_a_file_that_no_index_lists_is_not_replaced(tmp_path: Path) -> None:
    engine = engine_of()
    engine.save(tmp_path / "ckpt")
    (tmp_path / "ckpt" / "model.blocks.json").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"model.blocks.json is in the way: the checkpoint there does not list it"
    ):
        engine.save(tmp_path / "ckpt", asynchronous=True)
    engine.save(tmp_path / "ckpt")  # which has no such file
    assert (tmp_path / "ckpt" / "model.blocks.json").read_text() == "mine"
    engine.load(tmp_path / "ckpt")  # nor is it read
    (tmp_path / "ckpt" / "optimizer.safetensors").unlink()
    (tmp_path / "ckpt" / "optimizer.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors is in the way"):
        engine.save(tmp_path / "ckpt")
    engine.close()


def test_a_file_that_appears_while_it_is_written_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    (tmp_path / "ckpt").mkdir()
    real = writing.with_checksum

    def late(state: Any) -> Any:
        (tmp_path / "ckpt" / "model.safetensors").write_text("mine")
        return real(state)

    monkeypatch.setattr(writing, "with_checksum", late)
    with pytest.raises(CheckpointError, match=r"exists and is not a checkpoint"):
        engine.save(tmp_path / "ckpt")
    assert (names(tmp_path / "ckpt"), names(tmp_path)) == (["model.safetensors"], ["ckpt"])
    engine.close()


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    engine = engine_of()
    engine.save(tmp_path / "ckpt")
    (tmp_path / "ckpt" / "model.safetensors").rename(tmp_path / "kept")
    (tmp_path / "ckpt" / "model.safetensors").symlink_to(tmp_path / "kept")
    before = (tmp_path / "kept").read_bytes()
    train(engine)
    engine.save(tmp_path / "ckpt")
    assert (tmp_path / "kept").read_bytes() == before
    assert not (tmp_path / "ckpt" / "model.safetensors").is_symlink()
    engine.load(tmp_path / "ckpt")
    engine.close()


def test_an_index_that_lists_files_of_others_removes_none(tmp_path: Path) -> None:
    """Somebody else may have written it."""
    engine = engine_of()
    engine.save(tmp_path / "runs" / "step-00000001")
    engine.save(tmp_path / "runs" / "step-00000002")
    (tmp_path / "secret").write_text("mine")
    for path in ("../../secret", str(tmp_path / "secret"), "notes.txt"):
        (tmp_path / "runs" / "step-00000001" / "notes.txt").write_text("mine")
        edit_state(tmp_path / "runs" / "step-00000001", lambda state, path=path: state["files"].update({path: 4}))
        assert prune(tmp_path / "runs", 1) == []
        with pytest.raises(CheckpointError):
            engine.save(tmp_path / "runs" / "step-00000001")
        assert (tmp_path / "secret").exists() and (tmp_path / "runs" / "step-00000001" / "notes.txt").exists()
        edit_state(tmp_path / "runs" / "step-00000001", lambda state, path=path: state["files"].pop(path))
    engine.close()


def test_prune_leaves_what_is_not_a_checkpoints(tmp_path: Path) -> None:
    engine = engine_of()
    for step in (1, 2, 3):
        foreign = tmp_path / "theirs" / f"step-{step:08}"
        foreign.mkdir(parents=True)
        (foreign / "state.json").write_text("{}")
        (foreign / "data.txt").write_text("not a checkpoint")
        engine.save(tmp_path / "runs" / f"step-{step:08}")
    assert prune(tmp_path / "theirs", 1) == []
    assert len([*(tmp_path / "theirs").rglob("*.txt")]) == 3
    (tmp_path / "runs" / "step-00000001" / "notes").mkdir()
    assert [path.name for path in prune(tmp_path / "runs", 1)] == ["step-00000001", "step-00000002"]
    assert [str(path.relative_to(tmp_path / "runs")) for path in sorted((tmp_path / "runs").rglob("*"))][:3] == [
        "step-00000001",
        "step-00000001/notes",
        "step-00000003",
    ]
    engine.close()


def test_a_removal_that_was_cut_short_is_ended_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    for step in (1, 2):
        engine.save(tmp_path / f"step-{step:08}")
    with monkeypatch.context() as patched:
        patched.setattr(replacement, "finish_removal", lambda _: None)
        prune(tmp_path, 1)
    first = tmp_path / "step-00000001"
    assert "state.json.removing" in names(first) and "model.safetensors" in names(first)
    assert (complete_checkpoints(tmp_path), all_checkpoints(tmp_path)) == ([tmp_path / "step-00000002"],) * 2
    assert prune(tmp_path, 1) == []
    assert names(tmp_path) == ["step-00000002"]
    engine.save(first)
    with monkeypatch.context() as patched:
        patched.setattr(replacement, "finish_removal", lambda _: None)
        prune(tmp_path, 1)
    engine.save(first)  # in its place, too
    Checkpoint(first).verify()
    engine.close()


def test_a_folder_that_cannot_be_renamed_is_written_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mount point, whose parent may not be writable either."""
    engine, mount = engine_of(), tmp_path / "volume"
    mount.mkdir()
    (tmp_path / "like").mkdir()
    real = os.rename

    def refusing(source: Any, target: Any, **options: Any) -> None:
        if mount in (Path(source), Path(target)):
            raise OSError(errno.EBUSY, "Device or resource busy")
        real(source, target, **options)

    monkeypatch.setattr(os, "rename", refusing)
    for asynchronous in (False, True, False):
        train(engine)
        engine.save(mount, asynchronous=asynchronous)
        engine.saver.finish()
        Checkpoint(mount).verify()
    assert names(tmp_path) == ["like", "volume"]
    for path in mount.iterdir():
        path.unlink()
    engine.save_hugging_face(mount)
    assert names(mount) == ["config.json", "model.safetensors"]
    assert names(tmp_path) == ["like", "volume"]
    engine.close()


# -- deaths -----------------------------------------------------------------------------------------------------------


def die_at_the_end_of_the_last_save(path: str) -> None:
    engine = engine_of()
    engine.save(path)
    train(engine)
    real = Path.replace

    def dying(self: Path, target: Path) -> Path:
        found = real(self, target)
        if self.name == "model.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Path.replace = dying  # type: ignore[assignment,method-assign]
    engine.save(path)


def go_on(path: str) -> tuple[int, list[str], list[str]]:
    engine = engine_of()
    engine.load(path)
    found = [name for name in names(Path(path)) if name.startswith(".")]
    engine.save(path)
    engine.close()
    return engine.steps, found, names(Path(path))


def test_a_death_while_files_take_their_places(tmp_path: Path) -> None:
    """The run that goes on from there has nothing more to save, perhaps: then it stays so. Loading removes nothing."""
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_on_ranks(1, die_at_the_end_of_the_last_save, str(tmp_path / "ckpt"))
    found = Checkpoint(tmp_path / "ckpt")
    found.verify()
    left = f".saved-{found.state['checksum']}"
    assert names(tmp_path / "ckpt" / left) == ["optimizer.safetensors", "replaced.json"]
    assert is_complete(tmp_path / "ckpt")
    shutil.copytree(tmp_path / "ckpt", tmp_path / "moved")
    [(steps, hidden, after)] = run_on_ranks(1, go_on, str(tmp_path / "ckpt"))
    assert (steps, hidden) == (1, [".lock", left])
    assert after == ["model.safetensors", "optimizer.safetensors", "state.json"]
    assert names(tmp_path) == ["ckpt", "moved"]
    remove_leftovers(tmp_path / "moved")
    assert names(tmp_path / "moved") == after
    Checkpoint(tmp_path / "moved").verify()


def test_its_index_is_there_at_every_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ``if path.exists(): engine.load(path)`` begins anew after an unlucky death, and then saves over all that was."""
    engine, there = engine_of(), []

    def looking(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def looked(*arguments: Any, **options: Any) -> Any:
            found = real(*arguments, **options)
            Checkpoint(tmp_path / "ckpt").verify()
            there.append((tmp_path / "ckpt" / "state.json").exists())
            return found

        monkeypatch.setattr(owner, name, looked)

    engine.save(tmp_path / "ckpt")
    for name in ("rename", "replace", "unlink", "rmdir"):
        looking(os, name)
    train(engine)
    engine.save(tmp_path / "ckpt")
    train(engine)
    engine.save(tmp_path / "ckpt", asynchronous=True)
    engine.close()
    assert len(there) > 6 and all(there)


def test_a_file_that_cannot_be_moved_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    engine.save(tmp_path / "ckpt")
    train(engine)
    real, failing_at = Path.replace, ["state.json", "optimizer.safetensors"]

    def failing(self: Path, target: Path) -> Path:
        if self.name == failing_at[0]:
            raise OSError(5, "Input/output error")
        return real(self, target)

    for expected in (0, 1):  # before its index is in place it is the one before, then the new one
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", failing)
            with pytest.raises(CheckpointError, match="Input/output error"):
                engine.save(tmp_path / "ckpt")
        Checkpoint(tmp_path / "ckpt").verify()
        assert Checkpoint(tmp_path / "ckpt").state["step"] == expected
        failing_at.pop(0)
    engine.save(tmp_path / "ckpt")
    assert not [name for name in names(tmp_path / "ckpt") if name.startswith(".")]
    engine.close()


def test_one_that_an_earlier_version_put_aside_is_put_back(tmp_path: Path) -> None:
    """Where a file system cannot exchange two folders it did so for an instant."""
    engine = engine_of()
    engine.save(tmp_path / "ckpt")
    (tmp_path / "ckpt" / "notes").touch()
    (tmp_path / "ckpt").rename(tmp_path / ".ckpt.old")
    (tmp_path / "ckpt").mkdir()
    engine.load(tmp_path / "ckpt")
    engine.save(tmp_path / "ckpt")
    assert names(tmp_path) == ["ckpt"]
    assert "notes" in names(tmp_path / "ckpt")
    engine.close()


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
        assert "the ranks opened it, so they opened different checkpoints" in text
        assert (steps, same) == (0, True)
