"""Communication for Lightning: objects between all ranks, numbers over the data axes alone.

Ranks along tensor axes have the same rows, and sequence ranks parts of them: a mean, a sum or a list over all ranks would
count those rows several times. So reductions and gathers go over the data coordinates, each once.
"""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshfold.engine.batches import gather_list
from meshfold.engine.world import World
from meshfold.mesh import Group, SpecError, all_gather, all_reduce, broadcast
from meshfold.mesh.collectives import gather

T = TypeVar("T")

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
        raise SpecError(f"reduce_op={how!r}: known are {', '.join((*_SUMS, *_EXTREMES))}")
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
