"""Writing of a Hugging Face folder tensor by tensor: weights in one file or in shards, and the files that belong to them.

The folder gets its name when it is complete on disk. An existing empty folder, such as a mount point, is written in place:
then ``config.json`` comes last. Only one process writes a folder at a time. At most one tensor is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.files import fsync_path
from meshfold.checkpoint.folder import (
    LOCK_FILE,
    SAVING_FOLDER,
    hold_lock,
    lock_path,
    make_durable_folder,
    writing_path,
)
from meshfold.checkpoint.tensors import SAFETENSORS_NAME, TensorInfo, TensorWriter, check_inside_folder
from meshfold.huggingface.folder_config import read_raw_config

SHARD_BYTES = 5 * 10**9
"""Approximate largest size of a file of weights, as in transformers"""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")


class FolderWriter:
    """Writes weights in the order in which they were announced."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        announced: Mapping[str, TensorInfo],
        *,
        config: Mapping[str, Any] | None,
        like: Path | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Args:
            folder: made with its parents, or empty.
            announced: every tensor that will come, in order.
            config: of ``config.json``; None: that of ``like``.
            like: a folder whose files except weights are copied, such as the tokenizer.
            shard_bytes: limit of a file; a larger tensor gets its own file.

        Raises:
            CheckpointError: if the folder is not empty, no configuration is known, or a file of ``like`` is a link to one
                elsewhere.
            InUseError: if another process writes there.
        """
        self._target = Path(folder).absolute()
        self._check_empty()
        if config is None and (like is None or not (like / "config.json").is_file()):
            raise CheckpointError(
                f"nothing says the config.json of {folder}: name the Hugging Face folder that the model came from (like)"
            )
        self._announced, self._config = dict(announced), config
        self._beside = [] if like is None else _carried(like)
        if config is None and like is not None:
            self._config = read_raw_config(like)
        self._shards = _shards(self._announced, shard_bytes)
        inside = self._target.exists()
        make_durable_folder(self._target if inside else self._target.parent)
        with ExitStack() as mine:
            lock = lock_path(self._target, inside=inside)
            mine.enter_context(hold_lock(lock, doing="exporting into it", folder=self._target))
            self._check_empty()
            self.folder = writing_path(self._target, inside=inside)
            _clear(self.folder)  # left by a process that was killed
            make_durable_folder(self.folder)
            self._mine = mine.pop_all()
        self._left = [*self._announced]
        self._number = -1
        self._writer: TensorWriter | None = None

    @property
    def files(self) -> int:
        """The number of files with weights."""
        return len(self._shards)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, in its announced dtype."""
        while self._writer is None or name not in self._shards[self._number]:
            self._next()
        self._writer.write(name, tensor.to(self._announced[name].dtype))
        self._left.remove(name)

    def close(self) -> None:
        """Write the other files, sync everything to disk, and give the folder its name."""
        if self._left:
            raise CheckpointError(f"{self._target}: {self._left[0]!r} was announced but never written")
        self._next()
        if len(self._shards) > 1:
            where = {name: self._file(number) for number, shard in enumerate(self._shards) for name in shard}
            total = sum(described.bytes for described in self._announced.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
            (self.folder / f"{SAFETENSORS_NAME}.index.json").write_text(text)
        for path in self._beside:
            shutil.copyfile(path, self.folder / path.name)
        (self.folder / "config.json").write_text(json.dumps(self._described(), indent=2) + "\n")
        for path in self.folder.iterdir():
            fsync_path(path)
        fsync_path(self.folder)
        self._check_empty()
        if self.folder.parent == self._target:
            for path in sorted(self.folder.iterdir(), key=lambda path: path.name == "config.json"):
                path.rename(self._target / path.name)
            self.folder.rmdir()
            fsync_path(self._target)
        else:
            self.folder.rename(self._target)
            fsync_path(self._target.parent)
        self._mine.close()

    def abandon(self) -> None:
        """Remove the written files; does nothing after ``close``."""
        if self._writer is not None:
            self._writer.abandon()
        with self._mine, suppress(OSError, CheckpointError):
            _clear(self.folder)

    def _check_empty(self) -> None:
        """Raise a CheckpointError unless the target is missing or empty."""
        target = self._target
        if target.exists() and (
            not target.is_dir() or any(path.name not in (LOCK_FILE, SAVING_FOLDER) for path in target.iterdir())
        ):
            raise CheckpointError(f"{target} already exists: remove it, or choose another folder")

    def _next(self) -> None:
        """Close the file, and start the next one if there is one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._number += 1
        if self._number < len(self._shards):
            shard = self._shards[self._number]
            self._writer = TensorWriter(self.folder / self._file(self._number), shard, order=[*shard])

    def _file(self, number: int) -> str:
        if len(self._shards) == 1:
            return SAFETENSORS_NAME
        stem, _, ending = SAFETENSORS_NAME.rpartition(".")
        return f"{stem}-{number + 1:05}-of-{len(self._shards):05}.{ending}"

    def _described(self) -> dict[str, Any]:
        """Return the configuration, with the dtype of most elements."""
        found = dict(self._config or {})
        elements: dict[torch.dtype, int] = {}
        for described in self._announced.values():
            if described.dtype.is_floating_point:
                size = torch.Size(described.shape).numel()
                elements[described.dtype] = elements.get(described.dtype, 0) + size
        if elements:
            name = str(max(elements, key=elements.__getitem__)).removeprefix("torch.")
            found["torch_dtype" if "torch_dtype" in found and "dtype" not in found else "dtype"] = name
        return found


def _carried(like: Path) -> list[Path]:
    """Return the files of a folder to copy: all but the weights.

    Raises:
        CheckpointError: for a link to a file elsewhere, which would be copied into a folder that may be published.
    """
    found = [
        path
        for path in sorted(like.iterdir())
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in ("state.json", LOCK_FILE)
    ]
    for path in found:
        check_inside_folder(path, like)
    return found


def _clear(folder: Path) -> None:
    """Remove the folder of an unfinished export, which has only files in it.

    Raises:
        CheckpointError: if it contains something that an export does not write.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or any(path.is_symlink() or not path.is_file() for path in folder.iterdir()):
        raise CheckpointError(f"{folder} is in the way, but no export wrote it: move it away")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _shards(announced: Mapping[str, TensorInfo], most: int) -> list[dict[str, TensorInfo]]:
    shards: list[dict[str, TensorInfo]] = [{}]
    held = 0
    for name, described in announced.items():
        if shards[-1] and held + described.bytes > most:
            shards.append({})
            held = 0
        shards[-1][name] = described
        held += described.bytes
    return shards
