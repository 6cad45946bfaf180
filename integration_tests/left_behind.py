"""What a test leaves in the process that runs the tests: an open process group, threads of ours, child processes.

The next test that starts a process group would hang or fail for a reason that is not its own. ``conftest.py`` fails the test
that left it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

SERVERS: set[int] = set()
"""Ids of processes that serve all tests, and end with this one."""

GRACE_S = 30.0
"""How long threads and processes may take to end that were told to, on a machine that does other things too."""

# Of Python and torch; they serve later tests, and end with this process.
_SERVANTS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"compile_worker")


class Before:
    """The threads and children of this process before a test."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._children = _children()

    def left(self) -> str:
        """Say what is there that was not, in a sentence; empty if nothing is. Close and end what can be."""
        found = []
        if groups := _open_groups():
            found.append(groups)
        if names := _after_a_while(self._new_threads):
            found.append(f"threads ({', '.join(names)}): close the engine, the store or the save that started them")
        if processes := _after_a_while(self._new_children):
            found.append(f"child processes ({', '.join(processes)}): wait for them, or end them")
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process.split()[0]), signal.SIGKILL)
        return f"the test left behind {'; and '.join(found)}" if found else ""

    def _new_threads(self) -> list[str]:
        new = [thread for thread in threading.enumerate() if thread not in self._threads and thread.is_alive()]
        return [thread.name for thread in new if thread.name.startswith(("meshfold", "save "))]

    def _new_children(self) -> list[str]:
        return [f"{pid} {words}" for pid in _children() - self._children if (words := _command(pid))]


def _open_groups() -> str:
    """Close the process group of torch and name it; empty if there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return ""
    world = f"{distributed.get_world_size()} ranks over {distributed.get_backend()}"
    distributed.destroy_process_group()
    return f"an open process group of {world}: use `with` for what starts it, or destroy_process_group()"


def _after_a_while(look: Callable[[], list[str]]) -> list[str]:
    """Return what is found still when garbage is collected and a little time has gone by."""
    found = look()
    if found:
        gc.collect()
    until = time.monotonic() + GRACE_S
    while found and time.monotonic() < until:
        time.sleep(0.01)
        found = look()
    return found


def _children() -> set[int]:
    """Return the processes that this one has started and not waited for; none where the system does not say."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:  # of the main thread, which runs the tests
            return {int(pid) for pid in file.read().split()}
    except OSError:
        return set()


def _command(pid: int) -> str:
    """Return the command of a process that runs; empty for those that have ended and for servants of all tests."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    servant = pid in _servers() or any(name in command for name in _SERVANTS)
    return "" if state in "ZX" or servant else command.replace(b"\0", b" ").decode(errors="replace")[:200].strip()


def _servers() -> Iterable[int]:
    """Return the processes that fork ranks and programs for all tests."""
    forks_ranks = sys.modules.get("meshfold.mesh.testing.fork_server")
    return {*SERVERS, *(forks_ranks.RUNNING if forks_ranks is not None else ())}
