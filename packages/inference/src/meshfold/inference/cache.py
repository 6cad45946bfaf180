"""Pool of keys and values of a rank, and attention that reads them page by page.

The pool has a tensor ``2 (pages + 1) kv_heads size d`` for each attention layer of this rank, with its heads; the last page takes
the rows that fill up a batch. In bytes that is ``2 · (pages + 1) · size · Σ layers (kv_heads · d) · itemsize``. In eight bits
the keys of a token and a head share a scale in float32, and so do its values: d + 4 bytes in the place of ``d · itemsize``.
Attention sees what the codes stand for, of the newest token too, so a text does not depend on when its tokens were computed.

In a forward every token is a row of its own, ``t 1``: rows of sequences that go on come first, then chunks of prompts. Attention
first writes the keys and values of all rows, then each row reads those of its sequence, up to its own position. This file has
the reference in torch; on a GPU the rows of sequences that go on take the Triton kernel beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


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


@dataclass(frozen=True, eq=False)
class Chunk:
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
class Rows:
    """The rows of a forward, as attention sees them; tensors on the device.

    Attributes:
        page, offset: int64 ``t``, where the keys of each row go.
        positions: int64 ``t``.
        tables: int64 ``b w``: the pages of the first b rows, each of another sequence.
        chunks: the other rows.
    """

    page: Tensor
    offset: Tensor
    positions: Tensor
    tables: Tensor
    chunks: Sequence[Chunk] = ()


CACHES = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
"""Formats of keys and values in eight bits: dtype of the codes, and the largest."""


@dataclass(frozen=True, eq=False)
class LayerPages:
    """Keys and values of one attention layer on this rank.

    Attributes:
        kept: keys and values, or their codes, ``2 pages kv_heads size d``.
        scale: float32 ``2 pages kv_heads size``, of the codes of a token and a head; None: no codes are kept.
        dtype: in which attention computes.
    """

    kept: Tensor
    scale: Tensor | None
    dtype: torch.dtype

    @classmethod
    def zeros(cls, layer: LayerShape, pages: int, size: int, form: str | None, device: torch.device) -> LayerPages:
        """Return so many empty pages; ``form``: of :data:`CACHES`, or None."""
        shape = (2, pages, layer.kv_heads, size, layer.d)
        kept = torch.zeros(shape, dtype=layer.dtype if form is None else CACHES[form][0], device=device)
        scale = None if form is None else torch.zeros(shape[:-1], dtype=torch.float32, device=device)
        return cls(kept, scale, layer.dtype)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors."""
        return (self.kept,) if self.scale is None else (self.kept, self.scale)

    def keep(self, page: Tensor, offset: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values ``t kv_heads d`` of tokens to their places; return them as they will be read."""
        found = []
        for i, x in enumerate((k, v)):
            if self.scale is None:
                self.kept[i][page, :, offset] = x
                found.append(x)
                continue
            codes, scale = to_codes(x, self.kept.dtype)
            # torch writes no float8 at indices
            self.kept[i].view(torch.uint8)[page, :, offset] = codes.view(torch.uint8)
            self.scale[i][page, :, offset] = scale
            found.append(of_codes(codes, scale, self.dtype))
        return found[0], found[1]

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of pages, each ``*pages kv_heads size d``."""
        if self.scale is None:
            return self.kept[0][pages], self.kept[1][pages]
        raw = self.kept.view(torch.uint8)
        k, v = (of_codes(raw[i][pages].view(self.kept.dtype), self.scale[i][pages], self.dtype) for i in (0, 1))
        return k, v


def to_codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes ``.. d`` and scales ``..``, float32: the largest code stands for the largest magnitude of each d."""
    top = next(largest for kind, largest in CACHES.values() if kind == dtype)
    wide = x.float()
    largest = wide.abs().amax(-1)
    scale = torch.where(largest > 0, largest / top, 1.0)
    levels = (wide / scale.unsqueeze(-1)).clamp(-top, top)
    return (levels.round() if dtype == torch.int8 else levels).to(dtype), scale


def of_codes(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what codes stand for."""
    return (codes.float() * scale.unsqueeze(-1)).to(dtype)


class Pool:
    """Keys and values of all layers of a rank.

    Attributes:
        triton: single tokens attend by the Triton kernel on a GPU.
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
        form: of the keys and values, one of :data:`CACHES`; None: the model's dtype.
        """
        self.pages, self.size, self.device = pages, size, device
        self.triton = find_spec("triton") is not None
        self.layers = [LayerPages.zeros(layer, pages + 1, size, form, device) for layer in layers]

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
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Keep the keys and values of all rows, and attend.

        Args:
            layer: which.
            q: ``t heads d``.
            k, v: ``t kv_heads d``.
            rows: of this forward.
            scale: of the scores; 1/√d by default.
            window: a token sees itself and ``window - 1`` before; None: all before.

        Returns:
            ``t heads d``.
        """
        pages = self.layers[layer]
        q, k, v = (x.to(pages.dtype) for x in (q, k, v))  # under autocast rotary queries and keys are wider than values
        singles = rows.tables.shape[0]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out = []
        if singles:
            first = slice(0, singles)
            given = (rows.page[first], rows.offset[first], rows.positions[first], rows.tables)
            kept = (pages.kept, pages.scale)
            out.append(attend_and_keep(q[first], k[first], v[first], *kept, *given, scale, window or 0, self._fuses(q)))
        if singles < q.shape[0]:
            read = pages.keep(rows.page[singles:], rows.offset[singles:], k[singles:], v[singles:])
            k, v = (
                x if pages.scale is None else torch.cat((x[:singles], y)) for x, y in zip((k, v), read, strict=True)
            )
        for chunk in rows.chunks:
            these = slice(chunk.row, chunk.row + chunk.count)
            out.append(_attend_chunk(q[these], k[these], v[these], pages, chunk, scale, window))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _fuses(self, x: Tensor) -> bool:
        """Return True if the Triton kernel takes such tensors."""
        return self.triton and x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16)

    def layer(self, number: int) -> PagedLayer:
        """Return the attention of a layer."""
        pages = self.layers[number]
        return PagedLayer(pages, self._fuses(pages.kept.new_empty(0, dtype=pages.dtype)))


class PagedLayer:
    """Attention of one layer with single tokens, as an operation that torch.compile leaves whole within a block's graph.

    Attributes:
        rows: of the forward.
    """

    rows: Rows

    def __init__(self, pages: LayerPages, fused: bool) -> None:
        """Args:
        pages: keys and values of the layer.
        fused: by the Triton kernel.
        """
        self.kept, self.scale, self.dtype, self.fused = pages.kept, pages.scale, pages.dtype, fused

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None) -> Tensor:
        """Keep keys and values, and attend, as :meth:`Pool.attend` does."""
        q, k, v = (x.to(self.dtype) for x in (q, k, v))
        rows, scale = self.rows, q.shape[-1] ** -0.5 if scale is None else scale
        given = (rows.page, rows.offset, rows.positions, rows.tables)
        found: Tensor = _operation(q, k, v, self.kept, self.scale, *given, scale, window or 0, self.fused)
        return found


def attend_and_keep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
    scales: Tensor | None,
    page: Tensor,
    offset: Tensor,
    positions: Tensor,
    tables: Tensor,
    scale: float,
    window: int,
    fused: bool,
) -> Tensor:
    """Keep the keys and values of single tokens, and attend with them; arguments as in :class:`Rows`, window 0 for none."""
    limit = window or None
    if fused:
        from meshfold.inference.attention_triton import attend_new  # which needs Triton

        return attend_new(q, k, v, kept, scales, tables, positions, scale, limit)
    pages = LayerPages(kept, scales, q.dtype)
    pages.keep(page, offset, k, v)
    return attend_singles(q, pages, tables, positions, scale, limit)


def _contiguous(*args: Any) -> Tensor:
    return attend_and_keep(*args).contiguous()


# That it writes to the pool is not said of it: compiled code would keep a copy of the pool if it could not see that nobody else
# reads it meanwhile. Nobody does, and what it returns is needed, so it is neither left out nor moved.
_operation = torch.library.custom_op(
    "meshfold::attend_pages",
    _contiguous,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor kept, Tensor? scales, Tensor page, Tensor offset, Tensor positions, "
    "Tensor tables, float scale, int window, bool fused) -> Tensor",
)
_operation.register_fake(lambda q, *others: q.new_empty(q.shape))


def attend_singles(
    q: Tensor, pages: LayerPages, tables: Tensor, positions: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attend with one token of each of many sequences, whose keys are in the pool: ``b heads d`` -> ``b heads d``.

    Args:
        q: queries.
        pages: of the layer.
        tables: ``b w``, the pages of each sequence; behind its last one any page.
        positions: ``b``, of the queries: each sees keys up to its own.
        scale, window: as in :meth:`Pool.attend`.
    """
    b, width = tables.shape
    _, _, kv_heads, size, d = pages.kept.shape
    k, v = (part.transpose(1, 2).reshape(b, kv_heads, width * size, d) for part in pages.read(tables))
    place = torch.arange(width * size, device=q.device)
    seen = place <= positions.unsqueeze(1)
    if window is not None:
        seen = seen & (place > positions.unsqueeze(1) - window)
    return _attend(q.unsqueeze(2), k, v, seen[:, None, None], scale).squeeze(2)


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, pages: LayerPages, chunk: Chunk, scale: float, window: int | None
) -> Tensor:
    """Attend with a chunk of one sequence: ``n heads d`` -> ``n heads d``."""
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
    return _attend(q.transpose(0, 1)[None], k[None], v[None], seen, scale)[0].transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if seen is not None and groups > 1 and q.is_cuda:
        # There the kernel that takes a mask wants as many heads of keys; without it all scores would be kept.
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        groups = 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=groups > 1
    )
