"""What a causal language model returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CausalLMOutput:
    """The result of one forward.

    Attributes:
        loss: mean over the labels that count, a scalar; None when no labels were given.
        logits: ``b s v`` when no labels were given; with labels the head's output as it stands, ``m v``. A sharded model
            puts them together when they are read (:mod:`meshfold.mesh.model_io.lazy_tensor`).
    """

    loss: Tensor | None
    logits: Tensor
