"""Process groups of the running world: made by their ranks' names, limited in time, broken off.

Beside :mod:`meshfold.mesh.processes.process_group`, which joins and leaves the world, the only module that makes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshfold.mesh.errors import LaunchError, SpecError
from meshfold.mesh.processes.rendezvous import Address, leave, meet
from meshfold.mesh.processes.sub_world import current_ranks
from meshfold.mesh.recording import flight_recorder

_NEVER_SENT = 0x5EED  # a tag that no message has
_limit: timedelta | None = None  # timeout of all groups, if a watchdog has set one
_limits_before: dict[Any, timedelta] = {}  # of groups that were there then
addresses: dict[int, Address] = {}
"""Ranks of this world that :func:`meet_members` has met."""
_broken_off: Any = None  # the world whose collectives must fail at once
# Groups by their ranks, reused by later meshes. A group is named after its ranks, independent of other groups, and the
# store keeps the addresses under that name. They are dropped with their world.
_made: dict[tuple[tuple[int, ...], str], Any] = {}
_made_in: Any = None


def is_started() -> bool:
    """Return True if this process is in a process group, started by Meshfold or not."""
    return dist.is_available() and dist.is_initialized()


def is_simulated() -> bool:
    """Return True if this process is in a simulated world, whose collectives return meaningless results."""
    return is_started() and dist.get_backend() == dist.Backend.FAKE


@dataclass(frozen=True, slots=True)
class RunningWorld:
    """This process's place among all processes, or among those of a part."""

    rank: int
    size: int


def running_world() -> RunningWorld | None:
    """Return the running world, inside :func:`only_ranks` as these ranks see it; None without a process group."""
    return world_of(current_ranks())


def world_of(ranks: range | None) -> RunningWorld | None:
    """Return the running world as some of its ranks see it, which have numbers from 0; None without a process group.

    Args:
        ranks: global ranks; None: all.

    Raises:
        SpecError: if this process is not one of them.
    """
    if not is_started():
        return None
    rank, size = rank_and_world_size()
    if ranks is None:
        return RunningWorld(rank=rank, size=size)
    if rank not in ranks or ranks.stop > size:
        raise SpecError(
            f"rank {rank} of {size} is not one of ranks {ranks.start} to {ranks.stop - 1}: it makes no mesh of these"
        )
    return RunningWorld(rank=rank - ranks.start, size=len(ranks))


def create_group(ranks: tuple[int, ...], purpose: str = "", backend: str | None = None) -> Any:
    """Return a process group of the ranks; each of them must call, the others need not.

    Args:
        ranks: global ranks, ascending.
        purpose: another purpose makes another group of the same ranks, whose messages do not wait for each other's.
        backend: as for :func:`new_group`.

    Raises:
        LaunchError: without running processes.
    """
    global _made_in
    if not is_started():
        raise LaunchError(
            f"ranks {ranks} cannot communicate: no process group is running. Start the script with "
            f"'meshfold run --ranks N script.py' or torchrun, and call meshfold.mesh.start() first"
        )
    if _made_in is not dist.group.WORLD:
        _made.clear()
        _made_in = dist.group.WORLD
    if len(ranks) == dist.get_world_size() and not purpose:
        return dist.group.WORLD
    if (ranks, purpose) not in _made:
        name = " ".join(filter(None, ("mesh", "-".join(map(str, ranks)), purpose)))
        _made[ranks, purpose] = new_group(ranks, name, backend)
    return _made[ranks, purpose]


def host_group(ranks: tuple[int, ...]) -> Any:
    """Return a process group of the ranks over gloo, which does not wait for their devices; each of them must call."""
    if dist.get_backend() == dist.Backend.GLOO:
        return create_group(ranks)
    return create_group(ranks, "hosts", dist.Backend.GLOO)


def group_name(handle: Any) -> str:
    """Return the name under which the functional collectives find the group."""
    return str(handle.group_name)


def new_group(ranks: Sequence[int], name: str, backend: str | None = None) -> Any:
    """Return a process group of these ranks under a name of its own; only they call.

    ``torch.distributed.new_group`` either needs calls on all ranks of the world in one order, or (local synchronisation) names the
    group by the number of groups that the process has open. Then ranks that opened different groups before wait forever, and so do
    ranks that open a destroyed group again.

    Args:
        ranks: global ranks in group order; this process's is among them.
        name: the same on all of them, and never used before in this job, not even for a group destroyed since.
        backend: what carries its messages; None: what carries those of all ranks.

    Raises:
        LaunchError: if one of them does not come; where a watchdog looks, a CollectiveError that says why.
    """
    c10d = dist.distributed_c10d
    members, rank = list(ranks), dist.get_rank()
    with flight_recorder.meeting("creating a process group", members, rank, name):
        meet_members(members, name)
        own, store = c10d._world.pg_map[c10d._get_default_group()]
        group, _ = c10d._new_process_group_helper(
            len(members),
            members.index(rank),
            members,
            dist.Backend(own if backend is None else backend),
            store,
            c10d.GroupName(name),
            timeout=call_limit(),
        )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    if _limit is not None:
        _limit_group(group, _limit)
    return group


def meet_members(ranks: Sequence[int], name: str, look: Callable[[], None] = lambda: None, forget: str = "") -> None:
    """Wait in the store until all of these ranks have arrived; return at once for one rank or in a simulated world.

    Args:
        ranks: global ranks; this process's is among them.
        name: the same on all of them.
        look: called once a second; an error it raises ends the wait.
        forget: the name of a meeting that all of them have left.

    Raises:
        RuntimeError: if one of them does not come.
    """
    c10d = dist.distributed_c10d
    backend, store = c10d._world.pg_map[c10d._get_default_group()]
    if backend == dist.Backend.FAKE or store is None:
        return
    rank = dist.get_rank()
    meet(store, name, rank, ranks, call_limit(), addresses, lambda: _broken_off is world_key(), look)
    if forget:
        leave(store, forget, rank)


def call_limit() -> timedelta:
    """Return the timeout for collectives of a new group."""
    return _limit or dist.distributed_c10d._get_default_timeout(dist.Backend(dist.get_backend()))


def own_store() -> Any:
    """Return a new connection to the store in which all processes met; None for one rank or in a simulated world."""
    if not is_started() or dist.get_world_size() == 1 or dist.get_backend() == dist.Backend.FAKE:
        return None
    c10d = dist.distributed_c10d
    store: Any = c10d._world.pg_map[c10d._get_default_group()][1]
    return store.clone()


def limit_groups(limit: timedelta | None) -> None:
    """Limit how long a collective of any group, present or future, may take; None restores the limits before.

    Groups that were made in between get torch's limit then.
    """
    global _limit
    groups = list(dist.distributed_c10d._world.pg_map) if is_started() else []
    if _limit is None:
        _limits_before.clear()
        _limits_before.update((group, found) for group in groups if (found := _limit_of(group)) is not None)
    _limit = limit
    for group in groups:
        _limit_group(group, limit)
    if limit is None:
        _limits_before.clear()


def _limit_of(group: Any) -> timedelta | None:
    """Return how long a group's collectives may take; None where torch does not say."""
    if dist.Backend(dist.get_backend(group)) not in (dist.Backend.GLOO, dist.Backend.NCCL):
        return None
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def _limit_group(group: Any, limit: timedelta | None) -> None:
    c10d = dist.distributed_c10d
    backend = dist.Backend(dist.get_backend(group))
    if limit is None:
        limit = _limits_before.get(group) or c10d._get_default_timeout(backend)
    elif backend == dist.Backend.NCCL:
        limit += timedelta(minutes=1)  # later than ours: torch ends the process without naming the missing ranks
    if backend in (dist.Backend.GLOO, dist.Backend.NCCL):
        c10d._set_pg_timeout(limit, group)


def break_off() -> None:
    """Make every present and later gloo collective of this process, in any thread, fail at once.

    gloo has no call for that, but closes all connections of a group when one of its messages is not there in time.
    """
    global _broken_off
    _broken_off = world_key()
    for group in list(dist.distributed_c10d._world.pg_map) if is_started() else []:
        if group.size() == 1 or dist.get_backend(group) != dist.Backend.GLOO:
            continue
        # A connection that is closed already raises before it waits, and closes no other.
        for step in range(1, group.size()):
            with contextlib.suppress(RuntimeError):
                never = group.recv([torch.empty(1)], (group.rank() + step) % group.size(), _NEVER_SENT)
                with contextlib.suppress(RuntimeError):
                    never.wait(timedelta(milliseconds=1))
                break


def is_broken_off() -> bool:
    """Return True after :func:`break_off` in this world."""
    return _broken_off is not None and _broken_off is world_key()


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank, and how many take part."""
    return dist.get_rank(), dist.get_world_size()


def ended_ranks(ranks: Iterable[int]) -> list[int]:
    """Return the ranks whose processes are known to have ended, on this machine, in a world that :func:`start` made."""
    own = Address.own()
    return [rank for rank in ranks if rank in addresses and addresses[rank].is_gone(own)]


def world_key() -> Any:
    """Return an object that identifies this world of processes; None without one."""
    return dist.group.WORLD if is_started() else None


def group_count() -> int:
    """Return the number of process groups that this process has open, the world's own included."""
    return len(dist.distributed_c10d._world.pg_map) if is_started() else 0
