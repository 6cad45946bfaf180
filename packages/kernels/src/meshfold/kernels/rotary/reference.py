"""Rotary position embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.kernels.rows import compute_dtype


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``b s heads d, b s r, b s r -> b s heads d``, differentiable."""
    dtype = compute_dtype(x)
    half = cos.shape[-1] // 2
    cos, sin = cos.to(dtype).unsqueeze(2), sin.to(dtype).unsqueeze(2)
    a, b, rest = x[..., :half].to(dtype), x[..., half : 2 * half].to(dtype), x[..., 2 * half :]
    first = a * cos[..., :half] - b * sin[..., :half]
    second = b * cos[..., half:] + a * sin[..., half:]
    return torch.cat((first.to(x.dtype), second.to(x.dtype), rest), -1)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, inverse: bool
) -> None:
    half = cos.shape[-1] // 2
    if inverse:
        # The transpose of [[cos_a, -sin_a], [sin_b, cos_b]]: the sines change places and signs.
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
