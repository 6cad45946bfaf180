"""Protocol of the weights, gradients and optimizer state of an engine's model.

:class:`meshfold.engine.states.replicated.PlainStates` keeps them whole on every data rank;
:class:`meshfold.engine.zero.states.ZeroStates` keeps them in chunks that data ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshfold.checkpoint.shards import ShardRule, Window
from meshfold.engine.states.data_parallel import GradientReducer
from meshfold.mesh.parameters import StoredValue

if TYPE_CHECKING:
    from meshfold.pipeline import Pipeline
    from meshfold.pipeline.runtime import Microbatch
    from meshfold.zero_gemini import BackwardRole


class Source(NamedTuple):
    """A whole tensor that ranks hold parts of. A tuple, since every save makes one per tensor while training waits.

    Attributes:
        dtype: of its elements.
        shape: of the whole.
        read: makes the whole tensor; a collective over the ranks given by ``States.all_read``. A read error of this rank
            is raised after the collective.
        cut: how what this rank writes of it, where nothing is gathered, is found by its name. Without communication.
        parts: the tensors that this rank keeps of it; the pieces are views of them. None where there are no pieces.
        alike: all ranks read the same values, which do not change before a step; else rank 0's counts.
        on_disk: this rank's part is on a disk: ``parts`` reads it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    cut: Callable[[], ShardRule]
    parts: Callable[[], StoredValue]
    alike: bool = True
    on_disk: bool = False


Sources = Mapping[str, Source] | Callable[[], Iterator[tuple[str, Source]]]
"""Sources by name, or what makes them of what was noted: in whatever thread, while no step is made."""


class States(Protocol):
    """Weights, gradients and optimizer state of a model.

    Attributes:
        optimizer: a torch optimizer; None for evaluation only.
        all_read: every rank must call ``Source.read``; else those of one data coordinate.
    """

    optimizer: torch.optim.Optimizer | None
    all_read: bool

    @property
    def reducer(self) -> GradientReducer | None:
        """Collects whole gradients; None if they are in chunks."""

    @property
    def residency(self) -> Any:
        """Controller of the placement of chunks, a :class:`meshfold.engine.zero.residency.Residency`; None without chunks."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """The trained parameters of the model; a gradient's index is that of its parameter here."""

    def begin(self, *, first: bool) -> None:
        """Prepare for a forward whose backward will follow; ``first``: of an accumulation."""

    def backward(self, kind: BackwardRole) -> AbstractContextManager[None]:
        """Context manager around a backward: gradients that arrive inside count.

        Args:
            kind: ``"last"``: they are summed over the data axes at once, with all that were not yet; it is probably the last of an
                accumulation. ``"more"`` and ``"apart"``: they wait for such a one, or for ``finish``;
                ``"apart"``: without any communication. ``"final"``: certainly the last, and until ``step`` only
                ``finish(1.0)`` and ``norm(2.0)`` are called.
        """

    def end_backward(self, kind: BackwardRole) -> None:
        """End a ``backward`` that all ranks make, called inside it: parameters that it did not reach have zero gradients."""

    def complete(self, parameters: Iterable[Tensor]) -> None:
        """Record inside ``backward`` of a pipeline that these parameters have the gradients of all its micro-batches."""

    def finish(self, factor: float) -> None:
        """Finish after the last backward: sum all gradients over the data axes, times the factor."""

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the whole model's gradient."""

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients to a norm of at most ``max_norm``; return the norm before."""

    def clip_value(self, max_value: float) -> None:
        """Clamp every element of the gradients to [-max_value, max_value]."""

    def norm_of(self, places: Sequence[int], norm_type: float) -> Tensor:
        """Return the norm of some gradients, over the whole model. All ranks must call."""

    def multiply(self, places: Sequence[int], factor: Tensor | float) -> None:
        """Multiply some of the gradients."""

    def clamp(self, places: Sequence[int], low: float | None, high: float | None) -> None:
        """Clamp every element of some of the gradients to [low, high]."""

    def gradient(self, place: int) -> Tensor | None:
        """Return this rank's block of a complete gradient, zeros if no rank used its parameter; None if ranks share the block."""

    def step(self) -> None:
        """Step the optimizer, and publish the result to the model."""

    def forget(self) -> None:
        """Release the gradients."""

    def source(self, tensor: Tensor) -> Source:
        """Return the source of a parameter, of its master weights, or of a buffer."""

    def write(self, tensor: Tensor, whole: Tensor) -> None:
        """Write a parameter, into its master weights, or a buffer; then call ``publish``."""

    def windows(self, tensor: Tensor) -> list[tuple[Window, Window]]:
        """Return the rectangles of a parameter or buffer that this rank has, each with its place in the rank's block."""

    def write_block(self, tensor: Tensor, block: Tensor) -> None:
        """Write this rank's block, of which only :meth:`windows` are read, as ``write`` does; then call ``publish``."""

    def publish(self) -> None:
        """Publish written values to the model."""

    def settle(self) -> None:
        """Finish optimizer steps that are still to be made, so that sources can be read."""

    def optimizer_sources(self) -> dict[str, Source]:
        """Return the optimizer's tensors by ``parameter/state``. All ranks must call."""

    def noted_sources(self, names: Mapping[Tensor, str]) -> Sources:
        """Return sources of the model's tensors, by these names, for a background save, with their present values.

        Work that can be done later is deferred, but uses the tensors of now; copies of those that a forward may
        change.
        """

    def noted_optimizer_sources(self) -> Sources:
        """Return the same for ``optimizer_sources``. All ranks must call."""

    def optimizer_description(self) -> dict[str, Any]:
        """Return the optimizer's settings, which a checkpoint stores with its tensors."""

    def check_optimizer(self, description: Mapping[str, Any], entries: Iterable[str]) -> None:
        """Raise a CheckpointError for what ``load_optimizer`` would refuse; ``entries`` are ``parameter/state``."""

    def load_optimizer(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load the optimizer's state from a checkpoint."""

    def shapes_only(self) -> AbstractContextManager[None]:
        """Context manager around forwards that need only shapes, possibly on some ranks only."""

    def look_at(self, pipeline: Pipeline, works: Sequence[Microbatch]) -> None:
        """Run trial forwards of this rank's stages before a pipeline's step, if that gives information."""

    def explain(self, error: BaseException) -> None:
        """Add a note to an error of a model's forward, if the states may have caused it."""

    def can_relieve(self, error: BaseException) -> bool:
        """Return True if the first micro-step since the last optimizer step ran out of memory, and some can be freed."""

    def relieve(self) -> None:
        """Undo that micro-step, and free memory."""

    def close(self) -> None:
        """Remove the hooks from the model."""
