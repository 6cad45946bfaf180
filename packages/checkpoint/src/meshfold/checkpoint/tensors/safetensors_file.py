"""Files of named tensors in the safetensors format, written tensor by tensor and read by memory mapping.

The format: eight bytes with the length of a JSON header (little endian), the header (name to dtype, shape and byte
offsets), then the tensors in a row. The safetensors library reads these files and vice versa;
it is not used because it needs all tensors in memory to write them.

Files that are written here have a checksum of each tensor, the CRC-32 of its bytes, in the header's metadata under
``crc32``: eight hexadecimal digits per tensor in order of their offsets. It costs a quarter of a second per GB on one core.
The header has its own under ``header_crc32``, computed with zeros in its place.
"""

from __future__ import annotations

import json
import math
import os
import stat
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshfold.checkpoint.errors import CheckpointError
from meshfold.checkpoint.files import parse_json_object

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
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGN = 8  # bytes
_SUMS, _OWN_SUM, _DIGITS = "crc32", "header_crc32", 8
_BEGIN = f'{{"__metadata__": {{"{_OWN_SUM}": "'.encode()
"""How a header begins that has a checksum of itself."""

_TOGETHER_BYTES = 32 * 2**20  # bytes that ``TensorWriter.add`` collects before it writes
_TOGETHER = 512  # and tensors; a system call takes 1024 (IOV_MAX of Linux)


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Dtype and shape of a tensor to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsHeader:
    """The header of a file: the tensors that it will hold, and their offsets.

    Attributes:
        announced: every tensor to be written.
        order: of the tensors.
        text: the first bytes of the file.
        sums_at: position of the tensors' checksums in them.
        own_sum_at: position of the header's own checksum.
    """

    def __init__(
        self,
        announced: Mapping[str, TensorInfo],
        notes: Mapping[str, str] | None = None,
        *,
        order: Sequence[str] | None = None,
    ) -> None:
        """See :class:`TensorWriter`."""
        self.order = writing_order(announced) if order is None else list(order)
        self.announced = dict(announced)
        unknown_sums = "0" * (_DIGITS * len(self.order))  # overwritten once they are known
        metadata = {_OWN_SUM: "0" * _DIGITS, _SUMS: unknown_sums, **(notes or {"format": "pt"})}
        header: dict[str, object] = {"__metadata__": metadata}
        offset = 0
        for name in self.order:
            described = self.announced[name]
            if described.dtype not in _NAMES:
                raise CheckpointError(f"{name!r} has dtype {described.dtype}, which safetensors files cannot store")
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
        self.own_sum_at = 8 + len(_BEGIN)
        self.sums_at = self.text.index(f'"{_SUMS}": "'.encode()) + len(f'"{_SUMS}": "')

    def with_sums(self, sums: Sequence[str]) -> bytes:
        """Return the first bytes of the file, with the checksums of the tensors, in their order, and its own."""
        told = "".join(sums).encode()
        text = self.text[: self.sums_at] + told + self.text[self.sums_at + len(told) :]
        own = f"{zlib.crc32(text[8:]):0{_DIGITS}x}".encode()
        return text[: self.own_sum_at] + own + text[self.own_sum_at + _DIGITS :]


class TensorWriter:
    """Writes the tensors that were announced, in ``order``."""

    def __init__(
        self,
        path: Path,
        announced: Mapping[str, TensorInfo] | SafetensorsHeader,
        notes: Mapping[str, str] | None = None,
        *,
        order: Sequence[str] | None = None,
        opener: Callable[[str, int], int] | None = None,
    ) -> None:
        """Args:
            path: of the new file.
            announced: every tensor to be written; or a header that was made from these.
            notes: free text for the header.
            order: of the tensors; None: wide dtypes first.
            opener: as of Python's ``open``.

        Raises:
            CheckpointError: for a dtype that the format does not have.
        """
        header = (
            announced if isinstance(announced, SafetensorsHeader) else SafetensorsHeader(announced, notes, order=order)
        )
        self.order, self._announced, self._path = header.order, header.announced, path
        self._left = deque(header.order)
        self._together: deque[memoryview] = deque()
        self._together_bytes = 0
        self._sums: list[str] = []
        self._header = header
        with _naming(path):
            self._file = open(path, "wb", opener=opener)  # noqa: SIM115 - close() and abandon() close it
            self._file.write(header.text)
            self._file.flush()  # the writes below bypass its buffer

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a tensor: the next in ``order``."""
        self.add(name, tensor)
        self._write_together()

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor, the next in ``order``, which must not change until ``close``.

        Many are written in one system call, since each call releases the interpreter and takes it back.
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
                f"{name!r} ({tensor.dtype}, {tuple(tensor.shape)}) is not the tensor announced as the next one"
            )
        self._left.popleft()
        data = _bytes_of(tensor)
        self._sums.append(f"{zlib.crc32(data):0{_DIGITS}x}")
        self._together.append(data)
        self._together_bytes += len(data)
        if self._together_bytes >= _TOGETHER_BYTES or len(self._together) == _TOGETHER:
            self._write_together()

    def _write_together(self) -> None:
        """Write the collected tensors."""
        with _naming(self._path):
            while self._together:
                done = os.writev(self._file.fileno(), self._together)  # may write only a part
                while self._together and done >= len(self._together[0]):
                    done -= len(self._together.popleft())
                if done:
                    self._together[0] = self._together[0][done:]
        self._together_bytes = 0

    def close(self) -> None:
        """Sync everything to disk.

        Raises:
            CheckpointError: if announced tensors are missing.
        """
        if self._left:
            raise CheckpointError(f"{len(self._left)} announced tensors were never written, {self._left[0]!r} first")
        self._write_together()
        with _naming(self._path):
            self._file.seek(0)
            self._file.write(self._header.with_sums(self._sums))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Close the unfinished file; does nothing after ``close``."""
        with suppress(OSError):  # the disk may be full
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
    """Return a tensor's bytes, in order. A contiguous host tensor needs no torch operation, after which this thread would have to
    wait for the interpreter again."""
    if tensor.device.type != "cpu" or tensor.requires_grad or not tensor.is_contiguous():
        tensor = tensor.detach().to("cpu").contiguous()
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16
        tensor = tensor.view(torch.int16)
    elif tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.view(torch.uint8)
    return tensor.numpy().reshape(-1).view(np.uint8).data


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's name to a system error; errors of ``write`` have none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _regular(path: str, flags: int) -> int:
    """Open a regular file, since a pipe or a device would block or never end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file")
    return descriptor


_MOST = 2**62
"""Elements that a shape may have, were its dims of 0 left out: what can be counted in 64 bits."""


def _is_entry(entry: Any) -> bool:
    """Return True if a header's entry describes a tensor: a dtype, a shape, and two offsets in order."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    if not all(type(number) is int and 0 <= number < _MOST for number in (*shape, *offsets)):
        return False
    return offsets[0] <= offsets[1] and math.prod(size or 1 for size in shape) < _MOST


def writing_order(announced: Mapping[str, TensorInfo]) -> list[str]:
    """Sort wide dtypes first, so that every tensor begins at a multiple of its element's size."""
    return sorted(announced, key=lambda name: -announced[name].dtype.itemsize)


class TensorFile(Mapping[str, Tensor]):
    """The memory-mapped tensors of a file: reading part of one reads that part of the file.

    Writing into the tensors does not change the file.
    """

    def __init__(self, path: Path) -> None:
        """Raises:
        CheckpointError: if the file is missing or damaged.
        """
        self._path = path
        try:
            with open(path, "rb", opener=_regular) as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= size - 8:
                    raise CheckpointError(
                        f"{path} is damaged or not a safetensors file: its header is {length} bytes in a file of {size}"
                    )
                text = file.read(length)
                header = parse_json_object(text)
                self._start = 8 + length
                self._read_header(header, text, size - self._start)
                mapped = (
                    np.memmap(file, dtype=np.uint8, mode="c", offset=0) if size > self._start else np.zeros(0, np.uint8)
                )
        except PermissionError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}. Let this user read it") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        self._bytes = torch.from_numpy(mapped)

    def _read_header(self, header: dict[str, Any], text: bytes, there: int) -> None:
        """Check that every tensor lies within the file, has the right size, and overlaps no other.

        Args:
            header: the entry of each tensor by name; and notes.
            text: the header as read.
            there: bytes of the file after the header.
        """
        notes = header.pop("__metadata__", None) or {}
        if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
            raise self._odd("its metadata are not strings")
        if text.startswith(_BEGIN):
            at = len(_BEGIN)
            blank = text[:at] + b"0" * _DIGITS + text[at + _DIGITS :]
            if text[at : at + _DIGITS] != f"{zlib.crc32(blank):0{_DIGITS}x}".encode():
                raise self._odd("the checksum of its header does not match")
        for name, entry in header.items():
            if not _is_entry(entry):
                raise self._odd(f"it describes {name!r} as {str(entry)[:80]}")
        self._entries: dict[str, Any] = header
        self._in_order = sorted(header, key=lambda name: header[name]["data_offsets"])
        at = 0
        for name in self._in_order:
            start, end = header[name]["data_offsets"]
            if start != at:
                raise self._odd(f"{name!r} begins at byte {start}, but the tensor before it ends at byte {at}")
            at = end
            dtype, shape = _DTYPES.get(header[name]["dtype"]), header[name]["shape"]
            if dtype is not None and end - start != math.prod(shape) * dtype.itemsize:
                raise self._odd(f"{name!r} of shape {shape} and dtype {header[name]['dtype']} has {end - start} bytes")
        if at > there:
            raise CheckpointError(
                f"{self._path} is truncated: it should have {self._start + at} bytes and has {self._start + there}"
            )
        if at < there:
            raise self._odd(f"its last {there - at} bytes belong to no tensor")
        sums = notes.get(_SUMS, "")
        known = len(sums) == _DIGITS * len(header)  # else they belong to another file, whose notes were copied
        self._sums = [sums[at : at + _DIGITS] for at in range(0, len(sums), _DIGITS)] if known else []

    def _odd(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged or no safetensors file: {what}")

    def __getitem__(self, name: str) -> Tensor:
        found, (start, end) = self.described(name), self._entries[name]["data_offsets"]
        dtype, shape = found.dtype, found.shape
        if start == end:
            return torch.empty(shape, dtype=dtype)
        raw = self._bytes[self._start + start : self._start + end]
        if (self._start + start) % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(shape)

    def described(self, name: str) -> TensorInfo:
        """Return a tensor's dtype and shape from the header."""
        entry = self._entries[name]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(f"{name!r} in {self._path} has the unknown dtype {entry['dtype']}")
        return TensorInfo(dtype=dtype, shape=tuple(entry["shape"]))

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Read every ``parts``-th tensor from number ``part`` on and compare it with its checksum, if it has one.

        Raises:
            CheckpointError: for the first tensor that differs from the one that was written.
        """
        for name, wanted in [*zip(self._in_order, self._sums, strict=False)][part::parts]:
            start, end = self._entries[name]["data_offsets"]
            found = zlib.crc32(self._bytes[self._start + start : self._start + end].numpy().data)
            if f"{found:0{_DIGITS}x}" != wanted:
                raise CheckpointError(
                    f"{self._path} is damaged: {name!r} has checksum {found:0{_DIGITS}x} and was written with {wanted}. Copy "
                    "the file again from its source, or resume from an earlier checkpoint"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
