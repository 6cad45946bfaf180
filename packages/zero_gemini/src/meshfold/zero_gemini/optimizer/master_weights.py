"""The master weights that a chunk's optimizer changes: the chunk's shard itself where it can be, else a plane of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.memory.arena import Block, MemoryTier


class Weights:
    """One plane of master weights. They are the shard itself if that is of their dtype and where they live.

    Attributes:
        chunk: whose.
        place: where they live; what is for the disk is on the host, since the model is shown it every step.
        tensor: flat, ``shard_elems``.
        stretches: this rank's part of each parameter, views of ``tensor``: what an optimizer of torch is given.
    """

    def __init__(self, chunk: Chunk, dtype: torch.dtype, place: MemoryTier) -> None:
        """Zeros, where they are not the shard."""
        self.chunk, self.dtype, self.place = chunk, dtype, place
        self._own: Block | None = None
        self.tensor = self._settled()
        self.stretches = {part.name: nn.Parameter(torch.empty(0, dtype=dtype)) for part in chunk.slices}
        self._point()

    @property
    def are_shard(self) -> bool:
        """Return whether the master weights are the chunk's shard itself."""
        return self._own is None

    @torch.no_grad()
    def show(self) -> None:
        """Start copying them to the chunk's shard, beside what is computed: what comes of it waits for ``chunk.wait``."""
        if self._own is not None:
            self.chunk.show(self._own.tensor)

    @torch.no_grad()
    def move(self, place: MemoryTier, parameters: MemoryTier) -> None:
        """Live on ``place`` from now on, and the chunk's shard on ``parameters``; on an error all is as it was.

        Raises:
            OutOfBudget: if one of the arenas has not as much left.
        """
        was, home = self.place, self.chunk.home
        if self._own is None:  # views would keep memory that the chunk gives back
            self.tensor = self.tensor.new_empty(0)
            self._point()
        try:
            self.chunk.rehome(parameters)
            self.place = place
            self.tensor = self._settled()
        except BaseException:
            if self.chunk.home != home:
                self.chunk.rehome(home)
            self.place = was
            self.tensor = self._settled()
            raise
        finally:
            self._point()

    def exchange(self, block: Block) -> Block:
        """Be another block of memory in the same place, which has their next values; the one that they were."""
        if self._own is None:
            was = self.chunk.exchange(block)
        else:
            was, self._own = self._own, block
        self.tensor = block.tensor
        self._point()
        return was

    def free(self) -> None:
        """Give the memory back."""
        self.tensor = self.tensor.new_empty(0)
        self._point()
        if self._own is not None:
            self._own.free()
            self._own = None

    def _settled(self) -> Tensor:
        """Their tensor, with their own memory taken or given back as their place and the shard's want it."""
        chunk, own = self.chunk, self._own
        shard_is_there = (chunk.resident or chunk.home == "device") == (self.place == "device")
        if self.dtype == chunk.dtype and shard_is_there:
            if own is not None:
                chunk.shard.copy_(own.tensor)
                own.free()
                self._own = None
            return chunk.shard
        if own is None or own.arena is not chunk.memory.arena(self.place):
            block = chunk.memory.allocate(chunk.shard.numel(), self.dtype, self.place, "master weights")
            block.tensor.copy_(chunk.shard if own is None else own.tensor)
            if own is not None:
                own.free()
            self._own = own = block
        return own.tensor

    def _point(self) -> None:
        """Let the stretches be where the weights are; as objects they stay, which an optimizer's groups know them by."""
        for part in self.chunk.slices:
            self.stretches[part.name].data = self.tensor[part.shard_start : part.shard_start + part.length]
