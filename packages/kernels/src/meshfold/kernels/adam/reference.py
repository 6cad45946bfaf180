"""Adam in plain torch: what the other twins are held to, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.kernels import float_bits as fb
from meshfold.kernels.adam.interface import MOMENTS, PARAMETERS
from meshfold.kernels.adam.scalars import Scalars

if TYPE_CHECKING:
    from meshfold.kernels.adam.states import QuantizedState, SplitState, WholeState


def split_master(x: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Writes ``hi`` and ``lo``."""
    upper, lower = fb.split(x)
    hi.copy_(upper)
    lo.copy_(lower)


def join_master(hi: Tensor, lo: Tensor, x: Tensor) -> None:
    """Writes ``x``."""
    x.copy_(fb.join(hi, lo))


def gradient(grad: Tensor, p: Tensor | None, s: Scalars, grad_scale: float | Tensor) -> Tensor:
    """The gradient in float32, scaled, with the L2 term where there is one."""
    g = grad.float() * grad_scale
    return g + s.l2 * p if s.l2 and p is not None else g


def moments(m: Tensor, v: Tensor, g: Tensor, s: Scalars) -> tuple[Tensor, Tensor]:
    """Both moments after the step, in float32."""
    return m * s.beta1 + g * s.rest1, v * s.beta2 + (g * g) * s.rest2


def moved(p: Tensor, m: Tensor, v: Tensor, s: Scalars) -> Tensor:
    """The parameter after the step, from the moments after it, in float32."""
    root = (
        v.double().sqrt().float()
    )  # torch's float32 root is not the nearest float on every CPU; this one is
    return p * s.keep - (m / (root * s.correction + s.eps)) * s.step_size


def step_whole(
    state: WholeState,
    grad: Tensor,
    scalars: Scalars,
    grad_scale: float | Tensor,
    writes: int,
    before: WholeState | None = None,
) -> None:
    """A step of float32 parameters."""
    was = before or state
    p = was.parameter
    g = gradient(grad, p, scalars, grad_scale)
    m, v = moments(was.exp_avg, was.exp_avg_sq, g, scalars)
    if writes & PARAMETERS:
        state.parameter.copy_(moved(p, m, v, scalars))
        if state.copy is not None:
            state.copy.copy_(state.parameter)
    if writes & MOMENTS:
        state.exp_avg.copy_(m)
        state.exp_avg_sq.copy_(v)


def step_split(
    state: SplitState,
    grad: Tensor,
    scalars: Scalars,
    grad_scale: float | Tensor,
    writes: int,
    noise: int,
    start: int,
    before: SplitState | None = None,
) -> None:
    """A step of split masters; bfloat16 moments are rounded stochastically."""
    was = before or state
    p = fb.join(was.hi, was.lo)
    g = gradient(grad, p, scalars, grad_scale)
    m, v = moments(was.exp_avg.float(), was.exp_avg_sq.float(), g, scalars)
    if writes & PARAMETERS:
        split_master(moved(p, m, v, scalars), state.hi, state.lo)
    if writes & MOMENTS:
        if state.exp_avg.dtype is torch.bfloat16:
            random = fb.noise(noise, start, p.numel(), p.device)
            m, v = fb.stochastic(m, random >> 16), fb.stochastic(v, random & 0xFFFF)
        state.exp_avg.copy_(m)
        state.exp_avg_sq.copy_(v)


def step_quantized(
    state: QuantizedState,
    grad: Tensor,
    scalars: Scalars,
    grad_scale: float | Tensor,
    writes: int,
    noise: int,
    start: int,
    before: QuantizedState | None = None,
) -> None:
    """A step of split masters with 8-bit moments."""
    n, was = grad.numel(), before or state
    p = fb.join(was.hi, was.lo)
    g = gradient(grad, p, scalars, grad_scale)
    code = _blocks(was.exp_avg).to(torch.int64)
    m = fb.decode(code & 127, was.exp_avg_scale.unsqueeze(1), fb.SIGNED_CODE)
    m = torch.where(code > 127, -m, m)
    v = fb.decode(_blocks(was.exp_avg_sq), was.exp_avg_sq_scale.unsqueeze(1), fb.UNSIGNED_CODE)
    m, v = moments(m.view(-1)[:n], v.view(-1)[:n], g, scalars)
    if writes & PARAMETERS:
        split_master(moved(p, m, v, scalars), state.hi, state.lo)
    if writes & MOMENTS:
        random = fb.noise(noise, start, n, p.device)
        q, scale = _quantized(m.abs(), random >> 16, fb.SIGNED_CODE)
        state.exp_avg.copy_(q[:n] + 128 * m.signbit())
        state.exp_avg_scale.copy_(scale)
        q, scale = _quantized(v, random & 0xFFFF, fb.UNSIGNED_CODE)
        state.exp_avg_sq.copy_(torch.maximum(q[:n], (v > 0).to(torch.int64)))
        state.exp_avg_sq_scale.copy_(scale)


def _blocks(x: Tensor) -> Tensor:
    """``n -> blocks 256``, zeros behind the end."""
    return F.pad(x, (0, -x.numel() % fb.QUANTIZED_BLOCK)).view(-1, fb.QUANTIZED_BLOCK)


def _quantized(magnitude: Tensor, noise16: Tensor, code: fb.Minifloat) -> tuple[Tensor, Tensor]:
    """Codes ``blocks * 256`` and scales ``blocks`` of magnitudes ``n``."""
    blocks = _blocks(magnitude)
    scale, inverse = fb.scales(blocks.amax(1), code)
    return fb.encode(blocks, inverse.unsqueeze(1), _blocks(noise16), code).view(-1), scale
