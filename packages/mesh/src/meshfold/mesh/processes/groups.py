"""Process groups for a mesh: the one place that makes and destroys them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from meshfold.mesh.errors import LaunchError
from meshfold.mesh.processes import process_group


@dataclass(frozen=True, slots=True)
class RunningWorld:
    """This process's place among all processes."""

    rank: int
    size: int


def running_world() -> RunningWorld | None:
    """Return the running world, or None without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return RunningWorld(rank=dist.get_rank(), size=dist.get_world_size())


# Groups by their ranks, kept for the next mesh that wants the same ones: a group is named after its ranks, whichever
# other groups a rank has made, and the store keeps the addresses under that name. They go with their world.
_made: dict[tuple[tuple[int, ...], str], Any] = {}
_made_in: Any = None


def create_group(ranks: tuple[int, ...], purpose: str = "") -> Any:
    """Return a process group of the ranks; each of them must call, the others need not.

    Args:
        ranks: global ranks, ascending.
        purpose: another purpose makes another group of the same ranks, whose messages do not wait for each other's.

    Raises:
        LaunchError: without running processes.
    """
    global _made_in
    here = running_world()
    if here is None:
        raise LaunchError(
            f"ranks {ranks} are to communicate, but no process group is running: start the script with "
            f"'meshfold run --ranks N script.py' or torchrun, and call meshfold.mesh.start() first"
        )
    if _made_in is not dist.group.WORLD:
        _made.clear()
        _made_in = dist.group.WORLD
    if len(ranks) == here.size and not purpose:
        return dist.group.WORLD
    if (ranks, purpose) not in _made:
        name = " ".join(filter(None, ("mesh", "-".join(map(str, ranks)), purpose)))
        _made[ranks, purpose] = process_group.new_group(ranks, name)
    return _made[ranks, purpose]


def group_name(handle: Any) -> str:
    """Return the name under which the functional collectives find the group."""
    return str(handle.group_name)
