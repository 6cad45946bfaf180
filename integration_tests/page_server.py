"""Processes for pages of documentation: each of its own, with torch imported, as are those that its commands start."""

from __future__ import annotations

import subprocess
from pathlib import Path

from integration_tests import page
from integration_tests.warm_python import WarmPython


class PageServer:
    """The end that asks.

    Args:
        warm: what the pages and their commands are run by.
    """

    def __init__(self, warm: WarmPython) -> None:
        self._warm = warm

    def run(self, script: Path, *, timeout: float) -> tuple[str, str]:
        """How a script ended ("" for well) and all it printed; it runs in a folder of its own, our commands on the path.

        Text that its blocks printed, by the calls that :func:`integration_tests.markdown.write_script` put before them, is
        in files ``printed.0``, ``printed.1``, ... beside the script.
        """
        work, output = script.parent / "work", script.parent / "output"
        work.mkdir()
        with output.open("wb") as file:
            process = subprocess.Popen(
                [self._warm.python, page.__file__, str(script)],
                cwd=work,
                env=self._warm.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            code = process.wait(timeout)
            how = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            process.kill()  # and with it the page's session, and the ranks it started
            process.wait()
            how = f"took more than {timeout:.0f} s"
        return how, output.read_text(encoding="utf-8", errors="replace")
