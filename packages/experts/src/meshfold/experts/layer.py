"""A mixture of experts in plain torch, for any model: router, stacked experts, an optional shared expert."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from meshfold.experts.dispatch import dispatch
from meshfold.experts.feed_forward import ExpertLayout, feed_forward
from meshfold.experts.routers import Router, SigmoidRouter, SoftmaxRouter
from meshfold.kernels import swiglu, swiglu2
from meshfold.mesh import SpecError

ROUTERS = ("softmax", "sigmoid")


class Experts(nn.Module):
    """Gated SiLU experts with stacked parameters, laid out as transformers' are.

    Attributes:
        gate_up: [e, 2·ffn, h], the gate's rows first.
        down: [e, h, ffn].
        capacity: see :func:`meshfold.experts.dispatch`.
    """

    layout = ExpertLayout(gate_up="gate_up", down="down", gate=swiglu)

    def __init__(self, hidden: int, ffn: int, experts: int, capacity: float | None = None) -> None:
        super().__init__()
        self.num_experts = experts
        self.capacity = capacity
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn))
        nn.init.uniform_(self.gate_up, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))
        nn.init.uniform_(self.down, -1 / math.sqrt(ffn), 1 / math.sqrt(ffn))

    def forward(
        self, x: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], object] | None = None
    ) -> Tensor:
        """Return the weighted sum of each token's experts: ``[n, h], [n, k], [n, k] -> [n, h]``.

        ``meanwhile`` is called once; if tokens are exchanged, during the exchange.
        """
        return dispatch(
            x,
            index,
            weights,
            lambda rows: feed_forward(self.layout, self, rows),
            experts=self.num_experts,
            weighs=True,
            capacity=self.capacity,
            meanwhile=meanwhile,
        )

    def extra_repr(self) -> str:
        """Return the sizes, as in ``8 experts of 64 -> 128 -> 64``."""
        experts, hidden, ffn = self.down.shape
        return f"{experts} experts of {hidden} -> {ffn} -> {hidden}"


class SharedExpert(nn.Module):
    """A gated SiLU feed-forward that every token passes: ``m h -> m h``."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``down(silu(gate(x)) * up(x))``."""
        y: Tensor = self.down(swiglu2(self.gate(x), self.up(x)))
        return y


class MixtureOfExperts(nn.Module):
    """A feed-forward in which a router sends each token to k of e experts: ``.. h -> .. h``.

    Attributes:
        router: weighs the experts; keeps what :func:`balance_loss` reads.
        experts: the stacked experts.
        shared: the shared expert; None without.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int,
        *,
        router: Literal["softmax", "sigmoid"] | Router = "softmax",
        shared: int | None = None,
        capacity: float | None = None,
    ) -> None:
        """Args:
        hidden: size of a token.
        ffn: inner size of an expert.
        experts: how many there are.
        top_k: how many of them a token goes to.
        router: ``"softmax"`` (Mixtral's), ``"sigmoid"`` (DeepSeek-V3's, one group), or a router with settings of its own.
        shared: inner size of a shared expert; None for none.
        capacity: drop an expert's tokens beyond ``capacity · tokens · k / experts``; None: drop none.

        Raises:
            SpecError: for a router of another name, or of other sizes than the experts'.
        """
        super().__init__()
        if isinstance(router, Router):
            if router.weight.shape != (experts, hidden) or router.top_k != top_k:
                raise SpecError(
                    f"router={router!r}: the layer has {experts} experts of hidden={hidden} and top_k={top_k}; give both the same"
                )
            self.router: Router = router
        elif router in ROUTERS:
            self.router = (SoftmaxRouter if router == "softmax" else SigmoidRouter)(hidden, experts, top_k)
        else:
            raise SpecError(
                f"router={router!r}: write one of {', '.join(map(repr, ROUTERS))}, or a meshfold.experts.Router"
            )
        self.experts = Experts(hidden, ffn, experts, capacity)
        self.shared = None if shared is None else SharedExpert(hidden, shared)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, plus the shared expert."""
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.router(tokens)
        tokens = tokens if routing.tokens is None else routing.tokens
        shared = self.shared
        if shared is None:
            y: Tensor = self.experts(tokens, routing.index, routing.weights)
            return y.view(x.shape)
        beside: list[Tensor] = []
        y = self.experts(tokens, routing.index, routing.weights, meanwhile=lambda: beside.append(shared(tokens)))
        return (y + beside[0]).view(x.shape)
