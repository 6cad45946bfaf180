"""Named tensors in one file, or in several with an index that many ranks write at once; weights in torch's files.

Names are as in Hugging Face folders: ``model.safetensors`` alone, or ``model-00001-of-00004.safetensors`` and so on with
``model.safetensors.index.json``, which maps tensors to files. Tensors are memory-mapped: a rank reads only the parts that it
uses.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from meshfold.checkpoint.errors import CheckpointError
from meshfold.checkpoint.files import is_whole, parse_json_object, read_torch_file, verify_archive
from meshfold.checkpoint.tensors.safetensors_file import TensorFile, TensorInfo, TensorWriter
from meshfold.checkpoint.tensors.shard_files import ShardFiles, shard_index_name
from meshfold.checkpoint.tensors.tensor_folder import TensorFolder, is_file_name

LEAST_BYTES = 64 * 2**20
"""Least bytes of a file before a second one is begun: smaller files are not worth splitting over ranks."""


@dataclass(frozen=True, kw_only=True)
class FileAssignment:
    """Assignment of tensors to the ranks that write them, and to files.

    Attributes:
        name: of the file, if there is only one.
        announced: all tensors.
        writers: the ranks that write, in order of their files.
        writer_of: tensor to the rank that writes it.
    """

    name: str
    announced: Mapping[str, TensorInfo]
    writers: list[int]
    writer_of: dict[str, int]

    @classmethod
    def make(
        cls, name: str, announced: Mapping[str, TensorInfo], ranks: int, by_first: Collection[str]
    ) -> FileAssignment:
        """Assign tensors to as many ranks as worthwhile, evenly by bytes and in order; with ``by_first``, to rank 0."""
        total = sum(described.bytes for described in announced.values())
        count = max(1, min(ranks, -(-total // LEAST_BYTES)))
        writers = [number * ranks // count for number in range(count)]  # spread over all nodes
        load = dict.fromkeys(writers, 0)
        writer_of = {}
        for tensor in sorted(announced, key=lambda tensor: tensor not in by_first):
            writer = 0 if tensor in by_first else min(load, key=load.__getitem__)
            writer_of[tensor] = writer
            load[writer] += announced[tensor].bytes
        return cls(name=name, announced=announced, writers=writers, writer_of=writer_of)

    def file_of(self, writer: int) -> str:
        """Return the name of the file that a rank writes."""
        stem, _, ending = self.name.rpartition(".")
        number, count = self.writers.index(writer) + 1, len(self.writers)
        return self.name if count == 1 else f"{stem}-{number:05}-of-{count:05}.{ending}"

    def share(self, rank: int) -> dict[str, TensorInfo]:
        """Return the tensors that a rank writes."""
        return {name: described for name, described in self.announced.items() if self.writer_of[name] == rank}

    @property
    def files(self) -> list[str]:
        """All files that are written, the index too."""
        index = [f"{self.name}.index.json"] if len(self.writers) > 1 else []
        return [*map(self.file_of, self.writers), *index]

    def write_index(self, folder: Path) -> None:
        """Write the index, if there are several files."""
        if len(self.writers) > 1:
            total = sum(described.bytes for described in self.announced.values())
            where = {name: self.file_of(self.writer_of[name]) for name in self.announced}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
            (folder / f"{self.name}.index.json").write_text(text)


class BackgroundWriter:
    """Writes a file's tensors in a thread while the next one is gathered; holds one tensor at a time."""

    def __init__(self, path: Path, announced: Mapping[str, TensorInfo]) -> None:
        """Raises:
        OSError: if the file cannot be made, or exists because another process writes it.
        CheckpointError: for a dtype that files cannot hold.
        """
        self._writer = TensorWriter(path, announced, opener=_anew)
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def wait(self) -> None:
        """Wait until the last tensor is written; raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def write(self, name: str, tensor: Tensor) -> None:
        """Start writing a tensor, the next in the order of the file."""
        self.wait()
        self._pending = self._thread.submit(self._writer.write, name, tensor.detach().to("cpu"))

    def close(self, *, complete: bool) -> None:
        """End the thread; sync everything to disk if it is complete."""
        try:
            if complete:
                self.wait()
                self._writer.close()
        finally:
            self._thread.shutdown()
            self._writer.abandon()


def _anew(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o666)


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of several files with an index, mapped into memory."""

    def __init__(self, folder: TensorFolder, index: str) -> None:
        """Raises:
        CheckpointError: if a file is missing or damaged, or lacks what the index says.
        """
        self._where = weight_map(folder.path(index))
        self._files = {name: folder.open(name) for name in sorted(set(self._where.values()))}
        for name, file in self._where.items():
            if name not in self._files[file]:
                raise CheckpointError(
                    f"{folder.folder / index} says that {name!r} is in {file}, which does not have it"
                )
        for file, found in self._files.items():  # as transformers does: a shard counts as a whole
            self._where = {**dict.fromkeys(found, file), **self._where}

    def __getitem__(self, name: str) -> Tensor:
        return self._files[self._where[name]][name]

    @property
    def files(self) -> list[TensorFile]:
        """Return the files."""
        return [*self._files.values()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor in a folder, from an index.

    Raises:
        CheckpointError: if it is damaged, or names something outside of the folder.
    """
    try:
        where = parse_json_object(index.read_bytes()).get("weight_map")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {index}: {error}") from error
    if not isinstance(where, dict):
        raise CheckpointError(f"cannot read {index}: its weight_map is not a table of tensors and files")
    for name, file in where.items():
        if not is_file_name(file):
            raise CheckpointError(f"{index} says that {name!r} is in {file!r}, which is not a file of its folder")
    return where


def open_tensors(folder: TensorFolder | Path, name: str) -> Mapping[str, Tensor]:
    """Return the tensors of a file, or of a set of files that replaces it.

    Raises:
        CheckpointError: if no files are found, or they are damaged.
    """
    if isinstance(folder, Path):
        folder = TensorFolder(folder)
    if folder.has(shard_index_name(name)):
        return ShardFiles(folder, shard_index_name(name))
    index = f"{name}.index.json"
    return TensorFiles(folder, index) if folder.has(index) else folder.open(name)


def verify_checksums(tensors: Mapping[str, Tensor], part: int, parts: int) -> None:
    """Compare every ``parts``-th opened tensor with its checksum, from number ``part`` on.

    Raises:
        CheckpointError: for a tensor that differs from the one that was written.
    """
    files = [tensors] if isinstance(tensors, TensorFile) else getattr(tensors, "files", [])
    for number, file in enumerate(files):
        file.verify((part + number) % parts, parts)


SAFETENSORS_NAME, TORCH = "model.safetensors", "pytorch_model.bin"
SAFETENSORS_SUFFIX = ".safetensors"


class TorchFiles(Mapping[str, Tensor]):
    """The tensors of ``pytorch_model.bin``, or of the shards that its index names; never any other object (weights_only).

    Files in torch's current format are memory-mapped. Those from before torch 1.6 cannot be: of these the one that was read
    last is kept.
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
        """Return the files."""
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
    """Return the tensors of a torch file, and True if they are mapped into memory."""
    mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are not zip archives
    found = read_torch_file(path, mapped=mapped)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not tensors by name (a state dict)")
    odd = [name for name, value in found.items() if isinstance(value, Tensor) and not is_whole(value)]
    if odd:
        raise CheckpointError(f"{path}: {odd[0]!r} is sparse, has no values, or claims more elements than the file has")
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}, mapped


def has_weights(folder: Path) -> bool:
    """Return True if a folder has weights in a form that :func:`open_weights` reads."""
    names = (SAFETENSORS_NAME, f"{SAFETENSORS_NAME}.index.json", TORCH, f"{TORCH}.index.json")
    return any((folder / name).exists() for name in names)


def open_weights(place: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a folder by their names in its files, safetensors if there are both kinds; or those of one file.

    Raises:
        CheckpointError: if no files are found, or they are damaged or incomplete.
    """
    if not place.is_dir():
        return TensorFile(place) if place.suffix == SAFETENSORS_SUFFIX else _torch_file(place)[0]
    if (place / SAFETENSORS_NAME).exists() or (place / f"{SAFETENSORS_NAME}.index.json").exists():
        return open_tensors(place, SAFETENSORS_NAME)
    if has_weights(place):
        return TorchFiles(place)
    raise CheckpointError(f"{place} has no weights: no {SAFETENSORS_NAME} and no {TORCH}, nor an index of several")
