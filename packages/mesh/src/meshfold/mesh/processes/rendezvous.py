"""The store in which processes meet. Ranks wait there for each other before they connect.

torch waits for a rank that never comes in C++, for half an hour and without a name. Here a rank leaves its address under a key of
the meeting and waits for the others' keys. Once a second it checks if the missing ranks can still come. A process of this machine
that has ended cannot, and a rank that has failed cannot (:mod:`meshfold.mesh.watchdog` then ends the wait).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from meshfold.mesh.processes.environment import Environment, store_is_served
from meshfold.mesh.recording.flight_recorder import shortened

_LOOK_S = 1.0
_FIRST_PAUSE_S = 0.0005
_starts = itertools.count()  # counts starts: equal on all ranks


class HasProcess(Protocol):
    """A process that is known by its machine and number."""

    @property
    def host(self) -> str:
        """The name of its machine."""

    @property
    def pid(self) -> int:
        """Its number there."""


def process_state(process: HasProcess, host: str) -> str:
    """Return ``runs``, ``gone`` or ``stopped`` for a process of this machine; an empty text for another machine's."""
    if process.host != host or not sys.platform.startswith("linux"):
        return ""
    try:
        letter = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "runs")


_EXITING = 0x4  # PF_EXITING of the kernel


def is_ending(pid: int) -> bool:
    """Return True if a process of this machine has begun to end, and so closes its connections; False where nothing says so."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return words[0] in "ZX" or bool(int(words[6]) & _EXITING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The process of a rank.

    Attributes:
        host: the name of its machine.
        space: in which its number counts: two containers may have one host's name, and numbers of their own.
        pid: its number there.
    """

    host: str
    space: str
    pid: int

    @classmethod
    def own(cls) -> Address:
        """Return the address of this process."""
        space = ""
        with suppress(OSError):
            space = os.readlink("/proc/self/ns/pid")
        return cls(host=socket.gethostname(), space=space, pid=os.getpid())

    def is_gone(self, seen_from: Address) -> bool:
        """Return True if the process is known to have ended; False for one that cannot be seen from here."""
        return self.space == seen_from.space and process_state(self, seen_from.host) == "gone"


def meet(
    store: Any,
    name: str,
    rank: int,
    ranks: Sequence[int],
    limit: timedelta,
    known: dict[int, Address],
    broken_off: Callable[[], bool] = lambda: False,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Wait until all ranks have arrived; add their addresses to ``known``.

    Args:
        store: where they meet.
        name: of the meeting; never used before in this store.
        rank: this one.
        ranks: all that are to come.
        limit: how long they are waited for.
        known: addresses from earlier meetings, by rank.
        broken_off: whether the wait is to end at once.
        look: called once a second; an error it raises ends the wait.

    Raises:
        RuntimeError: if a rank did not arrive within the limit or its process is gone, the wait was cancelled, or the store
            does not answer.
    """
    keys = {one: _key(name, one) for one in ranks}
    own = Address.own()
    store.set(keys[rank], json.dumps(asdict(own)))
    try:
        _wait(store, keys, limit, broken_off, lambda missing: _check_alive(missing, known, own), look)
    except BaseException:
        with suppress(RuntimeError):  # the store may be gone
            leave(store, name, rank)  # later ranks must not believe that this one waits
        raise
    for one, text in zip(ranks, store.multi_get(list(keys.values())), strict=True):
        known[one] = Address(**json.loads(text))
    _check_alive(ranks, known, own)


def _wait(
    store: Any,
    keys: dict[int, str],
    limit: timedelta,
    broken_off: Callable[[], bool],
    check: Callable[[Sequence[int]], None],
    look: Callable[[], None],
) -> None:
    deadline = time.monotonic() + limit.total_seconds()
    missing, pause, looked = list(keys), _FIRST_PAUSE_S, -math.inf
    while missing := [one for one in missing if not store.check([keys[one]])]:
        now = time.monotonic()
        if broken_off():
            raise RuntimeError("the wait for the other ranks was cancelled")
        if now >= deadline:
            raise RuntimeError(
                f"timed out after {limit.total_seconds():g} s: {_named(missing)} of {len(keys)} did not arrive"
            )
        if now - looked > _LOOK_S:
            check(missing)
            if looked > 0:  # not the first time: they may be just arriving
                look()
            looked = now
        # Poll, because torch's own wait prints to standard error on a timeout. With many ranks, poll less often.
        time.sleep(pause)
        pause = min(2 * pause, 0.02 + 0.002 * len(keys), _LOOK_S)


def leave(store: Any, name: str, rank: int) -> None:
    """Withdraw a rank's arrival: when all have met, or when it no longer waits."""
    store.delete_key(_key(name, rank))


def _key(name: str, rank: int) -> str:
    return f"meshfold meeting/{name}/{rank}"


def _check_alive(ranks: Sequence[int], known: dict[int, Address], own: Address) -> None:
    gone = [rank for rank in ranks if rank in known and known[rank].is_gone(own)]
    if gone:
        raise RuntimeError(f"{_named(gone)} ended before all ranks had joined")


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s'[: len(ranks) > 1]} {shortened(tuple(ranks))}"


def serve_store(listener: int) -> Any:
    """Serve the store in which processes meet, from this process, on a socket that listens already.

    Args:
        listener: the socket's descriptor, which the store takes over.
    """
    from torch._C._distributed_c10d import TCPStore

    with socket.socket(fileno=os.dup(listener)) as bound:
        host, port = bound.getsockname()[:2]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)


def join_store(host: str, port: int) -> Any:
    """Return the store that another process serves."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, is_master=False, wait_for_workers=False)


def open_store(environment: Environment, timeout: timedelta) -> Any:
    """Return the store at the environment's address, without waiting; rank 0 serves it unless the launcher does."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        environment.master_addr,
        environment.master_port,
        is_master=environment.rank == 0 and not store_is_served(),
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def store_of_this_start(store: Any, attempt: int) -> Any:
    """Return a part of the store for this start, since a restart would find dead addresses of the one before."""
    from torch._C._distributed_c10d import PrefixStore

    again = f" of attempt {attempt}" if attempt else ""
    return PrefixStore(f"meshfold start {next(_starts)}{again}", store)
