"""Preference losses: a reward model's, the DPO family and KTO. Pure functions, one loss a pair or sequence.

With y the completion, x the prompt, and log-probabilities summed over the tokens of a completion::

    h     = log p(chosen|x) - log p(rejected|x) - (the same of the reference)
    DPO   = -log sigmoid(beta h)

Take the mean with :func:`meshfold.align.mean_of_sequences`, which averages over the pairs of the global batch. Formulas
are those of the papers; where TRL's differ, the docstring says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.align.means import global_mean
from meshfold.mesh import Group, SpecError, did_you_mean


def reward_losses(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, *, centering: float = 0.0) -> Tensor:
    """Return the losses of a reward model, ``n n -> n``: -log sigmoid(chosen - rejected - margin) (Bradley and Terry, 1952).

    Args:
        chosen, rejected: scores.
        margin: by how much the chosen is better (Llama 2, arXiv 2307.09288, section 3.2.2).
        centering: factor of (chosen + rejected)², which keeps scores around 0 (arXiv 2312.09244, section 2).

    Raises:
        SpecError: for a negative centering.
    """
    if centering < 0:
        raise SpecError(f"centering={centering!r}: a factor from 0 up")
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(difference) + centering * (chosen + rejected).square()


def _sigmoid(h: Tensor, beta: float, smoothing: float) -> Tensor:
    return -F.logsigmoid(beta * h) * (1 - smoothing) - F.logsigmoid(-beta * h) * smoothing


def _hinge(h: Tensor, beta: float, smoothing: float) -> Tensor:
    return torch.relu(1 - beta * h)


def _ipo(h: Tensor, beta: float, smoothing: float) -> Tensor:
    return (h - 1 / (2 * beta)).square()


def _robust(h: Tensor, beta: float, smoothing: float) -> Tensor:
    clean, flipped = -F.logsigmoid(beta * h), -F.logsigmoid(-beta * h)
    return ((1 - smoothing) * clean - smoothing * flipped) / (1 - 2 * smoothing)


DPO_LOSSES: Mapping[str, Callable[[Tensor, float, float], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
}
"""The losses of :func:`dpo_losses` by name, as functions of h, beta and label smoothing."""


def dpo_losses(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    lengths: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the losses of pairs, ``n n n n -> n``.

    Args:
        chosen, rejected: log-probabilities of the completions under the policy, summed over their tokens.
        reference_chosen, reference_rejected: the same under the reference, without a gradient.
        kind: ``"sigmoid"`` (DPO, arXiv 2305.18290; with smoothing cDPO), ``"hinge"`` (SLiC, arXiv 2305.10425), ``"ipo"`` (arXiv
            2310.12036; log-probabilities are divided by the lengths, as its authors and TRL do), ``"robust"`` (arXiv 2403.00409).
        beta: how strongly the policy is held to the reference.
        label_smoothing: the expected share of pairs with wrong labels: for sigmoid and robust, in [0, 0.5).
        lengths: tokens of the chosen and of the rejected completions, ``n`` each; ``"ipo"`` needs them.

    Raises:
        SpecError: for an unknown kind or a setting out of range.
    """
    if kind not in DPO_LOSSES:
        raise SpecError(f"kind={kind!r}: use {_names(DPO_LOSSES)}.{did_you_mean(kind, DPO_LOSSES)}")
    _check_beta(beta)
    if not 0 <= label_smoothing < 0.5:
        raise SpecError(f"label_smoothing={label_smoothing!r}: a share of the pairs, from 0 up and below 0.5")
    if label_smoothing and kind in ("hinge", "ipo"):
        raise SpecError(
            f"label_smoothing={label_smoothing!r} with kind={kind!r}, which has none: use 'sigmoid' or 'robust'"
        )
    of_chosen, of_rejected = chosen - reference_chosen, rejected - reference_rejected
    if kind == "ipo":
        if lengths is None:
            raise SpecError(
                "kind='ipo' without lengths: it compares log-probabilities a token, so give lengths=(chosen, rejected)"
            )
        of_chosen, of_rejected = (
            ratio / length.clamp(min=1) for ratio, length in zip((of_chosen, of_rejected), lengths, strict=True)
        )
    return DPO_LOSSES[kind](of_chosen - of_rejected, beta, label_smoothing)


def simpo_losses(
    chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """Return the losses of pairs without a reference, ``n n -> n``: -log sigmoid(beta (chosen - rejected) - gamma).

    SimPO, arXiv 2405.14734, equation 6.

    Args:
        chosen, rejected: log-probabilities of the completions, the mean over the tokens of each.
        beta: factor of their difference.
        gamma: the margin that the chosen completion should win by.
        label_smoothing: share of wrong labels.

    Raises:
        SpecError: for a setting out of range.
    """
    _check_beta(beta)
    return _sigmoid(chosen - rejected - gamma / beta, beta, label_smoothing)


def odds_ratio_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the odds ratio losses of pairs, ``n n -> n``: -log sigmoid(log odds(chosen) - log odds(rejected)), odds = p / (1 - p).

    ORPO (arXiv 2403.07691, equations 6 and 7) adds them, times lambda, to the loss of SFT on the chosen completions.

    Args:
        chosen, rejected: log-probabilities of the completions, the mean over the tokens of each.
    """
    odds = (chosen - _log_1m_exp(chosen)) - (rejected - _log_1m_exp(rejected))
    return -F.logsigmoid(odds)


def kto_baseline(mismatched: Tensor, counts: Tensor | None = None, group: Group | None = None) -> Tensor:
    """Return KTO's reference point: the mean log-ratio of completions of *other* prompts, 0 at least, without a gradient.

    Args:
        mismatched: ``n``, log p - log p of the reference, of completions that were put behind another prompt of the batch.
        counts: ``n``, those that count; None: all.
        group: the ranks that have different ones; all of them must call.
    """
    return global_mean(mismatched, counts, group).clamp(min=0)


def kto_losses(
    log_ratios: Tensor,
    desirable: Tensor,
    baseline: Tensor | float = 0.0,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the losses of completions that are good or bad, not paired: ``n n -> n`` (KTO, arXiv 2402.01306, equation 7).

    Args:
        log_ratios: log p - log p of the reference, summed over the tokens of each.
        desirable: True for good ones.
        baseline: of :func:`kto_baseline`.
        beta: how strongly the policy is held to the reference.
        desirable_weight, undesirable_weight: factors of their losses.

    Raises:
        SpecError: for a setting out of range.
    """
    _check_beta(beta)
    against = beta * (log_ratios - baseline)
    good = desirable_weight * (1 - torch.sigmoid(against))
    bad = undesirable_weight * (1 - torch.sigmoid(-against))
    return torch.where(desirable.bool(), good, bad)


def _log_1m_exp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, without cancellation (Mächler, 2012); x is kept from 0, where it is minus infinity."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    small = x > -0.6931471805599453
    near, far = (
        torch.where(small, x, -1.0),
        torch.where(small, -1.0, x),
    )  # the branch not taken gets no NaN in its gradient
    return torch.where(small, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise SpecError(f"beta={beta!r}: a number above 0")


def _names(table: Mapping[str, object]) -> str:
    *first, last = (repr(name) for name in table)
    return f"{', '.join(first)} or {last}"
