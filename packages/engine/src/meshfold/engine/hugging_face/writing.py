"""Writing a Hugging Face folder tensor by tensor: weights in one file or in shards, what belongs to them beside.

The folder gets its name when all of it is on the disk. No more than one tensor is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfold.engine.checkpoints.place import make, sync, writing_of
from meshfold.engine.checkpoints.tensor_file import Described, TensorWriter
from meshfold.engine.errors import CheckpointError
from meshfold.engine.hugging_face.folder_weights import SAFE

SHARD_BYTES = 5 * 10**9
"""Of a file of weights, about: as transformers does it."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")


class FolderWriter:
    """Writes weights in the order in which they were announced."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        announced: Mapping[str, Described],
        *,
        config: Mapping[str, Any] | None,
        like: Path | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Args:
            folder: where; made with its parents, and empty so far.
            announced: every tensor that will come, in order.
            config: of ``config.json``; None: that of ``like``.
            like: a folder whose files are carried along, but for its weights: the tokenizer, say.
            shard_bytes: of a file; a tensor that is larger has a file of its own.

        Raises:
            CheckpointError: if there is something already, or no configuration is known.
        """
        self._target = Path(folder).absolute()
        if self._target.exists() and (not self._target.is_dir() or any(self._target.iterdir())):
            raise CheckpointError(f"{folder} is there already: remove it, or choose another folder")
        if config is None and (like is None or not (like / "config.json").is_file()):
            raise CheckpointError(
                f"nothing says the config.json of {folder}: name the Hugging Face folder that the model came from (like)"
            )
        self._announced, self._config, self._like = dict(announced), config, like
        self._shards = _shards(self._announced, shard_bytes)
        self.folder = writing_of(self._target)
        if self.folder.exists():  # left by a process that died
            shutil.rmtree(self.folder)
        make(self.folder)
        self._left = [*self._announced]
        self._number = -1
        self._writer: TensorWriter | None = None

    @property
    def files(self) -> int:
        """How many files the weights are in."""
        return len(self._shards)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, in its announced dtype."""
        while self._writer is None or name not in self._shards[self._number]:
            self._next()
        self._writer.write(name, tensor.to(self._announced[name].dtype))
        self._left.remove(name)

    def close(self) -> None:
        """Write what belongs to the weights, bring all to the disk, and give the folder its name."""
        if self._left:
            raise CheckpointError(f"{self._target}: {self._left[0]!r} was announced and never came")
        self._next()
        if len(self._shards) > 1:
            where = {name: self._file(number) for number, shard in enumerate(self._shards) for name in shard}
            total = sum(described.bytes for described in self._announced.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
            (self.folder / f"{SAFE}.index.json").write_text(text)
        if self._like is not None:
            for path in sorted(self._like.iterdir()):
                if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name != "state.json":
                    shutil.copyfile(path, self.folder / path.name)
        (self.folder / "config.json").write_text(json.dumps(self._described(), indent=2) + "\n")
        for path in self.folder.iterdir():
            sync(path)
        sync(self.folder)
        if self._target.exists():
            self._target.rmdir()
        self.folder.rename(self._target)
        sync(self._target.parent)

    def abandon(self) -> None:
        """Remove what was written; nothing after ``close``."""
        if self._writer is not None:
            self._writer.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _next(self) -> None:
        """End a file, and begin the next one if there is one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._number += 1
        if self._number < len(self._shards):
            shard = self._shards[self._number]
            self._writer = TensorWriter(self.folder / self._file(self._number), shard, order=[*shard])

    def _file(self, number: int) -> str:
        if len(self._shards) == 1:
            return SAFE
        stem, _, ending = SAFE.rpartition(".")
        return f"{stem}-{number + 1:05}-of-{len(self._shards):05}.{ending}"

    def _described(self) -> dict[str, Any]:
        """The configuration, with the dtype that most elements have."""
        config = self._config
        if config is None and self._like is not None:
            config = json.loads((self._like / "config.json").read_text())
        found = dict(config or {})
        elements: dict[torch.dtype, int] = {}
        for described in self._announced.values():
            if described.dtype.is_floating_point:
                size = torch.Size(described.shape).numel()
                elements[described.dtype] = elements.get(described.dtype, 0) + size
        if elements:
            name = str(max(elements, key=elements.__getitem__)).removeprefix("torch.")
            found["torch_dtype" if "torch_dtype" in found and "dtype" not in found else "dtype"] = name
        return found


def _shards(announced: Mapping[str, Described], most: int) -> list[dict[str, Described]]:
    shards: list[dict[str, Described]] = [{}]
    held = 0
    for name, described in announced.items():
        if shards[-1] and held + described.bytes > most:
            shards.append({})
            held = 0
        shards[-1][name] = described
        held += described.bytes
    return shards
