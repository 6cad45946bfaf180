"""The processes of a strategy: connecting them, the mesh over them, and their communication.

Objects are exchanged between all ranks, numbers only over the data axes. Ranks along tensor axes have the same rows, and sequence
ranks have parts of them. A mean, a sum or a list over all ranks would count those rows several times.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning.pytorch.strategies import DDPStrategy
from meshfold.engine import TrainingError
from meshfold.engine.batches import gather_list
from meshfold.engine.precision import LossScaler
from meshfold.engine.world import World, join_world
from meshfold.lightning.environment import environment_of
from meshfold.lightning.precision import MeshfoldPrecision
from meshfold.mesh import Group, ParallelSpec, SpecError, all_gather, all_reduce, barrier, broadcast
from meshfold.mesh.collectives import gather

T = TypeVar("T")


class ProcessStrategy(DDPStrategy):
    """Processes of a parallel spec, instead of data parallelism only.

    Attributes:
        world: spec, mesh and device; None before the trainer has connected the processes.
    """

    world: World | None = None
    _parallel: Mapping[str, object] | ParallelSpec
    _seed: int | None

    def setup_distributed(self) -> None:
        """Connect the processes and make the mesh."""
        self.set_world_ranks()
        if self.world is None:
            place = None
            if self.cluster_environment is not None:
                place = environment_of(self.cluster_environment, self.num_processes)
            self.world = join_world(self._parallel, self.root_device, place)
            seed = torch.initial_seed() % 2**62 if self._seed is None else self._seed
            self._seed = broadcast_object(seed, self.world, 0)
            if isinstance(self.precision_plugin, MeshfoldPrecision):
                self.precision_plugin.scaler = LossScaler(self.precision_plugin.engine.scale, says=self.is_global_zero)

    @property
    def _world(self) -> World:
        if self.world is None:
            raise TrainingError(
                "the processes are not connected yet: the trainer does so when fit, validate or test begins"
            )
        return self.world

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments that split rows over the data coordinates: ranks along other axes get the same rows."""
        return {"num_replicas": self._world.row_size, "rank": self._world.row_index}

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if self.world is not None:
            barrier(self.world.everyone, self.world.device)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return one rank's object on all ranks."""
        return obj if self.world is None else broadcast_object(obj, self.world, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor's mean (or sum, max, min) over the data coordinates, each counted once; equal on every rank.

        Args:
            tensor: anything else is returned unchanged.
            group: axes of the mesh to reduce over instead of the data axes, such as ``"tensor"`` or ``("row", "col")``.
            reduce_op: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, or torch's names.
        """
        if not isinstance(tensor, Tensor) or self.world is None:
            return tensor
        return reduce_over(tensor, self.world, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return ``... -> d ...``: the tensor of each data coordinate; the tensor itself if there is only one.

        Args:
            tensor: of one shape on all ranks.
            group: as for :meth:`reduce`.
            sync_grads: return gradients in backward, summed over the ranks.
        """
        return tensor if self.world is None else gather_from(tensor, self.world, group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if all ranks, or any, decide so."""
        if self.world is None:
            return decision
        said = torch.tensor(int(decision), device=self.world.device)
        return bool(reduce_over(said, self.world, self.world.everyone, "min" if all else "max"))


_SUMS = {"sum": False, "mean": True, "avg": True}
_EXTREMES = ("max", "min")


def group_of(world: World, group: Any) -> Group:
    """Return the ranks that a reduction goes over.

    Args:
        world: where they lie.
        group: None, or torch's group of all processes: the data coordinates. A name of a mesh axis, or a tuple of them: the
            ranks along these. A group of a mesh: itself.

    Raises:
        SpecError: for any other group of torch, and axes that the mesh does not have.
    """
    if isinstance(group, Group):
        return group
    if isinstance(group, str) or (isinstance(group, tuple) and all(isinstance(axis, str) for axis in group)):
        axes = (group,) if isinstance(group, str) else group
        for axis in axes:
            if axis not in world.mesh.axes:
                raise SpecError(f"group={group!r}: the mesh has the axes {', '.join(world.mesh.names)}")
        return world.mesh.group(*axes)
    if group is not None and _size(group) != world.mesh.world_size:
        raise SpecError(
            f"group={group!r}: give mesh axes, such as group='data' or group=('row', 'col'), or leave it out for the data "
            "coordinates"
        )
    return world.row_group


def _size(group: Any) -> int:
    size = getattr(group, "size", None)
    return int(size()) if callable(size) else -1


def reduce_over(value: Tensor, world: World, group: Any, how: Any) -> Tensor:
    """Return a tensor's sum, mean, maximum or minimum over a group; equal on all of its ranks, shape unchanged.

    Raises:
        SpecError: for another operation.
    """
    name = str(getattr(how, "name", how) or "mean").lower().rpartition(".")[2]
    if name not in _SUMS and name not in _EXTREMES:
        raise SpecError(f"reduce_op={how!r}: write one of {', '.join((*_SUMS, *_EXTREMES))}")
    over = group_of(world, group)
    moved = value.detach().to(world.device)
    if name in _EXTREMES:
        return all_reduce(moved, over, name).to(value.device)
    if _SUMS[name] and not moved.is_floating_point():
        moved = moved.float()
    total = all_reduce(moved.long() if moved.dtype == torch.bool else moved, over)
    return (total / over.size if _SUMS[name] else total).to(value.device)


def gather_from(value: Tensor, world: World, group: Any, *, sync_grads: bool) -> Tensor:
    """Return ``... -> g ...``: the tensors of a group's ranks in order; for a group of one rank the tensor itself.

    With ``sync_grads`` gradients flow back, summed over the ranks.
    """
    over = group_of(world, group)
    if over.size == 1:
        return value
    moved = value.to(world.device).unsqueeze(0)
    if sync_grads and torch.is_grad_enabled():
        return gather(moved, world.mesh, 0, over.axes)
    return all_gather(moved.detach().contiguous(), over, 0)


def broadcast_object(value: T, world: World, source: int) -> T:
    """Return one rank's object on all ranks; it is sent as a pickle.

    Args:
        value: the source's counts.
        world: the ranks.
        source: its global rank.
    """
    if world.mesh.world_size == 1:
        return value
    mine = world.mesh.rank == source
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if mine else torch.empty(0)
    length = broadcast(torch.tensor(data.numel(), device=world.device), world.everyone, source)
    room = data if mine else torch.empty(int(length), dtype=torch.uint8)
    sent = broadcast(room.to(world.device), world.everyone, source)
    if mine:
        return value
    found: T = pickle.loads(sent.cpu().numpy().tobytes())
    return found


def gather_metrics_over_data(module: Any, world: World) -> None:
    """Make torchmetrics of a module gather over the data coordinates, not all ranks; a user's own setting stays."""
    from torchmetrics import Metric

    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None and metric.process_group is None:
            metric.dist_sync_fn = lambda value, group=None: gather_list(value, world)
