"""Interface of a runner of steps, and the sampling of the tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshfold.inference.requests import Span, Step
from meshfold.inference.sampling import sample, sampling_rows

Sampled = tuple[list[int], list[float]]
"""tokens and log-probs"""


class Runner(Protocol):
    """Runs steps."""

    def run(self, step: Step) -> Sampled:
        """Run a step; return what is sampled, of the spans that sample, in their order."""


def draw(logits: Tensor, spans: Sequence[Span]) -> Sampled:
    """Sample the next token of every span from logits ``b v``."""
    if not spans:
        return [], []
    rows = sampling_rows([span.request.sampling for span in spans], logits.device)
    positions = torch.tensor([span.stop for span in spans], device=logits.device)
    tokens, logprobs = sample(logits, positions, rows, seen_words(spans, logits.shape[-1], logits.device))
    return tokens.tolist(), logprobs.tolist()


def seen_words(spans: Sequence[Span], words: int, device: torch.device) -> Tensor | None:
    """Return ``b v`` bool, the words that each sequence has; None if no request has a penalty on them."""
    if all(span.request.sampling.repetition_penalty == 1.0 for span in spans):
        return None
    seen = torch.zeros(len(spans), words, dtype=torch.bool, device=device)
    for row, span in enumerate(spans):
        seen[row, torch.tensor(span.request.slice(0, span.stop), device=device)] = True
    return seen
