"""Routing: which experts a token goes to, with what weights. Pure functions of the router's logits.

Computed in float32 (float64 for float64 logits).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshfold.kernels import softmax_choice
from meshfold.mesh import SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The choice of a router for n tokens.

    Attributes:
        index: [n, k] int64: the experts of each token, all different.
        weights: [n, k]: what their outputs are multiplied by.
        probabilities: [n, e]: sum to 1 over the experts; for the balance loss.
        logits: [n, e].
        tokens: [n, h], for experts to read instead of the router's input: the same values, cheaper in backward. None: the input.
    """

    index: Tensor
    weights: Tensor
    probabilities: Tensor
    logits: Tensor
    tokens: Tensor | None = None


def softmax_top_k(logits: Tensor, k: int, *, normalize: bool = True, after: bool = False) -> Routing:
    """Choose the k experts of the largest logits.

    Args:
        logits: [n, e].
        k: experts a token.
        normalize: divide a token's weights by their sum (Mixtral; Qwen and OLMoE with ``norm_topk_prob``).
        after: take the softmax of only the k chosen logits (gpt-oss). It implies ``normalize``, with the same weights.

    Raises:
        SpecError: unless k is 1 to e.
    """
    check_top_k(k, logits.shape[-1])
    # The softmax of the chosen logits is their probabilities divided by the sum of these.
    index, weights, probabilities = softmax_choice(logits, k, normalize or after)
    return Routing(index=index, weights=weights, probabilities=probabilities, logits=logits)


def sigmoid_top_k(
    logits: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Choose by sigmoid, within the best groups of experts, with a bias that affects only the choice (DeepSeek-V3).

    A group's score is the sum of its two highest scores.

    Args:
        logits: [n, e].
        k: experts a token.
        bias: [e], added to the scores to choose by, not to the weights; None for none.
        groups: of e / groups experts each, in order.
        top_groups: groups that a token may go to.
        normalize: divide a token's weights by their sum.
        scale: multiplies the weights after that.

    Raises:
        SpecError: for numbers that do not fit each other.
    """
    experts = logits.shape[-1]
    check_groups(k, experts, groups, top_groups)
    scores = logits.to(_dtype(logits)).sigmoid()
    preference = scores.detach() if bias is None else scores.detach() + bias.to(scores.dtype)
    if top_groups < groups:
        grouped = preference.unflatten(-1, (groups, -1))
        best = grouped.topk(min(2, experts // groups), -1).values.sum(-1).topk(top_groups, -1).indices
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        preference = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
    index = preference.topk(k, -1).indices
    weights = scores.gather(-1, index)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return Routing(index=index, weights=weights * scale, probabilities=probabilities, logits=logits)


def check_top_k(k: int, experts: int) -> None:
    """Raise SpecError unless each token can go to k different experts."""
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= experts:
        raise SpecError(f"top_k={k!r}: a token goes to 1 to {experts} of {experts} experts; write such a whole number")


def check_groups(k: int, experts: int, groups: int, top_groups: int) -> None:
    """Raise SpecError unless groups divide the experts and the chosen ones have room for k."""
    check_top_k(k, experts)
    if groups < 1 or experts % groups:
        raise SpecError(
            f"groups={groups!r}: {experts} experts are not so many equal groups; write a divisor of {experts}"
        )
    if not 1 <= top_groups <= groups or top_groups * (experts // groups) < k:
        raise SpecError(
            f"top_groups={top_groups!r}: of {groups} groups of {experts // groups} experts a token must be allowed enough for "
            f"top_k={k}; write {-(-k * groups // experts)} to {groups}"
        )


def _dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
