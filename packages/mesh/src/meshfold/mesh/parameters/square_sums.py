"""Sums of squares of whole sharded tensors, which LAMB and LARS need, in one all-reduce for all tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshfold.mesh.collectives import operations
from meshfold.mesh.group import Group
from meshfold.mesh.mesh import Mesh
from meshfold.mesh.parameters.grad_norm import gradient_shards
from meshfold.mesh.parameters.parameter_meta import ParameterMeta, metadata_on

Pieces = Callable[[Tensor], Iterable[tuple[Tensor, float | Tensor]]]
"""Cuts a tensor of a shard's shape into pieces, each with the number of ranks of the group that hold it.

The number may be a tensor with one for each element of the piece.
"""


class ShardOfTensor(NamedTuple):
    """This rank's shard of a tensor.

    Attributes:
        place: number of the tensor, the same on all ranks of the group.
        pieces: see :data:`Pieces`.
    """

    place: int
    pieces: Pieces


class ShardedSquareSums:
    """Sums squares over shards and ranks: ``(parameters, rows)`` to float64 of shape ``(len(rows), len(parameters))``.

    Each row has one tensor for each parameter, shaped like its shard. One all-reduce of ``8 · rows · tensors`` bytes adds them.
    All ranks of the group call it in every step, including those that hold nothing. The result is the same bits on every rank,
    and nothing waits for the device that ranks communicate from.

    Attributes:
        more: sums of this rank's parts that the next all-reduce also adds, as of :meth:`local`; None: there are none.
        whole: the last sums over the ranks of all tensors, ``(rows, tensors)``.
    """

    more: Tensor | None = None
    whole: Tensor | None = None

    def __init__(
        self, shards: Mapping[Tensor, ShardOfTensor], tensors: int, group: Group, device: torch.device
    ) -> None:
        """Args:
        shards: of the parameters that this rank holds.
        tensors: how many there are on all ranks of the group.
        group: the ranks that hold shards.
        device: where ranks communicate from.
        """
        self._shards, self._tensors, self._group, self._device = dict(shards), tensors, group, device
        self._indices: dict[tuple[int, ...], Tensor] = {}
        self._alike: dict[Tensor, float | None] = {}
        self._holders: dict[tuple[float, ...], Tensor] = {}

    def __deepcopy__(self, memo: object) -> ShardedSquareSums:
        """Return sums for whole tensors: a copy of an optimizer is tried out on other tensors, by one rank."""
        return _WholeSquareSums({}, 0, self._group, self._device)

    def __call__(self, parameters: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the sums; see the class."""
        shards = [self._shards[parameter] for parameter in parameters]
        return self._added_up(self.local(shards, rows), shards)

    def local(self, shards: Sequence[ShardOfTensor], rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the sums over some shards of this rank, ``(rows, tensors)``, nothing sent."""
        sums = torch.zeros(len(rows), self._tensors, dtype=torch.float64, device=self._device)
        for row, into in zip(rows, sums.unbind(), strict=True):
            _add_squares(row, shards, into, self._index)
        return sums

    def shard_of(self, parameter: Tensor) -> ShardOfTensor:
        """Return this rank's shard of a parameter."""
        return self._shards[parameter]

    def takes_sums(self, parameters: Sequence[Tensor]) -> bool:
        """Return True if :meth:`of_sums` can be called: equally many ranks hold each element of a shard, and none is padding."""
        return all(self._held_alike(parameter) is not None for parameter in parameters)

    def of_sums(self, parameters: Sequence[Tensor], sums: Tensor) -> Tensor:
        """Turn sums over shards into sums over whole tensors, both ``(rows, parameters)``; see the class."""
        shards = [self._shards[parameter] for parameter in parameters]
        key = tuple(float(self._held_alike(parameter) or 1.0) for parameter in parameters)
        if key not in self._holders:
            self._holders[key] = torch.tensor(key, dtype=torch.float64, device=self._device)
        found = torch.zeros(len(sums), self._tensors, dtype=torch.float64, device=self._device)
        places = self._index([shard.place for shard in shards])
        found.index_add_(1, places, sums.to(self._device, torch.float64) / self._holders[key])
        return self._added_up(found, shards)

    def _added_up(self, sums: Tensor, shards: Sequence[ShardOfTensor]) -> Tensor:
        if self.more is not None:
            sums = sums + self.more.to(sums.device)
        summed = self.whole = operations.all_reduce(sums, self._group)
        return summed.index_select(1, self._index([shard.place for shard in shards]))

    def _held_alike(self, parameter: Tensor) -> float | None:
        """Return how many ranks hold each element of a shard; None if they differ, or some do not count."""
        if parameter not in self._alike:
            pieces = list(self._shards[parameter].pieces(parameter.detach()))
            whole = len(pieces) == 1 and pieces[0][0].numel() == parameter.numel()
            held = pieces[0][1] if whole else None
            self._alike[parameter] = None if held is None or isinstance(held, Tensor) else float(held)
        return self._alike[parameter]

    def _index(self, places: Sequence[int]) -> Tensor:
        """Return numbers as a cached tensor on the device, to save a copy from the host in every step."""
        key = tuple(places)
        if key not in self._indices:
            self._indices[key] = torch.tensor(key, dtype=torch.int64, device=self._device)
        return self._indices[key]


class _WholeSquareSums(ShardedSquareSums):
    def takes_sums(self, parameters: Sequence[Tensor]) -> bool:
        return False

    def __call__(self, parameters: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.stack([torch.stack([one.double().square().sum() for one in row]) for row in rows])


def _add_squares(
    row: Sequence[Tensor], shards: Sequence[ShardOfTensor], into: Tensor, index: Callable[[Sequence[int]], Tensor]
) -> None:
    """Add the shards' sums of squares to their tensors' sums."""
    found: dict[tuple[float, torch.dtype, torch.device], tuple[list[int], list[Tensor]]] = {}
    for tensor, shard in zip(row, shards, strict=True):
        for piece, holders in shard.pieces(tensor):
            if not piece.numel():
                continue
            if isinstance(holders, Tensor):
                piece, holders = piece.double() / holders.to(piece.device, torch.float64).sqrt(), 1.0
            places, alike = found.setdefault((float(holders), piece.dtype, piece.device), ([], []))
            places.append(shard.place)
            alike.append(piece)
    for (holders, dtype, _), (places, alike) in found.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(alike, 2.0, dtype=wide)).to(into.device, torch.float64)
        into.index_add_(0, index(places), norms.square() / holders)


def holders_factor(meta: ParameterMeta, mesh: Mesh, axes: Collection[str]) -> float:
    """Return the number of ranks of the mesh that hold an element, divided by the number in a group over ``axes``.

    The axes have all that split the parameter, and none of those whose ranks have different parameters.
    """
    apart = meta.mesh.size(*meta.only_at)
    return mesh.size(*axes) * apart / (mesh.world_size * math.prod(map(len, meta.only_at.values())))


def square_sums_of_blocks(parameters: Sequence[Tensor], mesh: Mesh, device: torch.device) -> ShardedSquareSums:
    """Return the function for parameters that are this rank's blocks over tensor axes, equal on all data ranks.

    The all-reduce is over the axes that split any of them, by their metadata. Without such axes nothing is sent.
    """
    metas = [metadata_on(parameter, mesh) for parameter in parameters]
    axes = mesh.spanned(*dict.fromkeys(axis for meta in metas for axis in meta.placement.split_axes))
    shards = {}
    for place, (parameter, meta) in enumerate(zip(parameters, metas, strict=True)):
        shards[parameter] = ShardOfTensor(place, _BlockPieces(meta, mesh, holders_factor(meta, mesh, axes)))
    return ShardedSquareSums(shards, len(shards), mesh.group(*axes), device)


class _BlockPieces:
    """Pieces of a block, with the number of ranks in the group that hold each."""

    def __init__(self, meta: ParameterMeta, mesh: Mesh, factor: float) -> None:
        self._meta, self._mesh, self._factor = meta, mesh, factor

    def __call__(self, tensor: Tensor) -> Iterable[tuple[Tensor, float]]:
        for piece, holders in gradient_shards(tensor, self._meta, self._mesh):
            yield piece, holders * self._factor
