"""Files of named tensors in the safetensors format, written tensor by tensor and read by mapping them into memory.

The format: eight bytes with the length of a JSON header (little endian), the header (name to dtype, shape and byte
offsets), the tensors one behind the other. The safetensors library reads what is written here and the other way
round; it is not used since it wants to have all tensors in memory to write them.

Files that are written here carry a checksum of each tensor, the CRC-32 of its bytes, in the header's metadata under
``crc32``: eight hexadecimal digits a tensor in order of their offsets. It costs a quarter of a second a GB on one core.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from meshfold.engine.errors import CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGN = 8  # bytes
_SUMS, _DIGITS = "crc32", 8
_TOGETHER_BYTES = 32 * 2**20  # of what ``TensorWriter.add`` keeps before it is written
_TOGETHER = 512  # tensors, likewise; a call of the system takes 1024 (IOV_MAX of Linux)


@dataclass(frozen=True, kw_only=True)
class Described:
    """A tensor that is to be written: its dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Header:
    """How a file begins: what will be in it, and where.

    Attributes:
        announced: every tensor that will come.
        order: in which they come.
        text: the first bytes of the file.
        sums_at: where in them the checksums go when they are known.
    """

    def __init__(
        self,
        announced: Mapping[str, Described],
        notes: Mapping[str, str] | None = None,
        *,
        order: Sequence[str] | None = None,
    ) -> None:
        """See :class:`TensorWriter`."""
        self.order = writing_order(announced) if order is None else list(order)
        self.announced = dict(announced)
        unknown_sums = "0" * (_DIGITS * len(self.order))  # to be written over when they are known
        header: dict[str, object] = {"__metadata__": {_SUMS: unknown_sums, **(notes or {"format": "pt"})}}
        offset = 0
        for name in self.order:
            described = self.announced[name]
            if described.dtype not in _NAMES:
                raise CheckpointError(
                    f"{name!r} is of {described.dtype}, which safetensors files cannot hold"
                )
            end = offset + described.bytes
            header[name] = {
                "dtype": _NAMES[described.dtype],
                "shape": list(described.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGN)
        self.text = len(text).to_bytes(8, "little") + text
        self.sums_at = self.text.index(unknown_sums.encode()) if unknown_sums else 0


class TensorWriter:
    """Writes the tensors that were announced, in ``order``."""

    def __init__(
        self,
        path: Path,
        announced: Mapping[str, Described] | Header,
        notes: Mapping[str, str] | None = None,
        *,
        order: Sequence[str] | None = None,
        opener: Callable[[str, int], int] | None = None,
    ) -> None:
        """Args:
            path: a file that is made anew.
            announced: every tensor that will come; or a header that was made of these, then it says all.
            notes: free text for the header.
            order: in which they come; None: wide dtypes first.
            opener: opens the file, as Python's ``open`` asks for it.

        Raises:
            CheckpointError: for a dtype that the format does not have.
        """
        header = announced if isinstance(announced, Header) else Header(announced, notes, order=order)
        self.order, self._announced, self._path = header.order, header.announced, path
        self._left = deque(header.order)
        self._together: deque[memoryview] = deque()
        self._together_bytes = 0
        self._sums: list[str] = []
        self._sums_at = header.sums_at
        with _naming(path):
            self._file = open(path, "wb", opener=opener)  # noqa: SIM115 - close() and abandon() close it
            self._file.write(header.text)
            self._file.flush()  # what follows goes past its buffer

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a tensor: the next in ``order``."""
        self.add(name, tensor)
        self._write_together()

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor, the next in ``order``, which stays as it is until ``close``.

        Many are written in one call of the system: each call gives the interpreter to other threads and takes it back.
        """
        described = self._announced.get(name)
        if (
            not self._left
            or self._left[0] != name
            or described is None
            or described.dtype != tensor.dtype
            or described.shape != tuple(tensor.shape)
        ):
            raise CheckpointError(
                f"{name!r} ({tensor.dtype}, {tuple(tensor.shape)}) is not what was announced to be written next"
            )
        self._left.popleft()
        data = _bytes_of(tensor)
        self._sums.append(f"{zlib.crc32(data):0{_DIGITS}x}")
        self._together.append(data)
        self._together_bytes += len(data)
        if self._together_bytes >= _TOGETHER_BYTES or len(self._together) == _TOGETHER:
            self._write_together()

    def _write_together(self) -> None:
        """Write what was added."""
        with _naming(self._path):
            while self._together:
                done = os.writev(self._file.fileno(), self._together)  # all of it, or less
                while self._together and done >= len(self._together[0]):
                    done -= len(self._together.popleft())
                if done:
                    self._together[0] = self._together[0][done:]
        self._together_bytes = 0

    def close(self) -> None:
        """Bring everything to the disk.

        Raises:
            CheckpointError: if announced tensors are missing.
        """
        if self._left:
            raise CheckpointError(
                f"{len(self._left)} announced tensors were never written, {self._left[0]!r} first"
            )
        self._write_together()
        with _naming(self._path):
            self._file.seek(self._sums_at)
            self._file.write("".join(self._sums).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Close the file as it is; nothing after ``close``."""
        with suppress(OSError):  # what was not written yet may not find room
            self._file.close()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Of a tensor, in its order. One that lies so on the host costs no operation of torch: after each of them a thread has to
    wait for the interpreter again."""
    if tensor.device.type != "cpu" or tensor.requires_grad or not tensor.is_contiguous():
        tensor = tensor.detach().to("cpu").contiguous()
    if tensor.dtype == torch.bfloat16:  # which numpy does not know
        tensor = tensor.view(torch.int16)
    return tensor.numpy().reshape(-1).view(np.uint8).data


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an error of the system say which file it is of, which those of ``write`` do not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def writing_order(announced: Mapping[str, Described]) -> list[str]:
    """Wide dtypes first, so that every tensor begins at a multiple of its element's size."""
    return sorted(announced, key=lambda name: -announced[name].dtype.itemsize)


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file, mapped into memory: reading part of one reads that part of the file.

    Writing into the tensors does not change the file.
    """

    def __init__(self, path: Path) -> None:
        """Raises:
        CheckpointError: if there is no such file, or it is damaged.
        """
        self._path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                size = path.stat().st_size
                header = json.loads(file.read(length)) if 0 < length <= size - 8 else None
        except PermissionError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}. Let this user read it") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if not isinstance(header, dict):
            raise CheckpointError(
                f"{path} is damaged or no safetensors file: its header is {length} bytes in a file of {size}"
            )
        notes = header.pop("__metadata__", None) or {}
        self._entries = header
        self._start = 8 + length
        try:
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            self._in_order = sorted(header, key=lambda name: header[name]["data_offsets"])
        except (TypeError, KeyError, IndexError) as error:
            raise CheckpointError(f"{path} is damaged or no safetensors file: its header is odd") from error
        sums = notes.get(_SUMS, "")
        self._sums = [sums[at : at + _DIGITS] for at in range(0, len(sums), _DIGITS)]
        if self._start + end > size:
            raise CheckpointError(
                f"{path} is cut off: it should have {self._start + end} bytes and has {size}"
            )
        mapped = (
            np.memmap(path, dtype=np.uint8, mode="c", offset=0)
            if size > self._start
            else np.zeros(0, np.uint8)
        )
        self._bytes = torch.from_numpy(mapped)

    def __getitem__(self, name: str) -> Tensor:
        found, (start, end) = self.described(name), self._entries[name]["data_offsets"]
        dtype, shape = found.dtype, found.shape
        if start == end:
            return torch.empty(shape, dtype=dtype)
        raw = self._bytes[self._start + start : self._start + end]
        if (self._start + start) % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(shape)

    def described(self, name: str) -> Described:
        """A tensor's dtype and shape, from the header alone."""
        entry = self._entries[name]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"{name!r} in {self._path} is of dtype {entry['dtype']}, which is not known here"
            )
        return Described(dtype=dtype, shape=tuple(entry["shape"]))

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Read every ``parts``-th tensor from number ``part`` on and compare it with its checksum, where it has one.

        Raises:
            CheckpointError: for the first that is not what was written.
        """
        for name, wanted in [*zip(self._in_order, self._sums, strict=False)][part::parts]:
            start, end = self._entries[name]["data_offsets"]
            found = zlib.crc32(self._bytes[self._start + start : self._start + end].numpy().data)
            if f"{found:0{_DIGITS}x}" != wanted:
                raise CheckpointError(
                    f"{self._path} is damaged: {name!r} has the checksum {found:0{_DIGITS}x} and was written with {wanted}. Copy "
                    "the file again from where it came, or go on from an earlier checkpoint"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
