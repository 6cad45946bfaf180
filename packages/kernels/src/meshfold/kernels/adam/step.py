"""A step of Adam in one call or in two halves, for any of its states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.adam.state import BLOCK, AdamState, SplitState, WholeState
from meshfold.kernels.adam.update import (
    MOMENTS,
    PARAMETERS,
    AdamSettings,
    Scalars,
    step_quantized,
    step_split,
    step_whole,
)
from meshfold.kernels.float_bits import noise_key, rounded
from meshfold.kernels.inputs import GRADIENTS, check_flat, check_start
from meshfold.kernels.random_bits import stream


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
    """One step of Adam, in place: reads ``grad``, updates every tensor of ``state``.

    Memory it moves, in bytes a parameter for a gradient of 2: 26 for float32 parameters (28 with a copy), 26 for split
    masters with float32 moments, 18 with bfloat16 and 14 with 8-bit ones.

    Args:
        state: :class:`WholeState`, :class:`SplitState` or :class:`QuantizedState` of ``n`` elements.
        grad: ``n``, flat, float32, bfloat16 or float16; left as it is.
        settings: learning rate, betas, eps, weight decay.
        step: number of the step, from 1; with ``seed`` it also chooses the noise of stochastic rounding.
        grad_scale: what the gradient is multiplied by first: clip factor over loss scale; a number, or a float32
            tensor of one element on the gradient's device, which a GPU reads without waiting for it.
        start: global number of the shard's first element. With it, shards of a flat parameter round stochastically as
            the whole would; for 8-bit moments it must be a multiple of 256, and so must the length of every shard but
            the last.
        seed: the run's seed.
        before: None, or a state of the same kind and length in memory of its own, which is stepped from and left as it is:
            ``state`` is only written. On a CPU that is one pass too, of as many bytes: what is written goes past the caches
            (but for 8-bit moments).

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
    """The first half of :func:`adam_step`: writes the parameter and leaves the moments as they were.

    18 bytes a parameter for split masters with float32 moments and a gradient of 2 bytes.
    :func:`adam_update_moments` with the same arguments completes the step, at any later time, to the same bits.

    Raises:
        ValueError: with ``adamw_mode=False`` and weight decay, where the second half would need the parameter as it
            was; and as :func:`adam_step`.
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
    """The second half of :func:`adam_step`: writes the moments and leaves the parameter alone.

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
    before: Any = None,  # of the state's type
) -> None:
    weights = state.weights
    check_flat("grad", grad, GRADIENTS, weights)
    check_start(start)
    scalars = Scalars.at(settings, step)
    grad = grad.detach()
    scale = _scale(grad_scale, grad)
    if isinstance(state, WholeState):
        dispatch.twin(step_whole, grad)(state, grad, scalars, scale, writes, before)
    else:
        noise = int(stream(seed, noise_key(step)))
        if isinstance(state, SplitState):
            dispatch.twin(step_split, grad)(state, grad, scalars, scale, writes, noise, start, before)
        else:
            if start % BLOCK:
                raise ValueError(
                    f"start is {start}, {start % BLOCK} elements behind the start of a block of {BLOCK} that share a "
                    f"scale: cut shards of 8-bit moments at multiples of {BLOCK}"
                )
            dispatch.twin(step_quantized, grad)(state, grad, scalars, scale, writes, noise, start, before)
    if (
        writes & PARAMETERS
    ):  # a backward that saved the old weights must notice, as with torch's own optimizers
        changed = {id(t): t for t in (weights, state.parameter if isinstance(state, WholeState) else weights)}
        torch.autograd.graph.increment_version([t for t in changed.values() if not t.is_inference()])


def _scale(grad_scale: float | Tensor, grad: Tensor) -> float | Tensor:
    if not isinstance(grad_scale, Tensor):
        return rounded(float(grad_scale))
    if grad_scale.numel() != 1:
        raise ValueError(f"grad_scale has shape {list(grad_scale.shape)}; it must have one element")
    check_flat("grad_scale", grad_scale.detach().reshape(1), (torch.float32,), grad, 1)
    return grad_scale.detach().reshape(())
