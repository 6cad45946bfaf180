"""Interface of a stepper: the operations on the chunks that it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshfold.mesh.parameters import StoredValue
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.memory.arena import MemoryTier


class Entry(NamedTuple):
    """One tensor of an optimizer: whether it has its parameter's shape, its dtype's name, and its own shape if it has not.

    On shards those that have another shape are numbers.
    """

    like: bool
    dtype: str
    shape: tuple[int, ...] = ()


class Stepper(Protocol):
    """Keeps the master weights and the optimizer's state of chunks, and steps.

    Attributes:
        optimizer: has the groups and their settings; its parameters are slices of this rank's shards.
    """

    optimizer: torch.optim.Optimizer

    def reserve(self, shards: Iterable[tuple[torch.dtype, int]]) -> None:
        """Have room on disk for the state of chunks, before anything is done: of each the dtype and the shard's elements.

        Raises:
            MemoryPlanError: if it cannot live there.
            DiskError: if there is not as much room.
        """

    def adopt(self, chunk: Chunk, place: MemoryTier) -> None:
        """Take charge of a chunk; state and master weights live on ``place``.

        Raises:
            OutOfBudget: if there is not as much memory.
            MemoryPlanError: for a place that this way of stepping cannot use.
        """

    def move(self, chunk: Chunk, placement: ChunkPlacement) -> None:
        """Let a chunk, its master weights and its state live elsewhere from now on, with the same bits.

        Between steps, after ``finish``; all ranks must call. On an error everything is where it was.

        Raises:
            OutOfBudget: if there is not as much memory.
            MemoryPlanError: for a place that this way of stepping cannot use.
        """

    def optimizer_parameter(self, name: str) -> nn.Parameter | None:
        """This rank's elements of a parameter as a parameter of the optimizer; None if it has none."""

    def master_dtype(self, chunk: Chunk) -> torch.dtype:
        """Return the dtype of the chunk's master weights."""

    def fill(self, name: str, block: Tensor) -> None:
        """Take a parameter's master weights, of its shape."""

    def master(self, name: str) -> Tensor:
        """This rank's elements of a parameter's master weights, flat."""

    def publish(self, chunk: Chunk) -> None:
        """Start showing the master weights to the model."""

    def step(self, gradients: Mapping[Chunk, Tensor], scale: float | Tensor, used: set[str]) -> None:
        """Step on every chunk.

        Args:
            gradients: each chunk's shard of the gradient, where the chunk's state is; on the host for one on disk.
            scale: what gradients count times.
            used: names of the parameters that have a gradient; the others are left as they are.
        """

    def finish(self) -> None:
        """Let every step be done that was only promised, and the model see it. All ranks must call."""

    def steps_in_background(self, chunk: Chunk) -> bool:
        """Return True if it promises the steps of a chunk (``Chunk.promise_step``) instead of making them at once."""

    def done_with(self, chunk: Chunk) -> None:
        """Return once the gradient that a chunk was stepped with is needed no more."""

    def reset(self) -> None:
        """Forget the optimizer's state, as if it had not stepped yet."""

    def close(self) -> None:
        """The end."""

    def entries(self, chunk: Chunk) -> dict[str, dict[str, Entry]]:
        """The optimizer's tensors of a chunk on this rank, by parameter and key."""

    def read(self, name: str, key: str) -> Tensor:
        """One of them: this rank's elements, flat, or a number."""

    def parts(self, name: str, key: str | None) -> StoredValue:
        """One of them, or for None the master weights, as it lies in memory; what is on disk is read."""

    def write(self, name: str, key: str, value: Tensor) -> None:
        """Take one of them."""


class EarlyStepper(Protocol):
    """Steps chunks one by one while backward goes on, which not every way of stepping can: no other gradient is there yet."""

    def begin_steps(self, chunks: Sequence[Chunk]) -> None:
        """Before the backward: these will be stepped, about in this order. All ranks must call."""

    def step_one(self, chunk: Chunk, gradient: Tensor, used: set[str], *, ready: Callable[[], None]) -> None:
        """Step on one chunk, once after ``begin_steps``; beside the computation where its state is not on the device.

        Args:
            chunk: which; nothing reads its parameters any more before the next step.
            gradient: its shard, where the chunk's state is; on the host for one on disk.
            used: names of the parameters that have a gradient; the others are left as they are.
            ready: returns when the gradient is there; may be called in another thread.
        """

    def end_steps(self) -> None:
        """After the backward: all chunks were stepped, or it is promised."""

    def done_with(self, chunk: Chunk) -> None:
        """Return once the gradient that a chunk was stepped with is needed no more."""
