"""The interface through which :mod:`meshfold.kernels.fuse` defers a head's logits to their loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshfold.kernels import VocabularyShard
from meshfold.kernels.fuse import LazyLogits, SplitRows
from meshfold.mesh import Mesh, metadata
from meshfold.mesh.collectives import bind_collect, bind_leave, identity, take_block
from meshfold.mesh.model_io import meet_for_loss, meet_to_read
from meshfold.tensor_parallel.layers.exchanged_head import ExchangedHead
from meshfold.tensor_parallel.layers.input_adapters import InputAdapter, as_given, flattened
from meshfold.tensor_parallel.layers.vocabulary import checked, shard_of
from meshfold.tensor_parallel.matmul import bind_enter_operand, lead_shape
from meshfold.tensor_parallel.plan import MatmulPlan


def block_of_loss(
    logits: LazyLogits, mesh: Mesh, rows: tuple[str, ...], words: tuple[str, ...], size: int
) -> tuple[tuple[str, ...], VocabularyShard]:
    """Return the axes that split the rows of a loss of a rank's block of logits that wait, and this rank's words in it.

    Args:
        rows, words: axes that split the logits.
        size: words in the whole vocabulary.
    """
    layer = logits.head.layer
    exchanged = layer.exchanged if isinstance(layer, WaitingHead) else None
    if exchanged is None:
        return rows, shard_of(mesh, words, logits.shape[-1], size)
    return exchanged.tokens, exchanged.shard(layer.weight_rows, size)


class WaitingHead:
    """Part of a sharded linear layer: its logits may wait for their loss if it is a head.

    Logits that the layer gathers may wait, too: every rank has them whole, and computes their loss from its own rows and words.
    Where its product would be partial sums of logits, the loss has other rows and words than the logits: :func:`block_of_loss`.
    """

    mesh: Mesh
    plan: MatmulPlan
    role: str
    stored: str
    input_adapter: InputAdapter
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    _sum_weight: Callable[[Tensor], Tensor]

    if TYPE_CHECKING:

        @property
        def gather_output(self) -> bool: ...

        def _entered(self, bias: nn.Parameter) -> Tensor: ...

    @property
    def makes_logits(self) -> bool:
        """Return True if the layer is a head."""
        return self.role in ("head", "tied_head")

    def defers_logits(self) -> bool:
        """Return True if the loss of this call can be computed with the layer.

        Its product is one local matmul, or its operands can be moved so that a local one is enough.
        """
        return (
            self.makes_logits
            and self.input_adapter in (as_given, flattened)
            and (self._is_local or self.exchanged is not None)
        )

    @property
    def _is_local(self) -> bool:
        """Return True if the product is one local matmul: ranks neither sum nor exchange parts of it."""
        return self.stored == "nk" and not self.plan.extras("y") and not self.plan.sums("y")

    @property
    def exchanged(self) -> ExchangedHead | None:
        """Return how the operands move for the loss; None: they stay, or cannot move."""
        if self._is_local or self.stored != "nk" or self._sum_weight is not identity:
            return None
        return self.mesh.once(("exchanged head", self.plan), lambda: ExchangedHead.of(self.plan, self.mesh))

    def gathered_words(self) -> VocabularyShard | None:
        """Return this rank's words if this call gathers its output; else None."""
        if not self.gather_output:
            return None
        if (exchanged := self.exchanged) is not None:
            return exchanged.shard(self.weight_rows, self.out_features)
        return shard_of(self.mesh, self.plan.y[self.plan.n], self.own_words, self.out_features)

    def gathered_rows(self, x: Tensor) -> SplitRows | None:
        """Return the rows of logits of ``x``, ``.. k``, if this call gathers them; None if every rank has them all."""
        mesh, plan = self.mesh, self.plan
        if not self.gather_output or mesh.size(*plan.x[plan.m], *plan.y[plan.m]) == 1:
            return None
        exchanged, shape = self.exchanged, self.logits_shape(x)
        tokens = plan.y[plan.m] if exchanged is None else exchanged.tokens
        count = math.prod(shape[:-1])

        def targets(labels: Tensor, ignore_index: int) -> Tensor:
            return take_block(checked(labels, self.out_features, "label", ignore_index), mesh, 0, tokens)

        return SplitRows(
            numbers=torch.arange(count, device=x.device).view(*shape[:-1], 1),
            targets=targets,
            add_up=bind_leave(mesh, tokens),
            collect=bind_collect(mesh, -1, tokens),
        )

    def meet_to_read(self, name: str) -> None:
        """Wait until all ranks that have a part of gathered logits read them.

        Raises:
            CollectiveError: if one of them does not come.
        """
        meet_to_read(f"the output of {name}", self.mesh, self._gathered_axes)

    def meet_for_loss(self, name: str, rows: int) -> None:
        """Wait until all ranks that have a part of gathered logits compute a loss of so many rows of them.

        Raises:
            CollectiveError: if one of them does not come.
        """
        meet_for_loss(f"the output of {name}", rows, self.mesh, self._gathered_axes)

    @property
    def _gathered_axes(self) -> tuple[str, ...]:
        plan = self.plan
        return tuple(dict.fromkeys((*plan.y[plan.n], *plan.y[plan.m], *plan.x[plan.m])))

    @property
    def own_words(self) -> int:
        """Words of the logits of a head on this rank, with padding."""
        plan, mesh = self.plan, self.mesh
        return self.weight_rows * mesh.size(*plan.w[plan.n]) // mesh.size(*plan.y[plan.n])

    @property
    def weight_rows(self) -> int:
        """Words of this rank's block of the weight, with padding."""
        known = metadata(self.weight)
        # Under ZeRO stage 3 the weight itself may be away.
        shape = self.weight.shape if known is None else known.placement.local_shape(self.mesh)
        return int(shape[0 if self.stored == "nk" else 1])

    def logits_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the output for an input, ``.. k`` to ``.. v``, local."""
        plan, tokens = self.plan, x.shape[:-1].numel()
        lead = x.shape[:-1] if self.input_adapter is as_given else torch.Size([tokens])
        if self.gather_output:
            return (*lead_shape(lead, tokens * self.mesh.size(*plan.x[plan.m])), self.out_features)
        rows = tokens * self.mesh.size(*plan.x[plan.m]) // self.mesh.size(*plan.y[plan.m])
        return (*lead_shape(lead, rows), self.own_words)

    def loss_operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the operands of a local matmul: rows ``m k``, weight ``v k`` and bias ``v``, each with its gradient."""
        if (exchanged := self.exchanged) is not None:
            return exchanged.operands(x, self.weight, self.bias)
        rows = bind_enter_operand(self.plan, self.mesh, "x")(x.reshape(-1, x.shape[-1]))
        weight = bind_enter_operand(self.plan, self.mesh, "w")(self._sum_weight(self.weight))
        bias = None if self.bias is None else self._entered(self.bias)
        return rows, weight, bias
