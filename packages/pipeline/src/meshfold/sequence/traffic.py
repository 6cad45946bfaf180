"""Bytes that attention over a split sequence sends: computed exactly, and equal to what is recorded."""

from __future__ import annotations

from fractions import Fraction

import torch

from meshfold.mesh import Mesh
from meshfold.mesh.recording import moved_bytes
from meshfold.sequence.kernels import accumulating
from meshfold.sequence.sharding import check_documents, sequence_mode, sequence_sharding
from meshfold.sequence.tiling import Mask, steps
from meshfold.sequence.ulysses import kv_head_repeats


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
      backward the same again, and T messages of 2 n in float32: dK and dV, on their way home.
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
    exchanges = moved_bytes("all_to_all", packed, sharding.ulysses) + moved_bytes(
        "all_to_all", back, sharding.ulysses
    )
    if documents is not None:
        documents = check_documents(documents, length)
    mask = Mask(length=length, causal=causal, window=window, documents=documents)
    hops = len(steps(sharding, mask, mesh.index(*found.ring))) - 1
    block = (
        2 * batch * sharding.local * kv_heads * times * head_dim
    )  # of a place in the ring: more tokens, fewer heads
    home = (hops + 1) * block * wide if hops else 0
    return exchanges + hops * block * size, exchanges + hops * block * size + home
