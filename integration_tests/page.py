"""Runs the script of a page of documentation, ``python page.py SCRIPT``: what each block prints goes into a file too."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import IO, Any


class Printed:
    """Standard output that is also written to a file for each block of a page."""

    def __init__(self, real: IO[str], folder: Path) -> None:
        self._real, self._folder = real, folder
        self._file: IO[str] | None = None

    def block(self, number: int) -> None:
        """What is printed from now on is that block's."""
        if self._file is not None:
            self._file.close()
        self._file = open(self._folder / f"printed.{number}", "w", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, text: str) -> int:
        """To both."""
        if self._file is not None:
            self._file.write(text)
        return self._real.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


if __name__ == "__main__":
    script = os.path.abspath(sys.argv[1])
    sys.argv, sys.path[0] = [script], os.path.dirname(script)
    sys.stdout = Printed(sys.stdout, Path(script).parent)
    runpy.run_path(script, run_name="__main__")
