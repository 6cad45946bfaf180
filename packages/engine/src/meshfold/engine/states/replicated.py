"""Weights, gradients and optimizer state of an engine's model, and operations on them.

:class:`PlainStates` keeps them whole on every data rank; :class:`meshfold.engine.zero.states.ZeroStates` keeps them in chunks
that data ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshfold.checkpoint.shards import (
    Shard,
    ShardRule,
    ranks_with_same_index,
    shards_of_local,
    shards_of_replicated,
)
from meshfold.engine.optimizers import Factory
from meshfold.engine.optimizers.sight import give_sight
from meshfold.engine.precision import Masters
from meshfold.engine.states.data_parallel import GradientReducer
from meshfold.engine.states.optimizer_state import OptimizerState, gather, global_shape, put
from meshfold.engine.world import PIPE, World
from meshfold.mesh import Mesh, clip_gradient_values, clip_gradients, gradient_norm, metadata
from meshfold.mesh.parameters import ParameterMeta, StoredValue, uncompiled_name

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

    def publish(self) -> None:
        """Publish written values to the model."""

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


class PlainStates:
    """Every data rank has all of its tensor block's state: gradients are summed over the data axes.

    Attributes:
        masters: the master weights, which may be the parameters themselves.
        targets: the tensors that the optimizer updates, by name.
        trained: the trained parameters.
        reducer: sums the gradients.
    """

    residency = None

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        masters: Masters,
        world: World,
        make: Factory | None,
        *,
        trains: bool = True,
    ) -> None:
        """Args:
        parameters: those that are trained, by name.
        masters: their master weights.
        world: their ranks.
        make: makes the optimizer; None: other code steps, or none.
        trains: whether gradients are taken and summed; not for evaluation only.
        """
        self.masters, self._world = masters, world
        self.all_read = world.spec.expert is not None  # data ranks hold different experts
        self.targets = {uncompiled_name(name): masters.of(p) for name, p in parameters.items()}
        self.optimizer = None if make is None else _optimizer(make, list(self.targets.values()))
        if self.optimizer is not None:
            give_sight(self.optimizer, self.targets, world)
            if hasattr(self.optimizer, "copies"):
                self.optimizer.copies = masters.copies()
        self.trained = list(parameters.values()) if trains else []
        self.reducer = GradientReducer(self.trained, masters, world.mesh, several=world.pipelined)

    def begin(self, *, first: bool) -> None:
        if first:
            self.reducer.reset()

    def backward(self, kind: BackwardRole) -> AbstractContextManager[None]:
        return self.reducer.backward(last=kind in ("last", "final"))

    def end_backward(self, kind: BackwardRole) -> None:
        pass  # all buckets are sent on leaving ``backward``

    def complete(self, parameters: Iterable[Tensor]) -> None:
        self.reducer.complete(parameters)

    def finish(self, factor: float) -> None:
        self.reducer.finish(factor)

    def norm(self, norm_type: float = 2.0) -> Tensor:
        world = self._world
        return gradient_norm(self.targets.values(), world.mesh, norm_type, device=world.device)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        world = self._world
        return clip_gradients(self.targets.values(), world.mesh, max_norm, norm_type, device=world.device)

    def clip_value(self, max_value: float) -> None:
        clip_gradient_values(self.targets.values(), max_value)

    def norm_of(self, places: Sequence[int], norm_type: float) -> Tensor:
        world = self._world
        return gradient_norm(self._targets_at(places), world.mesh, norm_type, device=world.device)

    def multiply(self, places: Sequence[int], factor: Tensor | float) -> None:
        gradients = [target.grad for target in self._targets_at(places) if target.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clamp(self, places: Sequence[int], low: float | None, high: float | None) -> None:
        for target in self._targets_at(places):
            if target.grad is not None:
                target.grad.clamp_(low, high)

    def gradient(self, place: int) -> Tensor | None:
        [target] = self._targets_at([place])
        return torch.zeros_like(target) if target.grad is None else target.grad

    def _targets_at(self, places: Sequence[int]) -> list[Tensor]:
        return [self.masters.of(self.trained[place]) for place in places]

    def step(self) -> None:
        if self.optimizer is not None:
            self.masters.take_written()
            self.optimizer.step()
            written: set[Tensor] = getattr(self.optimizer, "copied", set())  # by the step itself
            self.masters.publish(written)
            written.clear()

    def forget(self) -> None:
        self.reducer.reset()
        for target in self.targets.values():
            target.grad = None

    def source(self, tensor: Tensor) -> Source:
        self.masters.take_written(tensor)
        master = self.masters.of(tensor)
        return source_like(master, master, self._world)

    def noted_sources(self, names: Mapping[Tensor, str]) -> Callable[[], Iterator[tuple[str, Source]]]:
        self.masters.take_written()
        noted = [(name, self.masters.of(tensor)) for tensor, name in names.items()]
        kept = {name: master.detach().clone() for name, master in noted if metadata(master) is None}
        world = self._world
        return lambda: ((name, source_like(kept.get(name, master), master, world)) for name, master in noted)

    def write(self, tensor: Tensor, whole: Tensor) -> None:
        master = self.masters.of(tensor)
        put(whole, master, master)

    def publish(self) -> None:
        self.masters.publish()

    def optimizer_sources(self) -> dict[str, Source]:
        return dict(self.noted_optimizer_sources()())

    def noted_optimizer_sources(self) -> Callable[[], Iterator[tuple[str, Source]]]:
        # Record the tensors now, so that later replacements do not get into the save. Only a step changes their values.
        noted, world = self._optimizer_state().noted(), self._world
        return lambda: ((name, source_like(*pair, world)) for name, pair in noted.tensors())

    def optimizer_description(self) -> dict[str, Any]:
        return self._optimizer_state().description()

    def check_optimizer(self, description: Mapping[str, Any], entries: Iterable[str]) -> None:
        self._optimizer_state().check(description, entries)

    def load_optimizer(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._optimizer_state().load(description, tensors)

    def shapes_only(self) -> AbstractContextManager[None]:
        return nullcontext()

    def look_at(self, pipeline: Pipeline, works: Sequence[Microbatch]) -> None:
        pass

    def can_relieve(self, error: BaseException) -> bool:
        return False

    def relieve(self) -> None:
        pass

    def explain(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        self.reducer.close()
        self.masters.close()

    def _optimizer_state(self) -> OptimizerState:
        assert self.optimizer is not None  # the engine calls this only with an optimizer
        return OptimizerState(self.optimizer, self.targets)


class _Held:
    """Reader of a tensor that is placed like another; see :func:`held`."""

    __slots__ = ("_like", "_local", "_world")

    def __init__(self, local: Tensor, like: Tensor, world: World) -> None:
        self._local, self._like, self._world = local, like, world

    def read(self) -> Tensor:
        return gather(self._local, self._like, self._world)

    def parts(self) -> StoredValue:
        return StoredValue((self._local.detach(),))

    def cut(self) -> ShardRule:
        meta, shape = metadata(self._like), tuple(self._local.shape)
        if meta is not None and shape == self._like.shape:
            return ShardRule(shards_of_local, (shape, meta, self._local.dtype))
        return ShardRule(_pieces_of_same, (shape, meta, self._world.mesh))


def _optimizer(make: Factory, targets: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Make an optimizer; for a stage whose layers are all frozen, one with the same groups and no parameters."""
    if targets:
        return make(targets)  # type: ignore[arg-type]
    made = make([nn.Parameter(torch.empty(0))])  # torch refuses an empty list
    made.state.clear()
    for group in made.param_groups:
        group["params"] = []
    return made


def source_like(local: Tensor, like: Tensor, world: World) -> Source:
    """Return the source of a tensor placed like another (such as a parameter's optimizer state); one of another shape unchanged.

    A tensor without metadata is a buffer, which may differ between ranks (statistics of batch norm).
    """
    found, alike = _Held(local, like, world), metadata(like) is not None
    return Source(
        dtype=local.dtype,
        shape=global_shape(local, like),
        read=found.read,
        cut=found.cut,
        parts=found.parts,
        alike=alike,
    )


def _pieces_of_same(name: str, shape: tuple[int, ...], meta: ParameterMeta | None, mesh: Mesh) -> tuple[Shard, ...]:
    """Return the shards of a replicated tensor; ``meta``: metadata of its parameter."""
    if meta is not None:
        ranks = ranks_with_same_index(mesh, tuple(meta.only_at))
    else:
        others = [axis for axis in mesh.names if axis != PIPE]
        ranks = [rank for rank in ranks_with_same_index(mesh, (PIPE,)) if mesh.index(*others, rank=rank) == 0]
    return shards_of_replicated(name, shape, ranks, mesh.rank)
