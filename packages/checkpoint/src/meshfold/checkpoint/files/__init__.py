"""Single files: atomic writes, and reading of untrusted ones (JSON, torch's) without running code, with one kind of error."""

from __future__ import annotations

import json
import os
import pickle
import re
import secrets
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfold.checkpoint.errors import CheckpointError, FileWriteError, advice_on
from meshfold.mesh import SpecError

__all__ = [
    "fsync_path",
    "name_in_errors",
    "parse_json",
    "parse_json_object",
    "read_json_lines",
    "read_torch_file",
    "write_atomically",
]


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: for anything but JSON, also for bytes that are not UTF-8 and for values nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: for anything else.
    """
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not an object")
    return found


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line of a file, from 1, and the JSON object on it. Empty lines are skipped.

    Raises:
        SpecError: if the file cannot be read, or a line is not a JSON object.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = parse_json(line)
                except ValueError as error:
                    raise SpecError(f"{str(path)!r}, line {number}: is not JSON ({error})") from error
                if not isinstance(record, dict):
                    raise SpecError(f"{str(path)!r}, line {number}: holds a {type(record).__name__}, not {{...}}")
                yield number, record
    except OSError as error:
        reason = error.strerror or error
        raise SpecError(f"{str(path)!r} cannot be read: {reason}; give a file of JSON lines") from error


def read_torch_file(path: Path, *, mapped: bool = False) -> Any:
    """Return tensors and plain Python values from a file.

    Args:
        path: of the file.
        mapped: map it into memory instead of reading it.

    Raises:
        CheckpointError: if it is damaged, would take more memory than its size, or holds other objects.
    """
    try:
        _check_archive(path)
        return torch.load(path, map_location="cpu", mmap=mapped or None, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # from the system, the archive or the pickle
        raise CheckpointError(f"cannot read {path}: {_reason(error)}") from error


def is_whole(value: Any) -> bool:
    """Return True for a tensor that stores all of its elements: not sparse, on meta or expanded."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _reason(error: Exception) -> str:
    """Return the first sentence of an error; torch's error about pickled code is a page long."""
    named = re.search(r"(?:GLOBAL|global) ([\w.]+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and named is not None:
        return (
            f"it holds {named[1]}, and nothing but tensors and plain values is read, since other objects can run code"
        )
    return str(error).strip().partition("\n")[0] or type(error).__name__


def verify_archive(path: Path, part: int = 0, parts: int = 1) -> None:
    """Compare every ``parts``-th entry of a file with its checksum in the archive, from number ``part`` on.

    Raises:
        CheckpointError: for a tensor that differs from the one that was written.
    """
    if not zipfile.is_zipfile(path):
        return  # written by torch before 1.6: not an archive
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist()[part::parts]:
                if entry.CRC:  # 0: torch was told not to compute checksums
                    with archive.open(entry) as file:
                        while file.read(1 << 24):
                            pass
    except Exception as error:  # zipfile raises BadZipFile, and others for odd entries
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _check_archive(path: Path) -> None:
    """Raise a CheckpointError for a compressed archive: torch never compresses, and a compressed file may expand to any size."""
    if not zipfile.is_zipfile(path):
        return  # written by torch before 1.6, or damaged
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > size:
        raise CheckpointError(f"cannot read {path}: it is a compressed archive, which torch.save does not write")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically, also in case of a power failure; several processes may do so at once.

    Args:
        path: of the file, in an existing folder. The old file stays until the new one is on disk.
        write: writes the file to the path that it gets.

    Raises:
        FileWriteError: if it cannot be written.
    """
    part = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        with name_in_errors(path):
            write(part)
            fsync_path(part)
            part.replace(path)
            fsync_path(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Context manager: an error of the system while a file is written becomes one that names the file and says what to do.

    Raises:
        FileWriteError: in place of an OSError, which often names no file: those of a full disk.
    """
    try:
        yield
    except FileWriteError:
        raise
    except OSError as error:
        # numpy's has a text and no reason: "354382 requested and 448 written"
        reason = error.strerror or f"it was not written whole ({error})"
        advice = advice_on(error) or "look whether that disk is full and whether this user may write there"
        raise FileWriteError(f"cannot write {path}: {reason}: {advice}") from error


def write_text_synced(path: Path, text: str) -> None:
    """Write a text file in a folder that is not read yet, and sync it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Sync a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
