"""Attention over an image's tokens, which are split over ranks, and a text's tokens, which every rank has.

Each rank computes the text's queries itself. The sum of the ranks' losses depends on P copies of the text, each through its own
rank. So the gradients of all copies add up to the text's gradient. A rank's image tokens get their whole gradient there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.collectives import gather
from meshfold.sequence.kernels import choose
from meshfold.sequence.ring import Round, ring_attention
from meshfold.sequence.sharding import SequenceSharding, sequence_mode, sequence_sharding
from meshfold.sequence.tiling import Tile
from meshfold.sequence.ulysses import kv_head_repeats, to_heads, to_sequence

ORDER = "contiguous"
"""Of the image's tokens: without a causal mask every rank computes the same."""


def joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    text: int,
    length: int,
    mesh: Mesh,
    mode: str = "ring",
    scale: float | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Attend from the text's tokens and this rank's of the image to all of both: three of ``b (t s) heads d`` to the same.

    Args:
        q, k, v: the first ``text`` tokens are the text's, the same on every rank; the others this rank's of the image, in
            contiguous order.
        text: tokens of the text; 0 for none.
        length: tokens of the whole image. Those that a rank has beyond it are padding: neither seen nor seeing.
        mesh, mode: "ring", "ulysses" or "ring_ulysses", as in :func:`meshfold.sequence.attention`.
        scale: of the scores; None: 1 / sqrt(d).
        kernel: as in :func:`meshfold.sequence.attention`.

    Raises:
        LayoutError: for shapes, heads or a mode that do not fit.
    """
    found = sequence_mode(mode, mesh)
    sharding = sequence_sharding(length, mesh, mode, ORDER)
    _check(q, k, v, text, sharding, mode)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    width, missing = q.shape[-1], -q.shape[-1] % 8
    pads = missing > 0 and q.is_cuda and q.dtype.itemsize < 8
    if pads:  # GPU kernels need multiples of 8 features; zeros change nothing
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
    ranks = mesh.size(*found.ulysses)
    kv_head_repeats(q.shape[2], k.shape[2], ranks)
    heads, first = q.shape[2] // ranks, q.shape[2] // ranks * mesh.index(*found.ulysses)
    of_text = [x[:, :text, first : first + heads] for x in (q, k, v)]
    of_image = to_heads(q[:, text:], k[:, text:], v[:, text:], mesh, found.ulysses)
    q, k, v = (torch.cat(pair, 1) if text else pair[1] for pair in zip(of_text, of_image, strict=True))
    steps = joint_steps(sharding, text, mesh.index(*found.ring))
    shapes = len({(tile.rows, tile.columns) for step in steps for tile in step})
    job = Round(kernel=choose(kernel, q, k, v, shapes), group=mesh.group(*found.ring), steps=steps, scale=scale)
    out = ring_attention(q, k, v, job)
    image = to_sequence(out[:, text:], mesh, found.ulysses)
    if text:
        image = torch.cat([gather(out[:, :text], mesh, 2, found.ulysses), image], 1)
    return image[..., :width] if pads else image


def joint_steps(sharding: SequenceSharding, text: int, index: int) -> tuple[tuple[Tile, ...], ...]:
    """Return the tiles of each step of the ring at position ``index``; the text's keys count once, in the first step."""
    counts = [_real(sharding, place) for place in range(sharding.ring)]
    rows, steps = text + counts[index], []
    for step in range(sharding.ring):
        columns = counts[(index - step) % sharding.ring]
        tile = Tile("full", 0, 0, rows, text + columns) if step == 0 else Tile("full", 0, text, rows, columns)
        steps.append((tile,) if tile.work else ())
    return tuple(steps)


def _real(sharding: SequenceSharding, place: int) -> int:
    """Return the tokens at a place of the ring that are no padding; they come first."""
    return sum(max(0, min(stop, sharding.length) - start) for start, stop in sharding.ring_pieces(place))


def _check(q: Tensor, k: Tensor, v: Tensor, text: int, sharding: SequenceSharding, mode: str) -> None:
    shapes: Sequence[object] = [list(x.shape) for x in (q, k, v)]
    if mode not in ("ring", "ulysses", "ring_ulysses"):
        raise LayoutError(f"mode={mode!r}: tokens of an image are split by 'ring', 'ulysses' or 'ring_ulysses'")
    if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape:
        raise LayoutError(f"q, k and v must have one shape [b, tokens, heads, d], got {shapes}")
    if q.shape[1] != text + sharding.local:
        raise LayoutError(
            f"an image of {sharding.length} tokens gives each of {sharding.ranks} ranks {sharding.local} of them, but q has "
            f"{q.shape[1]} with the {text} of the text: shard it with order='contiguous'"
        )
