"""The process's membership in the job: how it joins the process group of all ranks, and leaves it."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshfold.mesh.errors import LaunchError
from meshfold.mesh.processes.environment import Environment
from meshfold.mesh.processes.freed_memory import keep_freed_memory
from meshfold.mesh.processes.groups import addresses, is_started
from meshfold.mesh.processes.rendezvous import meet, open_store, store_of_this_start

DEFAULT_TIMEOUT = timedelta(minutes=30)
_LEAVE_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """This process as a member of the job: its rank and device.

    Attributes:
        rank: 0 to ``world_size - 1``.
        world_size: how many processes take part.
        device: where this rank's tensors belong, ``cpu`` or ``cuda:i``.
        backend: what carries the communication: ``nccl``, ``gloo`` or ``fake``.
        environment: what the numbers came from.
        owner: whether :func:`start` made the process group, so that :meth:`close` destroys it.
    """

    rank: int
    world_size: int
    device: torch.device
    backend: str
    environment: Environment
    owner: bool = True
    _hooks: tuple[Any, Any] | None = field(default=None, repr=False, compare=False)

    def close(self, *, wait: bool = True) -> None:
        """Leave the job and end all groups, if this object joined it. May be called twice.

        Args:
            wait: first wait for the other ranks to end (ten seconds at most): rank 0 may serve the store, and ranks that still run
                would report its loss. False where this rank failed.
        """
        if self.owner and is_started():
            if wait:
                _meet(self.world_size)
            dist.destroy_process_group()
            # torch's excepthook prefixes tracebacks with the rank, and would be nested once more at each start. Keep it if this
            # rank has failed: its traceback is still to be printed.
            if self._hooks is not None and (wait or self.backend == "fake"):
                before, ours = self._hooks
                if sys.excepthook is ours:
                    sys.excepthook = before

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(wait=kind is None)


def start(
    environment: Environment | None = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    *,
    store: Any = None,
    meeting: timedelta | float | None = None,
) -> Process:
    """Join the job: find the other processes and make the process group of all.

    Without a launcher, the process becomes a world of one, without a port. If a process group is already running, it is used
    unchanged. Where tensors belong on the CPU, the process keeps the memory that they free (:func:`keep_freed_memory`).

    Args:
        environment: which rank to be; by default :meth:`Environment.detect`.
        backend: ``nccl``, ``gloo`` or any that torch.distributed knows; by default NCCL when this machine has a
            GPU for each of its ranks, else gloo.
        device: where this rank's tensors belong; by default the local rank's GPU under NCCL, else the CPU.
        timeout: seconds (or a timedelta) after which a collective that some rank never joins is an error.
        store: where to meet, instead of the environment's address and port.
        meeting: seconds (or a timedelta) that ranks are waited for here; by default the timeout.

    Raises:
        LaunchError: when the environment is wrong, there are too few GPUs, or the others cannot be met.
    """
    environment = Environment.detect() if environment is None else environment
    if is_started():
        return _running(environment, backend, device)
    chosen = None if device is None else torch.device(device)
    if backend is None:
        gpu_wanted = chosen is None or chosen.type == "cuda"
        backend = "nccl" if gpu_wanted and _gpu_for_each(environment) else "gloo"
    chosen = _settle(chosen, backend, environment)
    if store is None and environment.world_size == 1:
        from torch._C._distributed_c10d import HashStore

        store = HashStore()
    limit, wait = _seconds(timeout), _seconds(timeout if meeting is None else meeting)
    hook = sys.excepthook
    addresses.clear()
    where = "" if store is not None else f" at {environment.master_addr}:{environment.master_port}"
    # No device_id: with it every later new_group splits the world's communicator, which is a collective of *all* ranks.
    # A pipeline stage that makes its own group would wait forever.
    try:
        own = store_of_this_start(open_store(environment, wait) if store is None else store, environment.attempt)
        if backend != "fake" and environment.world_size > 1:
            meet(own, "world", environment.rank, range(environment.world_size), wait, addresses)
        dist.init_process_group(
            backend, rank=environment.rank, world_size=environment.world_size, timeout=wait, store=own
        )
        if limit != wait and backend in (dist.Backend.GLOO, dist.Backend.NCCL):
            dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {environment.rank} of {environment.world_size} could not start {backend}{where}: {error}"
        ) from error
    if chosen.type == "cpu" and backend != "fake":
        keep_freed_memory()
    return Process(
        rank=environment.rank,
        world_size=environment.world_size,
        device=chosen,
        backend=backend,
        environment=environment,
        _hooks=(hook, sys.excepthook),
    )


def start_fake(world_size: int, rank: int = 0) -> Process:
    """Join a simulated world: groups of any size can be made, and collectives return at once.

    Results of collectives are meaningless, but the calls can be recorded.
    """
    if is_started():
        raise LaunchError("a process group is already running in this process: close it before starting a fake one")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if world_size < 1:
        raise LaunchError(f"a fake world of {world_size} ranks: give 1 or more")
    if not 0 <= rank < world_size:
        raise LaunchError(f"rank {rank} is outside a fake world of {world_size} ranks: use 0 to {world_size - 1}")
    environment = Environment(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    return start(environment, backend="fake", device="cpu", store=FakeStore())


def _meet(world_size: int) -> None:
    """Wait in the store until all ranks have reached this point."""
    c10d = dist.distributed_c10d
    store = c10d._world.pg_map[c10d._get_default_group()][1]
    # The rank that serves the store leaves as soon as all have come, so a lost store counts as a reply.
    with contextlib.suppress(RuntimeError):
        if store.add("meshfold/leaving", 1) == world_size:
            store.set("meshfold/left", "1")
        elif dist.get_backend() != dist.Backend.FAKE:
            store.wait(["meshfold/left"], _LEAVE_TIMEOUT)


def _running(environment: Environment, backend: str | None, device: torch.device | str | None) -> Process:
    rank, world_size, running = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    if backend is not None and backend != running and running not in backend:
        raise LaunchError(
            f"backend {backend!r} was asked for, but a process group with {running!r} is running: close it first"
        )
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if running == "nccl" else torch.device("cpu")
    return Process(
        rank=rank,
        world_size=world_size,
        device=torch.device(device),
        backend=running,
        environment=environment,
        owner=False,
    )


def _seconds(value: timedelta | float) -> timedelta:
    return value if isinstance(value, timedelta) else timedelta(seconds=value)


def _gpu_for_each(environment: Environment) -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() >= environment.local_world_size


def _settle(device: torch.device | None, backend: str, environment: Environment) -> torch.device:
    """Return the device with its index, and make it current if it is a GPU; raise if it does not exist."""
    if device is None:
        device = torch.device("cuda" if "nccl" in backend else "cpu")
    if device.type != "cuda":
        if backend == "nccl":
            raise LaunchError(
                f"backend 'nccl' needs a GPU, not device {str(device)!r}: leave device out, or use 'gloo'"
            )
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = environment.local_rank if device.index is None else device.index
    if index >= count:
        remedy = f"start at most {count} ranks on it, or use" if count else "use"
        raise LaunchError(
            f"rank {environment.rank} (local rank {environment.local_rank}) needs GPU {index}, but torch sees {count} "
            f"GPUs on this machine: {remedy} backend='gloo'"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
