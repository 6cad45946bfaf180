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

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshfold.folding import functions
from meshfold.folding.axial.axes import Axes
from meshfold.folding.axial.overlap import begin, redistribute
from meshfold.folding.axial.ring import ring_attend
from meshfold.folding.memory import MemorySettings, Parts, run_parts, some_lines
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
    into: Tensor | None = None,
) -> Tensor:
    """Attend within each row: ``b a n c -> b a n c``, a over ``axes.rows`` and n over ``axes.columns``.

    Rows go in parts that keep to ``axes.memory``.

    Args:
        axes: the axes of ``x``; ``turned`` for attention within columns, with everything transposed.
        mha: the projections.
        norm: applied to ``x`` first.
        x: this rank's block.
        mask: ``b a n``, whole on every rank, without padding; None: all count.
        bias: this rank's block of the pair bias, ``b q k h``.
        bias_layout: how it lies: :data:`UPRIGHT` or :data:`TRANSPOSED`.
        into: what the result is added to, in place; without gradients only.

    Returns:
        The result, or ``into``.
    """
    exchanges = axes.keys == "exchange"
    coming = None
    if bias is not None:
        coming = begin(axes.move(bias_layout, "q k" if exchanges else "q:columns k", BIAS), bias)
    parts = row_parts(axes, mha, x)
    own = None if mask is None else axes.take(mask, 1, axes.all if exchanges else axes.rows)

    def arrived() -> Tensor | None:
        return None if coming is None else coming.wait().permute(0, 3, 1, 2)

    if parts.is_whole:
        y = _attend(axes, mha, norm, x, own, arrived)
        return y if into is None else into.add_(y)
    # Rows that the exchange sends to one rank are a cell: a part has some rows of every cell.
    cells = axes.mesh.size(*axes.columns) if exchanges else 1
    x = x.unflatten(1, (cells, parts.length))
    pair_bias = arrived()

    def compute(first: int, size: int) -> Tensor:
        some = x.narrow(2, first, size).flatten(1, 2)
        some_own = None if own is None else own.narrow(1, first, size)
        made: Tensor = _attend(axes, mha, norm, some, some_own, lambda: pair_bias).unflatten(1, (cells, size))
        return made

    target = None if into is None else into.unflatten(1, (cells, parts.length))
    y = run_parts(parts, compute, 2, target)
    return y.flatten(1, 2) if into is None else into


def pair_bias(memory: MemorySettings, norm: nn.Module, linear: nn.Module, z: Tensor) -> Tensor:
    """Return ``linear(norm(z))``, some rows at a time: ``b i j c -> b i j h``."""
    parts = Parts.of(memory, z.shape[1], z.shape[0] * z.shape[2] * 2 * z.shape[3] * z.element_size())

    def compute(first: int, size: int) -> Tensor:
        bias: Tensor = linear(norm(some_lines(z, 1, first, size)))
        return bias

    return run_parts(parts, compute, 1)


def row_parts(axes: Axes, mha: Attention, x: Tensor) -> Parts:
    """Return the parts of :func:`attend_rows` for a block ``x``, in rows as they are while they attend."""
    b, a, n, c = x.shape
    if axes.keys == "exchange":
        size = axes.mesh.size(*axes.columns)
        a, n = a // size, n * size
    keys = n if axes.keys != "gather" else n * axes.mesh.size(*axes.columns)
    width, item = mha.no_heads * mha.c_hidden, x.element_size()
    line = b * (n * (3 * c + 6 * width) + 4 * keys * width) * item
    logits = functions.logit_bytes(x, b * mha.no_heads * n * keys)
    if axes.memory.chunk_bytes is not None and axes.keys != "ring":
        logits = min(logits, axes.memory.chunk_bytes)  # queries are divided too
    return Parts.of(axes.memory, a, line + logits)


def _attend(
    axes: Axes,
    mha: Attention,
    norm: nn.Module,
    x: Tensor,
    own: Tensor | None,
    arrived: Callable[[], Tensor | None],
) -> Tensor:
    """Attend within some rows; ``own``: their mask, whole rows; ``arrived`` returns the pair bias ``b h q k``."""
    exchanges = axes.keys == "exchange"
    if exchanges:
        x = redistribute(axes.move("a:rows n:columns", "a:rows,columns n", LINE), x)
    x = norm(x)
    q, k, v, logits = mha.project(x)
    key_bias = None
    if own is not None:
        padding = axes.padded(own.shape[-1]) - own.shape[-1]
        key_bias = functions.key_bias_of(own, torch.promote_types(q.dtype, torch.float32), padding)
    if axes.keys == "gather":
        move = axes.move("a:rows n:columns", "a:rows n", LINE)
        k, v = redistribute(move, torch.cat((k, v), -1)).chunk(2, -1)
    pair_bias = arrived()
    if axes.keys == "ring":
        out = ring_attend(q, k, v, pair_bias, key_bias, axes.mesh, axes.columns)
    else:
        out = functions.attend(q, k, v, pair_bias, key_bias, axes.memory.chunk_bytes)
    y = mha.output(out, x, logits)
    return redistribute(axes.move("a:rows,columns n", "a:rows n:columns", LINE), y) if exchanges else y
