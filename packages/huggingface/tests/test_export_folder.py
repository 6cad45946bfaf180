"""Folders of exported models: one process writes one, and nothing of somebody else's gets in or is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.checkpoint.tensors import TensorInfo
from meshfold.engine import CheckpointError
from meshfold.huggingface import convert_folder
from meshfold.huggingface.folder_writer import FolderWriter

ANNOUNCED = {name: TensorInfo(dtype=torch.float32, shape=(4,)) for name in "ab"}
CONFIG: dict[str, Any] = {"model_type": "gpt2"}


def writer(target: Path, **options: Any) -> FolderWriter:
    return FolderWriter(target, ANNOUNCED, **{"config": CONFIG, **options})


def written(target: Path, **options: Any) -> None:
    export = writer(target, **options)
    for name in "ab":
        export.write(name, torch.ones(4))
    export.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("inside", [False, True], ids=["new", "empty"])
def test_two_exports_into_one_folder(inside: bool, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if inside:
        target.mkdir()
    one = writer(target)
    one.write("a", torch.ones(4))
    with pytest.raises(CheckpointError, match=rf"{target} is in use: process {os.getpid()} on .* has been exporting"):
        writer(target)
    one.write("b", torch.ones(4))
    one.close()
    assert names(target) == ["config.json", "model.safetensors"]
    with pytest.raises(CheckpointError, match="already exists"):
        writer(target)
    assert names(tmp_path) == ["out"]


def test_what_an_export_left_that_died_goes_with_the_next(tmp_path: Path) -> None:
    for target in (tmp_path / "new", tmp_path / "empty"):
        if target.name == "empty":
            target.mkdir()
        dead = writer(target)
        dead.write("a", torch.ones(4))
        dead._mine.close()  # as the end of its process does
        written(target)
        assert names(target) == ["config.json", "model.safetensors"]
    assert names(tmp_path) == ["empty", "new"]
    (tmp_path / ".other.writing" / "photos").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is in the way, but no export wrote it"):
        writer(tmp_path / "other")
    assert (tmp_path / ".other.writing" / "photos").exists()


def test_a_file_that_appears_while_it_is_written_stays(tmp_path: Path) -> None:
    for inside in (False, True):
        target = tmp_path / str(inside)
        if inside:
            target.mkdir()
        export = writer(target)
        for name in "ab":
            export.write(name, torch.ones(4))
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text("mine")
        with pytest.raises(CheckpointError, match="already exists"):
            export.close()
        export.abandon()
        assert names(target) == ["config.json"]
        assert (target / "config.json").read_text() == "mine"


def test_a_link_out_of_the_folder_is_not_copied(tmp_path: Path) -> None:
    written(tmp_path / "like")
    (tmp_path / "private.txt").write_text("not yours")
    (tmp_path / "like" / "vocab.txt").symlink_to(tmp_path / "private.txt")
    with pytest.raises(CheckpointError, match=r"vocab.txt is a link to .*private.txt, which is not in the folder"):
        written(tmp_path / "one", like=tmp_path / "like")
    with pytest.raises(CheckpointError, match="is a link to"):
        convert_folder(tmp_path / "like", tmp_path / "one", to="hf")
    assert names(tmp_path) == ["like", "private.txt"]
    (tmp_path / "like" / "vocab.txt").unlink()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "like" / name).rename(tmp_path / name)
        (tmp_path / "like" / name).symlink_to(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name} is a link to"):
            convert_folder(tmp_path / "like", tmp_path / "one", to="checkpoint")
        (tmp_path / "like" / name).unlink()
        (tmp_path / name).rename(tmp_path / "like" / name)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    """It consists of links to files that are named after what they hold."""
    written(tmp_path / "plain")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1f0c"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(names(tmp_path / "plain")):
        (tmp_path / "plain" / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    done = convert_folder(snapshot, tmp_path / "out", to="hf")
    assert (done.tensors, names(tmp_path / "out")) == (2, ["config.json", "model.safetensors"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gpt2"
