"""Runners of steps: their interface, the sampling of a step's tokens, and one for models whose attention cannot run over pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshfold.inference.requests import Span, Step
from meshfold.inference.sampling import sample, sampling_rows
from meshfold.mesh.model_io import eval_mode
from meshfold.mesh.tracking import uncompiled

Sampled = tuple[list[int], list[float]]
"""tokens and log-probs"""


class Runner(Protocol):
    """Runs steps; ``device``: of what it computes."""

    device: torch.device

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


@dataclass
class WholeForward:
    """Forward that computes all tokens of every sequence again, for any causal model under any spec.

    Attributes:
        model: a module, or a pipeline of its stages.
        device: of the ids.
    """

    model: Any
    device: torch.device
    module: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.module = self.model if isinstance(self.model, nn.Module) else self.model.module

    def run(self, step: Step) -> Sampled:
        """Run a step: a batch of the sequences that sample, filled up on the right."""
        spans = [span for span in step.spans if span.samples]
        if not spans:
            return [], []
        longest = max(span.stop for span in spans)
        listed = [[*span.request.slice(0, span.stop), *[0] * (longest - span.stop)] for span in spans]
        with torch.no_grad(), eval_mode(self.module), uncompiled():
            output = self.model(torch.tensor(listed, device=self.device))
        logits = getattr(output, "logits", output)
        last = torch.tensor([span.stop - 1 for span in spans], device=logits.device)
        return draw(logits[torch.arange(len(spans), device=logits.device), last], spans)
