"""Processes for pages of documentation: each of its own, forked from one that has imported torch and done nothing else.

Importing torch takes longer than most pages take. A process that was forked right after it has run nothing, so a page
sees what it would see in a process that it started itself, but for torch being imported already.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from select import select
from types import ModuleType, TracebackType
from typing import IO, Any

_FORKS = 120.0  # seconds that importing torch and a fork may take


class PageServer:
    """The end that asks; closing it ends the process that forks."""

    def __init__(self) -> None:
        environment = dict(os.environ, MPLBACKEND="agg", PYTHONUNBUFFERED="1")
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
        )

    def run(self, script: Path, *, timeout: float) -> tuple[str, str]:
        """How a script ended ("" for well) and all it printed; it runs in a folder of its own, our commands on the path.

        Text that its blocks printed, by the calls that :func:`integration_tests.markdown.write_script` put before them, is
        in files ``printed.0``, ``printed.1``, ... beside the script.
        """
        work, output = script.parent / "work", script.parent / "output"
        work.mkdir()
        job = {"script": str(script), "work": str(work), "output": str(output)}
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(job).encode() + b"\n")
        page = self._answer(_FORKS)
        if page is None:
            raise RuntimeError(f"the process that forks pages did not answer within {_FORKS:.0f} s")
        code = self._answer(timeout)
        how = f"ended with {code}" if code else ""
        if code is None:
            os.killpg(page, signal.SIGKILL)  # its session, so that the ranks it started end with it
            self._answer(None)
            how = f"took more than {timeout:.0f} s"
        return how, output.read_text(encoding="utf-8", errors="replace")

    def _answer(self, timeout: float | None) -> int | None:
        stdout = self._process.stdout
        assert stdout is not None
        if not select([stdout], [], [], timeout)[0]:
            return None
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the process that forks pages ended: {self._process.wait()}")
        return int(line)

    def __enter__(self) -> PageServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


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


def _serve() -> dict[str, str] | None:
    """Fork for each line; in the process that was forked, its job; None when there are no more."""
    for line in sys.stdin:
        page = os.fork()
        if page == 0:
            job: dict[str, str] = json.loads(line)
            return job
        print(page, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(page, 0)[1]), flush=True)
    return None


def _become(job: dict[str, str]) -> None:
    """Run the script as ``python script`` does, to this process's own end."""
    os.setsid()
    script = Path(job["script"])
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)
    os.chdir(job["work"])
    sys.argv, sys.path[0] = [str(script)], str(script.parent)
    main = ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules["__main__"] = main
    sys.stdout = Printed(sys.stdout, script.parent)
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), main.__dict__)


if __name__ == "__main__":
    import torch  # noqa: F401

    work = _serve()
    if work is not None:
        _become(work)
