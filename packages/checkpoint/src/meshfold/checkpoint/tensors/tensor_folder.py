"""A folder with files of tensors: which of its files may be opened, and their paths.

An index, which anyone may have written, may only name files of its own folder. A link is followed if it stays within the folder,
or within a model of the Hugging Face hub's cache, which consists of links.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from pathlib import Path

from meshfold.checkpoint.errors import CheckpointError
from meshfold.checkpoint.tensors.safetensors_file import TensorFile


class TensorFolder:
    """Opens files of a folder by their names."""

    def __init__(
        self,
        folder: Path,
        path_of: Callable[[str], Path] | None = None,
        listed: Container[str] | None = None,
    ) -> None:
        """Args:
        folder: in which they are.
        path_of: where a file is now; None: in the folder itself.
        listed: names that belong to it; None: all files of the folder.
        """
        self.folder, self._listed = folder, listed
        self._path_of = folder.joinpath if path_of is None else path_of

    def has(self, name: str) -> bool:
        """Return True if the file exists and belongs to the folder."""
        if self._listed is not None and name not in self._listed:
            return False
        return os.path.lexists(self._path_of(name))

    def path(self, name: object) -> Path:
        """Return where a file is.

        Raises:
            CheckpointError: if it is not a file of this folder.
        """
        if not is_file_name(name) or (self._listed is not None and name not in self._listed):
            raise CheckpointError(f"{self.folder} has no file {name!r}, which its index names: it is damaged")
        found = self._path_of(str(name))
        check_inside_folder(found, self.folder)
        return found

    def open(self, name: object) -> TensorFile:
        """Open a safetensors file.

        Raises:
            CheckpointError: if it is not a file of this folder, or damaged.
        """
        path = self.path(name)
        try:
            return TensorFile(path)
        except CheckpointError:
            moved = self.path(name)
            if moved == path:
                raise
            return TensorFile(moved)  # a save has moved it to its place since


def is_file_name(name: object) -> bool:
    """Return True for the name of a file in a folder, not a path to somewhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and not any(sign in name for sign in "/\\\0")


def check_inside_folder(path: Path, folder: Path) -> None:
    """Raise a CheckpointError for a link that leads out of a folder.

    Args:
        path: of a file in it.
        folder: may be a link itself, or a model in the cache of the Hugging Face hub.
    """
    if not path.is_symlink():
        return
    root, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(one) for one in roots):
        raise CheckpointError(
            f"{path} is a link to {real}, which is not in the folder: someone else's folder could take your files that way. "
            f"If it is yours, put the file in its place: cp --remove-destination '{real}' '{path}'"
        )
