"""Rotary position embedding, applied to queries and keys in one launch.

The convention is Hugging Face's ``rotate_half``: feature i of the first half turns with feature i of the second::

    out = x * cos + rotate_half(x) * sin,   rotate_half([a | b]) = [-b | a]

Computed in float32 (float64 for float64), rounded once at the output. Source: Su et al., "RoFormer: Enhanced
Transformer with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.functions import applied, once_differentiable
from meshfold.kernels.inputs import compute_dtype, contiguous_like


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions, out of place, with autograd for q and k.

    Args:
        q: ``b s heads d``, any strides: slices of a fused QKV tensor and transposed views are fine.
        k: ``b s kv_heads d``, the same.
        cos, sin: ``s r`` or ``b s r`` (b may be 1), r <= d and even: the first r features turn and the rest pass through. Both
            halves are read, so Hugging Face's doubled tables work unchanged. No gradient flows to them.

    Returns:
        The turned q and k, contiguous, in their own dtypes.

    Raises:
        ValueError: if the shapes do not fit.
    """
    cos, sin = _tables(q, k, cos, sin)
    if torch.compiler.is_compiling():
        return turned(q, cos, sin), turned(k, cos, sin)
    q, k = _rotary(q, k, cos, sin)
    return q, k


def _tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin as ``b s r``, checked against q and k."""
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k must be [b, s, heads, d] and [b, s, kv_heads, d], got {list(q.shape)} and {list(k.shape)}"
        )
    b, s, _, d = q.shape
    r = cos.shape[-1]
    # Size by size: torch.compile finds no tuple of shapes that contains one with a size that is a symbol.
    fits = cos.ndim in (2, 3) and cos.shape[-2] == s and (cos.ndim == 2 or cos.shape[0] == 1 or cos.shape[0] == b)
    if cos.shape != sin.shape or not fits or r % 2 or r > d:
        raise ValueError(
            f"cos and sin must both be [s, r] or [b, s, r] with r even and at most d, here s = {s}, b = {b}, d = {d}; "
            f"got {list(cos.shape)} and {list(sin.shape)}"
        )
    if cos.ndim == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    return cos.expand(b, s, r), sin.expand(b, s, r)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.rotate = dispatch.twin(rotate, q)
        ctx.save_for_backward(cos, sin)
        return _rotated(ctx.rotate, q, k, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *_rotated(ctx.rotate, dq, dk, cos, sin, True), None, None


_rotary = applied(_Rotary)


def _rotated(
    run: Callable[..., None], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool
) -> tuple[Tensor, Tensor]:
    q_out, k_out = contiguous_like(q), contiguous_like(k)
    run(q, k, cos, sin, q_out, k_out, inverse)
    return q_out, k_out


# The reference in plain torch: it defines every result and the signatures of the Triton and numba versions.


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``b s heads d, b s r, b s r -> b s heads d``, differentiable."""
    dtype = compute_dtype(x)
    half = cos.shape[-1] // 2
    cos, sin = cos.to(dtype).unsqueeze(2), sin.to(dtype).unsqueeze(2)
    a, b, rest = x[..., :half].to(dtype), x[..., half : 2 * half].to(dtype), x[..., 2 * half :]
    first = a * cos[..., :half] - b * sin[..., :half]
    second = b * cos[..., half:] + a * sin[..., half:]
    return torch.cat((first.to(x.dtype), second.to(x.dtype), rest), -1)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, inverse: bool) -> None:
    """Turn q ``b s heads d`` and k ``b s kv_heads d`` by cos, sin ``b s r`` into q_out and k_out; back if ``inverse``.

    The outputs may be q and k themselves; any strides anywhere.
    """
    half = cos.shape[-1] // 2
    if inverse:
        # The transpose of [[cos_a, -sin_a], [sin_b, cos_b]]: swap the sines and negate them.
        sin = -torch.cat((sin[..., half:], sin[..., :half]), -1)
    for x, out in ((q, q_out), (k, k_out)):
        dtype = compute_dtype(x)
        c, s = cos.to(dtype).unsqueeze(2), sin.to(dtype).unsqueeze(2)
        turning = x[..., : 2 * half].to(dtype)
        result = turning * c
        result[..., :half].addcmul_(turning[..., half:], s[..., :half], value=-1)
        result[..., half:].addcmul_(turning[..., :half], s[..., half:])
        out[..., : 2 * half].copy_(result)
        if out is not x:
            out[..., 2 * half :].copy_(x[..., 2 * half :])
