"""Dropout that is the same under every layout, with a mask that is shared along a dim or with one for each element."""

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
    """Give every dropout of a stack its own random stream, which is the same in any model and on any stage of a pipeline."""
    for name, module in stack.named_modules():
        if isinstance(module, SharedDropout):
            module.name = f"{type(stack).__name__}.{name}"


class SharedDropout(nn.Module):
    """Dropout of ``* i j c`` with one mask for all i (row-wise), for all j (column-wise) or for each element, times 1/(1−p).

    In a ``with dropout_stream(seed, step)`` an element is kept by its global position, so every layout drops the same ones. Without
    a stream, which only one rank may do, torch's generator decides.

    Attributes:
        name: gives it a stream of its own; stacks name theirs.
    """

    def __init__(self, p: float, shared: str = "rows") -> None:
        """Args:
        p: probability to drop.
        shared: ``"rows"``: one mask for all i. ``"columns"``: one for all j. ``"nothing"``: each element has its own.

        Raises:
            ValueError: for another p or another word.
        """
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout p={p}: give a probability from 0 to 1")
        if shared not in ("rows", "columns", "nothing"):
            raise ValueError(f"shared={shared!r}: use 'rows', 'columns' or 'nothing'")
        self.p, self.shared, self.name = p, shared, ""
        self.axes: Axes = WHOLE

    def extra_repr(self) -> str:
        return f"p={self.p}, shared={self.shared!r}"

    def forward(self, x: Tensor) -> Tensor:
        """``* i j c -> * i j c``; a local block."""
        if not self.training or self.p == 0.0:
            return x
        shape = list(x.shape)
        if self.shared != "nothing":
            shape[-3 if self.shared == "rows" else -2] = 1
        if x.is_meta:  # a mask takes many operators, and little memory
            return x * x.new_empty(shape)
        ones = torch.ones(shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        try:
            draw = next_dropout_draw(self.name)
        except MeshfoldError:
            if self.axes.is_split:
                raise
            return x * functional.dropout(ones, self.p).to(x.dtype)
        lead = x.shape[:-3].numel()
        first_lead = draw.first_row * (lead // max(x.shape[0], 1)) if x.dim() > 3 else draw.first_row
        lines = torch.arange(first_lead, first_lead + lead, device=x.device)
        if self.shared != "rows":
            lines = self._positions(lines, x.shape[-3], self.row_axes)
        if self.shared != "columns":
            lines = self._positions(lines, x.shape[-2], self.axes.columns)
        mask = kernels.dropout(ones.flatten(0, -2), self.p, draw.seed, draw.key, lines.flatten())
        return x * mask.view(shape).to(x.dtype)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes that split i."""
        return self.axes.rows

    def _positions(self, lines: Tensor, length: int, axes: tuple[str, ...]) -> Tensor:
        """Append a dim with the global positions of this rank's block: ``.. -> .. length``."""
        first = self.axes.index(axes) * length
        return lines.mul(_LINE).unsqueeze(-1) + torch.arange(first, first + length, device=lines.device)


class ResidueDropout(SharedDropout):
    """Dropout of a single representation ``b r c``, r over all axes, times 1/(1−p); each element has its own mask."""

    def __init__(self, p: float) -> None:
        """``p``: probability to drop."""
        super().__init__(p, "columns")

    @property
    def row_axes(self) -> tuple[str, ...]:
        return self.axes.all

    def forward(self, x: Tensor) -> Tensor:
        """``b r c -> b r c``; this rank's residues."""
        return super().forward(x.unsqueeze(-2)).squeeze(-2)
