"""Forward of whole sequences, for models whose attention cannot run over pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshfold.inference.requests import Step
from meshfold.inference.runner import Sampled, draw
from meshfold.mesh.model_io import eval_mode
from meshfold.mesh.tracking import uncompiled


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
