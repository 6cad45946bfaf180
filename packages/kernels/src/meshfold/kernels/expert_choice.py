"""The choice of a softmax router and the sums that its balance losses need, each in one pass over the logits.

    probabilities  p = softmax(logits)
    weights        w = p of the k largest logits; normalized: w / sum(w)
    totals         tokens of each expert, sum(p) of each expert, sum(logsumexp(logits)²)

Computed in float32 (float64 for float64 logits).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.functions import once_differentiable
from meshfold.kernels.inputs import compute_dtype


def softmax_choice(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the k largest logits of each row: ``[n, e] -> index [n, k] int64, weights [n, k], probabilities [n, e]``.

    Args:
        logits: of n tokens.
        k: 1 to e.
        normalize: divide the weights of a token by their sum.

    Raises:
        ValueError: for another k or shape.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"softmax_choice takes logits [n, e] and k of 1 to e, got {list(logits.shape)} and k = {k}")
    if torch.compiler.is_compiling():
        return chosen(logits, k, normalize)
    index, weights, probabilities = _Choice.apply(logits, k, normalize)
    return index, weights, probabilities


def routing_totals(logits: Tensor, probabilities: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over tokens: ``[n, e], [n, e], [n, k] -> counts [e], sums of probabilities [e], sum of logsumexp(logits)² []``.

    Args:
        logits: of n tokens.
        probabilities: in the dtype of the results; they need not be the logits' softmax.
        index: of experts, all of them 0 to e - 1.
    """
    if torch.compiler.is_compiling():
        return totals(logits, probabilities, index)
    counts, sums, squares = _Totals.apply(logits, probabilities, index)
    return counts, sums, squares


class _Choice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
        index, weights, probabilities = dispatch.twin(chosen, logits)(logits, k, normalize)
        ctx.gradients, ctx.normalize, ctx.dtype = dispatch.twin(choice_gradients, logits), normalize, logits.dtype
        ctx.save_for_backward(probabilities, index)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        return index, weights, probabilities

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, dweights: Tensor | None, dprobabilities: Tensor | None) -> Any:
        if dweights is None and dprobabilities is None:
            return None, None, None
        probabilities, index = ctx.saved_tensors
        dlogits = ctx.gradients(dweights, dprobabilities, probabilities, index, ctx.normalize)
        return dlogits.to(ctx.dtype), None, None


class _Totals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, probabilities: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts, sums, squares = dispatch.twin(totals, logits)(logits, probabilities, index)
        ctx.save_for_backward(logits)
        ctx.mark_non_differentiable(counts)
        ctx.set_materialize_grads(False)
        return counts, sums, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, dsums: Tensor | None, dsquares: Tensor | None) -> Any:
        (logits,) = ctx.saved_tensors
        dlogits = None
        if dsquares is not None and ctx.needs_input_grad[0]:
            wide = logits.to(compute_dtype(logits))
            most = wide.logsumexp(1, keepdim=True)
            dlogits = ((wide - most).exp() * (2 * most * dsquares)).to(logits.dtype)
        return dlogits, None if dsums is None else dsums.expand(logits.shape), None


# The reference in plain torch: it defines every result and the signatures of the Triton version.


def chosen(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return index, weights and probabilities."""
    probabilities = logits.to(compute_dtype(logits)).softmax(-1)
    weights, index = probabilities.topk(k, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return index, weights, probabilities


def choice_gradients(
    dweights: Tensor | None, dprobabilities: Tensor | None, probabilities: Tensor, index: Tensor, normalize: bool
) -> Tensor:
    """Return the gradient of the logits ``n e`` in the dtype of the probabilities."""
    whole = torch.zeros_like(probabilities) if dprobabilities is None else dprobabilities
    if dweights is not None:
        if normalize:
            taken = probabilities.gather(1, index)
            total = taken.sum(1, keepdim=True)
            dweights = (dweights - (dweights * taken / total).sum(1, keepdim=True)) / total
        whole = whole.scatter_add(1, index, dweights)
    return probabilities * (whole - (whole * probabilities).sum(1, keepdim=True))


def totals(logits: Tensor, probabilities: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return counts, sums of probabilities and the sum of squares, in the dtype of the probabilities."""
    ones = torch.ones(index.numel(), dtype=probabilities.dtype, device=index.device)
    counts = torch.zeros_like(probabilities[0] if probabilities.shape[0] else probabilities.sum(0)).detach()
    squares = logits.to(probabilities.dtype).logsumexp(-1).square()
    return counts.scatter_add(0, index.flatten(), ones), probabilities.sum(0), squares.sum()
