"""Adam's state of one chunk: weights and planes, in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from meshfold.kernels import AdamState
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.memory.arena import Block, MemoryTier
from meshfold.zero_gemini.optimizer.disk_buffers import Piece, Ring
from meshfold.zero_gemini.optimizer.disk_state import DiskPlanes
from meshfold.zero_gemini.optimizer.gpu_streaming import HostState
from meshfold.zero_gemini.optimizer.master_weights import SecondCopy, Weights, cut, planes_of, state_of
from meshfold.zero_gemini.optimizer.state_tree import ChunkSnapshot


class Held:
    """The state of one chunk.

    Attributes:
        chunk: of the state.
        place: its memory tier.
        planes: stored in addition to the weights.
        weights: the weights that the model computes with, after the last step.
        second: the shadow copy, which a step can write to; None without.
    """

    def __init__(self, chunk: Chunk, regime: str, place: MemoryTier, disk: DiskPlanes | None) -> None:
        """Allocate the state, all zeros.

        Raises:
            OutOfBudget: if memory does not suffice.
            DiskError: if the disk has too little room.
            MemoryPlanError: for ``"disk"`` without one.
        """
        self.chunk, self.place, self.planes = chunk, place, planes_of(chunk.dtype, regime)
        self._disk = disk
        self.second: SecondCopy | None = None
        self._blocks: dict[str, Block] = {}
        self._pieces: list[Piece] = []
        if place == "disk":
            self._pieces = self._room()
        else:
            self._blocks = self._memory(place)
        try:
            self.weights = Weights(chunk, chunk.dtype, place)
        except BaseException:
            _freed(self._blocks)
            if self._pieces:
                self._leave_disk()
            raise

    def sections(
        self, spans: Sequence[tuple[int, int]], *, change: bool, now: bool = False
    ) -> Iterator[tuple[int, int, int, AdamState]]:
        """Yield the state of some runs of elements in turn: the run's number, first and one past the last element, and views.

        State on disk comes in pieces, and its views are valid until the next one.

        Args:
            spans: first and one past the last element of each run in the shard.
            change: the caller changes the views.
            now: write changes to disk at once.

        Raises:
            DiskError: if it cannot be read.
        """
        weights = _seen_alone(self.weights.tensor)
        if not self._pieces:
            tensors = _tensors(self._blocks)
            for index, (begin, end) in enumerate(spans):
                yield index, begin, end, state_of(weights[begin:end], cut(self.planes, tensors, begin, end))
        for piece in self.pieces_of(spans):
            with self._ring.open(piece, change=change, now=now) as tensors:
                for index, (begin, end) in enumerate(spans):
                    a, z = max(begin, piece.begin), min(end, piece.end)
                    if a < z:
                        views = cut(self.planes, tensors, a - piece.begin, z - piece.begin)
                        yield index, a, z, state_of(weights[a:z], views)

    def in_memory(self, gradient: Tensor, *, second: bool = False) -> HostState:
        """Return the state in memory, or the shadow copy, with a gradient of the shard."""
        weights, blocks = self.weights.tensor, self._blocks
        if second:
            weights, blocks = self._second.weights.tensor, self._second.planes
        return HostState(weights=weights, planes=self.planes, tensors=_tensors(blocks), gradient=gradient)

    # -- a second copy ------------------------------------------------------------------------------------------

    def keep_second(self, yes: bool) -> None:
        """Allocate or free a shadow copy of state in the host's memory.

        Raises:
            OutOfBudget: if memory does not suffice.
        """
        if not yes and self.second is not None:
            self.second.free()
            self.second = None
        elif yes and self.second is None and self.place == "host":
            planes, weights = self._memory("host", zeros=False), self.weights.tensor
            try:
                block = self.chunk.memory.allocate(weights.numel(), weights.dtype, "host", "master weights")
            except BaseException:
                _freed(planes)
                raise
            self.second = SecondCopy(weights=block, planes=planes)

    def both(self, begin: int, end: int) -> tuple[AdamState, AdamState]:
        """Return views of the elements from ``begin`` up to ``end``, in the current state and in the shadow copy."""
        second = self._second
        mine, other = (
            state_of(_seen_alone(weights)[begin:end], cut(self.planes, _tensors(blocks), begin, end))
            for weights, blocks in (
                (self.weights.tensor, self._blocks),
                (second.weights.tensor, second.planes),
            )
        )
        return mine, other

    def exchange(self) -> None:
        """Swap the shadow copy and the current one."""
        second = self._second
        second.weights = self.weights.exchange(second.weights)
        self._blocks, second.planes = second.planes, self._blocks

    @property
    def _second(self) -> SecondCopy:
        assert self.second is not None  # callers check `second` first
        return self.second

    # -- pieces -------------------------------------------------------------------------------------------------

    def snapshot(self) -> ChunkSnapshot:
        """Return the place of the state; planes only if they are in memory."""
        planes = {
            plane.name: (plane, self._blocks[plane.name].tensor) for plane in self.planes if plane.name in self._blocks
        }
        return ChunkSnapshot(dtype=self.chunk.dtype, weights=self.weights.tensor, planes=planes)

    def pieces_of(self, spans: Sequence[tuple[int, int]]) -> list[Piece]:
        """Return the parts of some runs of elements that are on disk, in order."""
        return [piece for piece in self._pieces if any(begin < piece.end and piece.begin < end for begin, end in spans)]

    # -- moving -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def move(self, placement: ChunkPlacement) -> None:
        """Move to another tier, with the same bits. On an error nothing has moved.

        Raises:
            OutOfBudget: if memory does not suffice.
            DiskError: if the disk has too little room, or fails.
            MemoryPlanError: for ``"disk"`` without one.
        """
        self.keep_second(False)
        was = self.place
        self._carry(placement.state)
        try:
            self.weights.move(placement.state, placement.parameters)
        except BaseException:
            self._carry(was)
            raise

    def free(self) -> None:
        """Release all memory; state on disk belongs to the disk, which is closed next."""
        self.keep_second(False)
        self.weights.free()
        self._blocks, self._pieces = _freed(self._blocks), []

    def _carry(self, place: MemoryTier) -> None:
        """Move the planes to a tier."""
        if place == self.place:
            return
        if place == "disk":
            self._write_out()
        elif self.place == "disk":
            self._read_in(place)
        else:
            self._copy_over(place)
        self.place = place

    def _copy_over(self, place: MemoryTier) -> None:
        """Copy between memories, one plane at a time."""
        done: list[str] = []
        try:
            for plane in self.planes:
                self._replace(plane.name, place)
                done.append(plane.name)
        except BaseException:
            for name in done:
                self._replace(name, self.place)
            raise

    def _replace(self, name: str, place: MemoryTier) -> None:
        old = self._blocks[name]
        new = self.chunk.memory.allocate(old.tensor.numel(), old.tensor.dtype, place, old.purpose)
        new.tensor.copy_(old.tensor)
        self._blocks[name] = new
        old.free()

    def _write_out(self) -> None:
        self._pieces = self._room()
        try:
            self._each_piece(True, lambda views, mine: _copy(mine, views), _tensors(self._blocks))
            self._ring.flush()
        except BaseException:
            self._leave_disk()
            raise
        self._blocks = _freed(self._blocks)

    def _read_in(self, place: MemoryTier) -> None:
        blocks = self._memory(place, zeros=False)
        try:
            self._each_piece(False, _copy, _tensors(blocks))
        except BaseException:
            _freed(blocks)
            raise
        self._blocks = blocks
        self._leave_disk()

    def _each_piece(
        self,
        change: bool,
        do: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None],
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Call a function with the views of each piece on disk, and of the same elements in memory."""
        self._ring.expect(() if change else self._pieces)
        for piece in self._pieces:
            with self._ring.open(piece, change=change, now=True) as views:
                do(views, cut(self.planes, tensors, piece.begin, piece.end))

    # -- memory -------------------------------------------------------------------------------------------------

    def _memory(self, place: MemoryTier, *, zeros: bool = True) -> dict[str, Block]:
        memory, elements = self.chunk.memory, self.chunk.shard.numel()
        blocks: dict[str, Block] = {}
        try:
            for plane in self.planes:
                block = memory.allocate(plane.numel(elements), plane.dtype, place, "optimizer state")
                blocks[plane.name] = block
                if zeros:
                    block.tensor.zero_()
        except BaseException:
            _freed(blocks)
            raise
        return blocks

    def _room(self) -> list[Piece]:
        if self._disk is None:
            raise MemoryPlanError(
                f"the optimizer state of {self.chunk} is planned for disk, but no folder is given: set offload_path"
            )
        chunk = self.chunk
        return self._disk.take(str(chunk), self.planes, chunk.shard.numel(), chunk.memory)

    @property
    def _ring(self) -> Ring:
        assert self._disk is not None  # chunks with pieces have a disk
        return self._disk.ring

    def _leave_disk(self) -> None:
        if self._disk is not None:
            pieces, self._pieces = self._pieces, []
            self._disk.give_back(pieces, self.chunk.memory)


def _tensors(blocks: Mapping[str, Block]) -> dict[str, Tensor]:
    return {name: block.tensor for name, block in blocks.items()}


def _seen_alone(weights: Tensor) -> Tensor:
    """Return host weights through a separate storage.

    Kernels access memory through NumPy, and torch refuses to resize a storage that NumPy has used. The shard's own storage
    must stay resizable, to release the chunk.
    """
    return from_dlpack(weights.detach()) if weights.device.type == "cpu" else weights


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


def _freed(blocks: Mapping[str, Block]) -> dict[str, Block]:
    for block in blocks.values():
        block.free()
    return {}
