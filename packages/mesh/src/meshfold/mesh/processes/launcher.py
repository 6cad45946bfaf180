"""Start a program on several local ranks, and end all of them when one fails.

The launcher itself hosts the store in which the ranks meet, on a port that the system picks, so a port in use cannot break a start.
torchrun and Slurm start ranks on several machines (:mod:`meshfold.mesh.processes.environment`). :func:`launch_node` does so with
torch's elastic agent: if a rank fails or a node is lost, the agents meet again and restart all ranks, as often as allowed. Added to
torchrun: the traceback of the rank that failed first comes last, and a request to stop goes to the ranks, which end by themselves.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from meshfold.mesh.errors import LaunchError
from meshfold.mesh.processes import _bootstrap
from meshfold.mesh.processes.environment import Environment
from meshfold.mesh.processes.rank_processes import Failure, Rank, Signals, end, report, watch
from meshfold.mesh.processes.rendezvous import serve_store
from meshfold.mesh.spec.text import format_bytes

_HOST = "127.0.0.1"
_RANK_BYTES = 250 * 2**20  # a process's own memory after `import torch` and a small model, without shared libraries


def launch(
    argv: Sequence[str],
    ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    port: int | None = None,
    grace_s: float = 2.0,
    stop_s: float = 0.0,
    stopped_code: int = 0,
) -> int:
    """Run a program on local ranks until all have ended, or one has failed and the others were ended.

    Rank 0's standard output passes through; every rank's standard error is shown with the rank before each line.
    The traceback of the rank that failed first comes last. SIGINT and SIGTERM end all ranks, and a line on standard error says
    so. On Linux the death of the launcher also ends them, without a line.

    Args:
        argv: ``["script.py", ...]``, ``["-m", "module", ...]`` or ``["file.py::function", ...]``.
        ranks: how many processes.
        env: variables for the ranks on top of this process's own.
        log_dir: folder for what ranks print: ``rank3.out`` (all but rank 0) and ``rank3.err``.
        port: where the ranks should meet; if it is in use, a free one is taken with a warning.
        grace_s: seconds between asking ranks to end (SIGTERM) and killing them.
        stop_s: a first SIGTERM or SIGUSR1 is passed to the ranks, a first SIGINT as SIGTERM; they then have so many seconds to end
            by themselves. The same a second time ends them.
        stopped_code: what ranks exit with that have stopped so: no failure.

    Returns:
        0, or the code of the rank that failed first; 128 + n if signal n ended it, or ended the launcher.

    Raises:
        LaunchError: before any process starts, for an invalid program or number of ranks.
    """
    _check(argv, ranks, port)
    logs = None if log_dir is None else Path(log_dir)
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"log_dir={str(logs)!r} cannot be made ({error.strerror}): give a folder that can be written to"
            ) from error
    store, meeting_port = _host_store(port)
    with (
        tempfile.TemporaryDirectory(prefix="meshfold-launch-") as records,
        Signals(gentle=stop_s > 0) as signals,
    ):
        job: list[Rank] = []
        try:
            for rank in range(ranks):
                place = Environment(
                    rank=rank,
                    world_size=ranks,
                    local_rank=rank,
                    local_world_size=ranks,
                    master_addr=_HOST,
                    master_port=meeting_port,
                    source="torchrun",
                )
                job.append(Rank(argv, place, _variables(place, env or {}), Path(records), logs))
            failure = watch(job, signals, calm=stopped_code)
            if failure is None and signals.caught:
                failure = _let_stop(job, signals, stop_s, stopped_code)
        finally:
            end(job, grace_s, signals)
        for rank_process in job:
            rank_process.finish()
        del store  # stop serving it
        if failure is not None:
            report(job, failure)
            return failure.code
        codes = {rank_process.process.returncode for rank_process in job}
        by_themselves = codes <= {0, stopped_code}
        on_request = not signals.caught or signals.caught[0] in (signal.SIGTERM, signal.SIGUSR1)
        if on_request and stopped_code and stopped_code in codes and by_themselves:
            return stopped_code
        if not signals.caught:
            return 0
        if not by_themselves:
            _say(f"{signal.Signals(signals.caught[0]).name}: {_ranks(ranks)} ended")
        return 128 + signals.caught[0]


def _let_stop(job: list[Rank], signals: Signals, stop_s: float, calm: int) -> Failure | None:
    """Forward requests to stop to the ranks until they have exited, their time is up, or a second request comes."""
    until, asked = time.monotonic() + stop_s, list[int]()
    while True:
        for number in signals.caught[len(asked) :]:
            # Ranks have their own sessions, so Ctrl-C does not reach them; they handle SIGTERM.
            request = int(signal.SIGTERM) if number == signal.SIGINT else number
            if number not in signals.gentle or request in asked:
                return None
            if number == signal.SIGINT:
                _say(f"{_ranks(len(job))} asked to stop; Ctrl-C again ends {_them(len(job))} at once")
            asked.append(request)
            for rank in job:
                rank.send(request, alone=True)
        failure = watch(job, signals, heeded=len(asked), calm=calm, seconds=until - time.monotonic())
        if failure is not None and signals.caught[0] == signal.SIGINT and failure.ended_by(signal.SIGTERM):
            return None  # it had no handler yet, so the signal ended it, as requested
        if failure is not None or len(signals.caught) == len(asked):
            return failure


def _say(sentence: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()


def _ranks(ranks: int) -> str:
    return "the rank was" if ranks == 1 else f"the {ranks} ranks were"


def _them(ranks: int) -> str:
    return "it" if ranks == 1 else "them"


def _check(argv: Sequence[str], ranks: int, port: int | None) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise LaunchError(f"cannot start {ranks!r} ranks: give a whole number from 1 up")
    words = isinstance(argv, Sequence) and not isinstance(argv, str)
    if not words or not argv or (argv[0] == "-m" and len(argv) < 2):
        raise LaunchError(f"nothing to run in {argv!r}: give ['script.py', ...] or ['-m', 'module', ...]")
    if argv[0] != "-m" and not Path(argv[0].partition("::")[0]).exists():
        raise LaunchError(f"there is no file {argv[0].partition('::')[0]!r} to run (in {os.getcwd()})")
    check_room(ranks, _available_memory())
    if port is not None and not 0 <= port <= 65535:
        raise LaunchError(f"port {port} is not a port: use 1 to 65535, or leave it out for a free one")


def check_room(ranks: int, available: int | None) -> None:
    """Check that ranks fit in the memory of this machine; where they do not, the system would end processes of the user.

    Args:
        ranks: how many processes.
        available: bytes; None if the system does not say.

    Raises:
        LaunchError: if they do not.
    """
    needed = ranks * _RANK_BYTES
    if available is not None and needed > available:
        fit = max(available // _RANK_BYTES, 1)
        raise LaunchError(
            f"cannot start {ranks} ranks: a process takes {format_bytes(_RANK_BYTES)} once it has imported torch, all of them "
            f"{format_bytes(needed)}, and this machine has {format_bytes(available)} left. Start {fit} at most, or look at so "
            f"many without processes: meshfold plan --ranks {ranks}"
        )


def _available_memory() -> int | None:
    """Return the bytes that processes can still take on this machine, or in its container; None if the system does not say."""
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with suppress(OSError, ValueError):  # ValueError: "max", which is no limit
        found.append(
            int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        )  # cached files count as used there
    return min(found, default=None)


def _host_store(port: int | None) -> tuple[Any, int]:
    """Return a store that listens only on this machine, and its port: the given one if it is free."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, port or 0))
    except OSError as error:
        listener.bind((_HOST, 0))
        free = listener.getsockname()[1]
        sys.stderr.write(f"warning: port {port} cannot be used ({error.strerror}); the ranks meet on port {free}\n")
    listener.listen(1024)
    number = listener.getsockname()[1]
    return serve_store(listener.detach()), number


def _stops_after(config: Any, seconds: int) -> dict[str, Any]:
    """Return the argument of torch's agent for the time that ranks have to exit; empty under torch 2.11, which lacks it."""
    known = {field.name for field in dataclasses.fields(config)}
    return {"shutdown_timeout": seconds} if "shutdown_timeout" in known else {}


def usable_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cores_each(ranks: int) -> int:
    return max(1, usable_cores() // ranks)


def _variables(place: Environment, given: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's environment, without the launcher's own rank if torchrun started it."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    variables.setdefault("OMP_NUM_THREADS", str(_cores_each(place.local_world_size)))
    variables.setdefault("PYTHONUNBUFFERED", "1")  # output appears at once, and is not lost if the rank dies
    if sys.platform.startswith("linux"):
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    variables.update(given)
    variables.update(place.variables())
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the launcher serves the store, not rank 0
    return variables


_GENTLE = (signal.SIGTERM, signal.SIGUSR1)


def launch_node(
    argv: Sequence[str],
    ranks: int,
    *,
    nodes: tuple[int, int] = (1, 1),
    rendezvous: str = "localhost:0",
    job: str = "meshfold",
    restarts: int = 0,
    address: str | None = None,
    stop_s: int = 30,
) -> int:
    """Run a program on this node's ranks, together with the other nodes', until all have ended.

    Args:
        argv: as for :func:`launch`; the same on every node.
        ranks: how many processes on this node; the same on every node.
        nodes: the least and the largest number of nodes. A job that has lost some continues while the minimum remains.
        rendezvous: ``host:port`` of one of them, which serves the store where the agents meet.
        job: a name that the agents of one job have in common.
        restarts: how often all ranks are restarted after a failure.
        address: of this node, as the others see it; by default its host name.
        stop_s: seconds that ranks get to finish when the agent must end them; under torch 2.11 always 30.

    Returns:
        0; 75 if the ranks stopped on request; else the code of the rank of this node that failed first.

    Raises:
        LaunchError: for invalid arguments, or if the other nodes could not be reached.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _check(argv, ranks, None)
    host = _check_nodes(nodes, rendezvous, restarts)
    if address is None and host in ("localhost", "127.0.0.1"):
        address = "127.0.0.1"
    os.environ.setdefault("OMP_NUM_THREADS", str(_cores_each(ranks)))
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    # A new store for every attempt: restarted ranks must not find old addresses.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        nproc_per_node=ranks,
        run_id=job,
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous,
        local_addr=address,
        max_restarts=restarts,
        monitor_interval=0.2,
        logs_specs=DefaultLogsSpecs(),
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
        **_stops_after(LaunchConfig, stop_s),
    )
    with tempfile.TemporaryDirectory(prefix="meshfold-agent-") as records, _forward_signals():
        program = ["-P", _bootstrap.__file__, str(os.getpid()), records, *argv]
        try:
            elastic_launch(config, sys.executable)(*program)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _report(Path(records), rank, failure.exitcode, nodes[1] * ranks)
        except SignalException as error:
            return 128 + int(error.sigval)
        except RendezvousError as error:
            if (Path(records) / "started").exists():
                raise LaunchError(
                    f"the connection to {rendezvous} was lost: the node that serves the rendezvous has ended, or cannot be "
                    "reached; what went wrong is in its output"
                ) from error
            raise LaunchError(
                f"the nodes did not meet at {rendezvous}: {error}. Is {rendezvous} an address of one of the nodes, with a "
                "port that is free there, and do all nodes give the same --nodes and --job?"
            ) from error
        stopped = any(_read(file).get("code") == _bootstrap.STOPPED_CODE for file in Path(records).glob("*.json"))
    return _bootstrap.STOPPED_CODE if stopped else 0


def _check_nodes(nodes: tuple[int, int], rendezvous: str, restarts: int) -> str:
    if not 1 <= nodes[0] <= nodes[1]:
        raise LaunchError(
            f"nodes={nodes}: write the least and the largest number of nodes, in this order, such as (2, 4) or --nodes 2:4"
        )
    if restarts < 0:
        raise LaunchError(f"restarts={restarts}: how often a failed job is restarted, 0 for never")
    host, colon, port = rendezvous.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise LaunchError(f"rendezvous={rendezvous!r}: write host:port, such as node1:29500")
    if nodes[1] > 1 and port == "0":
        raise LaunchError(f"rendezvous={rendezvous!r}: several nodes need a port that all of them know")
    return host


@contextmanager
def _forward_signals() -> Iterator[None]:
    """Context manager: forward requests to stop to the ranks; a second request kills them."""
    before = {number: signal.getsignal(number) for number in _GENTLE}

    def pass_on(number: int, frame: FrameType | None) -> None:
        for again in _GENTLE:
            signal.signal(again, interrupt)
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, number)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in _GENTLE:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children() -> list[int]:
    """Return this process's children that run the bootstrap."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                command = (folder / "cmdline").read_bytes().split(b"\0")
                if _bootstrap.__file__.encode() in command:
                    found.append(int(folder.name))
    return found


def _report(records: Path, rank: int, code: int, ranks: int) -> int:
    """Describe the first failure, which has the earliest record."""
    left = [(_read(file), file.stem) for file in records.glob("rank*.json")]
    failed = sorted((one for one in left if one[0].get("code")), key=lambda one: one[0]["time"])
    died = code < 0 and (not failed or f"rank{rank}" not in {name for _, name in failed})
    if died or not failed:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        text, code, sentence = "", 128 - code if code < 0 else code, ""
    else:
        words, name = failed[0]
        rank, code, text = int(name.removeprefix("rank")), words["code"], words["traceback"]
        how, sentence = "raised" if text else f"exited with code {code}", words["sentence"]
    others = "; the other ranks were ended"
    said = f"{others}: {sentence}\n" if sentence else f" {how}{others}.\n{text}"
    sys.stdout.flush()
    sys.stderr.write(f"\nrank {rank} of {ranks}{said}")
    sys.stderr.flush()
    return code


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
