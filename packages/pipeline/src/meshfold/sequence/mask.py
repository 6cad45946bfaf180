"""Masks as intervals: any combination lets a query see one interval of global key positions."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Mask:
    """A mask over a sequence of ``length`` tokens.

    Attributes:
        length: tokens of the sequence; what lies beyond is padding, which neither sees nor is seen.
        causal: a token sees no later one.
        window: a token sees those less than ``window`` away: itself and window - 1 earlier ones (and as many
            later ones if the mask is not causal). None: all.
        documents: cumulative lengths of packed documents; a token sees only its own. None: one document.
    """

    length: int
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def visible(self, position: int) -> tuple[int, int]:
        """Return the interval [first, stop) of keys that the query at ``position`` sees; empty for padding."""
        if position >= self.length:
            return (self.length, self.length)
        first, stop = 0, self.length
        if self.documents is not None:
            document = bisect_right(self.documents, position) - 1
            first, stop = self.documents[document], self.documents[document + 1]
        if self.causal:
            stop = min(stop, position + 1)
        if self.window is not None:
            first = max(first, position - self.window + 1)
            stop = min(stop, position + self.window)
        return first, stop


def dense(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the mask as a bool tensor ``s, t -> s t``: the keys at these positions that each query sees."""
    i, j = queries.unsqueeze(-1), keys.unsqueeze(0)
    seen = (i < mask.length) & (j < mask.length)
    if mask.causal:
        seen &= j <= i
    if mask.window is not None:
        seen &= (i - j).abs() < mask.window
    if mask.documents is not None:
        bounds = torch.tensor(mask.documents, dtype=torch.int64, device=queries.device)
        seen &= torch.searchsorted(bounds, i, right=True) == torch.searchsorted(bounds, j, right=True)
    return seen
