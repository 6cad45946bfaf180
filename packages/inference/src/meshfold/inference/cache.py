"""Pool of keys and values of a rank, and attention that reads them page by page.

The pool has a tensor ``2 (pages + 1) kv_heads size d`` for each attention layer of this rank, with its heads; the last page takes
the rows that pad a batch. In bytes that is ``2 · (pages + 1) · size · Σ layers (kv_heads · d) · itemsize``. In eight bits the keys
of a token and a head share a scale in float32, and so do its values: d + 4 bytes instead of ``d · itemsize``. Attention reads the
decoded values, also of the newest token, so a text does not depend on when its tokens were computed.

In a forward every token is a separate row, ``t 1``: first the rows of running sequences, then chunks of prompts. Attention first
writes the keys and values of all rows. Then each row reads its sequence's, up to its own position. Rows of running sequences attend
by :mod:`meshfold.kernels.paged_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfold.kernels import (
    KeyValuePages,
    PagedLayer,
    PagedRows,
    apply_rotary,
    attend_and_keep,
    attend_chunk,
    pages_in_triton,
)

_MOST_SPLIT = 512
"""Sequences times heads of keys, each read by several programs, that a kernel counts; more are read by one program each."""


@dataclass(frozen=True)
class LayerShape:
    """Keys of one attention layer on this rank.

    Attributes:
        kv_heads: local heads of keys.
        d: elements of a head.
        dtype: of the values, in which attention computes.
    """

    kv_heads: int
    d: int
    dtype: torch.dtype


class Pool:
    """Keys and values of all layers of a rank.

    Attributes:
        arrived: int32 zeros, in which that kernel counts.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        pages: int,
        size: int,
        device: torch.device,
        form: str | None = None,
    ) -> None:
        """Args:
        layers: in the order in which the model calls them.
        pages: that sequences may use; there is one more for rows that count for nothing.
        size: tokens of a page.
        form: of the keys and values, one of :data:`meshfold.kernels.CACHE_FORMS`; None: the model's dtype.
        """
        self.pages, self.size, self.device = pages, size, device
        self.arrived = torch.zeros(_MOST_SPLIT, dtype=torch.int32, device=device)
        self.layers = [
            KeyValuePages.zeros((pages + 1, layer.kv_heads, size, layer.d), layer.dtype, form, device)
            for layer in layers
        ]

    @property
    def spare(self) -> int:
        """The page that no sequence has."""
        return self.pages

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for layer in self.layers for part in layer.parts)

    def clear(self) -> None:
        """Make all pages empty."""
        for layer in self.layers:
            for part in layer.parts:
                part.view(torch.uint8).zero_()

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: PagedRows,
        *,
        scale: float | None,
        window: int | None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Keep the keys and values of all rows, and attend.

        Args:
            layer: which.
            q: ``t heads d``.
            k, v: ``t kv_heads d``.
            rows: of this forward.
            scale: of the scores; 1/√d by default.
            window: a token sees itself and ``window - 1`` before; None: all before.
            rotary: cosines and sines ``t d`` that turn q and k first; None: they are turned, or do not turn.

        Returns:
            ``t heads d``.
        """
        pages = self.layers[layer]
        if rotary is not None and not self._turns(q, rows, rotary):
            q, k = (x.squeeze(1) for x in apply_rotary(q[:, None], k[:, None], *(each[:, None] for each in rotary)))
            rotary = None
        q, k, v = (x.to(pages.dtype) for x in (q, k, v))  # under autocast rotary queries and keys are wider than values
        singles = rows.tables.shape[0]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out = []
        if singles:
            first = slice(0, singles)
            if rows.together:  # each row writes its own once more: the same bits
                pages.keep(rows.page[first], rows.offset[first], k[first], v[first])
            given = (rows.page[first], rows.offset[first], rows.positions[first], rows.tables)
            new = (q[first], k[first], v[first], pages.kept, pages.scale)
            turns = (rotary, self.arrived)
            out.append(attend_and_keep(*new, *given, scale, window or 0, pages_in_triton(q), *turns))
        if singles < q.shape[0]:
            read = pages.keep(rows.page[singles:], rows.offset[singles:], k[singles:], v[singles:])
            k, v = (
                x if pages.scale is None else torch.cat((x[:singles], y)) for x, y in zip((k, v), read, strict=True)
            )
        for chunk in rows.chunks:
            these = slice(chunk.row, chunk.row + chunk.count)
            out.append(attend_chunk(q[these], k[these], v[these], pages, chunk, scale, window))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _turns(self, q: Tensor, rows: PagedRows, rotary: tuple[Tensor, Tensor]) -> bool:
        """Return True if the Triton kernel turns queries and keys as it attends: of single tokens alone, all of each head."""
        alone = rows.tables.shape[0] == q.shape[0] and not rows.together
        return alone and pages_in_triton(q) and rotary[0].shape[-1] == q.shape[-1]

    @property
    def fused(self) -> bool:
        """True if the Triton kernel computes single tokens in all layers; it finds the places of new keys in the tables."""
        return all(self.layer(number).fused for number in range(len(self.layers)))

    def layer(self, number: int) -> PagedLayer:
        """Return the attention of a layer."""
        pages = self.layers[number]
        return PagedLayer(pages, pages_in_triton(pages.kept.new_empty(0, dtype=pages.dtype)))
