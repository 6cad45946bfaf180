"""Reading a checkpoint that :func:`meshfold.checkpoint.folder.writing.new_checkpoint` has written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from meshfold.checkpoint.errors import CheckpointError
from meshfold.checkpoint.file_names import STATE_FILE
from meshfold.checkpoint.folder.replacement import current_path, saved_folder
from meshfold.checkpoint.state.state_file import FILES, read_state
from meshfold.checkpoint.tensors.file_set import SAFETENSORS_NAME, open_tensors
from meshfold.checkpoint.tensors.tensor_folder import TensorFolder


class OpenedCheckpoint(NamedTuple):
    """A checkpoint's content.

    Attributes:
        state: the entries of its ``state.json``.
        tensors: those of its model by name, mapped into memory or read from several files.
    """

    state: dict[str, Any]
    tensors: Mapping[str, Tensor]


def open_checkpoint(path: str | os.PathLike[str], name: str = SAFETENSORS_NAME) -> OpenedCheckpoint:
    """Open a checkpoint, whole also if the process that replaced the one before it died on the way.

    Args:
        path: its folder.
        name: the safetensors file whose tensors are wanted, or the name of a set of them.

    Raises:
        CheckpointError: if it is damaged or incomplete.
    """
    folder = Path(path)
    state = read_state(folder / STATE_FILE)
    files: dict[str, int] = state.get(FILES, {})
    place = partial(current_path, folder, saved_folder(folder, state))
    for file, size in files.items():
        try:
            found = place(file).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder} is damaged: cannot read its {file}: {error.strerror}") from error
        if found != size:
            raise CheckpointError(f"{folder} is damaged: its {file} has {found:,} bytes, and not {size:,}")
    return OpenedCheckpoint(state, open_tensors(TensorFolder(folder, place, files), name))
