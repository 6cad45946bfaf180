"""Files of rectangles: each rank writes its part into its own file, and an index maps tensors to files. A tensor of several
rectangles is read only as far as needed.

::

    model-blocks-00003-of-00008.safetensors   of rank 2, each rectangle under its tensor's name and its place in it
    model.blocks.json                         {"tensors": {name: {"dtype", "shape", "blocks": [{"file", "offsets", "sizes"}]}}}

Names of rectangles are as in Python, ``up.weight[0:128, 64:96]``. Nothing is gathered for such files, so they can be written
during training without a collective.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from meshfold.checkpoint.errors import CheckpointError
from meshfold.checkpoint.files import parse_json_object
from meshfold.checkpoint.shards import Window, narrowed, overlap
from meshfold.checkpoint.staging import with_pauses
from meshfold.checkpoint.tensors.safetensors_file import TensorFile, TensorInfo
from meshfold.checkpoint.tensors.tensor_folder import TensorFolder


def shard_file_name(name: str, rank: int, ranks: int) -> str:
    """Return the name of a rank's file, one of those that replace ``model.safetensors``."""
    stem, _, ending = name.rpartition(".")
    return f"{stem}-blocks-{rank + 1:05}-of-{ranks:05}.{ending}"


def shard_index_name(name: str) -> str:
    """Return the name of the index of the files that replace ``model.safetensors``."""
    return f"{name.rpartition('.')[0]}.blocks.json"


def shard_key(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """Return the name of a rectangle of a tensor in a file.

    >>> shard_key("up.weight", (0, 64), (128, 32))
    'up.weight[0:128, 64:96]'
    """
    slices = (f"{at}:{at + size}" for at, size in zip(offsets, sizes, strict=True))
    return f"{name}[{', '.join(slices)}]"


def write_shard_index(folder: Path, name: str, tensors: Mapping[str, TensorInfo], ranks: int) -> None:
    """Check that the ranks' files are complete, and write the index.

    Args:
        folder: with the files.
        name: ``"model.safetensors"``.
        tensors: all expected ones.
        ranks: number of writers.

    Raises:
        CheckpointError: if elements of a tensor are in no file, or in two.
    """
    blocks: dict[str, list[dict[str, Any]]] = {tensor: [] for tensor in tensors}
    for rank in range(ranks):
        path = folder / shard_file_name(name, rank, ranks)
        found = TensorFile(path)
        for key in with_pauses(found):
            tensor, _, place = key.rpartition("[")
            bounds = [tuple(map(int, part.split(":"))) for part in place.rstrip("]").split(", ") if part]
            entry = {
                "file": path.name,
                "offsets": [a for a, _ in bounds],
                "sizes": [z - a for a, z in bounds],
            }
            blocks.setdefault(tensor, []).append(entry)
        if not found:
            path.unlink()
    for tensor, described in with_pauses(tensors.items()):
        written, wanted = (
            sum(math.prod(block["sizes"]) for block in blocks[tensor]),
            math.prod(described.shape),
        )
        if written != wanted:
            raise CheckpointError(
                f"{tensor!r} has {wanted} elements and {written} of them were written: ranks do not agree on who has what"
            )
    described_as = {
        tensor: {
            "dtype": str(described.dtype).removeprefix("torch."),
            "shape": list(described.shape),
            "blocks": blocks[tensor],
        }
        for tensor, described in with_pauses(tensors.items())
    }
    (folder / shard_index_name(name)).write_text(json.dumps({"tensors": described_as}))


class ShardFiles(Mapping[str, Tensor]):
    """Tensors stored as rectangles in several files. Tensors of several rectangles are
    :class:`~meshfold.checkpoint.tensors.shard_files.StoredTensor`: slicing one reads only the slice."""

    def __init__(self, folder: TensorFolder, index: str) -> None:
        """Raises:
        CheckpointError: if a file is missing or damaged, or lacks what the index says.
        """
        self._files: dict[str, TensorFile] = {}
        self._tensors: dict[str, tuple[TensorInfo, list[dict[str, Any]]]] = {}
        path = folder.path(index)
        try:
            found = parse_json_object(path.read_bytes()).get("tensors")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"cannot read {path}: it has no table of tensors")
        for name, entry in found.items():
            described = described_in(entry)
            if described is None:
                raise CheckpointError(f"{path} is damaged: it describes {name!r} as {str(entry)[:80]}")
            if not is_tiled(described.shape, [(block["offsets"], block["sizes"]) for block in entry["blocks"]]):
                raise CheckpointError(f"{path} is damaged: its blocks of {name!r} are not all of {described.shape}")
            self._tensors[name] = described, entry["blocks"]
        for name, (described, blocks) in self._tensors.items():
            for block in blocks:
                file = block["file"]
                if file not in self._files:
                    self._files[file] = folder.open(file)
                key = shard_key(name, tuple(block["offsets"]), tuple(block["sizes"]))
                if key not in self._files[file]:
                    raise CheckpointError(f"{path} says that {key!r} is in {file}, which does not have it")
                there = self._files[file].described(key)
                if there != TensorInfo(dtype=described.dtype, shape=tuple(block["sizes"])):
                    raise CheckpointError(
                        f"{path} says that {key!r} is of {described.dtype}, and {file} has {there.dtype} and {there.shape}"
                    )

    def __getitem__(self, name: str) -> Tensor:
        described, entries = self._tensors[name]
        blocks = []
        for entry in entries:
            window = tuple(entry["offsets"]), tuple(entry["sizes"])
            file = self._files[entry["file"]]
            blocks.append(StoredShard(window=window, load=partial(file.__getitem__, shard_key(name, *window))))
        if len(blocks) == 1:  # the block is the whole tensor
            return blocks[0].load()
        return cast(Tensor, StoredTensor(described.shape, described.dtype, blocks))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def files(self) -> list[TensorFile]:
        """Return the files."""
        return [*self._files.values()]


def described_in(entry: Any) -> TensorInfo | None:
    """Return the dtype and shape of an entry of the index; None if it is damaged, or its blocks are."""
    if not isinstance(entry, dict):
        return None
    dtype = getattr(torch, entry["dtype"], None) if isinstance(entry.get("dtype"), str) else None
    shape, blocks = entry.get("shape"), entry.get("blocks")
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, list) or not isinstance(blocks, list):
        return None
    if not _are_counts(shape):
        return None
    for block in blocks:
        if not isinstance(block, dict) or not isinstance(block.get("file"), str):
            return None
        if not all(_are_counts(block.get(key)) and len(block[key]) == len(shape) for key in ("offsets", "sizes")):
            return None
    return TensorInfo(dtype=dtype, shape=tuple(shape))


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**62 for number in value)


def is_tiled(shape: Sequence[int], blocks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return True if rectangles, given by offsets and sizes, tile a shape.

    >>> is_tiled((4, 4), [((0, 0), (4, 2)), ((0, 2), (4, 2))])
    True
    >>> is_tiled((4, 4), [((0, 0), (4, 2)), ((0, 0), (4, 2))])
    False
    """
    if sum(math.prod(sizes) for _, sizes in blocks) != math.prod(shape):
        return False
    begins = np.array([offsets for offsets, _ in blocks], dtype=np.int64).reshape(len(blocks), len(shape))
    ends = begins + np.array([sizes for _, sizes in blocks], dtype=np.int64).reshape(begins.shape)
    if (ends > np.array(shape, dtype=np.int64)).any():
        return False
    whole = (ends > begins).all(axis=1)  # empty ranges meet nothing
    begins, ends = begins[whole], ends[whole]
    return not any(
        ((begins[place] < ends[place + 1 :]) & (begins[place + 1 :] < ends[place])).all(axis=1).any()
        for place in range(len(begins) - 1)
    )


@dataclass(frozen=True, kw_only=True)
class StoredShard:
    """A rectangle of a tensor.

    Attributes:
        window: offsets and sizes in the whole tensor.
        load: maps it into memory.
    """

    window: Window
    load: Callable[[], Tensor]


class StoredTensor:
    """Stand-in for a stored tensor: shape and dtype are known, ``narrow`` returns another stand-in, everything else reads it.

    Torch functions accept it as a tensor; ``local.copy_(stored.narrow(0, 2, 4))`` reads four rows.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        blocks: Sequence[StoredShard],
        window: Window | None = None,
    ) -> None:
        """Args:
        shape: of the whole.
        dtype: of its elements.
        blocks: rectangles that do not overlap, and together are the whole.
        window: the part of the whole that this one is; None: all.
        """
        self._whole, self.dtype, self._blocks = tuple(shape), dtype, blocks
        self._window = window or ((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> torch.Size:
        """In elements, per dim."""
        return torch.Size(self._window[1])

    def dim(self) -> int:
        """Return the number of dims."""
        return len(self._whole)

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def narrow(self, dim: int, start: int, length: int) -> StoredTensor:
        """Return a window along one dim, without reading it."""
        offsets, sizes = map(list, self._window)
        offsets[dim] += start
        sizes[dim] = length
        return StoredTensor(self._whole, self.dtype, self._blocks, (tuple(offsets), tuple(sizes)))

    def new_zeros(self, size: Sequence[int]) -> Tensor:
        """Return zeros in memory, of the same dtype."""
        return torch.zeros(tuple(size), dtype=self.dtype, device="cpu")

    def read(self) -> Tensor:
        """Read the tensor into memory."""
        found = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for block in self._blocks:
            both = overlap(self._window, block.window)
            if both is not None:
                offsets, sizes = both
                source = narrowed(block.load(), _less(offsets, block.window[0]), sizes)
                narrowed(found, _less(offsets, self._window[0]), sizes).copy_(source)
        return found

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        read = [one.read() if isinstance(one, cls) else one for one in args]
        return func(*read, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.read(), name)


def _less(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
