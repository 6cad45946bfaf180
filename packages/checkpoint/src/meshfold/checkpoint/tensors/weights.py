"""The weights in a Hugging Face folder or in one file, by their names there and without reading them: safetensors or torch's own.

A tensor is mapped into memory: what a rank takes of it is what is read.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from meshfold.checkpoint.errors import CheckpointError
from meshfold.checkpoint.files.untrusted import is_whole, read_torch_file, verify_archive
from meshfold.checkpoint.tensors.file_set import open_tensors, weight_map
from meshfold.checkpoint.tensors.safetensors_file import TensorFile
from meshfold.checkpoint.tensors.tensor_folder import TensorFolder

SAFETENSORS_NAME, TORCH = "model.safetensors", "pytorch_model.bin"
SAFETENSORS_SUFFIX = ".safetensors"


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
            self._where = weight_map(index)
            for file in sorted(set(self._where.values())):  # as transformers does: a shard counts as a whole
                if zipfile.is_zipfile(TensorFolder(folder).path(file)):
                    self._where = {**dict.fromkeys(self._file(file), file), **self._where}
        else:
            self._where = dict.fromkeys(self._file(TORCH), TORCH)

    @property
    def files(self) -> list[TorchArchive]:
        """The files."""
        folder = TensorFolder(self._folder)
        return [TorchArchive(folder.path(name)) for name in sorted(set(self._where.values()))]

    def _file(self, name: str) -> Mapping[str, Tensor]:
        if name in self._open:
            return self._open[name]
        found, mapped = _torch_file(TensorFolder(self._folder).path(name))
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


@dataclass(frozen=True)
class TorchArchive:
    """A file of torch, whose archive has checksums."""

    path: Path

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Compare every ``parts``-th entry with its checksum, from number ``part`` on."""
        verify_archive(self.path, part, parts)


def _torch_file(path: Path) -> tuple[Mapping[str, Tensor], bool]:
    """Return the tensors of a torch file, and whether they are mapped into memory."""
    mapped = zipfile.is_zipfile(path)  # others are of torch before 1.6
    found = read_torch_file(path, mapped=mapped)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not tensors by name (a state dict)")
    odd = [name for name, value in found.items() if isinstance(value, Tensor) and not is_whole(value)]
    if odd:
        raise CheckpointError(
            f"{path}: {odd[0]!r} is sparse, has no values, or claims more elements than the file has"
        )
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}, mapped


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights in a form that :func:`open_weights` reads."""
    names = (SAFETENSORS_NAME, f"{SAFETENSORS_NAME}.index.json", TORCH, f"{TORCH}.index.json")
    return any((folder / name).exists() for name in names)


def open_weights(place: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a folder by their names in its files, safetensors if there are both kinds; or those of one file.

    Raises:
        CheckpointError: if there are none, or they are damaged or incomplete.
    """
    if not place.is_dir():
        return TensorFile(place) if place.suffix == SAFETENSORS_SUFFIX else _torch_file(place)[0]
    if (place / SAFETENSORS_NAME).exists() or (place / f"{SAFETENSORS_NAME}.index.json").exists():
        return open_tensors(place, SAFETENSORS_NAME)
    if has_weights(place):
        return TorchFiles(place)
    raise CheckpointError(
        f"{place} has no weights: no {SAFETENSORS_NAME} and no {TORCH}, nor an index of several"
    )
