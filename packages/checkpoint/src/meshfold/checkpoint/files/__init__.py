"""Single files: written whole or not at all, read without running code that they name."""

from __future__ import annotations

from meshfold.checkpoint.files.atomic_write import fsync_path, write_atomically
from meshfold.checkpoint.files.untrusted import parse_json, parse_json_object, read_torch_file

__all__ = [
    "fsync_path",
    "parse_json",
    "parse_json_object",
    "read_torch_file",
    "write_atomically",
]
