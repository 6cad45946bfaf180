"""Output of a causal language model, and its loss: each position predicts the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.kernels.fuse import LazyLogits
from meshfold.mesh import SpecError
from meshfold.mesh.model_io import IGNORE_INDEX


@dataclass(frozen=True, kw_only=True)
class CausalLMOutput:
    """The result of one forward.

    Attributes:
        loss: mean over the labels that count, a scalar; None when no labels were given.
        logits: ``b s v`` when no labels were given; with labels the head's own output, ``m v``. A sharded model puts them together
            when they are read (:mod:`meshfold.mesh.model_io.lazy_tensor`).
    """

    loss: Tensor | None
    logits: Tensor


class CausalLMLoss(nn.Module):
    """Cross entropy with the next token of the same sequence, in float32 at least.

    Shapes:
        logits ``m v``, labels ``b s`` with m = b·s -> scalar

    ``causal_lm_loss`` tells code that shards a model that a vocab-parallel module with the same forward may replace this one.
    With ``shifts = False`` labels are shifted already, as for sequences in token shards. Computed by
    ``torch.nn.functional.cross_entropy``: the reference for the sharded losses.
    """

    causal_lm_loss = True
    shifts = True

    def __init__(self, *, ignore_index: int = IGNORE_INDEX, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        """Args:
            ignore_index: label of a token that does not count.
            label_smoothing: share of the target spread evenly over the vocabulary, in [0, 1).
            z_loss: weight of log²(Z) of each token that counts (Chowdhery et al., arXiv 2204.02311, section 5).

        Raises:
            SpecError: for a share or a weight out of range.
        """
        super().__init__()
        if not 0.0 <= label_smoothing < 1.0:
            raise SpecError(f"label_smoothing={label_smoothing!r}: give a fraction from 0 to below 1")
        if z_loss < 0.0:
            raise SpecError(f"z_loss={z_loss!r}: give a weight from 0 up")
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over the labels that count; 0 where none does."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        shifted = F.pad(labels[:, 1:], (0, 1), value=self.ignore_index) if self.shifts else labels
        targets = shifted.reshape(-1)
        counts = targets != self.ignore_index
        settings: dict[str, Any] = dict(ignore_index=self.ignore_index, label_smoothing=self.label_smoothing)
        if self.z_loss and isinstance(wide, LazyLogits):  # F.cross_entropy has no z-loss
            total = wide.cross_entropy(targets, **settings, z_loss=self.z_loss, reduction="sum")
            return total / counts.sum().clamp(min=1)
        total = F.cross_entropy(wide, targets, **settings, reduction="sum")
        if self.z_loss:
            total = total + self.z_loss * (wide.logsumexp(-1).square() * counts).sum()
        return total / counts.sum().clamp(min=1)

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, z_loss={self.z_loss}"
