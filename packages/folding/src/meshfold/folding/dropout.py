"""Dropout whose mask is shared along a dim, and the same under every layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshfold import kernels
from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.mesh import MeshfoldError
from meshfold.mesh.random import next_dropout_draw

_LINE = 1 << 24  # positions that a line of a mask may have: masks do not depend on how far a tensor is padded


def name_dropouts(stack: nn.Module) -> None:
    """Give every dropout of a stack a stream of its own, which is the same in any model and on any stage of a pipeline."""
    for name, module in stack.named_modules():
        if isinstance(module, SharedDropout):
            module.name = f"{type(stack).__name__}.{name}"


class SharedDropout(nn.Module):
    """Dropout of ``* i j c`` with one mask for all i (row-wise) or for all j (column-wise), times 1/(1−p).

    In a ``with dropout_stream(seed, step)`` an element is kept by its global position, so every layout drops the same ones. Without
    a stream, which only one rank may do, torch's generator decides.

    Attributes:
        name: gives it a stream of its own; stacks name theirs.
    """

    def __init__(self, p: float, shared: str = "rows") -> None:
        """Args:
        p: probability to drop.
        shared: ``"rows"``: one mask for all i. ``"columns"``: one for all j.

        Raises:
            ValueError: for another p or another word.
        """
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout p={p}: give a probability from 0 to 1")
        if shared not in ("rows", "columns"):
            raise ValueError(f"shared={shared!r}: use 'rows' or 'columns'")
        self.p, self.shared, self.name = p, shared, ""
        self.axes: Axes = WHOLE

    def extra_repr(self) -> str:
        return f"p={self.p}, shared={self.shared!r}"

    def forward(self, x: Tensor) -> Tensor:
        """``* i j c -> * i j c``; a local block."""
        if not self.training or self.p == 0.0:
            return x
        dim, axes = (-3, self.axes.columns) if self.shared == "rows" else (-2, self.axes.rows)
        shape = list(x.shape)
        shape[dim] = 1
        ones = torch.ones(shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        try:
            draw = next_dropout_draw(self.name)
        except MeshfoldError:
            if self.axes.is_split:
                raise
            return x * functional.dropout(ones, self.p).to(x.dtype)
        lead, length = x.shape[:-3].numel(), x.shape[-2] if dim == -3 else x.shape[-3]
        first_lead = draw.first_row * (lead // max(x.shape[0], 1)) if x.dim() > 3 else draw.first_row
        first = self.axes.mesh.index(*axes) * length
        rows = torch.arange(lead, device=x.device).add_(first_lead).mul_(_LINE).unsqueeze(1)
        rows = rows + torch.arange(first, first + length, device=x.device)
        mask = kernels.dropout(ones.flatten(0, -2), self.p, draw.seed, draw.key, rows.flatten())
        return x * mask.view(shape).to(x.dtype)
