"""Warm pools of gloo ranks on the CPU: a test on eight ranks in tens of milliseconds.

A pool per world size is made at its first use and kept. Every call runs one module-level function on all its ranks, which are
stopped until the next one. If a rank fails, dies or does not answer, its pool is replaced at the next call. No test then sees a
collective that another test left unfinished.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from meshfold.mesh.errors import MeshfoldError
from meshfold.mesh.processes.rendezvous import is_ending
from meshfold.mesh.testing.fork_server import ForkServer, can_be_copied
from meshfold.mesh.testing.rank import Answer, Call

_START_TIMEOUT_S = 240.0
_MOST_POOLS = (
    4  # one per size that suites use: 1, 2, 4 and 8; idle ranks share most of their memory with the fork server
)
# Process groups that a rank may accumulate before its pool is replaced; each takes about 5 descriptors and 3 threads.
_MOST_GROUPS = 64
# If ranks lack modules that take longer to import than this, fork new ones from the fork server, which has them by now.
_WORTH_FORKING_S = 0.4
# A stopped rank does not notice that the test process has ended; on Linux the kernel kills it then.
_STOP_IDLE_RANKS = sys.platform.startswith("linux")
_GRACE_S = 0.1  # wait after the first sign of failure for an earlier one
_STACKS_S = 10.0  # the longest that ranks may take to write their stacks
_QUIET_S = 0.2  # when they have written nothing for so long, they have written all
_SHOWN_OUTPUT = 20_000  # characters


class RankFailure(MeshfoldError):
    """A function failed on a rank of the pool.

    Attributes:
        rank: the first rank that failed; -1 when ranks did not answer in time.
        detail: its traceback and output.
    """

    def __init__(self, message: str, rank: int, detail: str) -> None:
        super().__init__(f"{message}\n\n{detail}".rstrip())
        self.rank = rank
        self.detail = detail


class Pool:
    """The ranks of one world size, joined in one gloo process group."""

    def __init__(self, size: int, fork_server: ForkServer) -> None:
        self.size = size
        self.worn = False
        self.imported: tuple[str, ...] = ()  # slow packages imported by the last call
        self._fork_server = fork_server
        self._folder = Path(tempfile.mkdtemp(prefix="meshfold-ranks-"))
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(size + 8)
            for rank in range(size):
                ours, theirs = socket.socketpair()
                with theirs:
                    self._pids.append(
                        fork_server.fork(
                            theirs.fileno(),
                            listener.fileno() if rank == 0 else None,
                            rank=rank,
                            world_size=size,
                            port=listener.getsockname()[1],
                            output=str(self._output(rank)),
                        )
                    )
                self._connections.append(Connection(ours.detach()))
        self._collect("joining the process group", _START_TIMEOUT_S, [0] * size)

    def run(self, call: Call, what: str, timeout_s: float) -> list[Any]:
        """Run the call on every rank; return their values, by rank.

        Raises:
            RankFailure: for the first rank that failed; the pool is closed then.
        """
        starts = [self._output(rank).stat().st_size for rank in range(self.size)]
        message = pickle.dumps(call)
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            with suppress(OSError):  # it has died; reading reports that
                connection.send_bytes(message)
        answers = self._collect(what, timeout_s, starts)
        self._signal(signal.SIGSTOP)
        self.worn = max(answer.groups for answer in answers) > _MOST_GROUPS
        self.imported = answers[0].imported
        skipped = [answer.summary for answer in answers if answer.kind == "skip"]
        if skipped:
            import pytest

            if len(skipped) < self.size:
                self._fail(what, starts, 0, "RuntimeError: some ranks skipped the test and others did not", "")
            pytest.skip(skipped[0])
        print(self._printed(0, starts[0]), end="")
        return [pickle.loads(answer.payload) if answer.payload else None for answer in answers]

    def close(self) -> dict[int, int]:
        """End the ranks; return how each ended (exit code, or minus the signal), by rank."""
        ended = self._fork_server.kill(self._pids) if self._pids else {}
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        codes = {rank: ended[pid] for rank, pid in enumerate(self._pids)} if ended else {}
        self._pids, self._connections = [], []
        return codes

    def _signal(self, number: int) -> None:
        """Stop the ranks between calls, or have them go on.

        The gloo device of an idle rank wakes a hundred times a second: thirty idle ranks take 4 percent of a core.
        """
        if _STOP_IDLE_RANKS:
            for pid in self._pids:  # the fork server waits for them at the end, so no other process has their ids
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _collect(self, what: str, timeout_s: float, starts: list[int]) -> list[Answer]:
        """Return one answer from every rank, or the failure that came first."""
        answers: dict[int, Answer] = {}
        dead: list[int] = []
        rank_of = {id(connection): rank for rank, connection in enumerate(self._connections)}
        pending = list(self._connections)
        deadline = time.monotonic() + timeout_s
        failing = False
        while pending:
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                # The others see their connections to a rank that ends break, and may answer well before its connection to this
                # process breaks: where the machine is busy, or as long as a process that it has forked has that too.
                dead += [rank for one in pending if is_ending(self._pids[rank := rank_of[id(one)]])]
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                pending.remove(connection)
                rank = rank_of[id(connection)]
                try:
                    answers[rank] = connection.recv()
                    bad = answers[rank].kind == "error"
                except (EOFError, OSError):
                    dead.append(rank)
                    bad = True
                if bad and not failing:
                    failing, deadline = True, time.monotonic() + _GRACE_S
        if dead:  # a death outranks errors: it breaks the others' connections
            self._fail(what, starts, dead[0], "", "")
        errors = [(answer.time, rank) for rank, answer in answers.items() if answer.kind == "error"]
        if errors:
            first = min(errors)[1]
            self._fail(what, starts, first, answers[first].summary, answers[first].traceback)
        if pending:
            self._hang(what, starts, [rank_of[id(connection)] for connection in pending], timeout_s)
        return [answers[rank] for rank in range(self.size)]

    def _fail(self, what: str, starts: list[int], rank: int, summary: str, detail: str) -> None:
        printed = self._printed_by(rank, starts[rank])
        code = self.close().get(rank, 0)
        if not summary:
            ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            summary = f"the process {ending}"
        raise RankFailure(f"rank {rank} of {self.size} failed in {what}: {summary}", rank, detail + printed)

    def _hang(self, what: str, starts: list[int], missing: list[int], timeout_s: float) -> None:
        self._dump_stacks(missing)
        stacks = "".join(self._printed_by(rank, starts[rank]) for rank in missing)
        self.close()
        who = "rank" if len(missing) == 1 else "ranks"
        raise RankFailure(
            f"{who} {', '.join(map(str, missing))} of {self.size} did not end {what} within {timeout_s:g} s",
            -1,
            stacks,
        )

    def _dump_stacks(self, ranks: list[int]) -> None:
        """Have ranks write their stacks, and wait until they have."""
        before = last = [self._output(rank).stat().st_size for rank in ranks]
        self._fork_server.signal([self._pids[rank] for rank in ranks], signal.SIGUSR1)
        since = time.monotonic()
        until = since + _STACKS_S
        while time.monotonic() < until:
            time.sleep(_QUIET_S / 10)
            sizes = [self._output(rank).stat().st_size for rank in ranks]
            if sizes != last:
                last, since = sizes, time.monotonic()
            elif time.monotonic() - since > _QUIET_S and all(
                now > then for now, then in zip(last, before, strict=True)
            ):
                return

    def _output(self, rank: int) -> Path:
        path = self._folder / f"rank{rank}.txt"
        path.touch()
        return path

    def _printed(self, rank: int, start: int) -> str:
        with self._output(rank).open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def _printed_by(self, rank: int, start: int) -> str:
        text = self._printed(rank, start)[-_SHOWN_OUTPUT:].rstrip()
        return f"\n--- rank {rank} printed ---\n{text}\n" if text else ""


class Pools:
    """The pools of this process; the least recently used is closed first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._fork_server: ForkServer | None = None
        self._pools: dict[int, Pool] = {}
        self._imported: dict[str, None] = {}  # imported on ranks so far; new ranks get these too
        self._owner = os.getpid()

    def run(self, size: int, call: Call, what: str, timeout_s: float) -> list[Any]:
        with self._lock:
            pool = self._take(size)
            try:
                values = pool.run(call, what, timeout_s)
            except BaseException as error:
                if isinstance(error, Exception) or type(error).__name__ != "Skipped":
                    self._drop(size)
                raise
            self._imported.update(dict.fromkeys(pool.imported))
            if pool.worn:
                self._drop(size)
            return values

    def copy_this_process(self) -> bool:
        """Fork ranks from a copy of this process in its current state; return True if that is possible."""
        with self._lock:
            if self._fork_server is None and can_be_copied():
                self._fork_server = ForkServer(copied=True)
                return True
            return False

    def end_ranks(self) -> None:
        """End all ranks; the process that forked them forks new ones at a later call."""
        if os.getpid() != self._owner:  # a fork of the test process must not end its parent's ranks
            return
        with self._lock:
            for pool in self._pools.values():
                pool.close()
            self._pools.clear()

    def close(self) -> None:
        """End everything; a later call starts afresh."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self.end_ranks()
            if self._fork_server is not None:
                self._fork_server.close()
                self._fork_server = None

    def _take(self, size: int) -> Pool:
        if self._fork_server is None:
            self._fork_server = ForkServer()
        if self._fork_server.preload() > _WORTH_FORKING_S:
            for lacking in self._pools.values():
                lacking.worn = True
        if size in self._pools and self._pools[size].worn:
            self._drop(size)
        pool = self._pools.pop(size, None)
        if pool is None:
            while len(self._pools) >= _MOST_POOLS:
                self._pools.pop(next(iter(self._pools))).close()
            self._fork_server.preload_what(self._imported)
            pool = Pool(size, self._fork_server)
        self._pools[size] = pool
        return pool

    def _drop(self, size: int) -> None:
        pool = self._pools.pop(size, None)
        if pool is not None:
            pool.close()


POOLS = Pools()
atexit.register(POOLS.close)
