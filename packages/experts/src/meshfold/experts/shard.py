"""Experts over the ranks of a group: each keeps its block of every stacked parameter, tokens are dispatched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshfold.experts.dispatch import chosen_exchange, dispatch, experts_of_each
from meshfold.experts.expert_rows import ExpertRows
from meshfold.experts.feed_forward import feed_forward
from meshfold.experts.find import ExpertBlock
from meshfold.mesh import Group, SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShard:
    """This rank's block of a stacked parameter.

    Attributes:
        name: of the parameter in the model.
        offset: of the block along dim 0: the first expert that is here.
        shape: of the block.
        whole: the shape of the whole parameter.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dim: int = 0


class ShardedExperts:
    """A block of experts that is split over a group.

    Attributes:
        block: the block that was found.
        group: the ranks.
        shards: one for each stacked parameter.
    """

    def __init__(self, block: ExpertBlock, group: Group | None, shards: tuple[ExpertShard, ...], forward: Any) -> None:
        self.block, self.group, self.shards = block, group, shards
        self._forward = forward

    def close(self) -> None:
        """Restore the forward of the module of experts. Its parameters stay blocks."""
        if self.block.experts.__dict__.get("forward") is self._forward:
            del self.block.experts.forward


def shard_experts(
    block: ExpertBlock, group: Group | None = None, *, capacity: float | None = None, exchange: str = "auto"
) -> ShardedExperts:
    """Keep this rank's contiguous block of a block's experts, and let its forward dispatch tokens over the group.

    Each stacked parameter becomes a new ``nn.Parameter`` under its name with dim 0 of ``experts / ranks``; all else stays.

    Args:
        block: of :func:`meshfold.experts.find_experts`.
        group: the ranks, each with tokens of its own; None or of one rank: parameters stay, and experts run by grouped matmul.
        capacity: see :func:`meshfold.experts.dispatch`; None: the one that the experts have, which is none for transformers'.
        exchange: see :func:`meshfold.experts.dispatch`.

    Raises:
        SpecError: if the ranks do not divide the experts, the forward of the experts has been replaced, or for another exchange.
    """
    ranks, index = (1, 0) if group is None else (group.size, group.index)
    each = experts_of_each(block.num_experts, ranks)
    chosen_exchange(exchange, blocks=ranks, top_k=1)
    experts = block.experts
    if "forward" in experts.__dict__:
        raise SpecError(
            f"{block.experts_name}: its forward has been replaced, by shard_experts or by other code: undo that first"
        )
    shards = []
    for name, qualified in zip(block.layout.names, block.stacked, strict=True):
        parameter = experts.get_parameter(name)
        whole = tuple(parameter.shape)
        if ranks > 1:
            part = parameter.detach().narrow(0, index * each, each).clone()
            experts.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        shards.append(ExpertShard(name=qualified, offset=index * each, shape=(each, *whole[1:]), whole=whole))
    forward = DispatchingForward(block, group, capacity, exchange=exchange)
    experts.forward = forward
    return ShardedExperts(block, group, tuple(shards), forward)


class DispatchingForward:
    """A forward for stacked experts, called as theirs, that dispatches tokens over a group.

    It takes the parameters that the module has when it is called: this rank's block. A deep copy of the module has one of its own.

    Attributes:
        fp8: whether tokens travel in float8; see :func:`meshfold.experts.dispatch`.
    """

    def __init__(
        self,
        block: ExpertBlock,
        group: Group | None,
        capacity: float | None = None,
        sharing: int = 1,
        exchange: str = "auto",
    ) -> None:
        """Args:
        block: whose experts they are.
        group: the ranks; None for this one alone.
        sharing: how many neighbours in the group have parts of the same experts, along their inner dim.
        capacity: see :func:`meshfold.experts.dispatch`; None: the one that the experts have.
        exchange: see :func:`meshfold.experts.dispatch`.
        """
        self.experts, self.layout, self.number, self.group = block.experts, block.layout, block.num_experts, group
        self.sharing, self.fp8, self.exchange = sharing, False, exchange
        own = getattr(block.experts, "capacity", None)
        self.capacity = own if capacity is None and isinstance(own, int | float) else capacity

    def __call__(
        self, tokens: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], object] | None = None
    ) -> Tensor:
        """Return the weighted sum of each token's experts: ``[n, h], [n, k], [n, k] -> [n, h]``.

        ``meanwhile`` is called once, during the exchange.
        """
        return dispatch(
            tokens,
            index,
            weights,
            self._run,
            experts=self.number,
            group=self.group,
            sharing=self.sharing,
            weighs=self.layout.weighs,
            fp8=self.fp8,
            capacity=self.capacity,
            exchange=self.exchange,
            meanwhile=meanwhile,
            parameters={name: self.experts.get_parameter(name) for name in self.layout.names},
        )

    def _run(self, rows: ExpertRows) -> Tensor:
        return feed_forward(self.layout, self.experts, rows, sharing=self.sharing)
