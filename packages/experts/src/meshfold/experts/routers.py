"""Routers as modules: a linear layer and a way to choose. Each keeps the sums that a balance loss needs."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.experts.balance import Reduce, RoutingSums, moved_bias, routing_sums
from meshfold.experts.router_logits import router_logits
from meshfold.experts.routing import Routing, check_groups, check_top_k, sigmoid_top_k, softmax_top_k
from meshfold.mesh import Group, all_reduce


class Router(nn.Module):
    """Base of routers: ``[n, h] -> Routing``.

    Attributes:
        weight: [e, h].
        top_k: experts a token.
        sums: of the last forward; None before it, and after one in training mode without gradients.
        over_ranks: sums a vector over the ranks that share a batch, with gradients; set when the batch is split. None: not split.
        refusal: why a loss of the sums would be wrong, such as when this rank has only a part of the layers; "" if it would not.
    """

    weight: nn.Parameter

    def __init__(self, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        check_top_k(top_k, experts)
        self.top_k, self._experts = top_k, experts
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.sums: RoutingSums | None = None
        self.over_ranks: Reduce | None = None
        self.refusal = ""
        nn.init.uniform_(self.weight, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))

    @property
    def experts(self) -> int:
        """The number of experts that it chooses of."""
        return self._experts

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # dispatch, which follows, is eager too
    def forward(self, x: Tensor) -> Routing:
        """Route n tokens ``[n, h]``, outside of compiled graphs. Products of 16-bit operands are computed in float32."""
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            tokens, logits = router_logits(x, self.weight)
            routing = self.choose(logits)
        self.keep(routing)
        return replace(routing, tokens=tokens)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and files have: no sums, which belong to a forward."""
        return {**self.__dict__, "sums": None}

    def choose(self, logits: Tensor) -> Routing:
        """Choose experts by logits ``[n, e]``."""
        raise NotImplementedError

    def keep(self, routing: Routing) -> None:
        """Keep the sums of a forward that the losses need."""
        self.sums = routing_sums(routing) if not self.training or torch.is_grad_enabled() else None

    def extra_repr(self) -> str:
        """Return the sizes, as in ``64 -> 8, top_k=2``."""
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}, top_k={self.top_k}"


class SoftmaxRouter(Router):
    """Softmax over all experts, then the best k (:func:`meshfold.experts.softmax_top_k`)."""

    def __init__(self, hidden: int, experts: int, top_k: int, *, normalize: bool = True, after: bool = False) -> None:
        """Args:
        hidden: size of a token.
        experts: how many.
        top_k: experts a token.
        normalize: divide a token's weights by their sum.
        after: softmax over only the chosen logits.
        """
        super().__init__(hidden, experts, top_k)
        self.normalize, self.after = normalize, after

    def choose(self, logits: Tensor) -> Routing:
        """Choose experts by logits ``[n, e]``."""
        return softmax_top_k(logits, self.top_k, normalize=self.normalize, after=self.after)


class SigmoidRouter(Router):
    """Sigmoid scores, groups of experts, and a bias that balances them (:func:`meshfold.experts.sigmoid_top_k`).

    Attributes:
        selection_bias: [e], a buffer that checkpoints keep; moved by :func:`update_selection_bias`, never by gradients.
        counts: [e]: tokens of this rank since the last move. Counting a token twice, as recomputation does, changes no move.
    """

    selection_bias: Tensor
    counts: Tensor

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        groups: int = 1,
        top_groups: int = 1,
        normalize: bool = True,
        scale: float = 1.0,
    ) -> None:
        """Args:
        hidden: size of a token.
        experts: how many.
        top_k: experts a token.
        groups: of experts.
        top_groups: groups that a token may go to.
        normalize: divide a token's weights by their sum.
        scale: multiplies the weights.
        """
        super().__init__(hidden, experts, top_k)
        check_groups(top_k, experts, groups, top_groups)
        self.groups, self.top_groups, self.normalize, self.scale = groups, top_groups, normalize, scale
        self.register_buffer("selection_bias", torch.zeros(experts))
        self.register_buffer("counts", torch.zeros(experts), persistent=False)

    def choose(self, logits: Tensor) -> Routing:
        """Choose experts by logits ``[n, e]``."""
        return sigmoid_top_k(
            logits,
            self.top_k,
            bias=self.selection_bias,
            groups=self.groups,
            top_groups=self.top_groups,
            normalize=self.normalize,
            scale=self.scale,
        )

    def keep(self, routing: Routing) -> None:
        """Keep the sums of a forward that the losses and the bias need."""
        super().keep(routing)
        if self.training and self.sums is not None:
            self.counts = self.counts + self.sums.counts.to(self.counts.dtype)


@torch.no_grad()
def update_selection_bias(model: nn.Module, rate: float = 0.001, group: Group | None = None) -> None:
    """Move the bias of every :class:`SigmoidRouter` of a model, once an optimizer step.

    Args:
        model: all ranks of the group must call with the same routers in the same order; the bias is then the same on each.
        rate: of a move, for each expert up or down.
        group: the ranks that share the batch: their counts are summed, all layers in one all-reduce. None: the ranks that an engine
            has split it over; without an engine, this rank has all of it.
    """
    routers = [module for module in model.modules() if isinstance(module, SigmoidRouter)]
    if not routers:
        return
    counts = torch.cat([router.counts for router in routers])
    if group is not None:
        counts = all_reduce(counts, group)
    elif (reduce := routers[0].over_ranks) is not None:
        counts = reduce(counts)
    for router, own in zip(routers, counts.split([len(router.counts) for router in routers]), strict=True):
        router.selection_bias.copy_(moved_bias(router.selection_bias, own, rate))
        router.counts = torch.zeros_like(router.counts)
