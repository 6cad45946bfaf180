"""Choice of tokens from parts of the words, against an argmax and a log-softmax of all of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from meshfold.kernels import merge_words, random_bits, word_parts
from meshfold.kernels.random_bits import stream
from meshfold.kernels.word_choice import log_exponential


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("cuts", [(0, 37), (0, 10, 20, 37), (0, 37, 37)])
def test_parts_of_the_words_merge_into_the_choice_among_all(cuts: tuple[int, ...], noisy: bool) -> None:
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 37, generator=random, dtype=torch.float64)
    logits[0, [9, 10, 30]] = 7.0  # the first of equal ones is taken
    divisor = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 3.0], dtype=torch.float64)
    states = stream(random_bits(5, 6, torch.arange(6)), 9) if noisy else None
    draws = torch.tensor([False, True, True, True, False, True]) if noisy else None
    pairs = itertools.pairwise(cuts)
    parts = [word_parts(logits[:, a:b], divisor, a, states, draws) for a, b in pairs]  # type: ignore[arg-type]
    tokens, logprobs = merge_words(torch.stack(parts))
    scores = logits / divisor[:, None]
    chosen = scores
    if states is not None and draws is not None:
        noise = log_exponential(states, 37)  # type: ignore[arg-type]
        chosen = torch.where(draws[:, None], scores - noise, scores)
    assert torch.equal(tokens, chosen.argmax(-1)) and tokens[0] == 9
    wanted = scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs, wanted, atol=1e-12)


def test_half_precision_is_widened_first() -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, logprobs = merge_words(word_parts(logits, torch.ones(2))[None])
    wanted = logits.float().log_softmax(-1)
    assert torch.equal(tokens, wanted.argmax(-1))
    assert torch.allclose(logprobs, wanted.amax(-1), atol=1e-6) and logprobs.dtype == torch.float32
