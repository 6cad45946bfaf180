"""One node's part of a job on several: torch's elastic agent, which meets the others and starts the ranks of this one.

When a rank fails, or a node is lost, the agents meet again and start all ranks anew, as often as was allowed. What is
added to torch's own command (torchrun): a program is run as by :func:`meshfold.mesh.processes.launcher.launch`, with the traceback
of the rank that failed first in the end, and a request to stop goes to the ranks, who come to an end of their own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from meshfold.mesh.errors import LaunchError
from meshfold.mesh.processes import _bootstrap
from meshfold.mesh.processes.launcher import _check, _cores_each

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
        argv: as for :func:`meshfold.mesh.processes.launcher.launch`; the same on every node.
        ranks: how many processes on this node; the same on every node.
        nodes: the least and the largest number of nodes. A job that has lost some goes on with the least at least.
        rendezvous: ``host:port`` of one of them, where the agents meet; that one serves the meeting.
        job: a name that the agents of one job have in common.
        restarts: how often all ranks are started anew after a failure.
        address: of this node, as the others see it; by default its host name.
        stop_s: seconds that ranks get to end by themselves when the agent must end them.

    Returns:
        0; 75 if the ranks stopped on request; else the code of the rank of this node that failed first.

    Raises:
        LaunchError: for arguments that cannot be, or if the other nodes could not be met.
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
    # A store for every attempt: ranks that are started anew must not find the addresses of those before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=nodes[0], max_nodes=nodes[1], nproc_per_node=ranks, run_id=job,
        rdzv_backend="c10d", rdzv_endpoint=rendezvous, local_addr=address,
        max_restarts=restarts, monitor_interval=0.2, logs_specs=DefaultLogsSpecs(),
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT", shutdown_timeout=stop_s,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="meshfold-agent-") as records, _passed_on():
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
        stopped = any(
            _read(file).get("code") == _bootstrap.STOPPED_CODE for file in Path(records).glob("*.json")
        )
    return _bootstrap.STOPPED_CODE if stopped else 0


def _check_nodes(nodes: tuple[int, int], rendezvous: str, restarts: int) -> str:
    if not 1 <= nodes[0] <= nodes[1]:
        raise LaunchError(f"nodes={nodes}: the least and the largest number of nodes, such as (2, 4)")
    if restarts < 0:
        raise LaunchError(f"restarts={restarts}: how often a failed job is started anew, 0 for never")
    host, colon, port = rendezvous.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise LaunchError(f"rendezvous={rendezvous!r}: write host:port, such as node1:29500")
    if nodes[1] > 1 and port == "0":
        raise LaunchError(f"rendezvous={rendezvous!r}: several nodes need a port that all of them know")
    return host


@contextmanager
def _passed_on() -> Iterator[None]:
    """Requests to stop go to the ranks; a second one ends them."""
    before = {number: signal.getsignal(number) for number in _GENTLE}

    def pass_on(number: int, frame: FrameType | None) -> None:
        for again in _GENTLE:
            signal.signal(again, end)
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, number)

    def end(number: int, frame: FrameType | None) -> None:
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
    """Say how the rank failed that failed first, of all that left a record the earliest."""
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
