"""The merge of partial attention in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    part_lse = part_lse.to(lse.dtype)
    highest = torch.maximum(lse, part_lse)
    # Where neither side has seen a key, the difference of two infinities would be no number; such a row stays zero.
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    kept, added = (lse - shift).exp_(), (part_lse - shift).exp_()
    both = kept + added
    scale = both.reciprocal().masked_fill_(both == 0.0, 0.0)
    out.mul_((kept * scale).transpose(1, 2).unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (added * scale).transpose(1, 2).unsqueeze(-1))
    lse.copy_(shift + both.log())
