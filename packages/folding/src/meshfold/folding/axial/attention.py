"""Attention within rows whose columns are split over ranks, in the three ways of :class:`.AxialMode`.

========= ============================================================== =====================================================
way       forward                                                        backward
========= ============================================================== =====================================================
exchange  all-to-all to whole rows, attend, all-to-all back              the same, from the end
gather    all-gather keys and values                                     reduce-scatter their gradients
ring      keys and values pass from rank to rank                         once more, with the sums of their gradients
========= ============================================================== =====================================================

The pair bias moves from its own layout ``q:rows k:columns`` to that of the queries, with all keys; its gradient goes back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshfold.folding import functions
from meshfold.folding.axial.axes import Axes
from meshfold.folding.axial.overlap import begin, redistribute
from meshfold.folding.axial.ring import ring_attend
from meshfold.folding.primitives import Attention

LINE = {"a": 1, "n": 2}
BIAS = {"q": 1, "k": 2}
UPRIGHT = "q:rows k:columns"
"""Layout of a pair bias that is computed from the attended tensor itself."""
TRANSPOSED = "q:columns k:rows"
"""Layout of a pair bias that is computed from the transposed tensor."""


def attend_rows(
    axes: Axes,
    mha: Attention,
    norm: nn.Module,
    x: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    bias_layout: str = UPRIGHT,
) -> Tensor:
    """Attend within each row: ``b a n c -> b a n c``, a over ``axes.rows`` and n over ``axes.columns``.

    Args:
        axes: the axes of ``x``; ``turned`` for attention within columns, with everything transposed.
        mha: the projections.
        norm: applied to ``x`` first.
        x: this rank's block.
        mask: ``b a n``, whole on every rank, without padding; None: all count.
        bias: this rank's block of the pair bias, ``b q k h``.
        bias_layout: how it lies: :data:`UPRIGHT` or :data:`TRANSPOSED`.
    """
    exchanges = axes.keys == "exchange"
    coming = None
    if bias is not None:
        coming = begin(axes.move(bias_layout, "q k" if exchanges else "q:columns k", BIAS), bias)
    if exchanges:
        x = redistribute(axes.move("a:rows n:columns", "a:rows,columns n", LINE), x)
    x = norm(x)
    q, k, v = mha.project(x)
    key_bias = None
    if mask is not None:
        padding = axes.padded(mask.shape[-1]) - mask.shape[-1]
        own = axes.take(mask, 1, axes.all if exchanges else axes.rows)
        key_bias = functions.key_bias_of(own, torch.promote_types(q.dtype, torch.float32), padding)
    if axes.keys == "gather":
        move = axes.move("a:rows n:columns", "a:rows n", LINE)
        k, v = redistribute(move, torch.cat((k, v), -1)).chunk(2, -1)
    pair_bias = None if coming is None else coming.wait().permute(0, 3, 1, 2)
    if axes.keys == "ring":
        out = ring_attend(q, k, v, pair_bias, key_bias, axes.mesh, axes.columns)
    else:
        out = functions.attend(q, k, v, pair_bias, key_bias)
    y = mha.output(out, x)
    return redistribute(axes.move("a:rows,columns n", "a:rows n:columns", LINE), y) if exchanges else y
