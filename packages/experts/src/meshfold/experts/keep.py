"""The balance of third-party routers: a hook on each keeps the sums that a balance loss needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshfold.experts.balance import Reduce, RoutingSums, routing_sums
from meshfold.experts.find import ExpertBlock, find_experts
from meshfold.experts.routers import Router
from meshfold.experts.routing import Routing
from meshfold.mesh import SpecError

ATTRIBUTE = "routing_keeper"
_TOKENS = 6


class RoutingKeeper:
    """Keeps the sums of one router's last forward, as :class:`meshfold.experts.Router` does.

    Attributes:
        sums: of the last forward; None before it, and after one in training mode without gradients.
        over_ranks: sums a vector over the ranks that share a batch, with gradients; None: the batch is not split.
        refusal: why a loss of the sums would be wrong; "" if it would not.
        experts: that the router chooses of.
    """

    def __init__(self, router: nn.Module, experts: int, *, sigmoid: bool) -> None:
        self.sums: RoutingSums | None = None
        self.over_ranks: Reduce | None = None
        self.refusal = ""
        self._router, self.experts, self._sigmoid = router, experts, sigmoid
        self._handle = router.register_forward_hook(self._keep)
        setattr(router, ATTRIBUTE, self)

    def _keep(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.sums = None
        if not module.training or torch.is_grad_enabled():
            logits, _, index = outputs_of(output, self.experts)
            self.sums = routing_sums(routing_of(logits, index, sigmoid=self._sigmoid))

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies have: no sums, which belong to a forward."""
        return {**self.__dict__, "sums": None}

    def close(self) -> None:
        """Take the hook off."""
        self._handle.remove()
        if getattr(self._router, ATTRIBUTE, None) is self:
            delattr(self._router, ATTRIBUTE)


class RoutingSumsElsewhere(RoutingKeeper):
    """Holder for the sums of a router on another rank, such as in an earlier stage of a pipeline.

    The code that receives them sets them. They are read with the sums of local routers, in the order of the modules.
    """

    def __init__(self, stand_in: nn.Module) -> None:
        """Args:
        stand_in: the module that replaces the one with the router.
        """
        self.sums: RoutingSums | None = None
        self.over_ranks: Reduce | None = None
        self.refusal = ""
        stand_in.__dict__[ATTRIBUTE] = self

    def close(self) -> None:
        """Do nothing: there is no hook."""


def keep_routing(model: nn.Module) -> list[RoutingKeeper]:
    """Make the routers of a transformers model keep the sums that :func:`meshfold.experts.balance_loss` reads.

    :class:`meshfold.experts.Router` does so by itself. Every token counts, including padding. Leave transformers' own loss off
    (``output_router_logits=False``): it is over one rank's tokens.

    Args:
        model: before :func:`meshfold.experts.shard_experts`; each router returns logits, weights and expert numbers.

    Returns:
        one for each router that was given a hook; ``close()`` takes it off.

    Raises:
        SpecError: for a router whose probabilities do not follow from its output.
    """
    found = []
    for block in find_experts(model):
        router = None if block.router_name is None else model.get_submodule(block.router_name)
        if router is None:
            raise SpecError(
                f"{block.name}: no router found for {block.experts_name}, so its balance loss cannot be computed"
            )
        if keeper_of(router) is None:
            found.append((router, block.num_experts, _is_sigmoid(router, block)))
    return [RoutingKeeper(router, experts, sigmoid=sigmoid) for router, experts, sigmoid in found]


def read_sums(model: nn.Module) -> tuple[Sequence[RoutingSums], Reduce | None]:
    """Return the sums that routers kept in the last forward, in the order of the modules, and the function that sums over ranks.

    Raises:
        SpecError: if a loss of them would be wrong.
    """
    keepers = routing_keepers(model)
    for keeper in keepers:
        if keeper.refusal:
            raise SpecError(keeper.refusal)
    return [keeper.sums for keeper in keepers if keeper.sums is not None], keepers[0].over_ranks if keepers else None


def routing_keepers(model: nn.Module) -> list[Router | RoutingKeeper]:
    """Return the object that keeps each router's sums: the router itself if it is ours, otherwise its hook."""
    return [keeper for module in model.modules() if (keeper := keeper_of(module)) is not None]


def keeper_of(module: nn.Module) -> Router | RoutingKeeper | None:
    """Return the object that keeps a router's sums: the router itself or its hook. None for other modules."""
    found = module if isinstance(module, Router) else module.__dict__.get(ATTRIBUTE)
    return found if isinstance(found, Router | RoutingKeeper) else None


def outputs_of(output: Any, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [n, e], weights [n, k] and expert numbers [n, k] from a router's outputs, in any order.

    Raises:
        SpecError: if they are not there.
    """
    tensors = [t for t in output if isinstance(t, Tensor)] if isinstance(output, tuple | list) else []
    index = next((t for t in tensors if not t.is_floating_point()), None)
    floats = [t for t in tensors if t.is_floating_point()]
    if index is None or len(floats) < 2 or floats[0].shape[-1] != experts or floats[1].shape != index.shape:
        raise SpecError(
            f"a router of {experts} experts returned {[list(t.shape) for t in tensors]}: its balance is known where it returns "
            f"logits [tokens, {experts}], weights [tokens, k] and expert numbers [tokens, k]"
        )
    return floats[0].reshape(-1, experts), floats[1], index


def routing_of(logits: Tensor, index: Tensor, *, sigmoid: bool) -> Routing:
    """Return a routing with the probabilities of logits: their softmax, or their sigmoids divided by the sum."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.sigmoid() if sigmoid else wide.softmax(-1)
    probabilities = scores / scores.sum(-1, keepdim=True) if sigmoid else scores
    return Routing(index=index, weights=scores.gather(-1, index), probabilities=probabilities, logits=wide)


@torch.no_grad()
def _is_sigmoid(router: nn.Module, block: ExpertBlock) -> bool:
    """Return True if a router weighs by sigmoid, False if by softmax, found by trial on random numbers."""
    random = torch.Generator().manual_seed(0)
    values = {n: torch.randn(p.shape, generator=random) / p.shape[-1] ** 0.5 for n, p in router.named_parameters()}
    values |= {n: torch.zeros(b.shape) for n, b in router.named_buffers()}
    x = torch.randn(_TOKENS, block.hidden, generator=random)
    logits, weights, index = outputs_of(functional_call(router, values, (x,)), block.num_experts)
    shares = weights / weights.sum(-1, keepdim=True)
    for sigmoid in (False, True):
        guess = routing_of(logits, index, sigmoid=sigmoid).weights
        if index.shape[-1] > 1 and torch.allclose(shares, guess / guess.sum(-1, keepdim=True), rtol=1e-3, atol=1e-4):
            return sigmoid
        if index.shape[-1] == 1 and torch.allclose(weights, guess, rtol=1e-3, atol=1e-4):
            return sigmoid
    raise SpecError(
        f"{block.router_name}: its weights are neither the softmax nor the sigmoid of its logits, so what its balance is cannot be "
        "told: add a balance loss of your own to the loss"
    )
