"""A process that has imported torch and run nothing, and forks ranks on request.

Importing torch costs a second; a fork of a process that has done so costs milliseconds. The test process itself
must not be forked once it has run a backward: it has threads then, and a forked child hangs. So this one is kept clean. It
starts from nothing, or as a copy of the test process before the first test: that copy has imported all that tests import.

Requests and replies are one JSON line each over a socket; a request to fork carries file descriptors.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from meshfold.mesh.processes._bootstrap import die_with_parent

_LINE = 65536
# Of torch only its compiler: other modules of it start threads or processes when imported. `_preload` imports those that
# most ranks need.
_COMPILER = ("torch._functorch.", "torch._inductor.")
_OURS = {"meshfold", "numpy", "einops", "numba", "safetensors", "hypothesis"}
_THEIRS = {"transformers", "diffusers", "peft", "lightning", "lightning_utilities", "torchmetrics", "matplotlib"}
_WORTH_PRELOADING = frozenset(_OURS | _THEIRS)


def worth_preloading(among: int | None = None) -> list[str]:
    """Return the slow packages that this process has imported, in that order; of so many modules that it imported last.

    A fork shares memory with its parent until one of them writes, and looking at a module counts a reference, in the module's
    memory: a rank that looked at all copied 25 MB, which was three quarters of what its start took.
    """
    last = list(islice(reversed(sys.modules), among))
    return [
        name
        for name in reversed(last)
        if (name.partition(".")[0] in _WORTH_PRELOADING or name.startswith(_COMPILER))
        and sys.modules.get(name) is not None
    ]


def can_be_copied() -> bool:
    """Return False if a fork of this process could hang: not on Linux, a GPU in use, or threads of torch."""
    if not sys.platform.startswith("linux"):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return False
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            if task.read_text().startswith("pt_"):
                return False
    return True


class _Copy:
    """A fork of this process, polled like a :class:`subprocess.Popen`."""

    def __init__(self, serve: Callable[[], None]) -> None:
        self._code: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else the copy would print it again
        with warnings.catch_warnings():
            # Python warns of threads, such as pytest-xdist's; the copy uses nothing that they hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run_and_exit(serve)

    def poll(self) -> int | None:
        if self._code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if found else None
        return self._code

    def wait(self, timeout: float = float("inf")) -> None:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the process that forks the ranks", timeout)
            time.sleep(0.002)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


#: Ids of the fork servers of this process that run.
RUNNING: set[int] = set()


class ForkServer:
    """The test process's end: starts the fork server and asks it for ranks.

    Args:
        copied: fork it from this process, which :func:`can_be_copied` has to allow, instead of starting it from nothing.
    """

    def __init__(self, *, copied: bool = False) -> None:
        self._socket, theirs = socket.socketpair()
        self._preloaded: set[str] = set(worth_preloading()) if copied else set()
        self._looked_at = len(sys.modules) if copied else 0
        environment = dict(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_WARM_POOL="0")
        # Programs that ranks start must find the same modules as the test process, and so must ranks.
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        parent = os.getpid()

        def serve() -> None:
            self._socket.close()
            _leave_the_tests(environment)
            main(str(theirs.fileno()), str(parent))

        with theirs:
            self._process = _Copy(serve) if copied else _from_nothing(theirs.fileno(), environment)
        RUNNING.add(self._process.pid)

    def preload(self) -> float:
        """Import the slow packages that this process has imported, once there instead of in every rank.

        Returns:
            the CPU seconds that it took: about what every rank that was forked before will take to do the same.
        """
        if len(sys.modules) == self._looked_at:  # nothing new: the usual case, kept fast
            return 0.0
        self._looked_at = len(sys.modules)
        return self.preload_what(worth_preloading())

    def preload_what(self, modules: Iterable[str]) -> float:
        """Import these unless it has; return the CPU seconds taken. Ranks that are forked from now on have them."""
        names = [name for name in modules if name not in self._preloaded]
        self._preloaded.update(names)
        return float(self._ask({"do": "preload", "modules": names})) if names else 0.0

    def fork(self, connection: int, listener: int | None, **settings: Any) -> int:
        """Fork a rank that serves on ``connection``; return its process id. ``settings``: see :func:`rank.serve`."""
        descriptors = [connection] if listener is None else [connection, listener]
        return int(self._ask({"do": "fork", "settings": settings}, descriptors))

    def signal(self, pids: list[int], number: int) -> None:
        """Send a signal to ranks."""
        self._ask({"do": "signal", "pids": pids, "number": number})

    def kill(self, pids: list[int]) -> dict[int, int]:
        """End ranks and whatever they started; return how each ended: its exit code, or minus the signal."""
        return {int(pid): code for pid, code in self._ask({"do": "kill", "pids": pids}).items()}

    def close(self) -> None:
        """End the fork server and every rank."""
        self._socket.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        RUNNING.discard(self._process.pid)

    def _ask(self, request: dict[str, Any], descriptors: list[int] | None = None) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], descriptors or [])
        reply = b""
        while not reply.endswith(b"\n"):
            more = self._socket.recv(_LINE)
            if not more:
                raise RuntimeError(f"the process that forks the ranks ended (exit code {self._process.poll()})")
            reply += more
        return json.loads(reply)


def _from_nothing(descriptor: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the fork server as a new program, which inherits its end of the socket."""
    code = "import sys; from meshfold.mesh.testing.fork_server import main; main(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(descriptor), str(os.getpid())],
        pass_fds=[descriptor],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches only the test process, which then ends the ranks
    )


def _leave_the_tests(environment: dict[str, str]) -> None:
    """Detach a copy of the test process from its session, its input, and where errors are shown."""
    os.setsid()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.update(environment)
    threading.excepthook = threading.__excepthook__
    sys.excepthook = sys.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__


def main(descriptor: str, parent: str) -> None:
    """Run the fork server; it ends when the test process closes its end of the socket."""
    die_with_parent(int(parent))
    _preload()
    _prepare()
    # gloo's process groups need many descriptors: raise the limit as far as allowed.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with socket.socket(fileno=int(descriptor)) as connection:
        children: dict[int, int | None] = {}
        while True:
            line, descriptors, _, _ = socket.recv_fds(connection, _LINE, 8)
            while line and not line.endswith(b"\n"):
                line += connection.recv(_LINE)
            if not line:
                break
            reply = _answer(json.loads(line), descriptors, connection, children)
            connection.sendall(json.dumps(reply).encode() + b"\n")
        _kill(list(children), children)


def _preload() -> None:
    """Import what ranks will need. Nothing here may start a thread."""
    import torch
    import torch._dynamo  # every optimizer imports it, and it is as slow as torch itself
    import torch.distributed
    import torch.nn.functional

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        import pytest  # noqa: F401  every test file imports it
    import meshfold.mesh.testing.rank  # noqa: F401


def _prepare() -> None:
    """Do once what each rank would do at the first use of imported modules. Nothing here may start a thread."""
    # `inspect`: its first use scans all modules.
    inspect.getmodule(compile("", "a file of no module", "exec"))
    # numba: the first kernel registers all that numba knows, for a third of a second.
    registry = sys.modules.get("numba.core.registry")
    if registry is not None:
        registry.cpu_target.target_context.refresh()


def _answer(
    request: dict[str, Any],
    descriptors: list[int],
    connection: socket.socket,
    children: dict[int, int | None],
) -> Any:
    if request["do"] == "fork":
        gc.freeze()  # else a rank's collector would touch, and so copy, all shared memory
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_rank(parent, connection, descriptors, request["settings"])
        for descriptor in descriptors:
            os.close(descriptor)
        children[pid] = None
        return pid
    if request["do"] == "preload":
        begin = time.process_time()
        for name in request["modules"]:
            with contextlib.suppress(Exception):  # not importable here; ranks import it if they can
                importlib.import_module(name)
        _prepare()
        return time.process_time() - begin
    if request["do"] == "signal":
        for pid in request["pids"]:
            if children.get(pid, 0) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, request["number"])
        return None
    return _kill(request["pids"], children)


def _kill(pids: list[int], children: dict[int, int | None]) -> dict[int, int]:
    """Kill children that still run, with their sessions, and return how each child ended."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + 0.05  # a rank whose socket just closed may still be exiting
    for pid in pids:
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found or time.monotonic() > deadline:
                break
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if not found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        ended[pid] = os.waitstatus_to_exitcode(status)
        children.pop(pid, None)
    return ended


def _be_rank(parent: int, connection: socket.socket, descriptors: list[int], settings: dict[str, Any]) -> NoReturn:
    """Become a rank in the forked child, serve, and never return into the fork server's loop."""

    def be_rank() -> None:
        die_with_parent(parent)
        os.setsid()
        connection.close()
        from meshfold.mesh.testing.rank import serve

        serve(*descriptors, **settings)

    _run_and_exit(be_rank)


def _run_and_exit(function: Callable[[], None]) -> NoReturn:
    """Call the function in a forked child, and end that whatever happens."""
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
