"""Adam's step, in one call or two halves: hyperparameters, and the reference in plain torch for all other implementations.

All tensors are flat and contiguous, checked before, and updated in place. ``before`` is None, or the state that a whole step reads
instead of ``state``, which it then only writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels import float_bits as fb
from meshfold.kernels.adam.state import BLOCK, AdamState, QuantizedState, SplitState, WholeState
from meshfold.kernels.float_bits import noise_key, rounded
from meshfold.kernels.inputs import GRADIENTS, check_flat, check_start
from meshfold.kernels.random_bits import stream

PARAMETERS, MOMENTS = 1, 2  # what a step writes; their sum: both


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
        """Return the scalars of the step of this number, from 1.

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


@dataclass(frozen=True, kw_only=True)
class Step:
    """The numbers of one step that all its implementations read.

    Attributes:
        scalars: the numbers of the step.
        grad_scale: multiplies the gradient first: a float that float32 holds, or a float32 tensor of one element.
        writes: a sum of ``PARAMETERS`` and ``MOMENTS``.
        noise: state of the stream of random bits; not read for float32 parameters.
        start: global number of the first element.
    """

    scalars: Scalars
    grad_scale: float | Tensor
    writes: int
    noise: int
    start: int


def gradient(grad: Tensor, p: Tensor, step: Step) -> Tensor:
    """Return the gradient in float32, scaled, with the L2 term where there is one."""
    g = grad.float() * step.grad_scale
    return g + step.scalars.l2 * p if step.scalars.l2 else g


def moments(m: Tensor, v: Tensor, g: Tensor, s: Scalars) -> tuple[Tensor, Tensor]:
    """Return both moments after the step, in float32."""
    return m * s.beta1 + g * s.rest1, v * s.beta2 + (g * g) * s.rest2


def moved(p: Tensor, m: Tensor, v: Tensor, s: Scalars) -> Tensor:
    """Return the parameter after the step, from the moments after it, in float32."""
    root = v.double().sqrt().float()  # on some CPUs torch's float32 root is not correctly rounded
    return p * s.keep - (m / (root * s.correction + s.eps)) * s.step_size


def step_whole(state: WholeState, grad: Tensor, step: Step, before: WholeState | None) -> None:
    """Step float32 parameters."""
    was = before or state
    p = was.parameter
    g = gradient(grad, p, step)
    m, v = moments(was.exp_avg, was.exp_avg_sq, g, step.scalars)
    if step.writes & PARAMETERS:
        state.parameter.copy_(moved(p, m, v, step.scalars))
        if state.copy is not None:
            state.copy.copy_(state.parameter)
    if step.writes & MOMENTS:
        state.exp_avg.copy_(m)
        state.exp_avg_sq.copy_(v)


def step_split(state: SplitState, grad: Tensor, step: Step, before: SplitState | None) -> None:
    """Step split masters; bfloat16 moments are rounded stochastically."""
    was = before or state
    p = fb.join(was.hi, was.lo)
    g = gradient(grad, p, step)
    m, v = moments(was.exp_avg.float(), was.exp_avg_sq.float(), g, step.scalars)
    if step.writes & PARAMETERS:
        fb.split_into(moved(p, m, v, step.scalars), state.hi, state.lo)
    if step.writes & MOMENTS:
        if state.exp_avg.dtype is torch.bfloat16:
            random = fb.noise(step.noise, step.start, p.numel(), p.device)
            m, v = fb.stochastic(m, random >> 16), fb.stochastic(v, random & 0xFFFF)
        state.exp_avg.copy_(m)
        state.exp_avg_sq.copy_(v)


def step_quantized(state: QuantizedState, grad: Tensor, step: Step, before: QuantizedState | None) -> None:
    """Step split masters with 8-bit moments."""
    n, was = grad.numel(), before or state
    p = fb.join(was.hi, was.lo)
    g = gradient(grad, p, step)
    code = _blocks(was.exp_avg).to(torch.int64)
    m = fb.decode(code & 127, was.exp_avg_scale.unsqueeze(1), fb.SIGNED_CODE)
    m = torch.where(code > 127, -m, m)
    v = fb.decode(_blocks(was.exp_avg_sq), was.exp_avg_sq_scale.unsqueeze(1), fb.UNSIGNED_CODE)
    m, v = moments(m.view(-1)[:n], v.view(-1)[:n], g, step.scalars)
    if step.writes & PARAMETERS:
        fb.split_into(moved(p, m, v, step.scalars), state.hi, state.lo)
    if step.writes & MOMENTS:
        random = fb.noise(step.noise, step.start, n, p.device)
        q, scale = _quantized(m.abs(), random >> 16, fb.SIGNED_CODE)
        state.exp_avg.copy_(q[:n] + 128 * m.signbit())
        state.exp_avg_scale.copy_(scale)
        q, scale = _quantized(v, random & 0xFFFF, fb.UNSIGNED_CODE)
        state.exp_avg_sq.copy_(torch.maximum(q[:n], (v > 0).to(torch.int64)))
        state.exp_avg_sq_scale.copy_(scale)


def _blocks(x: Tensor) -> Tensor:
    """``n -> blocks 256``, zeros after the end."""
    return F.pad(x, (0, -x.numel() % fb.QUANTIZED_BLOCK)).view(-1, fb.QUANTIZED_BLOCK)


def _quantized(magnitude: Tensor, noise16: Tensor, code: fb.Minifloat) -> tuple[Tensor, Tensor]:
    """Return codes ``blocks * 256`` and scales ``blocks`` of magnitudes ``n``."""
    blocks = _blocks(magnitude)
    scale, inverse = fb.scales(blocks.amax(1), code)
    return fb.encode(blocks, inverse.unsqueeze(1), _blocks(noise16), code).view(-1), scale


def adam_step(
    state: AdamState,
    grad: Tensor,
    settings: AdamSettings,
    *,
    step: int,
    grad_scale: float | Tensor = 1.0,
    start: int = 0,
    seed: int = 0,
    before: AdamState | None = None,
) -> None:
    """Make one step of Adam in place: read ``grad``, update every tensor of ``state``.

    Memory it moves, in bytes a parameter for a gradient of 2: 26 for float32 parameters (28 with a copy), 26 for split
    masters with float32 moments, 18 with bfloat16 and 14 with 8-bit ones.

    Args:
        state: :class:`WholeState`, :class:`SplitState` or :class:`QuantizedState` of ``n`` elements.
        grad: ``n``, flat, float32, bfloat16 or float16; not changed.
        settings: learning rate, betas, eps, weight decay.
        step: number of the step, from 1; with ``seed`` it also chooses the noise of stochastic rounding.
        grad_scale: initial factor of the gradient: clip factor over loss scale; a number, or a float32
            tensor of one element on the gradient's device, which is read without a host synchronisation.
        start: global number of the shard's first element. With it, shards of a flat parameter round stochastically as the whole
            parameter would. For 8-bit moments it must be a multiple of 256, and so must the length of every shard but the last.
        seed: the run's seed.
        before: None, or a state of the same kind and length in separate memory: the step reads it and leaves it unchanged, and only
            writes ``state``. On a CPU this is also one pass, with the same bytes: writes bypass the caches (except for 8-bit
            moments).

    Raises:
        TypeError: for a gradient or scale of another dtype, or another kind of state ``before``.
        ValueError: for a gradient or ``before`` of another length or device, a step below 1, or a shard that cuts a block
            of 256.
    """
    if before is not None:
        _check_before(before, state)
    _run(state, grad, settings, step, grad_scale, start, seed, PARAMETERS + MOMENTS, before)


def _check_before(before: AdamState, state: AdamState) -> None:
    now, was = vars(state), vars(before)
    if type(before) is not type(state) or any((now[name] is None) != (was[name] is None) for name in now):
        raise TypeError(f"before is a {_kind(before)}, and state a {_kind(state)}: give one of the same kind")
    for name, new in now.items():
        if new is None:
            continue
        check_flat(f"before.{name}", was[name], (new.dtype,), new)
        if new.numel() and was[name].data_ptr() == new.data_ptr():
            raise ValueError(
                f"before.{name} is the tensor of state: leave before out, which steps in place, or give another"
            )


def _kind(state: AdamState) -> str:
    return f"{type(state).__name__} of {', '.join(name for name, x in vars(state).items() if x is not None)}"


def adam_update_parameters(
    state: AdamState,
    grad: Tensor,
    settings: AdamSettings,
    *,
    step: int,
    grad_scale: float | Tensor = 1.0,
    start: int = 0,
    seed: int = 0,
) -> None:
    """Run the first half of :func:`adam_step`: write the parameter and leave the moments unchanged.

    18 bytes a parameter for split masters with float32 moments and a gradient of 2 bytes.
    :func:`adam_update_moments` with the same arguments completes the step, at any later time, to the same bits.

    Raises:
        ValueError: with ``adamw_mode=False`` and weight decay, where the second half would need the old parameter; and as
            :func:`adam_step`.
    """
    _refuse_l2(settings)
    _run(state, grad, settings, step, grad_scale, start, seed, PARAMETERS)


def adam_update_moments(
    state: AdamState,
    grad: Tensor,
    settings: AdamSettings,
    *,
    step: int,
    grad_scale: float | Tensor = 1.0,
    start: int = 0,
    seed: int = 0,
) -> None:
    """Run the second half of :func:`adam_step`: write the moments and leave the parameter unchanged.

    18 bytes a parameter for float32 moments and a gradient of 2 bytes.

    Raises:
        ValueError: as :func:`adam_update_parameters`.
    """
    _refuse_l2(settings)
    _run(state, grad, settings, step, grad_scale, start, seed, MOMENTS)


def _refuse_l2(settings: AdamSettings) -> None:
    if not settings.adamw_mode and settings.weight_decay:
        raise ValueError(
            f"weight_decay is {settings.weight_decay} with adamw_mode=False: the gradient then depends on the "
            "parameter, and a step in two halves would need it as it was. Use adam_step, or adamw_mode=True"
        )


@torch.no_grad()
def _run(
    state: AdamState,
    grad: Tensor,
    settings: AdamSettings,
    step: int,
    grad_scale: float | Tensor,
    start: int,
    seed: int,
    writes: int,
    before: Any = None,  # same type as the state
) -> None:
    weights = state.weights
    check_flat("grad", grad, GRADIENTS, weights)
    check_start(start)
    if isinstance(state, QuantizedState) and start % BLOCK:
        raise ValueError(
            f"start is {start}, {start % BLOCK} elements past the start of a block of {BLOCK} that share a "
            f"scale: cut shards of 8-bit moments at multiples of {BLOCK}"
        )
    grad = grad.detach()
    made = Step(
        scalars=Scalars.at(settings, step),
        grad_scale=_scale(grad_scale, grad),
        writes=writes,
        noise=int(stream(seed, noise_key(step))),
        start=start,
    )
    dispatch.twin(_STEPS[type(state)], grad)(state, grad, made, before)
    if writes & PARAMETERS:  # as in torch's optimizers: a backward that saved the old weights must fail
        changed = {id(t): t for t in (weights, state.parameter if isinstance(state, WholeState) else weights)}
        torch.autograd.graph.increment_version([t for t in changed.values() if not t.is_inference()])


_STEPS: Mapping[type, Callable[..., None]] = {
    WholeState: step_whole,
    SplitState: step_split,
    QuantizedState: step_quantized,
}
"""The reference for each kind of state."""


def _scale(grad_scale: float | Tensor, grad: Tensor) -> float | Tensor:
    if not isinstance(grad_scale, Tensor):
        return rounded(float(grad_scale))
    if grad_scale.numel() != 1:
        raise ValueError(f"grad_scale has shape {list(grad_scale.shape)}; it must have one element")
    check_flat("grad_scale", grad_scale.detach().reshape(1), (torch.float32,), grad, 1)
    return grad_scale.detach().reshape(())
