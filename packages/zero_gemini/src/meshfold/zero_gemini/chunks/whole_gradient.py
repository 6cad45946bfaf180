"""The gradient of a whole chunk before its sum over the group: in one tensor, or in the tensors that autograd made.

A push takes memory from anywhere, so gradients that are pushed are not copied: they are held until they have been sent. Gradients
that are added up over backwards, and those that a collective takes, are copied together.

The first gradients of parameters are copied some at a time, by one launch: a model of convolutions has hundreds of small
parameters, and the host took longer to launch a copy for each than the device to copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshfold.kernels import write_gradient
from meshfold.zero_gemini.chunks.chunk import Chunk, parts_of
from meshfold.zero_gemini.memory.arena import Block


class WholeGradient:
    """The part of a chunk's gradient that has arrived on this rank.

    Attributes:
        filled: indices of the parameters whose gradient is in it.
    """

    def __init__(self, chunk: Chunk, name: str) -> None:
        """Args:
        chunk: whose gradients arrive.
        name: purpose of the memory.
        """
        self.filled: set[int] = set()
        self._chunk, self._name = chunk, name
        self._together: Block | None = None
        self._parts: Sequence[Tensor] = ()  # of ``_together``, by parameter
        self._padding: Sequence[Tensor] = ()
        self._held: dict[int, Block] = {}
        self._to_copy: dict[int, Tensor] = {}  # gradients that are not in ``_together`` yet
        self._stream = 0  # on which they were made

    @property
    def blocks(self) -> list[Block]:
        """The memory that it takes."""
        return [*self._held.values(), *([] if self._together is None else [self._together])]

    def add(self, place: int, gradient: Tensor, dtype: torch.dtype, *, hold: bool) -> int:
        """Add a parameter's gradient.

        Args:
            place: of the parameter in the chunk.
            gradient: no other code changes its memory.
            dtype: of the whole chunk's.
            hold: keep it where it is, if no gradient of the chunk was copied yet.

        Returns:
            Bytes of the gradient if it is only noted, for :meth:`copy_noted`; else 0.
        """
        first = place not in self.filled
        if hold and self._together is None and first:
            self._held[place] = self._chunk.memory.count(_by_itself(gradient, dtype), self._name)
        elif first and not hold and gradient.dtype is dtype and gradient.is_contiguous():
            stream = _stream(gradient)
            if self._to_copy and stream != self._stream:
                self.copy_noted()
            if self._together is None:
                self._copy_together(dtype)
            self._stream, self._to_copy[place] = stream, gradient
            self.filled.add(place)
            return gradient.nbytes
        else:
            self.copy_noted()
            part = self._held[place].tensor if place in self._held else self._part(place, dtype)
            more = not first
            if gradient.dtype is not part.dtype and gradient.is_contiguous():  # twice as fast as torch
                write_gradient(gradient.view(-1), part, add=more)
            elif more:
                part.view_as(gradient).add_(gradient)
            else:
                part.view_as(gradient).copy_(gradient)
        self.filled.add(place)
        return 0

    @torch.no_grad()
    def copy_noted(self) -> None:
        """Copy the gradients that were only noted, by one launch, on the stream that made them."""
        if not self._to_copy:
            return
        noted, self._to_copy = self._to_copy, {}
        into, found = [self._parts[place] for place in noted], [gradient.view(-1) for gradient in noted.values()]
        here = self._chunk.device
        if self._stream == _stream(found[0]):
            torch._foreach_copy_(into, found)
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(self._stream, here)):
            torch._foreach_copy_(into, found)

    def take_held(self) -> list[Block]:
        """Return every parameter's gradient, in order, for the caller to free; an empty list unless all of them are held."""
        if len(self._held) < len(self._chunk.parameters):
            return []
        held = [self._held[place] for place in range(len(self._held))]
        self._held.clear()
        self.filled.clear()
        return held

    def take(self, dtype: torch.dtype) -> Block:
        """Return the whole gradient in one tensor, for the caller to free: zeros where none arrived and in padding."""
        self.copy_noted()
        whole = self._copy_together(dtype)
        if missing := [*self._padding, *(part for at, part in enumerate(self._parts) if at not in self.filled)]:
            torch._foreach_zero_(missing)
        self._forget_together()
        self.filled.clear()
        return whole

    def clear(self) -> None:
        """Forget what has arrived."""
        for block in self.blocks:
            block.free()
        self._forget_together()
        self._to_copy.clear()
        self._held.clear()
        self.filled.clear()

    def _forget_together(self) -> None:
        self._together, self._parts, self._padding = None, (), ()

    def _part(self, place: int, dtype: torch.dtype) -> Tensor:
        self._copy_together(dtype)
        return self._parts[place]

    def _copy_together(self, dtype: torch.dtype) -> Block:
        """Return the whole chunk's memory, with what was held in it."""
        if self._together is None:
            self._together = self._chunk.memory.allocate(self._chunk.spec.size_elems, dtype, "device", self._name)
            self._parts, self._padding = parts_of(self._chunk.spec, self._together.tensor)
        for place, held in self._held.items():
            self._parts[place].copy_(held.tensor)
            held.free()
        self._held.clear()
        return self._together


def runs_of(chunk: Chunk, held: list[Block]) -> list[Tensor]:
    """Return the parts of a chunk's gradient in order: the gradients of all parameters, and zeros for padding."""
    runs, end = [], 0
    for slot, block in zip(chunk.spec.slots, held, strict=True):
        if slot.start_elems > end:
            runs.append(block.tensor.new_zeros(slot.start_elems - end))
        runs.append(block.tensor)
        end = slot.start_elems + slot.numel
    if end < chunk.spec.size_elems:
        runs.append(runs[0].new_zeros(chunk.spec.size_elems - end))
    return runs


def _stream(tensor: Tensor) -> int:
    """Return the current stream of a tensor's device, as CUDA numbers it; 0 on other devices."""
    return int(torch._C._cuda_getCurrentRawStream(tensor.get_device())) if tensor.is_cuda else 0


def _by_itself(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient flat, in a dtype, in memory of its own."""
    alone = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    if alone and gradient.is_contiguous() and gradient.dtype is dtype:
        return gradient.detach().view(-1)
    return gradient.detach().to(dtype, memory_format=torch.contiguous_format, copy=True).view(-1)
