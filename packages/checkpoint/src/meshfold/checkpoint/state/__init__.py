"""The small state of a checkpoint: ``state.json``, and extra state of modules."""

from __future__ import annotations

from meshfold.checkpoint.state.extra_state import (
    describe_extra_state,
    extra_state_value,
    load_extra_state,
    modules_with_extra_state,
    restore_extra_state,
    split_extra_state,
)
from meshfold.checkpoint.state.state_file import (
    CHECKSUM,
    CHECKSUMS,
    FILES,
    FORMAT_SHARDED,
    FORMAT_WHOLE,
    file_checksum,
    has_valid_checksum,
    listed_files,
    parse_state,
    read_state,
    with_checksum,
)

__all__ = [
    "CHECKSUM",
    "CHECKSUMS",
    "FILES",
    "FORMAT_SHARDED",
    "FORMAT_WHOLE",
    "describe_extra_state",
    "extra_state_value",
    "file_checksum",
    "has_valid_checksum",
    "listed_files",
    "load_extra_state",
    "modules_with_extra_state",
    "parse_state",
    "read_state",
    "restore_extra_state",
    "split_extra_state",
    "with_checksum",
]
