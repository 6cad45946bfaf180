"""Causal self-attention over a flat stream of tokens: one fused projection, the mask, rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.kernels import Segment, Segments, apply_rotary, segment_attention
from meshfold.mesh.model_io import segments_of, visible
from meshfold.models.config import DecoderConfig

if TYPE_CHECKING:
    from meshfold.models.generate import KeyValueCache


def fused(linear: nn.Linear, parts: Sequence[int]) -> nn.Linear:
    """Record the parts of a linear layer's output, so that a split gives every rank its share of each part."""
    linear.__dict__["parts"] = tuple(parts)
    return linear


class Rotary(nn.Module):
    """Tables of cosines and sines for rotary positions (Su et al., arXiv 2104.09864), recomputed for each batch.

    ``attended_rows = True`` tells code that shards a model to give it the positions of the rows that attention has.
    """

    attended_rows = True

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    def forward(self, position_ids: Tensor | None, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin, ``s d``, or ``b s d`` for positions ``b s``; float32, their two halves equal as in
        ``rotate_half``."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        positions = torch.arange(seq_len, device=device) if position_ids is None else position_ids
        angles = positions.to(torch.float32).unsqueeze(-1) * self.theta**-exponents
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, theta={self.theta}"


class Attention(nn.Module):
    """``m h -> m h``: each sequence attends to its own past, less what a mask hides.

    ``n_heads`` and ``n_kv_heads`` are the heads of this module's own projection; code that shards it sets them to the local
    numbers. During generation ``kv_cache`` has the keys and values of earlier tokens, or ``attend`` is called instead of rotary
    embedding and attention: q ``b s heads d``, k and v ``b s kv_heads d``, and the tables of ``rotary`` or None -> ``b s heads d``.
    """

    def __init__(self, config: DecoderConfig, *, bias: bool) -> None:
        super().__init__()
        self.kv_cache: KeyValueCache | None = None
        self.attend: Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None], Tensor] | None = None
        self.n_heads, self.n_kv_heads, self.head_dim = config.heads, config.n_kv_heads, config.d
        parts = config.qkv_parts
        self.qkv = fused(nn.Linear(config.hidden, sum(parts), bias=bias), parts)
        self.out = nn.Linear(config.heads * config.d, config.hidden, bias=bias)

    def forward(
        self,
        x: Tensor,
        seq_len: int,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Segments | None = None,
    ) -> Tensor:
        heads, kv_heads, d = self.n_heads, self.n_kv_heads, self.head_dim
        qkv = self.qkv(x).view(-1, seq_len, heads + 2 * kv_heads, d)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
        if self.attend is not None:
            attended: Tensor = self.out(self.attend(q, k, v, rotary).reshape(-1, heads * d))
            return attended
        if rotary is not None:
            q, k = apply_rotary(q, k, *rotary)
        if isinstance(mask, Segments):
            within: Tensor = self.out(segment_attention(q, k, v, mask).reshape(-1, heads * d))
            return within
        causal = mask is None
        if self.kv_cache is not None:
            k, v = self.kv_cache.add(k, v)
            causal = causal and seq_len > 1  # a single new token sees everything in the cache
        if mask is not None and heads != kv_heads:
            # On GPUs the kernel that takes a mask needs as many key heads as query heads; the fallback would store all scores.
            k, v = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k, v))
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=heads != kv_heads and mask is None,
        )
        out: Tensor = self.out(y.transpose(1, 2).reshape(-1, heads * d))
        return out

    def extra_repr(self) -> str:
        return f"heads={self.n_heads}, kv_heads={self.n_kv_heads}, head_dim={self.head_dim}"


class CausalMask(nn.Module):
    """Masks for attention over whole rows, ``s s``, which are added to the scores; with positions the segments of each row, in
    which attention makes no mask.

    Two attributes are for code that shards a model. ``attended_rows = True``: it takes the positions of exactly the rows that
    attention has. ``makes_masks`` can be set to False if sequences are sharded and something else enforces documents and
    ``window``.
    """

    attended_rows = True
    makes_masks = True

    def __init__(self, window: int | None) -> None:
        """Args:
        window: a token sees itself and ``window - 1`` before; None: all before.
        """
        super().__init__()
        self.window = window

    def forward(self, position_ids: Tensor | None, like: Tensor, length: int) -> Tensor | Segments | None:
        """Return one mask for all layers, or None if each token sees all tokens before it or there is only one token.

        With positions a window, torch.compile and meta tensors get a mask ``b 1 s s``, all others segments.

        Args:
            position_ids: ``b s`` or ``1 s``, restart at each document, and go back where a branch continues its first tokens
                (:func:`meshfold.mesh.model_io.visible`); None: each row is a document.
            like: the residual stream; says dtype and device.
            length: s, tokens of a row.
        """
        window = None if self.window is None or self.window >= length else self.window
        if not self.makes_masks or length == 1 or (window is None and position_ids is None):
            return None
        if (
            position_ids is not None
            and window is None
            and not position_ids.is_meta
            and not torch.compiler.is_compiling()
        ):
            rows = segments_of(position_ids)
            return Segments([[Segment(*one) for one in row] for row in rows], length, like.device)
        if position_ids is not None:
            seen = visible(position_ids, window).unsqueeze(1)
        else:
            token = torch.arange(length, device=like.device)
            back = token[:, None] - token
            seen = back >= 0
            if window is not None:
                seen = seen & (back < window)
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill_(~seen, -torch.inf)

    def extra_repr(self) -> str:
        return f"window={self.window}"
