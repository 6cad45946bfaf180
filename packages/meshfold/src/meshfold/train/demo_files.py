"""Files that a demo writes: the next demo removes them and nothing else.

When a demo ends it writes down its files with their sizes and times. A file that is not on that list, or has changed since, is
somebody's: of a run that went on from the demo's checkpoint, say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from meshfold.checkpoint.files import write_atomically

LIST = ".demo.json"
WRITTEN = ("checkpoint", "serial", "metrics.jsonl", "settings.json", "loss.png", "sample.txt")
"""All that a demo writes, but for the tokens, which are kept."""


def sign(out: Path) -> None:
    """Write down what is there: the demo that ends has written it, since none of it was there when it began."""
    if not out.is_dir():
        return
    listed = {_name(path, out): _seen(path) for path in _there(out) if not _is_folder(path)}
    write_atomically(out / LIST, lambda part: part.write_text(json.dumps(listed, indent=1)))


def of_others(out: Path) -> list[Path]:
    """Return the paths in a demo's folder that no demo has written."""
    listed = _listed(out)
    return [
        path for path in _there(out) if not _is_folder(path) and listed.get(_name(path, out)) != _seen(path)
    ]


def clear(out: Path) -> None:
    """Remove what an earlier demo left, file by file, and nothing else."""
    listed = _listed(out)
    for path in reversed([*_there(out)]):  # what is in a folder comes before it
        if not _is_folder(path):
            if listed.get(_name(path, out)) == _seen(path):
                path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()


def _listed(out: Path) -> dict[str, list[int]]:
    try:
        found = json.loads((out / LIST).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _there(out: Path) -> Iterator[Path]:
    """All files and folders that are where a demo writes; a folder comes before what is in it."""
    for name in WRITTEN:
        path = out / name
        if path.is_symlink() or path.exists():
            yield path
        if _is_folder(path):
            yield from path.rglob("*")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _name(path: Path, out: Path) -> str:
    return path.relative_to(out).as_posix()


def _seen(path: Path) -> list[int]:
    """By what a file that was written since is told from the one before."""
    status = path.lstat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]
