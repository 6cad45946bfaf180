"""The update of Adam: hyperparameters, the numbers of one step, and the reference in plain torch, to which all others are held.

Everything is flat and contiguous, checked before, and updated in place. ``grad_scale`` multiplies the gradient first: a float
that float32 holds, or a float32 tensor of one element. ``noise`` is the state of the stream of random bits, ``start`` the global
number of the first element, ``writes`` a sum of ``PARAMETERS`` and ``MOMENTS``. ``before`` is None, or what a whole step reads in
place of ``state``, which it then only writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.kernels import float_bits as fb
from meshfold.kernels.adam.state import QuantizedState, SplitState, WholeState
from meshfold.kernels.float_bits import rounded

PARAMETERS, MOMENTS = 1, 2  # what a step writes: one, the other, or their sum


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Hyperparameters of Adam, with the names and defaults of torch.optim.

    Attributes:
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: 0 for none.
        adamw_mode: True for decoupled decay (AdamW), False for L2 regularisation in the gradient (Adam).
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    adamw_mode: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The numbers of one step, computed in float64 and rounded to float32 once.

    Attributes:
        beta1: decay of the first moment.
        rest1: 1 - beta1.
        beta2: decay of the second moment.
        rest2: 1 - beta2.
        keep: 1 - lr * weight_decay for decoupled decay, else 1.
        step_size: lr / (1 - beta1 ** step).
        correction: 1 / sqrt(1 - beta2 ** step).
        eps: added to the root of the second moment.
        l2: weight decay that goes through the gradient, else 0.
    """

    beta1: float
    rest1: float
    beta2: float
    rest2: float
    keep: float
    step_size: float
    correction: float
    eps: float
    l2: float

    @classmethod
    def at(cls, settings: AdamSettings, step: int) -> Scalars:
        """The scalars of the step of this number, from 1.

        Raises:
            ValueError: for a step below 1.
        """
        if step < 1:
            raise ValueError(f"step is {step}; the first step has number 1, for the bias corrections")
        s = settings
        return cls(
            beta1=rounded(s.beta1),
            rest1=rounded(1.0 - s.beta1),
            beta2=rounded(s.beta2),
            rest2=rounded(1.0 - s.beta2),
            keep=rounded(1.0 - s.lr * s.weight_decay) if s.adamw_mode else 1.0,
            step_size=rounded(s.lr / (1.0 - s.beta1**step)),
            correction=rounded((1.0 - s.beta2**step) ** -0.5),
            eps=rounded(s.eps),
            l2=0.0 if s.adamw_mode else rounded(s.weight_decay),
        )


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
        fb.split_into(moved(p, m, v, scalars), state.hi, state.lo)
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
        fb.split_into(moved(p, m, v, scalars), state.hi, state.lo)
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
