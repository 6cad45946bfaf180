"""Device memory that gathered parameters may keep from one use to the next, and from micro-batch to micro-batch."""

from __future__ import annotations

import torch

from meshfold.engine.world import World
from meshfold.mesh import all_reduce
from meshfold.mesh.spec import ZeroSpec
from meshfold.zero_gemini import Gemini
from meshfold.zero_gemini.machine_rates import UNLIMITED_BYTES, available_device_bytes

ROOM = 0.1
"""Share of a GPU that is left free: batches differ, and who runs out in the middle of a step cannot undo it."""


class GatherCacheBytes:
    """Under ``zero`` stage 3 and ``pipeline``: lets chunks stay gathered in what a step without has left free.

    The first step, and the first after chunks have moved, gathers each stage's parameters anew for every use, and shows
    what that takes at most. What a later step took beyond the limit is taken back after it; what one left is not given on top, as
    nothing says how much stayed in the moment of its peak. With ``reshard_after_forward=False`` all stay, with and without a
    pipeline.

    Attributes:
        some: whether chunks may stay at all. Then they must be let go before the optimizer steps.
    """

    def __init__(self, gemini: Gemini, spec: ZeroSpec, world: World) -> None:
        self._gemini, self._world, self._limit = gemini, world, spec.gpu_memory_limit
        self.some = world.pipelined or not spec.reshard_after_forward
        on_device = world.device.type != "meta"
        self._wanted = world.pipelined and spec.stage == 3 and spec.reshard_after_forward and on_device
        if not spec.reshard_after_forward:
            gemini.gather_cache_bytes = UNLIMITED_BYTES
        self._moves = 0
        self._is_known = False  # what a step takes without
        self._reset()

    def stepped(self, *, moves: int) -> None:
        """After an optimizer step. All ranks must call.

        Args:
            moves: how often chunks have moved so far.
        """
        if not self._wanted:
            return
        if moves != self._moves:  # the step was one of the placements before
            self._moves, self._is_known = moves, False
            self._gemini.gather_cache_bytes = 0
            self._reset()
            return
        room = torch.tensor([self._room()], dtype=torch.int64, device=self._world.device)
        least = -int(all_reduce(-room, self._world.data_group, "max"))  # who shares chunks
        if self._is_known:
            stays = self._gemini.gather_cache_bytes + min(0, least)
        else:
            stays = least
        gathered = sum(chunk.gathered_bytes for chunk in self._gemini.chunks if not chunk.resident)
        self._gemini.gather_cache_bytes, self._is_known = min(gathered, max(0, stays)), True
        self._reset()

    def _room(self) -> int:
        """Bytes of this rank's device that its last step has left free; below zero if it was short of some.

        On a CPU chunks alone are counted, and held to a budget if there is a limit.
        """
        device = self._world.device
        if device.type == "cuda":
            limit = min(available_device_bytes(device), self._limit or UNLIMITED_BYTES)
            return int((1.0 - ROOM) * limit) - torch.cuda.max_memory_allocated(device)
        arena = self._gemini.memory.compute
        if arena.budget_bytes is not None:
            return arena.budget_bytes - arena.peak_bytes
        return UNLIMITED_BYTES if self._limit is None else self._limit - arena.peak_bytes

    def _reset(self) -> None:
        if self._wanted and self._world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._world.device)
        elif self._wanted:
            self._gemini.memory.compute.reset_peak()
