"""Rows of a forward over pages of keys and values: first single tokens of many sequences, then chunks of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfold.kernels.paged_attention import KeyValuePages, attend_pages, masked_attention


@dataclass(frozen=True, eq=False)
class PagedChunk:
    """Rows of a batch that are a chunk of a prompt.

    Attributes:
        row: the first of them.
        count: how many.
        start: the position of the first.
        pages: int64, those that hold the tokens up to the last row.
    """

    row: int
    count: int
    start: int
    pages: Tensor


@dataclass(frozen=True, eq=False)
class PagedRows:
    """The rows of a forward, as attention sees them; tensors on the device.

    Attributes:
        page, offset: int64 ``t``, where the keys of each row go.
        positions: int64 ``t``.
        tables: int64 ``b w``: the pages of the first b rows, each of another sequence.
        chunks: the other rows.
        together: the first rows may be of one sequence: keys and values of all are written before any are read.
    """

    page: Tensor
    offset: Tensor
    positions: Tensor
    tables: Tensor
    chunks: Sequence[PagedChunk] = ()
    together: bool = False


class PagedLayer:
    """Attention of one layer with single tokens, as an operation that torch.compile leaves whole within a block's graph.

    Attributes:
        rows: of the forward.
    """

    rows: PagedRows

    def __init__(self, pages: KeyValuePages, fused: bool) -> None:
        """Args:
        pages: keys and values of the layer.
        fused: by the Triton kernel.
        """
        self.kept, self.scale, self.dtype, self.fused = pages.kept, pages.scale, pages.dtype, fused

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None) -> Tensor:
        """Keep keys and values ``b kv_heads d``, and attend with q ``b heads d``; ``scale``: of the scores, 1/√d by default."""
        q, k, v = (x.to(self.dtype) for x in (q, k, v))
        rows, scale = self.rows, q.shape[-1] ** -0.5 if scale is None else scale
        given = (rows.page, rows.offset, rows.positions, rows.tables)
        found: Tensor = attend_pages(q, k, v, self.kept, self.scale, *given, scale, window or 0, self.fused)
        return found


def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, pages: KeyValuePages, chunk: PagedChunk, scale: float, window: int | None
) -> Tensor:
    """Attend with a chunk of one sequence: ``n heads d`` -> ``n heads d``.

    Args:
        q: queries.
        k, v: the chunk's own, ``n kv_heads d``, as they were kept; earlier ones are read from the pages.
        pages: of the layer.
        chunk: which rows and pages.
        scale: of the scores.
        window: a token sees itself and ``window - 1`` before; None: all before.
    """
    stop = chunk.start + chunk.count
    _, _, kv_heads, _, d = pages.kept.shape
    if chunk.start:
        k, v = (part.transpose(0, 1).reshape(kv_heads, -1, d)[:, :stop] for part in pages.read(chunk.pages))
    else:
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    seen = None
    if chunk.start or (window is not None and window < stop):
        back = torch.arange(chunk.start, stop, device=q.device)[:, None] - torch.arange(stop, device=q.device)
        seen = back >= 0
        if window is not None:
            seen = seen & (back < window)
    return masked_attention(q.transpose(0, 1)[None], k[None], v[None], seen, scale)[0].transpose(0, 1)
