"""Blocks of parameters for optimizers that look at whole matrices: sums over their dims, and functions of whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from meshfold.mesh.collectives import operations
from meshfold.mesh.group import Group
from meshfold.mesh.mesh import Mesh
from meshfold.mesh.parameters.block_map import BlockMap, sum_over_others
from meshfold.mesh.parameters.matrix_owners import MatrixOwners, by_shape
from meshfold.mesh.parameters.parameter_meta import ParameterMeta, metadata_on

_BUCKET = 1 << 26
ProductOf = tuple[Tensor, Tensor, Tensor, int]
"""A parameter, values of its block's shape, the other matrix, and the dim that is summed over."""
SumOf = tuple[Tensor, Tensor, tuple[int, ...]]
"""A parameter, values of its block's shape, and the dims that are not summed over."""


class ShardedBlocks:
    """Answers an optimizer's questions about the rest of its parameters: see ``Blocks`` of ``meshfold.optimizers``.

    A parameter that is not among those given counts as whole. ``sums`` takes one all-reduce of the numbers that come out.
    ``through_whole`` takes two all-to-alls, or one if blocks are already whole. Each matrix goes to one rank, the largest first,
    always to the rank with the least work. Blocks of the results go to all ranks. Blocks that a rank keeps are not sent; pairs of
    ranks are padded to the largest.

    A parameter of three dims is a stack of matrices, such as the weights of experts. Where a rank has whole ones of them, the ranks
    that have the same ones compute a share each, which the second all-to-all takes to the others.

    All parameters of a call are of one of the lists of ``families``.

    Attributes:
        bucket_elements: number of elements of blocks to ask about together.
    """

    bucket_elements = _BUCKET

    def __init__(
        self,
        metas: Mapping[Tensor, ParameterMeta],
        splitting: Group,
        owners: Group,
        device: torch.device,
        apart: Sequence[ShardedBlocks] = (),
    ) -> None:
        """Args:
        metas: of the parameters that this rank has blocks of.
        splitting: the ranks that have other blocks of them, at least.
        owners: the ranks that matrices are assigned to: ``splitting``, and others that have the same blocks.
        device: where ranks communicate from, and matrices are computed.
        apart: the blocks of parameters whose other blocks are on ranks outside ``splitting``.
        """
        self._apart: dict[Tensor, ShardedBlocks] = {p: blocks for blocks in apart for p in blocks._metas}
        self._splitting, self._owners, self._device = splitting, owners, device
        self._matrices = MatrixOwners(owners, device)
        self._metas: dict[Tensor, ParameterMeta] = dict(metas)
        self._blocks: dict[tuple[Tensor, Group], BlockMap] = {}

    def __deepcopy__(self, memo: object) -> ShardedBlocks:
        """Return the same: a copy of an optimizer has parameters of its own, which count as whole."""
        return self

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        meta = self._of(parameter)._metas.get(parameter)
        return tuple(parameter.shape) if meta is None else meta.placement.shape

    def whole(self, parameters: Sequence[Tensor]) -> bool:
        """Return True if this rank has these parameters whole."""
        return all(self._of(parameter)._split_block(parameter) is None for parameter in parameters)

    def families(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Group the parameters by the ranks that have their other blocks; no list is empty."""
        every = [self, *dict.fromkeys(self._apart.values())]
        lists = [[p for p in parameters if self._of(p) is blocks] for blocks in every]
        return [one for one in lists if one]

    def _of(self, parameter: Tensor) -> ShardedBlocks:
        """Return the blocks that include a parameter."""
        return self._apart.get(parameter, self)

    def sums(self, wanted: Iterable[SumOf | ProductOf]) -> list[Tensor]:
        """Return sums over whole tensors, and products of whole matrices with others; see the class."""
        every = iter(wanted)
        first = next(every, None)
        return [] if first is None else self._of(first[0])._sums(chain([first], every))

    def _sums(self, wanted: Iterable[SumOf | ProductOf]) -> list[Tensor]:
        def addends() -> Iterator[tuple[Tensor, bool]]:
            for one in wanted:
                block = self._split_block(one[0])
                yield (_whole_sum(one) if block is None else _addend(block, one)), block is not None

        return self._added_up(addends())

    def _added_up(self, addends: Iterable[tuple[Tensor, bool]]) -> list[Tensor]:
        """Return the tensors; sum the marked ones over the ranks that split parameters."""
        found: list[Tensor] = []
        shared: list[int] = []
        for addend, is_shared in addends:
            if is_shared:
                shared.append(len(found))
            found.append(addend)
        if not shared or self._splitting.size == 1:
            return found
        wide = torch.float64 if any(found[i].dtype == torch.float64 for i in shared) else torch.float32
        flat = torch.cat([found[i].reshape(-1).to(self._device, wide) for i in shared])
        summed = operations.all_reduce(flat, self._splitting).split([found[i].numel() for i in shared])
        for i, one in zip(shared, summed, strict=True):
            found[i] = one.view(found[i].shape).to(found[i].device, found[i].dtype)
        return found

    def cut(self, whole: Tensor, parameter: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the part of a tensor over some dims of the whole that belongs to the block."""
        block = self._of(parameter)._split_block(parameter)
        return whole if block is None else block.cut(whole, dims)

    def through_whole(
        self, parameters: Sequence[Tensor], values: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return blocks of a function of whole matrices, which keeps shape and dtype; see the class."""
        if parameters and self._of(parameters[0]) is not self:
            return self._of(parameters[0]).through_whole(parameters, values, function)
        if self._owners.size == 1 or not all(parameter in self._metas for parameter in parameters):
            return by_shape(values, function)
        blocks = [self._block(parameter, self._owners) for parameter in parameters]
        return self._matrices.blocks_of(blocks, values, function)

    def of_whole(
        self,
        parameters: Sequence[Tensor],
        values: Sequence[Tensor],
        function: Callable[[Tensor], Tensor],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Tensor]:
        """Return a function of whole matrices on every rank, in an all-to-all and an all-gather; see the class."""
        if parameters and self._of(parameters[0]) is not self:
            return self._of(parameters[0]).of_whole(parameters, values, function, shapes)
        if not all(parameter in self._metas for parameter in parameters):
            return [function(value) for value in values]
        blocks = [self._block(parameter, self._owners) for parameter in parameters]
        return self._matrices.everywhere(blocks, values, function, shapes)

    def _split_block(self, parameter: Tensor) -> BlockMap | None:
        """Return a parameter's block unless it is exactly the whole tensor."""
        if parameter not in self._metas:
            return None
        block = self._block(parameter, self._splitting)
        return None if block.is_whole else block

    def _block(self, parameter: Tensor, group: Group) -> BlockMap:
        key = (parameter, group)
        if key not in self._blocks:
            self._blocks[key] = BlockMap(self._metas[parameter], group)
        return self._blocks[key]


def _whole_sum(one: SumOf | ProductOf) -> Tensor:
    """Return a sum over dims, or a product, of a whole tensor."""
    if len(one) == 3:
        return sum_over_others(one[1], one[2])
    _, values, factor, dim = one
    return (values if dim == 1 else values.mT) @ factor


def _addend(block: BlockMap, one: SumOf | ProductOf) -> Tensor:
    """Return what a block adds to a sum over dims, or to a product."""
    return block.sum(one[1], one[2]) if len(one) == 3 else block.product(*one[1:])


def sharded_blocks(parameters: Sequence[Tensor], mesh: Mesh, owners: Group, device: torch.device) -> ShardedBlocks:
    """Return the blocks of parameters that are this rank's, over the axes that split any of them.

    Args:
        parameters: with their metadata.
        mesh: where they lie.
        owners: the ranks that have the same parameters, or other blocks of them.
        device: where ranks communicate from.
    """
    metas = {parameter: metadata_on(parameter, mesh) for parameter in parameters}
    return blocks_of(metas, mesh, owners, device)


def blocks_of(
    metas: Mapping[Tensor, ParameterMeta],
    mesh: Mesh,
    owners: Group | None,
    device: torch.device,
    every: Iterable[ParameterMeta] = (),
) -> ShardedBlocks:
    """Return the blocks of parameters whose metadata are given.

    Args:
        metas: of the parameters of this rank.
        mesh: where they lie.
        owners: the ranks that matrices are assigned to; None: those that have other blocks.
        device: where ranks communicate from.
        every: metadata of all parameters, where a rank does not have each.
    """
    known = [*metas.values(), *every]
    split = {axis for meta in known for axis in meta.placement.split_axes}
    if owners is None and len({mesh.spanned(*meta.sum_axes) for meta in every}) > 1:
        return _in_families(metas, mesh, device, known)
    bases = {base_axis(axis) for axis in split}
    splitting = mesh.group(*(axis for axis in mesh.names if axis in bases))
    return ShardedBlocks(metas, splitting, owners or splitting, device)


def _in_families(
    metas: Mapping[Tensor, ParameterMeta], mesh: Mesh, device: torch.device, known: Iterable[ParameterMeta]
) -> ShardedBlocks:
    """Return blocks of parameters that are divided among owners over different axes, such as experts and the rest under ZeRO.

    Ranks along the axes that split a parameter own the same ones of the parameters that are split in this way. Of other
    parameters they may own different ones.
    """

    def over(meta: ParameterMeta) -> tuple[str, ...]:
        return mesh.spanned(*meta.placement.split_axes)

    families = []
    for axes in sorted({over(meta) for meta in known} - {()}):
        group = mesh.group(*axes)
        families.append(ShardedBlocks({p: m for p, m in metas.items() if over(m) == axes}, group, group, device))
    alone = mesh.group()
    return ShardedBlocks({p: m for p, m in metas.items() if not over(m)}, alone, alone, device, families)


def base_axis(axis: str) -> str:
    """Return the axis of the mesh that an axis or a factor of one belongs to.

    >>> base_axis("data%2"), base_axis("data")
    ('data', 'data')
    """
    return axis.split("/")[0].split("%")[0]
