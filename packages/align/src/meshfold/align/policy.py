"""Losses of policies that are trained on their own samples: PPO, GRPO and its relatives, RLOO. Pure functions, one loss a token.

With r = exp(log p - log p of the policy that sampled) and A the advantage of a token::

    PPO, GRPO   -min(r A, clip(r, 1 - low, 1 + high) A)          (clip-higher: high > low)
    RLOO        the same with A of :func:`meshfold.align.leave_one_out`

What distinguishes GRPO, Dr. GRPO and DAPO is the mean: :func:`meshfold.align.mean_of_token_means`,
:func:`meshfold.align.mean_over_length`, :func:`meshfold.align.mean_of_tokens`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from meshfold.mesh import SpecError

KLKind = Literal["k1", "k2", "k3"]


def kl_penalties(log_probs: Tensor, reference: Tensor, kind: KLKind = "k3") -> Tensor:
    """Return estimates of KL(policy || reference) from tokens that the policy sampled, ``n s, n s -> n s``.

    Schulman, "Approximating KL Divergence", 2020: with d = log p - log p of the reference, k1 = d (unbiased), k2 = d²/2 (its
    gradient is the right one), k3 = exp(-d) - 1 + d (unbiased, never negative).

    Raises:
        SpecError: for another kind.
    """
    d = log_probs - reference
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return torch.expm1(-d) + d
    raise SpecError(f"kind={kind!r}: use 'k1', 'k2' or 'k3'")


def rewards_of_tokens(scores: Tensor, kl: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """Return PPO's reward of each token: minus the KL penalty, and the score of the completion at its last token.

    Ouyang et al., arXiv 2203.02155, equation 2.

    Args:
        scores: ``n``.
        kl: ``n s``, of :func:`kl_penalties`, without a gradient.
        mask: ``n s``, True for the completion's tokens.
        coefficient: of the penalty.
    """
    mask = mask.bool()
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).max(-1).values
    at_last = places == last[:, None]  # nowhere in an empty completion
    return torch.where(mask, -coefficient * kl, 0.0) + torch.where(at_last, scores[:, None], 0.0)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, ``n s`` each (generalised advantage estimation, arXiv 1506.02438, equation 16).

    The value after the last token is 0: a completion ends. Elsewhere than in the completion both are 0.

    Args:
        rewards, values: ``n s``, without a gradient.
        mask: ``n s``, True for the completion's tokens, which lie side by side.
        gamma: discount of a step.
        lam: weight of longer estimates.

    Raises:
        SpecError: for gamma or lam outside of [0, 1].
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise SpecError(f"{name}={value!r}: a number from 0 to 1")
    mask = mask.bool()
    values = torch.where(mask, values, 0.0)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    deltas = torch.where(mask, rewards + gamma * following - values, 0.0)
    advantages = torch.zeros_like(deltas)
    running = torch.zeros_like(deltas[:, 0])
    for place in reversed(range(deltas.shape[1])):
        running = torch.where(mask[:, place], deltas[:, place] + gamma * lam * running, 0.0)
        advantages[:, place] = running
    return advantages, advantages + values


def clipped_policy_losses(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    low: float = 0.2,
    high: float | None = None,
    dual: float | None = None,
    ratio_of: Literal["token", "sequence"] = "token",
) -> Tensor:
    """Return the losses of tokens, ``n s`` (PPO, arXiv 1707.06347, equation 7).

    Args:
        log_probs: of the sampled tokens under the policy.
        old: the same under the policy that sampled, without a gradient.
        advantages: ``n s``, or ``n 1`` for one a completion.
        mask: ``n s``, True for the completion's tokens.
        low, high: bounds of the ratio, 1 - low and 1 + high; ``high`` None: as ``low``. DAPO: 0.2 and 0.28 (arXiv
            2503.14476).
        dual: bound c > 1 of the loss of bad tokens, -c A (dual clip, arXiv 1912.09729, equation 5); None: none.
        ratio_of: ``"sequence"``: one ratio a completion, the geometric mean of its tokens' (GSPO, arXiv 2507.18071, equation 5).

    Raises:
        SpecError: for bounds out of range.
    """
    high = low if high is None else high
    if not 0 < low <= 1 or not high > 0:
        raise SpecError(
            f"low={low!r}, high={high!r}: the ratio is kept in [1 - low, 1 + high], so 0 < low <= 1 and high > 0"
        )
    if dual is not None and not dual > 1:
        raise SpecError(f"dual={dual!r}: a bound above 1, or None")
    if ratio_of not in ("token", "sequence"):
        raise SpecError(f"ratio_of={ratio_of!r}: use 'token' or 'sequence'")
    mask = mask.bool()
    difference = torch.where(mask, log_probs - old, 0.0)
    if ratio_of == "sequence":
        difference = (difference.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(difference)
    ratio = difference.exp()
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual * advantages), losses)
    return losses


def clipped_value_losses(values: Tensor, old: Tensor, returns: Tensor, clip: float | None = 0.2) -> Tensor:
    """Return the losses of a critic, ``n s``: half the larger squared error of the value and of the value near the old one.

    Args:
        values: the critic's now.
        old: the critic's when the advantages were estimated, without a gradient.
        returns: of :func:`gae`.
        clip: how far from ``old`` a value is believed; None: no bound.

    Raises:
        SpecError: for a clip that is not above 0.
    """
    errors = (values - returns).square()
    if clip is None:
        return errors / 2
    if not clip > 0:
        raise SpecError(f"clip={clip!r}: a number above 0, or None")
    near = old + (values - old).clamp(-clip, clip)
    return torch.maximum(errors, (near - returns).square()) / 2


def importance_weights(
    log_probs: Tensor,
    sampled: Tensor,
    mask: Tensor,
    *,
    level: Literal["token", "sequence"] = "token",
    low: float | None = None,
    high: float | None = 2.0,
    outside: Literal["truncate", "drop"] = "truncate",
) -> Tensor:
    """Return the weights that make up for a generator whose log-probabilities are not the trainer's: ``n s``, or ``n 1``.

    Truncated importance sampling: p of the trainer's old policy over p of the generator, kept within bounds.

    Args:
        log_probs: of the sampled tokens under the policy that was sampled from, as the trainer computes them; without a gradient.
        sampled: as the generator reported them.
        mask: ``n s``, True for the completion's tokens.
        level: a weight for each ``"token"``, or the product of all of a ``"sequence"``.
        low, high: the bounds; None: none.
        outside: weights beyond the bounds become the bound, or with ``"drop"`` 0.

    Raises:
        SpecError: for another level or treatment.
    """
    if level not in ("token", "sequence") or outside not in ("truncate", "drop"):
        raise SpecError(f"level={level!r}, outside={outside!r}: use 'token' or 'sequence', and 'truncate' or 'drop'")
    difference = torch.where(mask.bool(), log_probs - sampled, 0.0)
    weights = (difference if level == "token" else difference.sum(-1, keepdim=True)).exp()
    if outside == "truncate":
        return weights if low is None and high is None else weights.clamp(low, high)
    wrong = torch.zeros_like(weights, dtype=torch.bool)
    if low is not None:
        wrong = wrong | (weights < low)
    if high is not None:
        wrong = wrong | (weights > high)
    return weights.masked_fill(wrong, 0.0)
