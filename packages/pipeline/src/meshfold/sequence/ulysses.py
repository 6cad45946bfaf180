"""Ulysses: an all-to-all turns a split of the sequence into a split of the heads, and another turns it back.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509. Queries, keys and values go in one exchange.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.collectives import exchange


def kv_head_repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """Return how often to repeat each key and value head, at least, so that every rank has the ones of its query heads.

    Raises:
        LayoutError: if the ranks do not divide the query heads.
    """
    if heads % ranks:
        fits = [n for n in range(2, heads + 1) if heads % n == 0][:8]
        raise LayoutError(
            f"{heads} query heads cannot be split over {ranks} ranks of ulysses: "
            + (f"give it {', '.join(map(str, fits))} ranks, " if fits else "")
            + "use mode='ring', which splits no heads, or 'ring_ulysses' with fewer ulysses ranks"
        )
    group = heads // kv_heads
    return next(n for n in range(1, group + 1) if group % n == 0 and kv_heads * n % ranks == 0)


def to_heads(q: Tensor, k: Tensor, v: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange the split of the sequence for a split of the heads, for queries ``b s heads d`` and twice ``b s kv_heads d``.

    Shapes:
        ``b (u s) (heads / u) d`` and twice ``b (u s) (kv_heads · repeats / u) d`` for u ranks
    """
    ranks = mesh.size(*axes)
    if ranks == 1:
        return q, k, v
    times = kv_head_repeats(q.shape[2], k.shape[2], ranks)
    if times > 1:
        k, v = (x.repeat_interleave(times, dim=2) for x in (k, v))
    sizes = [x.shape[-1] for x in (q, k, v)]
    if len(set(sizes)) > 1:  # pad heads of different widths to the largest
        q, k, v = (F.pad(x, (0, max(sizes) - size)) for x, size in zip((q, k, v), sizes, strict=True))
    # Pack contiguously per destination, so that nothing is copied twice. Not by x.unflatten: torch.compile cannot trace it
    # under the TorchFunctionMode that intercepts attention.
    b, s, d = q.shape[0], q.shape[1], q.shape[3]
    packed = torch.cat([x.reshape(b, s, ranks, -1, d).movedim(2, 0) for x in (q, k, v)], 3)
    arrived = exchange(packed, mesh, 0, 0, axes).movedim(0, 1).flatten(1, 2)
    q, k, v = arrived.split([x.shape[2] // ranks for x in (q, k, v)], 2)
    return q[..., : sizes[0]], k[..., : sizes[1]], v[..., : sizes[2]]


def to_sequence(out: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    """Invert :func:`to_heads` for the output: ``b (u s) (heads / u) d -> b s heads d``."""
    return exchange(out, mesh, 1, 2, axes)
