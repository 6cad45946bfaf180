"""The weights in a Hugging Face folder or in one file, by their names there and without reading them: safetensors or torch's own.

A tensor is mapped into memory: what a rank takes of it is what is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshfold.engine.checkpoints.tensor_file import TensorFile
from meshfold.engine.checkpoints.tensor_files import open_tensors
from meshfold.engine.errors import CheckpointError

SAFE, TORCH = "model.safetensors", "pytorch_model.bin"
ENDING = ".safetensors"


class TorchFiles(Mapping[str, Tensor]):
    """The tensors of ``pytorch_model.bin``, or of the shards that its index names; never any other object (weights_only).

    Files in torch's format of today are mapped into memory. Those from before torch 1.6 cannot be: of these the one that
    was read last is kept.
    """

    def __init__(self, folder: Path) -> None:
        """Raises:
        CheckpointError: if the index or a single file cannot be read.
        """
        self._folder = folder
        self._open: dict[str, Mapping[str, Tensor]] = {}
        index = folder / f"{TORCH}.index.json"
        if index.exists():
            try:
                self._where: dict[str, str] = json.loads(index.read_text())["weight_map"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"cannot read {index}: {error}") from error
        else:
            self._where = dict.fromkeys(self._file(TORCH), TORCH)

    def _file(self, name: str) -> Mapping[str, Tensor]:
        if name in self._open:
            return self._open[name]
        found, mapped = _torch_file(self._folder / name)
        self._open = {**(self._open if mapped else {}), name: found}
        return found

    def __getitem__(self, name: str) -> Tensor:
        found = self._file(self._where[name]).get(name)
        if found is None:
            raise CheckpointError(
                f"{self._folder / self._where[name]} does not have {name!r}, which the index says it has"
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _torch_file(path: Path) -> tuple[Mapping[str, Tensor], bool]:
    """The tensors of a file of torch, and whether they are mapped into memory."""
    mapped = True
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # also of the pickle's own
        mapped = False
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"cannot read {path}: {reason}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not tensors by name (a state dict)")
    return found, mapped


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights in a form that :func:`open_weights` reads."""
    names = (SAFE, f"{SAFE}.index.json", TORCH, f"{TORCH}.index.json")
    return any((folder / name).exists() for name in names)


def open_weights(place: Path) -> Mapping[str, Tensor]:
    """The tensors of a folder by their names in its files, safetensors where there are both kinds; or those of one file.

    Raises:
        CheckpointError: if there are none, or they are damaged or incomplete.
    """
    if not place.is_dir():
        return TensorFile(place) if place.suffix == ENDING else _torch_file(place)[0]
    if (place / SAFE).exists() or (place / f"{SAFE}.index.json").exists():
        return open_tensors(place, SAFE)
    if has_weights(place):
        return TorchFiles(place)
    raise CheckpointError(f"{place} has no weights: no {SAFE} and no {TORCH}, nor an index of several")
