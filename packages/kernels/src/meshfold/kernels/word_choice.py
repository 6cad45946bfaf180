"""Choice of the next token of each row from logits, whole or of some of the words, without copies of them in float32.

A row draws the word with the largest ``score - log(e)``: ``score = logit / temperature``, ``e`` exponentially distributed, a
function of (state of the row, word). Without noise that is the likeliest word; among equal ones the first. What some words say
about a row is five numbers, and those of all parts of the words merge into its choice: ranks that split the words exchange these.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from meshfold.kernels.inputs import compute_dtype
from meshfold.kernels.random_bits import bits_of

_MOST = (1 << 63) - 1
_MOST_WORDS = 1 << 24  # whole numbers that float32 has


def word_parts(
    logits: Tensor,
    divisor: Tensor,
    first: int = 0,
    states: Tensor | None = None,
    draws: Tensor | None = None,
) -> Tensor:
    """Return what words say about each row's choice: ``b 5`` in float32 (float64 for float64 logits).

    The five are the largest score with noise, its word, its score, the largest score, and the sum of ``exp(score - largest)``.

    Args:
        logits: ``b v``, of consecutive words; none of them is allowed.
        divisor: ``b``, of the logits: temperatures.
        first: number of the first word.
        states: int64 ``b``, of the random numbers; None: no row has noise.
        draws: bool ``b``, rows that have noise.
    """
    if _fuses(logits, first):
        from meshfold.kernels.word_choice_triton import launch_merge, launch_parts  # which need Triton

        found = launch_parts(logits, divisor, first, states, draws)
        return found[0] if found.shape[0] == 1 else launch_merge(found)
    wide = compute_dtype(logits)
    scores = logits.to(wide) / divisor.to(wide).unsqueeze(1)
    b, words = scores.shape
    if not words:
        return scores.new_tensor([-torch.inf, 0.0, -torch.inf, -torch.inf, 0.0]).expand(b, 5).clone()
    chosen = scores
    if states is not None and draws is not None:
        chosen = torch.where(draws.unsqueeze(1), scores - log_exponential(states, words, first), scores)
    at = chosen.argmax(-1, keepdim=True)
    top = scores.amax(-1, keepdim=True)
    total = (scores - top).exp().sum(-1, keepdim=True)
    return torch.cat((chosen.gather(1, at), (at + first).to(wide), scores.gather(1, at), top, total), 1)


def choose_words(
    logits: Tensor, divisor: Tensor, states: Tensor | None = None, draws: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return tokens and log-probs, as :func:`merge_words`, from the logits of all words; arguments as of :func:`word_parts`."""
    if _fuses(logits, 0):
        from meshfold.kernels.word_choice_triton import launch_choice, launch_parts  # which need Triton

        return launch_choice(launch_parts(logits, divisor, 0, states, draws))
    return merge_words(word_parts(logits, divisor, 0, states, draws).unsqueeze(0))


def merge_words(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens, int64 ``b``, and their log-probs without noise, from the parts ``n b 5`` of all words in their order."""
    if parts.is_cuda and parts.dtype == torch.float32 and find_spec("triton") is not None:
        from meshfold.kernels.word_choice_triton import launch_choice  # which needs Triton

        return launch_choice(parts)
    best = parts[..., 0].argmax(0, keepdim=True)
    word, score = (parts[..., i].gather(0, best)[0] for i in (1, 2))
    tops = parts[..., 3]
    top = tops.amax(0)
    total = (parts[..., 4] * (tops - top).exp()).sum(0)
    return word.to(torch.int64), score - top - total.log()


def log_exponential(states: Tensor, words: int, first: int = 0) -> Tensor:
    """Return logarithms of exponentially distributed numbers, ``b words`` in float32, for (state, word).

    Args:
        states: int64 ``b``, as of :func:`meshfold.kernels.random_bits.stream`.
        words: how many.
        first: number of the first.
    """
    word = torch.arange(first, first + words, device=states.device)
    uniform = ((bits_of(states.unsqueeze(1), word) >> 1) & _MOST).to(torch.float32) * 2.0**-63
    # Close to 0 float32 has all the digits it needs; 1 - 2**-24 is the largest number below 1.
    uniform = uniform.clamp(2.0**-63, 1 - 2.0**-24)
    return (-torch.log1p(-uniform)).log()


def _fuses(logits: Tensor, first: int) -> bool:
    fits = logits.is_cuda and logits.dtype in (torch.float32, torch.bfloat16, torch.float16) and logits.stride(-1) == 1
    return fits and 0 < logits.shape[1] < _MOST_WORDS - first and find_spec("triton") is not None
