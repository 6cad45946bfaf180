"""Python that has torch imported when it starts: a stand-in for the interpreter, for the commands that pages and tests type.

Importing torch and what training needs beside it takes longer than most commands do, and each of the ranks that they start
imports it again. The stand-in (``stand_in.py``) is called as ``python`` or ``meshfold`` is. It hands arguments, environment,
folder and open files to a process that has imported all that and run nothing; a fork of that runs the program, with the
stand-in as ``sys.executable``. The stand-in waits for it, passes signals on and ends as it ended. That a start from nothing
works is tested in ``packages/meshfold/tests/test_cli.py`` and ``packages/mesh/tests/test_launch.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import inspect
import json
import os
import random
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from select import select
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from integration_tests import stand_in
from integration_tests.house import ROOT
from integration_tests.left_behind import SERVERS

_MOST_FILES = 64  # that a program inherits
# What the programs import, dearest first; nothing here starts a thread. Every optimizer of torch imports its compiler, and
# every training draws its losses.
_IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "numba",
    "transformers.modeling_utils",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.models.transformers.dit_transformer_2d",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "matplotlib.ticker",
    "meshfold.cli.train",
    "meshfold.train.loop",
    "meshfold.train.plots",
    "meshfold.planner.planner",
)


_SHARED: list[subprocess.Popen[bytes] | None] = []
"""Processes that this one has started and that outlive it."""


class WarmPython:
    """Starts the process that forks; closing it ends that and what it forked.

    Args:
        imported: modules that its programs find imported.
        run: name of a run of tests by several workers of pytest-xdist: they share one process, which ends with their parent.

    Attributes:
        folder: to be put first on the path of commands: ``python`` and ``meshfold`` are in it.
    """

    def __init__(self, imported: Sequence[str] = _IMPORTED, run: str | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if run is None or not hasattr(os, "pidfd_open"):
            self.folder = Path(tempfile.mkdtemp(prefix="meshfold-warm-"))
            self._start(imported, owner=None)
            return
        kind = zlib.crc32(" ".join(imported).encode())
        self.folder = Path(tempfile.gettempdir(), f"meshfold-warm-{run}-{kind:08x}")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (self.folder / "ready").exists():
                self._start(imported, owner=os.getppid())
                (self.folder / "ready").touch()
                _SHARED.append(self._process)
        self._process = None

    @property
    def python(self) -> str:
        """The path to call instead of ``sys.executable``."""
        return str(self.folder / "python")

    def _start(self, imported: Sequence[str], owner: int | None) -> None:
        address = str(self.folder / "socket")
        scripts = Path(sys.executable).parent
        for name in ("python", "meshfold"):
            words = [sys.executable, "-IS", stand_in.__file__, address]
            if name != "python":
                words.append(str(scripts / name))
            command = self.folder / name
            command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            command.chmod(0o755)
        environment = dict(os.environ, MPLBACKEND="agg", PYTHONUNBUFFERED="1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, address, self.python, str(owner or 0), *imported],
            cwd=ROOT,
            stdin=subprocess.PIPE if owner is None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment,
        )
        SERVERS.add(self._process.pid)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the process that forks programs ended: {self._process.wait()}")

    def environment(self) -> dict[str, str]:
        """This process's own, with the stand-ins first on the path of commands."""
        path = os.pathsep.join([str(self.folder), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return dict(os.environ, PATH=path, MPLBACKEND="agg", PYTHONUNBUFFERED="1")

    def close(self) -> None:
        """End it; one that others use goes on."""
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        SERVERS.discard(self._process.pid)
        self._process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reap(number: int, frame: object) -> None:
    """Wait for those that wait for a program."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _serve(listener: socket.socket, owner: int) -> dict[str, Any] | None:
    """Fork for each call; in the process that was forked, its job; None when the owner has ended, or closed its end."""
    signal.signal(signal.SIGCHLD, _reap)
    end = os.pidfd_open(owner) if owner else sys.stdin.fileno()
    while True:
        ready = select([listener.fileno(), end], [], [])[0]
        if end in ready:
            return None
        caller = listener.accept()[0]
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _accompany(caller)
        caller.close()


def _accompany(caller: socket.socket) -> dict[str, Any]:
    """Fork the program, tell the caller how it ended, and end it should the caller be gone; its job, in the program."""
    files = socket.recv_fds(caller, 1, _MOST_FILES)[1]
    with caller.makefile() as lines:
        words = lines.readline()
    if not words.endswith("\n"):  # the caller was killed while it asked
        os._exit(0)
    job: dict[str, Any] = json.loads(words)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    program = os.fork()
    if program == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (ended, wake):
            os.close(other)
        caller.close()
        os.setsid()
        _take_over(files, job["files"])
        return job
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):
        caller.sendall(f"{program}\n".encode())
    if ended not in select([ended, caller.fileno()], [], [])[0]:
        for end in (os.killpg, os.kill):  # it may not have made its group yet
            with contextlib.suppress(ProcessLookupError):
                end(program, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(OSError):
        caller.sendall(f"{code}\n".encode())
    os._exit(0)


def _take_over(files: list[int], numbers: list[int]) -> None:
    """Give open files the numbers that they have in the caller, and close what the caller does not have."""
    above = max(*files, *numbers) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file in {0, *files} - set(numbers):
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _become(job: dict[str, Any], executable: str) -> None:
    """Do what the interpreter does with such words, to this process's own end."""
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    # Ranks look whether who called them is still there when they begin; a fork of this program asks for itself.
    program, parent, really = os.getpid(), int(job["parent"]), os.getppid
    vars(os)["getppid"] = lambda: parent if os.getpid() == program else really()
    sys.executable = executable
    random.seed()
    words: list[str] = job["words"]
    sys.orig_argv = [executable, *words]
    safe, unbuffered = words[:1] == ["-P"], words[:1] == ["-u"]
    if unbuffered:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    option, *rest = words[safe or unbuffered :]
    del sys.path[0]
    if option == "-c":
        sys.path[:0] = [] if safe else [""]
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif option == "-m":
        sys.path[:0] = [] if safe else [os.getcwd()]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif option.startswith("-"):
        raise SystemExit(f"warm_python.py does not know {option!r}: it takes -P or -u, -c, -m or a script")
    else:
        sys.path[:0] = [] if safe else [str(Path(option).resolve().parent)]
        sys.argv = [option, *rest]
        runpy.run_path(option, run_name="__main__")


def _end(error: BaseException | None) -> NoReturn:
    """What Python does at the end of a program, but for taking down all that is imported, which takes more than a second."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    elif error is not None:
        code = 1
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads any more
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 255)


if __name__ == "__main__":
    for name in sys.argv[4:]:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    # Each program would do once what these do: register what numba knows, and scan all modules.
    if "numba" in sys.modules:
        sys.modules["numba.core.registry"].cpu_target.target_context.refresh()
    inspect.getmodule(compile("", "a file of no module", "exec"))
    # At its end each would take all of torch's operators out of the dispatcher, in 25 MB that it shares with this process.
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False
    with socket.socket(socket.AF_UNIX) as calls:
        calls.bind(sys.argv[1])
        calls.listen(64)
        gc.freeze()  # no program looks for garbage in what it shares with this process, which would copy all of it
        print("ready", flush=True)
        work = _serve(calls, int(sys.argv[3]))
    if work is None and sys.argv[3] != "0":
        shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
    if work is not None:
        ended: BaseException | None = None
        try:
            _become(work, sys.argv[2])
        except BaseException as error:
            ended = error
        _end(ended)
