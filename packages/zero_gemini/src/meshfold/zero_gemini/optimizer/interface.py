"""Interface of a stepper: operations on its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshfold.mesh.parameters import StoredValue
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.memory.arena import MemoryTier

if TYPE_CHECKING:
    from meshfold.zero_gemini.optimizer.adam import AdamStepper
    from meshfold.zero_gemini.optimizer.kernel_runs import StepKind, StepTiming
    from meshfold.zero_gemini.optimizer.state_tree import AdamSnapshot


class Entry(NamedTuple):
    """Tensor of an optimizer's state: whether it has its parameter's shape, its dtype's name, and its own shape if it has another.

    In state of shards, tensors of another shape are numbers.
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
        """Reserve room on disk for the state of chunks, given the dtype and elements of each shard.

        Raises:
            MemoryPlanError: if this stepper keeps no state on disk.
            DiskError: if the disk has less room.
        """

    def adopt(self, chunk: Chunk, place: MemoryTier) -> None:
        """Add a chunk; its state and master weights are stored on ``place``.

        Raises:
            OutOfBudget: if memory does not suffice.
            MemoryPlanError: for a placement that this stepper cannot use.
        """

    def move(self, chunk: Chunk, placement: ChunkPlacement) -> None:
        """Move a chunk, its master weights and its state to a placement, with the same bits.

        Between steps, after ``finish``; all ranks must call. On an error everything is where it was.

        Raises:
            OutOfBudget: if memory does not suffice.
            MemoryPlanError: for a placement that this stepper cannot use.
        """

    def optimizer_parameter(self, name: str) -> nn.Parameter | None:
        """Return this rank's elements of a parameter as a parameter of the optimizer; None if it has none."""

    def master_dtype(self, chunk: Chunk) -> torch.dtype:
        """Return the dtype of the chunk's master weights."""

    def fill(self, name: str, block: Tensor) -> None:
        """Set a parameter's master weights, given in its shape."""

    def master(self, name: str) -> Tensor:
        """Return this rank's elements of a parameter's master weights, flat."""

    def publish(self, chunk: Chunk) -> None:
        """Start publishing the master weights to the model."""

    def step(self, gradients: Mapping[Chunk, Tensor], scale: float | Tensor, used: set[str]) -> None:
        """Step on every chunk.

        Args:
            gradients: each chunk's shard of the gradient, where the chunk's state is; on the host for one on disk.
            scale: factor of the gradients.
            used: names of the parameters that have a gradient; the others stay unchanged.
        """

    def finish(self) -> None:
        """Finish every promised step and publish it to the model. All ranks must call."""

    def steps_in_background(self, chunk: Chunk) -> bool:
        """Return True if it defers the steps of a chunk (``Chunk.promise_step``) instead of making them at once."""

    def done_with(self, chunk: Chunk) -> None:
        """Wait until the step of a chunk has read its gradient."""

    def reset(self) -> None:
        """Reset the optimizer's state, as if it had not stepped yet."""

    def close(self) -> None:
        """Free all memory; the stepper is not used afterwards."""

    def entries(self, chunk: Chunk) -> dict[str, dict[str, Entry]]:
        """Return the optimizer's tensors of a chunk on this rank, by parameter and key."""

    def read(self, name: str, key: str) -> Tensor:
        """Return one of these tensors: this rank's elements, flat, or a number."""

    def parts(self, name: str, key: str | None) -> StoredValue:
        """Return one of these tensors, or for None the master weights, as in memory; read it if it is on disk."""

    def write(self, name: str, key: str, value: Tensor) -> None:
        """Set one of these tensors."""

    def snapshot(self) -> AdamSnapshot | None:
        """Return views of all state, for any thread, valid until the next step or move; None if not possible."""

    def state_bytes(self, dtype: torch.dtype) -> float:
        """Return the bytes of state an element, of a chunk that the model computes with in this dtype."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on this rank's files: no direct I/O, files of a killed process that were removed."""

    def take_timings(self) -> dict[StepKind, StepTiming]:
        """Return timings of steps on the host since the last call."""

    @property
    def stored_parts(self) -> StoredParts | None:
        """Map of what each rank stores, if parameters have owners; None: slices of its chunks."""

    @property
    def one_by_one(self) -> AdamStepper | None:
        """The stepper, if it steps chunks speculatively or by GPU streaming, or defers all steps. None otherwise."""

    @property
    def early(self) -> EarlyStepper | None:
        """Steps of single chunks during the backward; None if it needs all gradients. Asked once all chunks are adopted."""


class StoredParts(Protocol):
    """The elements of parameters that a rank stores, of master weights and of state of the same shape."""

    def kept(self, name: str) -> range:
        """Return the range of flat elements that this rank stores."""

    def gather_master(self, name: str) -> Tensor:
        """Return a parameter's master weights: this rank's block over the tensor axes. Collective over its chunk's group."""

    def gather_state(self, name: str, key: str, entry: Entry) -> Tensor:
        """Return such a block of one of the optimizer's tensors, or a number on the CPU. Collective over the chunk's group."""

    def part_to_write(self, name: str, value: Tensor) -> Tensor:
        """Return what this rank stores of one of the optimizer's tensors."""


class StepsAtOnce:
    """Base of steppers whose steps are complete when ``step`` returns: a torch optimizer steps all parameters in one call.

    Attributes:
        optimizer: see :class:`Stepper`.
    """

    optimizer: torch.optim.Optimizer
    _made_with_state: bool

    def finish(self) -> None:
        """Do nothing: no step is pending."""

    def steps_in_background(self, chunk: Chunk) -> bool:
        """Return False."""
        return False

    def done_with(self, chunk: Chunk) -> None:
        """Do nothing: no step runs in the background."""

    def snapshot(self) -> None:
        """Return None: the optimizer may replace its tensors."""

    def state_bytes(self, dtype: torch.dtype) -> float:
        """Return an estimate: two numbers an element."""
        return 2.0 * dtype.itemsize

    @property
    def notes(self) -> tuple[str, ...]:
        """Return no notes: no state is on disk."""
        return ()

    def take_timings(self) -> dict[StepKind, StepTiming]:
        """Return no timings."""
        return {}

    @property
    def stored_parts(self) -> StoredParts | None:
        """Return None: ranks store slices of chunks, unless parameters have owners."""
        return None

    @property
    def one_by_one(self) -> None:
        """Return None: one call steps all chunks."""

    @property
    def early(self) -> EarlyStepper | None:
        """Return None: the call needs all gradients."""
        return None

    def begin(self) -> None:
        """Recreate the state of an optimizer that makes it at construction. Call it once the groups have their parameters."""
        if self._made_with_state:
            # Keep the object: schedulers refer to it.
            groups, defaults = self.optimizer.param_groups, self.optimizer.defaults
            type(self.optimizer).__init__(self.optimizer, groups, **defaults)
            self._count_state()

    def _count_state(self) -> None:
        """Count the optimizer's tensors that exist now."""
        raise NotImplementedError


class EarlyStepper(Protocol):
    """Interface for stepping chunks one by one during backward, before other gradients have arrived."""

    def begin_steps(self, chunks: Sequence[Chunk]) -> None:
        """Announce before the backward the chunks that will be stepped, in about this order. All ranks must call."""

    def step_one(self, chunk: Chunk, gradient: Tensor, used: set[str], *, ready: Callable[[], None]) -> None:
        """Step one chunk, once after ``begin_steps``; in parallel with compute if its state is not on the device.

        Args:
            chunk: its parameters are not read again before the next step.
            gradient: its shard, where the chunk's state is; on the host for one on disk.
            used: names of the parameters that have a gradient; the others stay unchanged.
            ready: returns when the gradient is ready; may be called in another thread.
        """

    def end_steps(self) -> None:
        """End the backward: all chunks were stepped, or their steps are pending."""

    def done_with(self, chunk: Chunk) -> None:
        """Wait until the step of a chunk has read its gradient."""
