"""Attention over a sequence that is split over ranks, and the exact bytes that it sends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.recording import moved_bytes
from meshfold.sequence.dropout import RingDropout, WeightDropout
from meshfold.sequence.kernels import CAUSAL_META_KERNEL, META_KERNEL, accumulating, choose
from meshfold.sequence.ring import Round, ring_attention
from meshfold.sequence.ring_self_attention import RingSelfSettings, ring_self_attention
from meshfold.sequence.sharding import SequenceSharding, check_documents, sequence_mode, sequence_sharding
from meshfold.sequence.tiling import Mask, steps
from meshfold.sequence.ulysses import kv_head_repeats, to_heads, to_sequence


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh,
    mode: str | Callable[..., object] = "ring",
    causal: bool = True,
    window: int | None = None,
    documents: Sequence[int] | Tensor | None = None,
    scale: float | None = None,
    length: int | None = None,
    order: str | None = None,
    kernel: str = "auto",
    dropout: float | WeightDropout = 0.0,
) -> Tensor:
    """Attend from this rank's tokens to the whole sequence: ``b s heads d, b s kv_heads d, b s kv_heads d -> b s heads d``.

    Note the layout: the heads come after the tokens (``scaled_dot_product_attention`` has them before). Gradients equal those of
    attention on one rank: each rank has the complete dQ, dK and dV of its own tokens.

    Args:
        q, k, v: this rank's tokens, as :func:`meshfold.sequence.shard_sequence` shards them; kv_heads divides heads.
        mesh: its axis ``seq`` (or ``ring`` and ``ulysses``) splits the sequence; axes of size 1 may be left out.
        mode: "ring" (keys and values travel), "ulysses" (heads are split instead of the sequence, by all-to-all),
            "ring_ulysses" (both), "ring_self" (the baseline of arXiv 2105.13120), or a callable over the axis ``seq``
            that takes q, k, v, mesh, causal, window, documents, scale, length and dropout by name and handles all of it.
        causal: tokens see no later ones.
        window: tokens see those less than this many tokens away (of themselves and earlier ones: ``window`` in all).
        documents: cumulative lengths of documents packed into the sequence, the same for every row of the batch: ``(0, 3, 8)`` for
            two of 3 and 5 tokens. Tokens see their own document.
        scale: of the scores; None: 1 / sqrt(d).
        length: tokens of the whole sequence if it does not divide evenly. Later tokens are padding: they attend to nothing, no
            token attends to them, and their outputs and gradients are zero. None: no padding.
        order: "zigzag" or "contiguous", as the sequence was sharded; None: the mode's own.
        kernel: "auto", "flash", "cudnn", "efficient" or "reference", see :mod:`meshfold.sequence.kernels`.
        dropout: which weights are dropped, as a :class:`meshfold.sequence.WeightDropout`: the same as in one process. A plain
            number is refused, since kernels draw by position in a tile. Computed by the reference kernel, at a rank's share of the
            memory of all scores.

    Returns:
        This rank's tokens, in the dtype of ``q``.

    Raises:
        LayoutError: for shapes, lengths, heads, masks or a mode that do not fit.
    """
    found = sequence_mode(mode, mesh)
    length = q.shape[1] * mesh.size(*found.axes) if length is None else length
    if callable(mode):
        own = mode(
            q,
            k,
            v,
            mesh=mesh,
            causal=causal,
            window=window,
            documents=documents,
            scale=scale,
            length=length,
            dropout=dropout,
        )
        return cast(Tensor, own)
    sharding = sequence_sharding(length, mesh, mode, order)
    _check(q, k, v, sharding, window, dropout)
    mask = Mask(
        length=length,
        causal=causal,
        window=window,
        documents=None if documents is None else check_documents(documents, length),
    )
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    drops = isinstance(dropout, WeightDropout) and dropout.p > 0.0 and not q.is_meta
    if mode == "ring_self":
        if drops:
            raise LayoutError("mode='ring_self' is a baseline and drops no weights: use mode='ring'")
        whole = RingSelfSettings(group=mesh.group(*found.ring), sharding=sharding, mask=mask, scale=scale)
        return ring_self_attention(q, k, v, whole)
    width, missing = q.shape[-1], -q.shape[-1] % 8
    pads = missing > 0 and q.is_cuda and q.dtype.itemsize < 8 and v.shape[-1] == width
    if pads:  # GPU kernels need multiples of 8 features; zeros change nothing
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
    counts_all = q.is_meta and causal and window is None and documents is None
    if counts_all:  # plans count all pairs of tokens, as for unsplit sequences; the number of steps is the same
        mask = replace(mask, causal=False)
    mine = steps(sharding, mask, mesh.index(*found.ring))
    shapes = len({(tile.shape, tile.rows, tile.columns) for step in mine for tile in step})
    drop = None
    if isinstance(dropout, WeightDropout) and drops:
        heads = q.shape[2] // mesh.size(*found.ulysses)
        weights = dropout.of_heads(heads * mesh.index(*found.ulysses))
        drop = RingDropout(weights=weights, sharding=sharding, index=mesh.index(*found.ring))
    chosen = choose(kernel, q, k, v, shapes)
    job = Round(
        kernel=CAUSAL_META_KERNEL if counts_all and chosen is META_KERNEL else chosen,
        group=mesh.group(*found.ring),
        steps=mine,
        scale=scale,
        drop=drop,
    )
    q, k, v = to_heads(q, k, v, mesh, found.ulysses)
    out = to_sequence(ring_attention(q, k, v, job), mesh, found.ulysses)
    return out[..., :width] if pads else out


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: SequenceSharding,
    window: int | None,
    dropout: float | WeightDropout,
) -> None:
    if dropout and not isinstance(dropout, WeightDropout):
        raise LayoutError(
            f"dropout={dropout!r}: kernels draw by position in a tile, so ranks would drop other weights than a single process: "
            "set the model's attention dropout to 0, or choose the dropped weights by WeightDropout, as the engine does"
        )
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3]:
        raise LayoutError(
            f"q must be [b, s, heads, d], k and v [b, s, kv_heads, d] with the same b and s, got {shapes}"
        )
    if q.shape[3] != k.shape[3] or not k.shape[2] or q.shape[2] % k.shape[2]:
        raise LayoutError(
            f"heads of q and k must be equally wide, and the {k.shape[2]} heads of keys divide the {q.shape[2]} of "
            f"queries, got {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise LayoutError(f"q, k and v must have one floating dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.shape[1] != sharding.local:
        raise LayoutError(
            f"a sequence of {sharding.length} tokens in {sharding.order} order gives each of {sharding.ranks} ranks "
            f"{sharding.local} of them ({sharding.padded} with padding), but q has {q.shape[1]}: shard it by shard_sequence, and "
            "give attention the whole sequence's length if the ranks do not divide it"
        )
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise LayoutError(f"window={window!r}: give the number of tokens that a token sees, from 1 (itself) up")


def traffic(
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mesh: Mesh,
    mode: str = "ring",
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    window: int | None = None,
    documents: tuple[int, ...] | None = None,
    order: str | None = None,
) -> tuple[Fraction, Fraction]:
    """Return the bytes that one rank sends in the forward and in the backward of one attention.

    With P ranks, s tokens a rank, and n = batch · s · kv_heads · head_dim elements of its keys:

    - ring: T - 1 messages of 2 n elements forward, T being the number of steps (P, or fewer under a window);
      backward the same again, and T messages of 2 n in float32: dK and dV, on their way back.
    - ulysses: (P - 1) / P of batch · s · (2 heads + 2 kv_heads · repeats) · head_dim elements, either way.
    - ring_ulysses: both, the ring with the keys that the all-to-all left on a rank.
    - ring_self: 2 (P - 1) n forward, 6 (P - 1) n backward, of these 4 (P - 1) n in float32 (arXiv 2105.13120).

    Args: as in :func:`meshfold.sequence.attention`.

    Raises:
        LayoutError: for heads, a mode, a mask or a mesh that do not fit.
    """
    found = sequence_mode(mode, mesh)
    sharding = sequence_sharding(length, mesh, mode, order)
    size, wide = dtype.itemsize, accumulating(dtype).itemsize
    if mode == "ring_self":
        block = 2 * batch * sharding.local * kv_heads * head_dim * (sharding.ring - 1)
        return Fraction(block * size), Fraction(block * (size + 2 * wide))
    times = kv_head_repeats(heads, kv_heads, sharding.ulysses)
    packed = batch * sharding.local * (heads + 2 * kv_heads * times) * head_dim * size
    back = batch * sharding.local * heads * head_dim * size
    exchanges = moved_bytes("all_to_all", packed, sharding.ulysses) + moved_bytes("all_to_all", back, sharding.ulysses)
    if documents is not None:
        documents = check_documents(documents, length)
    mask = Mask(length=length, causal=causal, window=window, documents=documents)
    hops = len(steps(sharding, mask, mesh.index(*found.ring))) - 1
    block = 2 * batch * sharding.local * kv_heads * times * head_dim  # after Ulysses: more tokens, fewer heads
    back = (hops + 1) * block * wide if hops else 0
    return exchanges + hops * block * size, exchanges + hops * block * size + back
