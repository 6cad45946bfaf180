"""Limit of the gather cache: device memory of parameters that stay gathered between uses and micro-batches."""

from __future__ import annotations

import torch

from meshfold.engine.world import World
from meshfold.mesh import all_reduce
from meshfold.mesh.spec import ZeroSpec
from meshfold.zero_gemini import Gemini
from meshfold.zero_gemini.machine_rates import UNLIMITED_BYTES, available_device_bytes

ROOM = 0.1
"""Share of a GPU that is left free: batches differ, and a step that runs out of memory cannot be undone."""


class GatherCacheBytes:
    """Controller of the gather cache under ``zero`` stage 3 and ``pipeline``: gives it memory that a step leaves free.

    The first step, and the first after chunks have moved, gathers parameters for every use and shows the peak of that.
    The cache gets the rest. If a later step exceeds the limit the cache shrinks by the excess; it never grows, as the cached
    bytes at a step's peak are unknown. With ``reshard_after_forward=False`` all chunks stay, with and without a pipeline.

    Attributes:
        some: whether chunks may stay gathered. Then they must be released before the optimizer steps.
    """

    def __init__(self, gemini: Gemini, spec: ZeroSpec, world: World) -> None:
        self._gemini, self._world, self._limit = gemini, world, spec.gpu_memory_limit
        self.some = world.pipelined or not spec.reshard_after_forward
        on_device = world.device.type != "meta"
        self._wanted = world.pipelined and spec.stage == 3 and spec.reshard_after_forward and on_device
        if not spec.reshard_after_forward:
            gemini.gather_cache_bytes = UNLIMITED_BYTES
        self._moves = 0
        self._is_known = False  # the peak of a step without the cache
        self._reset()

    def stepped(self, *, moves: int) -> None:
        """Update the limit after an optimizer step. All ranks must call.

        Args:
            moves: how often chunks have moved so far.
        """
        if not self._wanted:
            return
        if moves != self._moves:  # the measured step had other placements
            self._moves, self._is_known = moves, False
            self._gemini.gather_cache_bytes = 0
            self._reset()
            return
        room = torch.tensor([self._room()], dtype=torch.int64, device=self._world.device)
        least = -int(all_reduce(-room, self._world.data_group, "max"))  # minimum over the ranks that share chunks
        if self._is_known:
            stays = self._gemini.gather_cache_bytes + min(0, least)
        else:
            stays = least
        gathered = sum(chunk.gathered_bytes for chunk in self._gemini.chunks if not chunk.resident)
        self._gemini.gather_cache_bytes, self._is_known = min(gathered, max(0, stays)), True
        self._reset()

    def _room(self) -> int:
        """Return the bytes of the device that the last step left free on this rank; negative if it ran short.

        On a CPU count only chunks, against the budget if there is a limit.
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
