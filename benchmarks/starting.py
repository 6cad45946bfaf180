"""Start ranks in a group of processes of their own, so that nothing of one contestant is left when the next begins."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_LAUNCH = "import sys; from meshfold.mesh.processes import launch; raise SystemExit(launch(sys.argv[2:], int(sys.argv[1])))"


def start_ranks(script: Path, words: Sequence[str], ranks: int, timeout: float) -> tuple[int | None, str]:
    """Run a program on so many local ranks until it ends.

    Args:
        script: the program.
        words: its arguments.
        ranks: how many processes.
        timeout: seconds after which they are ended.

    Returns:
        What the launcher exited with (None: it was ended), and what all have printed.
    """
    command = [sys.executable, "-c", _LAUNCH, str(ranks), str(script.resolve()), *words]
    with tempfile.TemporaryFile() as out:
        running = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            ended: int | None = running.wait(timeout)
        except subprocess.TimeoutExpired:
            running.terminate()
            running.wait(30)
            ended = None
        out.seek(0)
        return ended, out.read().decode(errors="replace")


def how_it_ended(ended: int | None, said: str, timeout: float) -> str:
    """In a few words, with the last line that was printed."""
    if ended is None:
        return f"stopped after {timeout:g} s"
    last = (said.strip().splitlines() or [""])[-1]
    return f"ended with {ended}: {last[:200]}"
