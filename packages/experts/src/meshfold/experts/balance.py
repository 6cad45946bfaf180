"""Losses that balance the load of experts over the global batch, and DeepSeek-V3's bias, which needs no loss.

For one layer, with N tokens of all ranks, k experts a token, c_i tokens sent to expert i and P_i the sum of its probabilities::

    balance = e · Σ_i (c_i / N) · (P_i / N)        k when all experts are used alike
    z       = Σ_tokens logsumexp(logits)² / N

c, P and N are summed over the ranks before the product. The loss therefore does not depend on the number of ranks that share a
batch. A mean of the ranks' own losses would. Sources: Fedus et al., "Switch Transformers", 2021; Zoph et al., "ST-MoE", 2022; Qiu
et al., "Demons in the Detail", 2025 (the global batch); Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024 (the bias).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from meshfold.experts.routing import Routing
from meshfold.kernels import routing_totals
from meshfold.mesh import Group, SpecError, all_reduce
from meshfold.mesh.collectives import adjoint_pair

Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""A sum of a vector over ranks, with gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingSums:
    """Sums over tokens of one router's output.

    Attributes:
        counts: [e]: tokens sent to each expert, in the dtype of ``probabilities``.
        probabilities: [e]: sums; differentiable.
        squares: []: the sum of logsumexp(logits)²; differentiable.
        tokens: []: how many there were.
    """

    counts: Tensor
    probabilities: Tensor
    squares: Tensor
    tokens: Tensor

    @property
    def experts(self) -> int:
        """The number of experts."""
        return self.counts.shape[0]


def routing_sums(routing: Routing, mask: Tensor | None = None) -> RoutingSums:
    """Sum over the tokens of a routing.

    Args:
        routing: of n tokens.
        mask: [n], 1 for tokens that count and 0 for others, such as padding; None if all do.
    """
    probabilities = routing.probabilities
    if mask is None:
        counts, shares, squares = routing_totals(routing.logits, probabilities, routing.index)
        tokens = torch.full_like(squares, probabilities.shape[0], requires_grad=False)
        return RoutingSums(counts=counts, probabilities=shares, squares=squares, tokens=tokens)
    each = mask.to(probabilities.dtype)
    counts = torch.zeros_like(probabilities[0] if probabilities.shape[0] else probabilities.sum(0))
    counts = counts.detach().scatter_add(
        0, routing.index.flatten(), each.unsqueeze(1).expand_as(routing.index).flatten()
    )
    squares = routing.logits.to(probabilities.dtype).logsumexp(-1).square()
    return RoutingSums(
        counts=counts,
        probabilities=(probabilities * each.unsqueeze(1)).sum(0),
        squares=(squares * each).sum(),
        tokens=each.sum(),
    )


def over_ranks(sums: Sequence[RoutingSums], group: Group | Reduce | None) -> list[RoutingSums]:
    """Sum over the ranks of a group, all layers in one all-reduce. Backward sums the ranks' gradients.

    The gradient is exact if each rank's loss is weighted by a share and the shares sum to one.

    Args:
        sums: of each layer, over this rank's tokens.
        group: the ranks; or a function that sums a vector over them, with gradients; None: this rank has all tokens.
    """
    if group is None or (isinstance(group, Group) and group.size == 1) or not sums:
        return list(sums)
    reduce = _reduction(group) if isinstance(group, Group) else group
    sizes = [(each.experts, each.experts, 1, 1) for each in sums]
    flat = torch.cat(
        [
            part.reshape(-1).to(sums[0].probabilities.dtype)
            for each in sums
            for part in (each.counts, each.probabilities, each.squares, each.tokens)
        ]
    )
    parts = iter(reduce(flat).split([size for layer in sizes for size in layer]))
    found = []
    for _ in sums:
        counts, probabilities, squares, tokens = next(parts), next(parts), next(parts), next(parts)
        found.append(
            RoutingSums(
                counts=counts.detach(), probabilities=probabilities, squares=squares[0], tokens=tokens.detach()[0]
            )
        )
    return found


def balance_loss_of(
    sums: Sequence[RoutingSums], group: Group | Reduce | None = None, *, over: Literal["layer", "model"] = "layer"
) -> Tensor:
    """Return the balance loss: a scalar, k if all experts get equally many tokens.

    Args:
        sums: of each layer, over this rank's tokens.
        group: the ranks that share the batch, or a function that sums over them; None: this one has all of it.
        over: ``"layer"``: the mean over layers of each layer's loss. ``"model"``: tokens of all layers are counted as one layer's,
            as in transformers' ``load_balancing_loss_func``. A busy expert of one layer then offsets an idle one of another.

    Raises:
        SpecError: without layers, for another word, or for layers of different numbers of experts with ``"model"``.
    """
    _check_layers(sums)
    if over not in ("layer", "model"):
        raise SpecError(f"over={over!r}: write 'layer', or 'model' for the loss that transformers has")
    whole = over_ranks(sums, group)
    if over == "layer":
        return torch.stack([_one_layer(each) for each in whole]).mean()
    if len({each.experts for each in whole}) > 1:
        raise SpecError(
            f"over='model': layers have {sorted({each.experts for each in whole})} experts; write over='layer'"
        )
    return _one_layer(
        RoutingSums(
            counts=_total(each.counts for each in whole),
            probabilities=_total(each.probabilities for each in whole),
            squares=_total(each.squares for each in whole),
            tokens=_total(each.tokens for each in whole),
        )
    )


def z_loss_of(sums: Sequence[RoutingSums], group: Group | Reduce | None = None) -> Tensor:
    """Return the router z-loss: the mean over layers and tokens of logsumexp(logits)².

    Raises:
        SpecError: without layers.
    """
    _check_layers(sums)
    return torch.stack([each.squares / each.tokens.clamp(min=1) for each in over_ranks(sums, group)]).mean()


def moved_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Return the next bias: raised by ``rate`` for experts with fewer tokens than the mean, lowered for experts with more.

    Args:
        bias: [e].
        counts: [e]: tokens of the global batch.
        rate: 0.001 in DeepSeek-V3.
    """
    counts = counts.to(torch.promote_types(bias.dtype, torch.float32))
    return bias + (rate * (counts.mean() - counts).sign()).to(bias.dtype)


def _reduction(group: Group) -> Reduce:
    return adjoint_pair(lambda x: all_reduce(x, group), lambda g: all_reduce(g, group))


def _one_layer(sums: RoutingSums) -> Tensor:
    tokens = sums.tokens.clamp(min=1)
    return (sums.counts / tokens * sums.probabilities / tokens).sum() * sums.experts


def _total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def _check_layers(sums: Sequence[RoutingSums]) -> None:
    if not sums:
        raise SpecError(
            "no routing to balance: the model has no router that keeps its sums, or none has run forward with gradients"
        )
