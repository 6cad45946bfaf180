"""The sums of a pipeline's routers, on their way to the stage that computes the loss, which may count on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfold.engine.experts import RoutingSumsOverRanks, routers_by_name
from meshfold.engine.world import World

if TYPE_CHECKING:
    from meshfold.experts import RoutingSums
    from meshfold.pipeline import Pipeline


class CarriedRoutingSums:
    """See :class:`meshfold.pipeline.runtime.Carried`: for each router its counts, probabilities, squares and tokens.

    Each micro-batch is balanced by itself, over its tokens on all data ranks.
    """

    def __init__(self, model: nn.Module, world: World, dtype: torch.dtype) -> None:
        """Args:
        model: whole, before it is cut.
        world: where it will lie.
        dtype: that the model computes in.
        """
        self._world, self.dtype = world, torch.promote_types(dtype, torch.float32)
        self._experts = {name: keeper.experts for name, keeper in routers_by_name(model)}
        self._places: dict[int, Any] = {}  # block: the object that keeps its router's sums
        self._sizes: dict[int, int] = {}

    def carry(self, pipeline: Pipeline) -> None:
        """Let a pipeline carry the sums, if each block has one router at most and there are no others.

        Else a balance loss is refused where it is taken.
        """
        from meshfold.experts import RoutingSumsElsewhere

        partition = pipeline.partition
        blocks = {name: partition.blocks.index_of(name) for name in self._experts}
        if not blocks or None in blocks.values() or len(set(blocks.values())) < len(blocks):
            return
        here = dict(routers_by_name(partition.model))
        for name, block in blocks.items():
            assert block is not None  # checked above
            keeper = here.get(name) or RoutingSumsElsewhere(partition.partial_forward.blocks[block])
            keeper.over_ranks, keeper.refusal = RoutingSumsOverRanks(self._world), ""
            self._places[block], self._sizes[block] = keeper, 2 * self._experts[name] + 2
        pipeline.carry(self)

    def size(self, block: int) -> int:
        """Return the number of values that the blocks before ``block`` have."""
        return sum(size for at, size in self._sizes.items() if at < block)

    def arrive(self, numbers: Tensor | None, first: int) -> None:
        """Give each router of the blocks before ``first`` its sums; None: there are none."""

        from meshfold.experts import RoutingSums

        before = self._between(0, first)
        parts = () if numbers is None else numbers.split([self._sizes[at] for at in before])
        for at, part in zip(before, parts, strict=True):
            experts = (self._sizes[at] - 2) // 2
            counts, probabilities, squares, tokens = part.split([experts, experts, 1, 1])
            self._places[at].sums = RoutingSums(
                counts=counts.detach(), probabilities=probabilities, squares=squares[0], tokens=tokens.detach()[0]
            )

    def leave(self, first: int, stop: int) -> Tensor:
        """Return the sums of the routers in blocks ``first`` to ``stop - 1``, flat."""
        found = [self._flat(self._places[at].sums, self._sizes[at]) for at in self._between(first, stop)]
        return torch.cat([part.to(self._world.device, self.dtype) for part in found or [torch.empty(0)]])

    def _between(self, first: int, stop: int) -> Sequence[int]:
        return [at for at in sorted(self._sizes) if first <= at < stop]

    def _flat(self, sums: RoutingSums | None, size: int) -> Tensor:
        if sums is None:  # a forward without gradients keeps none
            return torch.zeros(size)
        parts = (sums.counts, sums.probabilities, sums.squares, sums.tokens)
        return torch.cat([part.reshape(-1).to(sums.probabilities.dtype) for part in parts])


def carry_routing_sums(model: nn.Module, world: World, dtype: torch.dtype) -> Callable[[Pipeline], None]:
    """Return a function to call with the pipeline that a model is cut into. See :class:`CarriedRoutingSums`."""
    return CarriedRoutingSums(model, world, dtype).carry
