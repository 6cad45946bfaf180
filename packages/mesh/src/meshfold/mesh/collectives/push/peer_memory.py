"""Memory of a group's GPUs that kernels of all of them read and write by address, for collectives inside of a kernel."""

from __future__ import annotations

from typing import Any

import torch

from meshfold.mesh.collectives.operations import barrier
from meshfold.mesh.collectives.push.channels import open_together
from meshfold.mesh.collectives.push.gpu import map_memory
from meshfold.mesh.group import Group
from meshfold.mesh.processes import groups

_memories: dict[tuple[str, str, int], PeerMemory | str] = {}
_made_in: Any = None  # the world of the memories


class PeerMemory:
    """The same number of bytes on each GPU of a group, mapped by all of them; zeros at first.

    Attributes:
        addresses: int64 ``ranks`` on the device: where this rank finds the bytes of each.
        length: bytes.
    """

    def __init__(self, group: Group, length: int, device: torch.device) -> None:
        """Args:
        group: whose GPUs reach each other; all of its ranks must call.
        length: bytes.
        device: of this rank.

        Raises:
            RuntimeError: if symmetric memory cannot be had, or a peer's writes do not arrive.
        """
        self.length = length
        with torch.cuda.device(device):
            whole, self._handle = map_memory(group, length, device)
            self._own = whole[group.index]
            self.addresses = torch.tensor([one.data_ptr() for one in whole], device=device)
            for one in whole:
                one[group.index] = 1
            torch.cuda.synchronize(device)
            barrier(group, device)
            late = [rank for rank, seen in enumerate(self._own[: group.size].tolist()) if not seen]
            self._own.zero_()
            torch.cuda.synchronize(device)
            barrier(group, device)  # nobody uses it before all have cleared theirs
        if late:
            raise RuntimeError(f"what the ranks {late} of the group wrote did not arrive")


def peer_memory(group: Group, purpose: str, length: int, device: torch.device) -> PeerMemory | str:
    """Return memory of a group, made at the first call for a purpose and a length; or why its ranks have none.

    All ranks of the group must call, in the same order.

    Args:
        group: of more than one rank.
        purpose: what the bytes are; equal ones share memory.
        length: bytes.
        device: of this rank.
    """
    world = groups.world_key()
    global _made_in
    if _made_in is not world:
        _memories.clear()
        _made_in = world
    key = (group.name, purpose, length)
    found = _memories.get(key)
    if found is None:
        if device.type != "cuda":
            return f"the ranks are on devices of type {device.type!r}, not on GPUs"
        found = open_together(group, device, "memory of peers", lambda: PeerMemory(group, length, device))
        _memories[key] = found
    return found
