"""The feed-forward of many experts on rows sorted by expert: grouped matmul, gated activation, grouped matmul."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshfold.experts.expert_rows import ExpertRows, RowSource
from meshfold.experts.grouped import grouped_matmul
from meshfold.kernels import swiglu, weighted_swiglu

Gate = Callable[[Tensor], Tensor]
"""From gate and up side by side (in any order) to the activation: ``[m, 2·ffn] -> [m, ffn]``."""


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The layout of a module's stacked expert parameters.

    Attributes:
        gate_up: the parameter's name in its module: ``[e, 2·ffn, h]``.
        down: ``[e, h, ffn]``.
        gate_up_bias: ``[e, 2·ffn]``; None without.
        down_bias: ``[e, h]``; None without.
        transposed: both matrices are transposed: ``[e, h, 2·ffn]`` and ``[e, ffn, h]``.
        interleaved: gate and up alternate along their dim; otherwise gate is its first half.
        gate: the gated activation.
    """

    gate_up: str
    down: str
    gate_up_bias: str | None = None
    down_bias: str | None = None
    transposed: bool = False
    interleaved: bool = False
    gate: Gate

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all stacked parameters."""
        return tuple(name for name in (self.gate_up, self.gate_up_bias, self.down, self.down_bias) if name is not None)

    @property
    def weighs(self) -> bool:
        """True if the activation can take the weights of rows: later operations are linear, so this weights outputs."""
        return self.gate is swiglu and self.down_bias is None


def feed_forward(layout: ExpertLayout, experts: nn.Module, rows: ExpertRows, *, sharing: int = 1) -> Tensor:
    """Run each expert on its rows: ``[m, h] -> [m, h]``, weighted if there are weights.

    Args:
        layout: of the parameters.
        experts: the module that has them; their dim 0 is e.
        rows: with weights only for a layout that :attr:`ExpertLayout.weighs`.
        sharing: the inner dim of the experts is split into so many parts; each rank adds 1/sharing of the last bias.
    """

    def parameter(name: str) -> Tensor:
        return experts.get_parameter(name) if rows.parameters is None else rows.parameters[name]

    def linear(x: Tensor, weight: str, bias: str | None, parts: int = 1, source: RowSource | None = None) -> Tensor:
        matrix = parameter(weight)
        turned = matrix if layout.transposed else matrix.transpose(1, 2)
        y = grouped_matmul(x, turned, rows.ends, rows.counts, source)
        if bias is None:
            return y
        shift = _of_rows(parameter(bias), rows.ends, x.shape[0])
        return y + (shift if parts == 1 else shift / parts)

    both = linear(rows.values, layout.gate_up, layout.gate_up_bias, source=rows.source)
    hidden = layout.gate(both) if rows.weights is None else weighted_swiglu(both, rows.weights, rows.filled)
    return linear(hidden, layout.down, layout.down_bias, sharing)


def _of_rows(bias: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Return the bias of each row's expert: ``[e, b] -> [m, b]``; rows after the last run get zeros, and give no gradient."""
    expert = torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)
    return F.pad(bias, (0, 0, 0, 1)).index_select(0, expert)
