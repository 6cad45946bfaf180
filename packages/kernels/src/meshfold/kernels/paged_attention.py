"""Attention of single tokens over keys and values in pages.

Keys and values of a layer are one tensor ``2 pages kv_heads size d``; a table says which pages a sequence has. The new token's are
written first, then it attends to all up to its own position. In eight bits, the keys of a token and a head share a scale, and
so do its values. Attention reads the decoded values, also of the newest token.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.kernels.rotary import apply_rotary

CACHE_FORMS = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
"""Formats of keys and values in eight bits: dtype of the codes, and the largest."""


@dataclass(frozen=True, eq=False)
class KeyValuePages:
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
    def zeros(
        cls, shape: tuple[int, int, int, int], dtype: torch.dtype, form: str | None, device: torch.device
    ) -> KeyValuePages:
        """Return empty pages of shape ``pages kv_heads size d``; ``form``: of :data:`CACHE_FORMS`, or None."""
        kept = torch.zeros((2, *shape), dtype=dtype if form is None else CACHE_FORMS[form][0], device=device)
        scale = None if form is None else torch.zeros((2, *shape[:-1]), dtype=torch.float32, device=device)
        return cls(kept, scale, dtype)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors."""
        return (self.kept,) if self.scale is None else (self.kept, self.scale)

    def keep(self, page: Tensor, offset: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values ``t kv_heads d`` of tokens to their places; return them as they will be read."""
        if self.scale is None and pages_in_triton(k):
            from meshfold.kernels.paged_attention_triton import keep_rows  # which needs Triton

            keep_rows(k, v, self.kept, page, offset)
            return k, v
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


def pages_in_triton(x: Tensor) -> bool:
    """Return True if the Triton kernels take keys and values such as these."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and find_spec("triton") is not None


def to_codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes ``.. d`` and scales ``..``, float32: the largest code is the largest magnitude of each d."""
    top = next(largest for kind, largest in CACHE_FORMS.values() if kind == dtype)
    wide = x.float()
    largest = wide.abs().amax(-1)
    # Multiplied: torch divides by a number on a CPU, and multiplies by its inverse on a GPU.
    scale = torch.where(largest > 0, largest * (1.0 / top), 1.0)
    levels = (wide / scale.unsqueeze(-1)).clamp(-top, top)
    return (levels.round() if dtype == torch.int8 else levels).to(dtype), scale


def of_codes(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of codes."""
    return (codes.float() * scale.unsqueeze(-1)).to(dtype)


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
    rotary: tuple[Tensor, Tensor] | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """Keep the keys and values of single tokens, and attend with them; window 0 for none.

    Args:
        q: ``b heads d``; k, v: ``b kv_heads d``.
        kept, scales: of :class:`KeyValuePages`.
        page, offset: int64 ``b``, where the new keys go.
        positions: int64 ``b``, of the tokens; the table gives page and offset.
        tables: int64 ``b w``, the pages of each sequence.
        scale: of the scores.
        window: a token sees itself and ``window - 1`` before.
        fused: by the Triton kernel, on a GPU.
        rotary: cosines and sines ``b d`` that turn q and k first; None: they are turned, or do not turn.
        arrived: int32 zeros, at least one for each sequence and head of keys, which the kernel counts in and leaves at zero.
    """
    limit = window or None
    if fused:
        from meshfold.kernels.paged_attention_triton import attend_new  # which needs Triton

        given = (q, k, v, kept, scales, tables, positions, scale, limit)
        return attend_new(*given, rotary=rotary, arrived=arrived)
    if rotary is not None:
        q, k = (x.squeeze(1) for x in apply_rotary(q[:, None], k[:, None], *(each[:, None] for each in rotary)))
    pages = KeyValuePages(kept, scales, q.dtype)
    pages.keep(page, offset, k, v)
    return attend_singles(q, pages, tables, positions, scale, limit)


def _contiguous(*args: Any) -> Tensor:
    return attend_and_keep(*args).contiguous()


# It is not declared to write to the pool: compiled code would copy the pool unless it could see that nothing else reads
# it meanwhile. Nothing does, and its result is needed, so the call is neither removed nor moved.
attend_pages = torch.library.custom_op(
    "meshfold::attend_pages",
    _contiguous,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor kept, Tensor? scales, Tensor page, Tensor offset, Tensor positions, "
    "Tensor tables, float scale, int window, bool fused) -> Tensor",
)
attend_pages.register_fake(lambda q, *others: q.new_empty(q.shape))


def attend_singles(
    q: Tensor, pages: KeyValuePages, tables: Tensor, positions: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attend with one token of each of many sequences, whose keys are in the pool: ``b heads d`` -> ``b heads d``.

    Args:
        q: queries.
        pages: of the layer.
        tables: ``b w``, the pages of each sequence; behind its last one any page.
        positions: ``b``, of the queries: each sees keys up to its own.
        scale: of the scores.
        window: a token sees itself and ``window - 1`` before; None: all before.
    """
    b, width = tables.shape
    _, _, kv_heads, size, d = pages.kept.shape
    k, v = (part.transpose(1, 2).reshape(b, kv_heads, width * size, d) for part in pages.read(tables))
    place = torch.arange(width * size, device=q.device)
    seen = place <= positions.unsqueeze(1)
    if window is not None:
        seen = seen & (place > positions.unsqueeze(1) - window)
    return masked_attention(q.unsqueeze(2), k, v, seen[:, None, None], scale).squeeze(2)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """Attend: ``b heads m d``, with keys ``b kv_heads n d``, to what is seen (bool), or to all before."""
    groups = q.shape[1] // k.shape[1]
    if seen is not None and groups > 1 and q.is_cuda:
        # There the kernel that takes a mask needs equally many heads of keys; without it all scores would be kept.
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        groups = 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=groups > 1
    )
