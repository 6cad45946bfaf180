"""Wheels of peers that are not installed, for this process and those that it starts."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def add_wheels(parser: argparse.ArgumentParser) -> None:
    """Add ``--wheels``, the files for :func:`unpacked`."""
    parser.add_argument(
        "--wheels",
        type=Path,
        nargs="*",
        default=[],
        help="wheels of peers, which their processes import before what is installed",
    )


@contextmanager
def unpacked(wheels: Sequence[Path]) -> Iterator[None]:
    """Put wheels in front of the path of this process and of those that it starts."""
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        before = os.environ.get("PYTHONPATH")
        if wheels:
            sys.path.insert(0, folder)
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, *([before] if before else [])])
            importlib.invalidate_caches()
        try:
            yield
        finally:
            if wheels:
                sys.path.remove(folder)
                os.environ.pop("PYTHONPATH")
                if before is not None:
                    os.environ["PYTHONPATH"] = before
