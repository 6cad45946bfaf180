"""The interface through which :mod:`meshfold.kernels.fuse` defers a head's logits to their loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshfold.kernels import VocabularyShard
from meshfold.mesh import Mesh, metadata
from meshfold.tensor_parallel.layers.input_adapters import InputAdapter, as_given, flattened
from meshfold.tensor_parallel.layers.vocabulary import shard_of
from meshfold.tensor_parallel.matmul import bind_enter_operand, lead_shape
from meshfold.tensor_parallel.plan import MatmulPlan


class WaitingHead:
    """Part of a sharded linear layer: its logits may wait for their loss if it is a head.

    Logits that the layer gathers may wait, too: every rank has them whole, and computes their loss from its own words.
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
        """Return True if the loss of this call can be computed with the layer: its product is one local matmul."""
        return (
            self.makes_logits
            and self.stored == "nk"
            and not (self.gather_output and self._rows_split)
            and self.input_adapter in (as_given, flattened)
            and not self.plan.extras("y")
            and not self.plan.sums("y")
        )

    @property
    def _rows_split(self) -> bool:
        """Return True if ranks have different rows of the input or the output."""
        plan = self.plan
        return self.mesh.size(*plan.x[plan.m], *plan.y[plan.m]) > 1

    def gathered_words(self) -> VocabularyShard | None:
        """Return this rank's words if this call gathers its output; else None."""
        if not self.gather_output:
            return None
        return shard_of(self.mesh, self.plan.y[self.plan.n], self.own_words, self.out_features)

    @property
    def own_words(self) -> int:
        """Words of a head on this rank, with padding."""
        known = metadata(self.weight)  # under ZeRO stage 3 the weight itself may be away
        return int(self.weight.shape[0]) if known is None else known.placement.local_shape(self.mesh)[0]

    def logits_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the output for an input, ``.. k`` to ``.. v``, local."""
        if self.gather_output:
            return (*x.shape[:-1], self.out_features)
        plan, tokens = self.plan, x.shape[:-1].numel()
        lead = x.shape[:-1] if self.input_adapter is as_given else torch.Size([tokens])
        rows = tokens * self.mesh.size(*plan.x[plan.m]) // self.mesh.size(*plan.y[plan.m])
        return (*lead_shape(lead, rows), self.own_words)

    def loss_operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the operands of the local matmul: rows ``m k``, weight ``v k`` and bias ``v``, each with its gradient."""
        rows = bind_enter_operand(self.plan, self.mesh, "x")(x.reshape(-1, x.shape[-1]))
        weight = bind_enter_operand(self.plan, self.mesh, "w")(self._sum_weight(self.weight))
        bias = None if self.bias is None else self._entered(self.bias)
        return rows, weight, bias
