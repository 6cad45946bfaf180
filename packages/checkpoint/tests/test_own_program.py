"""The package alone: a program of its own saves, is interrupted, runs out of disk, and reads what it wrote."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import meshfold.checkpoint
from meshfold.checkpoint import (
    CheckpointError,
    FileWriteError,
    TensorInfo,
    TensorWriter,
    latest,
    new_checkpoint,
    open_checkpoint,
    step_folder,
    write_atomically,
)


def save(target: Path, value: float, elements: int = 4) -> None:
    tensor = torch.full((elements,), value)
    with new_checkpoint(target, {"step": int(value)}) as folder:
        announced = {"w": TensorInfo(dtype=tensor.dtype, shape=tuple(tensor.shape))}
        with TensorWriter(folder / "model.safetensors", announced) as writer:
            writer.write("w", tensor)


def save_half(target: Path) -> None:
    with new_checkpoint(target, {"step": 2}) as folder:
        (folder / "notes.txt").write_text("half")
        announced = {"w": TensorInfo(dtype=torch.float32, shape=(4,))}
        with TensorWriter(folder / "model.safetensors", announced):
            pass  # and the announced tensor is missing


def save_names(target: Path, *names: str) -> None:
    with new_checkpoint(target) as folder:
        for name in names:
            (folder / name).touch()


def content(target: Path) -> tuple[int, float]:
    state, tensors = open_checkpoint(target)
    return state["step"], tensors["w"][0].item()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_public_name_is_there() -> None:
    for name in meshfold.checkpoint.__all__:
        assert getattr(meshfold.checkpoint, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'newest'"):
        meshfold.checkpoint.newest  # noqa: B018


def test_an_error_in_the_body_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    target = step_folder(tmp_path / "run", 1)
    save(target, 1.0)
    with pytest.raises(CheckpointError, match="'w'"):
        save_half(target)
    assert content(target) == (1, 1.0)
    assert sorted(path.name for path in target.iterdir()) == ["model.safetensors", "state.json"]
    save(target, 2.0)
    assert latest(tmp_path / "run") == target and content(target) == (2, 2.0)


def test_a_full_disk_is_told_in_a_sentence_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    save(tmp_path / "one", 1.0)
    with files_of_at_most(100_000), pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*ulimit -f"):
        save(tmp_path / "one", 2.0, elements=100_000)
    assert content(tmp_path / "one") == (1, 1.0)


def test_a_small_file_that_is_not_written_whole_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tokens.npy"
    file.write_text("before")
    with (
        files_of_at_most(10_000),
        pytest.raises(FileWriteError, match=r"cannot write .*tokens\.npy: .*whole.*disk is full"),
    ):
        write_atomically(file, lambda path: np.save(path, np.zeros(10_000)))
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.npy"] and file.read_text() == "before"
    with pytest.raises(FileWriteError, match=r"cannot write .*none/a: No such file"):
        write_atomically(tmp_path / "none" / "a", lambda path: path.write_text("a"))


def test_a_file_of_another_name_is_refused_and_is_in_nobodys_way(tmp_path: Path) -> None:
    save(tmp_path / "one", 1.0)
    with pytest.raises(CheckpointError, match=r"'notes\.txt' is no name .* optimizer\.safetensors"):
        save_names(tmp_path / "one", "model.safetensors", "notes.txt")
    save(tmp_path / "one", 2.0)
    assert content(tmp_path / "one") == (2, 2.0)


def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"), new_checkpoint(tmp_path / "empty"):
        pass
    assert not (tmp_path / "empty").exists()


def test_a_process_that_dies_while_it_replaces_one_leaves_the_new_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "one"
    save(target, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr("meshfold.checkpoint.folder.replacement.finish_replacement", lambda target: None)
        save(target, 2.0)  # the state is the new one, and model.safetensors in its place still the old one
    assert content(target) == (2, 2.0)
    (target / "model.safetensors").unlink()
    assert content(target) == (2, 2.0)


def test_a_checkpoint_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "one", 1.0)
    file = tmp_path / "one" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"is damaged: its model\.safetensors has"):
        open_checkpoint(tmp_path / "one")
