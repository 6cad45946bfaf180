"""Weights, gradients and optimizer state of an engine's model, whole on every data rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfold.checkpoint.shards import (
    Shard,
    ShardRule,
    Window,
    ranks_with_same_index,
    shards_of_local,
    shards_of_replicated,
    windows_of_block,
)
from meshfold.engine.optimizers import Factory
from meshfold.engine.optimizers.sight import give_sight
from meshfold.engine.precision import Masters
from meshfold.engine.states.data_parallel import GradientReducer
from meshfold.engine.states.optimizer_state import OptimizerState, gather, global_shape, put
from meshfold.engine.states.protocols import Source
from meshfold.engine.world import PIPE, World
from meshfold.mesh import Mesh, clip_gradient_values, clip_gradients, gradient_norm, metadata
from meshfold.mesh.parameters import ParameterMeta, StoredValue, metadata_on, uncompiled_name

if TYPE_CHECKING:
    from meshfold.pipeline import Pipeline
    from meshfold.pipeline.runtime import Microbatch
    from meshfold.zero_gemini import BackwardRole


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

    def windows(self, tensor: Tensor) -> list[tuple[Window, Window]]:
        return windows_of_block(metadata_on(tensor, self._world.mesh))

    @torch.no_grad()
    def write_block(self, tensor: Tensor, block: Tensor) -> None:
        self.masters.of(tensor).copy_(block)

    def publish(self) -> None:
        self.masters.publish()

    def settle(self) -> None:
        pass

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
