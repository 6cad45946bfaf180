"""Flags that are reduced over a group now and read later."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from meshfold.mesh import Group, all_reduce


class Flags:
    """Flags, each True if any rank sets it. All ranks of the group must create them, in the same order.

    Reading waits for the flags and for nothing else that is queued on the device.
    """

    def __init__(self, mine: Sequence[bool], group: Group, device: torch.device) -> None:
        """Args:
        mine: flags of this rank.
        group: ranks whose flags are combined.
        device: of its collectives.
        """
        said = torch.tensor([float(flag) for flag in mine], pin_memory=device.type == "cuda")
        self._answer: torch.Tensor | None = None
        self._there: torch.cuda.Event | None = None
        if device.type != "cuda":
            self._pending = all_reduce(said.to(device), group, "max", async_op=True)
            return
        stream = _stream_of(device)  # the collective does not wait for computation
        with torch.cuda.stream(stream):
            here = said.to(device, non_blocking=True)
            self._pending = all_reduce(here, group, "max", async_op=True)
            self._answer = torch.empty(len(mine), pin_memory=True)
            self._answer.copy_(self._pending.wait(), non_blocking=True)
            self._there = stream.record_event()

    def read(self) -> list[bool]:
        """Return the group's flags."""
        if self._there is not None:
            self._there.synchronize()
            self._there = None
        if self._answer is None:
            self._answer = self._pending.wait()
        return [flag > 0 for flag in self._answer.tolist()]


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
