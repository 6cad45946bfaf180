"""The interface through which :mod:`meshfold.kernels.fuse` defers a head's logits to their loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshfold.kernels import VocabularyShard
from meshfold.kernels.fuse import SplitRows
from meshfold.mesh import Mesh, metadata
from meshfold.mesh.collectives import bind_collect, bind_leave, take_block
from meshfold.mesh.model_io import meet_to_read
from meshfold.tensor_parallel.layers.base import BatchShape
from meshfold.tensor_parallel.layers.input_adapters import InputAdapter, as_given, flattened
from meshfold.tensor_parallel.layers.loss import losses_of_rows
from meshfold.tensor_parallel.layers.vocabulary import checked, shard_of
from meshfold.tensor_parallel.matmul import bind_enter_operand, lead_shape
from meshfold.tensor_parallel.plan import MatmulPlan


class WaitingHead:
    """Part of a sharded linear layer: its logits may wait for their loss if it is a head.

    Logits that the layer gathers may wait, too: every rank has them whole, and computes their loss from its own rows and words.
    """

    mesh: Mesh
    plan: MatmulPlan
    role: str
    stored: str
    input_adapter: InputAdapter
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    _batch: BatchShape | None
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

        Its product is one local matmul, or it gathers the output: a block of this is enough for the loss.
        """
        return (
            self.makes_logits
            and self.input_adapter in (as_given, flattened)
            and (self.gather_output or not self.makes_block)
        )

    @property
    def makes_block(self) -> bool:
        """Return True if the product is no local matmul: ranks sum parts of it, or exchange them, before they have logits."""
        return self.stored != "nk" or bool(self.plan.extras("y")) or bool(self.plan.sums("y"))

    @contextmanager
    def ungathered(self) -> Iterator[None]:
        """Context manager: forward returns this rank's block of the output."""
        batch, self._batch = self._batch, None
        try:
            yield
        finally:
            self._batch = batch

    def losses_of_block(
        self, block: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
    ) -> Tensor:
        """Return the loss of each row, ``m``, of this rank's block ``m v`` and its rows' targets; 0 where one does not count."""
        mesh, words = self.mesh, self.plan.y[self.plan.n]
        settings = (words, self.out_features, ignore_index, label_smoothing, z_loss)
        losses = mesh.once(("losses of rows", *settings), lambda: losses_of_rows(mesh, *settings))
        found: Tensor = losses.apply(block, target)
        return found

    def gathered_words(self) -> VocabularyShard | None:
        """Return this rank's words if this call gathers its output; else None."""
        if not self.gather_output:
            return None
        return shard_of(self.mesh, self.plan.y[self.plan.n], self.own_words, self.out_features)

    def gathered_rows(self, x: Tensor) -> SplitRows | None:
        """Return the rows of logits of ``x``, ``.. k``, if this call gathers them; None if every rank has them all."""
        mesh, plan = self.mesh, self.plan
        if not self.gather_output or mesh.size(*plan.x[plan.m], *plan.y[plan.m]) == 1:
            return None
        tokens, shape = plan.y[plan.m], self.logits_shape(x)
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
        plan, mesh = self.plan, self.mesh
        axes = tuple(dict.fromkeys((*plan.y[plan.n], *plan.y[plan.m], *plan.x[plan.m])))
        meet_to_read(f"the output of {name}", tuple(mesh.first_rank + rank for rank in mesh.ranks_along(*axes)))

    @property
    def own_words(self) -> int:
        """Words of the logits of a head on this rank, with padding."""
        known, dim = metadata(self.weight), 0 if self.stored == "nk" else 1
        # Under ZeRO stage 3 the weight itself may be away.
        shape = self.weight.shape if known is None else known.placement.local_shape(self.mesh)
        plan, mesh = self.plan, self.mesh
        return shape[dim] * mesh.size(*plan.w[plan.n]) // mesh.size(*plan.y[plan.n])

    def logits_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the output for an input, ``.. k`` to ``.. v``, local."""
        plan, tokens = self.plan, x.shape[:-1].numel()
        lead = x.shape[:-1] if self.input_adapter is as_given else torch.Size([tokens])
        if self.gather_output:
            return (*lead_shape(lead, tokens * self.mesh.size(*plan.x[plan.m])), self.out_features)
        rows = tokens * self.mesh.size(*plan.x[plan.m]) // self.mesh.size(*plan.y[plan.m])
        return (*lead_shape(lead, rows), self.own_words)

    def loss_operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the operands of the local matmul: rows ``m k``, weight ``v k`` and bias ``v``, each with its gradient."""
        rows = bind_enter_operand(self.plan, self.mesh, "x")(x.reshape(-1, x.shape[-1]))
        weight = bind_enter_operand(self.plan, self.mesh, "w")(self._sum_weight(self.weight))
        bias = None if self.bias is None else self._entered(self.bias)
        return rows, weight, bias
