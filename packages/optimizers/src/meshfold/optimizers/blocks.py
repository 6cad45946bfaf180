"""Blocks of whole tensors: how an optimizer of matrices asks for sums and products that other ranks have parts of.

An optimizer whose parameters are whole has :class:`WholeTensors`. Code that gives it blocks sets another object of this interface
on the instance: the engine sets :class:`meshfold.mesh.parameters.ShardedBlocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class SumOver(NamedTuple):
    """A sum over some dims of a whole tensor.

    Attributes:
        parameter: whose block it is.
        values: of the shape of the parameter's block.
        kept: dims that are not summed over, ascending.
    """

    parameter: Tensor
    values: Tensor
    kept: tuple[int, ...]


class Product(NamedTuple):
    """A product of a whole matrix with another one.

    Attributes:
        parameter: whose block it is.
        values: of the shape of the parameter's block, of two dims.
        factor: ``(size of dim, r)``, of the whole.
        dim: of the matrix, that is summed over.
    """

    parameter: Tensor
    values: Tensor
    factor: Tensor
    dim: int


class Blocks(Protocol):
    """Questions of an optimizer of matrices to the ranks that have the rest of its parameters; all of them must call.

    Attributes:
        bucket_elements: largest number of elements stepped together, for fewer collectives.
    """

    bucket_elements: int

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""

    def whole(self, parameters: Sequence[Tensor]) -> bool:
        """Return True if this rank has these parameters whole."""

    def families(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the parameters in lists, each of those that one call of the methods below may be about."""

    def sums(self, wanted: Iterable[SumOver | Product]) -> list[Tensor]:
        """Return sums and products in one all-reduce; padding counts as nothing.

        A sum has the whole tensor's sizes along the kept dims, a product ``(size of the other dim, r)``.
        """

    def cut(self, whole: Tensor, parameter: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the part of a tensor that belongs to the parameter's block, zero in padding.

        Args:
            whole: its first dims are the dims of the whole tensor that ``dims`` names.
            parameter: whose block.
            dims: of the parameter.
        """

    def of_whole(
        self,
        parameters: Sequence[Tensor],
        values: Sequence[Tensor],
        function: Callable[[Tensor], Tensor],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Tensor]:
        """Return ``function`` of whole matrices, each computed by one rank, on every rank.

        Args:
            parameters: of two dims.
            values: of the shapes of their blocks, of one dtype.
            function: of one matrix ``(m, n)``, to a tensor of that dtype.
            shapes: of what the function returns, for each.
        """

    def through_whole(
        self, parameters: Sequence[Tensor], values: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return blocks of ``function`` of whole matrices, each computed by one rank.

        Args:
            parameters: of two dims, or of three: stacks of matrices.
            values: of the shapes of their blocks, of one dtype.
            function: of matrices of one shape, ``(batch, m, n)``, to others of that shape and dtype.
        """


class WholeTensors:
    """Blocks that are whole tensors: see :class:`Blocks`."""

    bucket_elements = 1 << 26

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        return tuple(parameter.shape)

    def whole(self, parameters: Sequence[Tensor]) -> bool:
        return True

    def families(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        return [list(parameters)] if parameters else []

    def sums(self, wanted: Iterable[SumOver | Product]) -> list[Tensor]:
        return [_product(one) if isinstance(one, Product) else _sum(one) for one in wanted]

    def cut(self, whole: Tensor, parameter: Tensor, dims: Sequence[int]) -> Tensor:
        return whole

    def of_whole(
        self,
        parameters: Sequence[Tensor],
        values: Sequence[Tensor],
        function: Callable[[Tensor], Tensor],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Tensor]:
        return [function(value) for value in values]

    def through_whole(
        self, parameters: Sequence[Tensor], values: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        alike: dict[tuple[torch.Size, torch.device], list[int]] = {}
        for place, value in enumerate(values):
            alike.setdefault((value.shape, value.device), []).append(place)
        found: list[Tensor] = list(values)
        for (shape, _), places in alike.items():
            matrices = torch.cat([values[place].reshape(-1, *shape[-2:]) for place in places])
            made = function(matrices).view(len(places), *shape)
            for place, one in zip(places, made.unbind(), strict=True):
                found[place] = one
        return found


def _sum(one: SumOver) -> Tensor:
    dropped = [dim for dim in range(one.values.dim()) if dim not in one.kept]
    return one.values.sum(dim=dropped) if dropped else one.values


def _product(one: Product) -> Tensor:
    return (one.values if one.dim == 1 else one.values.mT) @ one.factor


def in_buckets(parameters: Sequence[Tensor], blocks: Blocks) -> Iterator[list[Tensor]]:
    """Yield parameters in order, family by family, in lists of at most ``bucket_elements``, or of one parameter."""
    for family in blocks.families(parameters):
        bucket: list[Tensor] = []
        held = 0
        for parameter in family:
            if bucket and held + parameter.numel() > blocks.bucket_elements:
                yield bucket
                bucket, held = [], 0
            bucket.append(parameter)
            held += parameter.numel()
        if bucket:
            yield bucket
