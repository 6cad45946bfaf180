"""Placement of chunks, and their moves: chosen before chunks exist, changed between steps on all ranks or on none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.gradient import ChunkGradient
from meshfold.zero_gemini.chunks.layout import ChunkSpec
from meshfold.zero_gemini.chunks.parameter_table import Kind
from meshfold.zero_gemini.chunks.placement import ChunkPlacement, Move, PlacementRule, in_turn
from meshfold.zero_gemini.errors import Faults, OutOfBudget
from meshfold.zero_gemini.memory.arena import Memory, MemoryTier
from meshfold.zero_gemini.memory.copies import synchronize
from meshfold.zero_gemini.optimizer import Stepper
from meshfold.zero_gemini.optimizer.gpu_streaming import GpuStreaming


class Residents:
    """Placements of chunks; moves chunks together with their gradients and state.

    Attributes:
        placements: of every chunk.
    """

    def __init__(
        self,
        memory: Memory,
        faults: Faults,
        stepper: Stepper | None,
        gradients: Mapping[Chunk, ChunkGradient],
        *,
        stage: int,
    ) -> None:
        """Args:
        memory: the arenas of the chunks.
        faults: makes all ranks move a chunk, or none.
        stepper: stores the optimizer state; None without an optimizer.
        gradients: of the chunks that it steps; may grow later.
        stage: of ZeRO: 1 and 2 keep parameters on the device.
        """
        self._memory, self._faults, self._stepper, self._gradients = memory, faults, stepper, gradients
        self._stage = stage
        self.placements: dict[Chunk, ChunkPlacement] = {}

    def choose(
        self, placements: PlacementRule, specs: Sequence[ChunkSpec], kinds: Sequence[Kind]
    ) -> list[ChunkPlacement]:
        """Return the placements of chunks, and reserve space on disk for the state placed there."""
        found = [self._allowed(placement) for placement in placements([spec.shard_elems for spec in specs])]
        self._reserve(
            (kind.dtype, spec.shard_elems)
            for placement, spec, kind in zip(found, specs, kinds, strict=True)
            if placement.state == "disk" and kind.trained
        )
        return found

    def move(self, placements: Mapping[Chunk, ChunkPlacement]) -> None:
        """Move chunks to other placements. All ranks must call.

        No step may be pending, no chunk gathered and no gradient stored. The order of moves keeps the peak of memory low. If one
        rank cannot move a chunk, no rank moves it, and all raise.
        """
        self._reserve(
            (chunk.dtype, chunk.spec.shard_elems)
            for chunk, placement in placements.items()
            if placement.state == "disk" != self.placements[chunk].state and chunk in self._gradients
        )
        synchronize(self._memory.device)  # running copies still read memory that will be freed
        for move in in_turn(self.moves_to(placements)):
            self._carry(*move.what)

    def moves_to(self, placements: Mapping[Chunk, ChunkPlacement]) -> list[Move[tuple[Chunk, ChunkPlacement]]]:
        """Return the moves that lead to other placements, in the order of ``placements``."""
        return [
            self._as_move(chunk, self._allowed(placement))
            for chunk, placement in placements.items()
            if self._allowed(placement) != self.placements[chunk]
        ]

    def bytes_of(self, chunk: Chunk) -> tuple[float, float]:
        """Return the bytes of a chunk's parameters on this rank, and of its state; that of torch's optimizers is estimated."""
        elements, state = chunk.shard.numel(), 0.0
        if self._stepper is not None and chunk in self._gradients:
            state = self._stepper.state_bytes(chunk.dtype)
        return float(elements * chunk.dtype.itemsize), elements * state

    def stream_on_gpu(self, on: bool, *, halves: bool = False) -> bool:
        """Switch GPU streaming; return True if it is on from now on. No step may be pending.

        With ``halves`` the GPU does only the first half of a step.
        """
        stepper = None if self._stepper is None else self._stepper.one_by_one
        if stepper is None:
            return False
        stepper.stream_on_gpu(None)
        if on:
            try:
                stepper.stream_on_gpu(GpuStreaming(memory=self._memory, halves=halves))
            except OutOfBudget:
                return False
        return on

    def _allowed(self, placement: ChunkPlacement) -> ChunkPlacement:
        """Return the placement adapted to the stage: stages 1 and 2 keep parameters on the device."""
        return placement if self._stage == 3 else replace(placement, parameters="device")

    def _reserve(self, shards: Iterable[tuple[torch.dtype, int]]) -> None:
        if self._stepper is not None:
            with self._faults.raised_on_all():
                self._stepper.reserve(shards)

    def _as_move(self, chunk: Chunk, placement: ChunkPlacement) -> Move[tuple[Chunk, ChunkPlacement]]:
        """Return a chunk's move, with the bytes that it adds to both memories; state of torch's optimizers is estimated."""
        was, (parameters, state) = self.placements[chunk], self.bytes_of(chunk)

        def more(place: MemoryTier) -> int:
            moved = (placement.parameters == place) - (was.parameters == place)
            return round(parameters * moved + state * ((placement.state == place) - (was.state == place)))

        return Move(what=(chunk, placement), device_bytes=more("device"), host_bytes=more("host"))

    def _carry(self, chunk: Chunk, placement: ChunkPlacement) -> None:
        """Move a chunk on all ranks, or on none if one rank cannot."""
        was, moved = self.placements[chunk], False
        try:
            with self._faults.raised_on_all():
                self._move(chunk, placement)
                moved = True
        except BaseException:
            if moved:  # moved here, but failed on another rank
                self._move(chunk, was)
            raise
        self.placements[chunk] = placement

    def _move(self, chunk: Chunk, placement: ChunkPlacement) -> None:
        if self._stepper is None or chunk not in self._gradients:
            chunk.move(placement.parameters)
            return
        gradient, was = self._gradients[chunk], self._gradients[chunk].tier
        gradient.move(placement.state)
        try:
            self._stepper.move(chunk, placement)
        except BaseException:
            gradient.move(was)
            raise
