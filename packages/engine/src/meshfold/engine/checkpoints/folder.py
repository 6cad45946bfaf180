"""A folder of checkpoints, one a step: which is the last complete one, what a step's is called, and letting old ones go.

::

    runs/step-00000100/   complete: it has a state.json, and every file that this names
    runs/step-00000120/
    runs/.step-00000140.writing/   under way, or left by a process that died: never taken for a checkpoint
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshfold.engine.checkpoints.place import locked
from meshfold.engine.errors import CheckpointError

_STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_ENDINGS = ("writing", "old", "removing")
_HIDDEN = re.compile(rf"\.step-(\d{{8,}})\.({'|'.join(_ENDINGS)})")


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step goes: ``step-00000120``.

    Raises:
        CheckpointError: for a step below 0.
    """
    if step < 0:
        raise CheckpointError(f"step {step}: steps are counted from 0 on")
    return Path(folder) / f"step-{step:08}"


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, if there is any. What is damaged or half-written is passed over."""
    return next(iter(complete(folder)), None)


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the last ``keep`` complete checkpoints, and what dead processes left of earlier ones.

    One rank calls. What is under way is left alone; a checkpoint that goes is never taken for one on its way.

    Returns:
        The checkpoints that went, the earliest first.

    Raises:
        CheckpointError: for ``keep`` below 1, or if one cannot be removed.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise CheckpointError(f"keep={keep!r}: how many checkpoints stay, a whole number from 1 up")
    folder = Path(folder)
    found = complete(folder)
    if not found:
        return []
    gone = found[keep:][::-1]
    # Of one that stays it may be all there is: its process died between two renames.
    spared = {_old(path).name for path in found[:keep] if path == found[0] or not is_complete(path)}
    for path in gone:
        remove(path)
    with _removing(folder):
        for path in folder.iterdir():
            named = _HIDDEN.fullmatch(path.name)
            earlier = named is not None and int(named[1]) <= step_of(found[0])
            if earlier and path.name not in spared and not _is_held(path):
                shutil.rmtree(path, ignore_errors=True)
    return gone


def remove(path: Path) -> None:
    """Remove a checkpoint, which at no moment looks like one that is whole and is not. One rank calls.

    Raises:
        CheckpointError: if it cannot be removed.
    """
    with _removing(path.parent):
        for place in (_old(path), path):
            if place.exists():
                removing = path.with_name(f".{path.name}.removing")
                shutil.rmtree(removing, ignore_errors=True)
                place.rename(removing)
                shutil.rmtree(removing)


def tidy(path: Path) -> None:
    """Remove what dead processes have left beside a checkpoint, if it is complete under its own name. One rank calls."""
    with suppress(OSError), locked(path):
        if is_complete(path):
            for ending in _ENDINGS:
                left = path.with_name(f".{path.name}.{ending}")
                if left.is_dir() and not _is_held(left):
                    shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _removing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot remove an old checkpoint in {folder}: {error}; remove it by hand, or let this user write there"
        ) from error


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, the last first. What is damaged or half-written is passed over."""
    return [path for path in present(folder) if is_complete(path) or is_complete(_old(path))]


def present(folder: Path) -> list[Path]:
    """The checkpoints, whole or damaged, the last first. What is under way is none."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    names = {entry.name for entry in folder.iterdir()}
    # Between the two renames of a replacement only the old one is there, under its other name.
    names |= {
        f"step-{named[1]}" for name in names if (named := _HIDDEN.fullmatch(name)) and named[2] == "old"
    }
    return sorted((folder / name for name in names if _NAME.fullmatch(name)), key=step_of)[::-1]


def is_complete(path: Path) -> bool:
    """Whether a folder is a checkpoint, with every file that its ``state.json`` names in its full size."""
    try:
        files = json.loads((path / _STATE).read_text()).get("files", {})
        return all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, AttributeError):
        return False


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def step_of(path: Path) -> int:
    """The step that a folder is named after."""
    return int(path.name.partition("-")[2])


def _is_held(path: Path) -> bool:
    """Whether a process is writing it, where the file system can tell."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # such as some network file systems
        return False
    finally:
        os.close(descriptor)
    return False
