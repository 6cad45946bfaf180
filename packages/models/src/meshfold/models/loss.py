"""The loss of a causal language model: each position predicts the next token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import SpecError
from meshfold.mesh.model_io import IGNORE_INDEX


class CausalLMLoss(nn.Module):
    """Cross entropy with the next token of the same sequence, in float32 at least.

    Shapes:
        logits ``m v``, labels ``b s`` with m = b·s -> scalar

    ``causal_lm_loss`` tells whoever shards a model that this module may be replaced by a vocab-parallel one with the
    same forward. With ``shifts = False`` labels come shifted already, as where the tokens of a sequence are dealt to ranks.
    Computed by ``torch.nn.functional.cross_entropy``: the reference that the sharded losses meet.
    """

    causal_lm_loss = True
    shifts = True

    def __init__(
        self, *, ignore_index: int = IGNORE_INDEX, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> None:
        """Args:
            ignore_index: label of a token that does not count.
            label_smoothing: share of the target spread evenly over the vocabulary, in [0, 1).
            z_loss: weight of log²(Z) of each token that counts (Chowdhery et al., arXiv 2204.02311, section 5).

        Raises:
            SpecError: for a share or a weight out of range.
        """
        super().__init__()
        if not 0.0 <= label_smoothing < 1.0:
            raise SpecError(
                f"label_smoothing={label_smoothing!r}: a share of the target, from 0 up and below 1"
            )
        if z_loss < 0.0:
            raise SpecError(f"z_loss={z_loss!r}: a weight, from 0 up")
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the labels that count; 0 where none does."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        shifted = F.pad(labels[:, 1:], (0, 1), value=self.ignore_index) if self.shifts else labels
        targets = shifted.reshape(-1)
        counts = targets != self.ignore_index
        total = F.cross_entropy(
            wide,
            targets,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        if self.z_loss:
            total = total + self.z_loss * (wide.logsumexp(-1).square() * counts).sum()
        return total / counts.sum().clamp(min=1)

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, z_loss={self.z_loss}"
        )
